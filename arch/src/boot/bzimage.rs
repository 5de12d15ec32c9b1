// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Loads a bzImage for the 64-bit entry of the Linux boot protocol.
//!
//! Owns the parsing and checking of the setup header. linux-loader loads whatever follows the
//! setup sectors to wherever it is told; this module checks what the header says about size,
//! alignment and entry before anything is loaded. Must never trust a header field as a size to
//! allocate.
//!
//! Format: Documentation/arch/x86/boot.rst of Linux, protocol 2.12 and later.

use memory::GuestMemory;

use super::error::{BootError, Image};
use super::image::{Fields, ImageReader, ImageSource, is_ram};
use crate::layout::{GpaRange, HIGH_RAM_GPA};

/// Offset of the setup header, in the file and in the zero page.
pub const HEADER_OFFSET: usize = 0x1f1;
/// First byte that is not header even in the newest protocol.
pub const HEADER_MAX_END: usize = 0x290;
const MAGIC_OFFSET: usize = 0x202;
const MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
const SECTOR_BYTES: u64 = 512;
/// Protocol 2.12 brought `xloadflags`.
const MIN_VERSION: u16 = 0x020c;
const LOADED_HIGH: u8 = 1;
const XLF_KERNEL_64: u16 = 1;
const XLF_CAN_BE_LOADED_ABOVE_4G: u16 = 2;
/// The 64-bit entry is this far into the protected mode part.
const ENTRY_64_OFFSET: u64 = 0x200;
/// What images that leave the field empty take.
const DEFAULT_CMDLINE_BYTES: u32 = 255;

/// A checked setup header.
#[derive(Debug)]
pub struct SetupHeader {
    /// The header as it is in the file, to be copied to the zero page; starts at
    /// [`HEADER_OFFSET`].
    pub bytes: Vec<u8>,
    /// Longest command line, terminator not counted.
    pub cmdline_max_bytes: u32,
    /// Last address an initramfs may occupy.
    pub initrd_last_gpa: u64,
    /// The initramfs may be above 4 GiB.
    pub initrd_above_4g: bool,
    /// Where in the file the protected mode part starts.
    code_offset: u64,
    code_bytes: u64,
    /// The kernel occupies this, from the load address on, until it knows the memory map.
    extent: GpaRange,
}

/// What was loaded.
#[derive(Debug)]
pub struct LoadedBzImage {
    /// The 64-bit entry point.
    pub entry_gpa: u64,
    /// What the kernel occupies, room to decompress included.
    pub extent: GpaRange,
    /// Its header.
    pub header: SetupHeader,
}

/// Whether the start of a file (at least [`HEADER_MAX_END`] bytes, or all of it) is a bzImage.
pub fn is_bzimage(start: &[u8]) -> bool {
    Fields(start).u32(MAGIC_OFFSET) == MAGIC
}

/// Checks the header and loads the kernel at the address it prefers.
pub fn load<S: ImageSource>(
    mem: &GuestMemory,
    image: &mut ImageReader<'_, S>,
) -> Result<LoadedBzImage, BootError> {
    let mut start = [0; HEADER_MAX_END];
    image.read_at(0, &mut start, "the setup header")?;
    let header = parse_header(&start, image.len_bytes())?;
    let GpaRange { gpa, len_bytes } = header.extent;
    if gpa < HIGH_RAM_GPA {
        return Err(BootError::KernelInLowMemory { gpa });
    }
    if !is_ram(mem, gpa, len_bytes) {
        return Err(BootError::KernelOutsideRam { gpa, len_bytes });
    }
    image.load(mem, header.code_offset, header.code_bytes, gpa, "the compressed kernel")?;
    Ok(LoadedBzImage { entry_gpa: gpa + ENTRY_64_OFFSET, extent: header.extent, header })
}

/// Parses the first [`HEADER_MAX_END`] bytes of a bzImage of `file_bytes` in all.
fn parse_header(start: &[u8; HEADER_MAX_END], file_bytes: u64) -> Result<SetupHeader, BootError> {
    let fields = Fields(start);
    let version = fields.u16(0x206);
    let [minor, major] = version.to_le_bytes();
    let xloadflags = fields.u16(0x236);
    let loaded_high = fields.u8(0x211) & LOADED_HIGH != 0;
    if version < MIN_VERSION || xloadflags & XLF_KERNEL_64 == 0 || !loaded_high {
        return Err(BootError::NoLinux64Entry { major, minor });
    }
    // The second byte of the jump instruction at 0x200 is the header's length after that jump.
    let header_end = MAGIC_OFFSET + usize::from(fields.u8(0x201));
    let Some(bytes) = start.get(HEADER_OFFSET..header_end) else {
        return Err(BootError::MalformedBzImage { what: "the header overlaps what follows it" });
    };
    let setup_sectors = match fields.u8(HEADER_OFFSET) {
        0 => 4,
        count => u64::from(count),
    };
    let code_offset = (setup_sectors + 1) * SECTOR_BYTES;
    let code_bytes = u64::from(fields.u32(0x1f4)) * 16;
    if code_bytes <= ENTRY_64_OFFSET {
        return Err(BootError::MalformedBzImage { what: "no code follows the setup sectors" });
    }
    // The size is in units of 16 bytes, and the last unit need not be whole.
    let have_bytes = file_bytes.saturating_sub(code_offset);
    if have_bytes + 15 < code_bytes {
        return Err(BootError::Truncated {
            image: Image::Kernel,
            what: "the compressed kernel",
            need_bytes: code_offset + code_bytes,
            have_bytes: file_bytes,
        });
    }
    let code_bytes = code_bytes.min(have_bytes);
    let align = u64::from(fields.u32(0x230));
    let load_gpa = fields.u64(0x258);
    if !align.is_power_of_two() || !load_gpa.is_multiple_of(align) {
        return Err(BootError::MalformedBzImage { what: "the load address is not aligned" });
    }
    let len_bytes = code_bytes.max(u64::from(fields.u32(0x260)));
    let cmdline_max_bytes = match fields.u32(0x238) {
        0 => DEFAULT_CMDLINE_BYTES,
        max => max,
    };
    Ok(SetupHeader {
        bytes: bytes.to_vec(),
        cmdline_max_bytes,
        initrd_last_gpa: u64::from(fields.u32(0x22c)),
        initrd_above_4g: xloadflags & XLF_CAN_BE_LOADED_ABOVE_4G != 0,
        code_offset,
        code_bytes,
        extent: GpaRange { gpa: load_gpa, len_bytes },
    })
}
