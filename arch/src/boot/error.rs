// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors in loading a guest's boot payload.
//!
//! Owns the error type of the boot module; each variant tells the operator what
//! to change. Must never name a path: the caller, who opened the file, adds that.

use std::fmt;
use std::io;

use vm_memory::GuestMemoryError;

/// Which of the two files an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// `--kernel` (or firmware in the form of a PVH ELF file).
    Kernel,
    /// `--initramfs`.
    Initramfs,
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Initramfs => "initramfs",
        })
    }
}

/// Why a kernel, an initramfs or a command line was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    /// Reading failed for a reason of the host.
    #[error("cannot read the {image}")]
    Read {
        /// Which file.
        image: Image,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// The file ends before something that its own header promises.
    #[error("the {image} is truncated: {what} ends at byte {need_bytes} of {have_bytes}")]
    Truncated {
        /// Which file.
        image: Image,
        /// The missing part.
        what: &'static str,
        /// Where that part would end.
        need_bytes: u64,
        /// Length of the file.
        have_bytes: u64,
    },
    /// No known magic number.
    #[error("the kernel is neither an ELF file nor a bzImage")]
    UnknownFormat,
    /// An ELF file for another machine.
    #[error("the kernel is an ELF file, but {what}")]
    UnsupportedElf {
        /// What is wrong with it.
        what: &'static str,
    },
    /// A vmlinux without the note that says where to enter it.
    #[error("the kernel has no PVH entry note: build it with CONFIG_PVH=y or give a bzImage")]
    NoPvhNote,
    /// An ELF header or note that contradicts itself.
    #[error("the kernel's ELF structure is damaged: {what}")]
    MalformedElf {
        /// What was found.
        what: &'static str,
    },
    /// A bzImage whose protocol has no 64-bit entry.
    #[error(
        "the bzImage has boot protocol {major}.{minor:02}; 2.12 or newer with a 64-bit entry is \
         needed (an x86_64 kernel from 3.8 on)"
    )]
    NoLinux64Entry {
        /// Major part of the version.
        major: u8,
        /// Minor part.
        minor: u8,
    },
    /// A bzImage header that contradicts itself.
    #[error("the bzImage's setup header is damaged: {what}")]
    MalformedBzImage {
        /// What was found.
        what: &'static str,
    },
    /// Part of the kernel would overwrite boot data.
    #[error("the kernel wants to be loaded at {gpa:#x}, below 1 MiB, where boot data is")]
    KernelInLowMemory {
        /// Where it wanted to be.
        gpa: u64,
    },
    /// Part of the kernel would not be in RAM.
    #[error(
        "the kernel does not fit in guest memory: it needs {len_bytes} bytes at {gpa:#x}; give \
         the VM more memory"
    )]
    KernelOutsideRam {
        /// First address it needs.
        gpa: u64,
        /// How much from there.
        len_bytes: u64,
    },
    /// The entry point is not in what was loaded.
    #[error("the kernel's entry point {gpa:#x} is not in any part that is loaded")]
    EntryOutsideKernel {
        /// The entry point.
        gpa: u64,
    },
    /// A file of length zero.
    #[error("the initramfs is empty")]
    InitramfsEmpty,
    /// No room alongside the kernel.
    #[error(
        "the initramfs of {len_bytes} bytes does not fit in guest memory alongside the kernel; give \
         the VM more memory"
    )]
    InitramfsTooLarge {
        /// Length of the file.
        len_bytes: u64,
    },
    /// Longer than the kernel or the boot data area takes.
    #[error("the command line has {len_bytes} bytes, the kernel takes at most {max_bytes}")]
    CmdlineTooLong {
        /// Its length.
        len_bytes: u64,
        /// The limit, terminator not counted.
        max_bytes: u64,
    },
    /// Control characters and anything beyond ASCII.
    #[error(
        "the command line has a character at byte {position} that is not printable ASCII, which \
         kernels do not accept"
    )]
    CmdlineNotAscii {
        /// Offset of the first such byte.
        position: usize,
    },
    /// More pieces of memory than the boot protocol can list.
    #[error("the guest's memory map has {entries} entries, the boot protocol takes {max}")]
    MemoryMapTooLong {
        /// How many there are.
        entries: usize,
        /// How many there may be.
        max: usize,
    },
    /// Guest memory could not be written.
    #[error("cannot write {what} to guest memory at {gpa:#x}")]
    Write {
        /// What was being written.
        what: &'static str,
        /// Where.
        gpa: u64,
        /// What the memory said.
        #[source]
        source: GuestMemoryError,
    },
}
