// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Boot protocols: loads a kernel and prepares the guest for its first instruction.
//!
//! Owns the two boot protocols, PVH for ELF files and the 64-bit Linux protocol for bzImages, the
//! place of the initramfs and the memory map the guest is told. Writes guest memory only; the
//! registers that go with a [`BootEntry`] come from [`crate::regs`]. Every field of an image is
//! untrusted.
//!
//! ```text
//! file --magic--> elf     --> PVH start info           --> BootEntry::Pvh
//!            \--> bzimage --> zero page, page tables   --> BootEntry::Linux64
//! ```

mod bzimage;
mod elf;
mod error;
mod image;
mod linux64;
mod memmap;
mod pvh;
mod reset;
#[cfg(test)]
mod tests;

use std::fs::File;

use memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress};

pub use error::{BootError, Image};
use image::{ImageReader, ImageSource};

use crate::layout::{self, GpaRange};
use crate::regs;
pub use crate::regs::BootEntry;

/// What a boot needs besides the files.
#[derive(Clone, Copy, Debug)]
pub struct BootSpec<'a> {
    /// Kernel command line.
    pub cmdline: &'a str,
    /// Where [`crate::acpi::write_tables`] put the RSDP.
    pub rsdp_gpa: u64,
    /// Addresses to name as reserved in the memory map, beyond those of [`crate::layout`].
    pub reserved: &'a [GpaRange],
    /// RAM that the guest gets later from a device: not to be named at all.
    pub later: &'a [GpaRange],
    /// Guest memory was never written: clearing what the kernel expects to be zero can be left
    /// out. False after a reboot that kept the memory.
    pub ram_is_zero: bool,
}

/// Loads the kernel and the initramfs and writes all that the kernel finds in memory at its entry.
///
/// Guest memory must have RAM from zero to at least the kernel's end. On an error guest memory
/// holds parts of what was loaded.
///
/// # Errors
///
/// [`BootError`] says which file or value is wrong and what to do about it.
pub fn load_kernel(
    mem: &GuestMemory,
    kernel: &mut File,
    initramfs: Option<&mut File>,
    spec: &BootSpec<'_>,
) -> Result<BootEntry, BootError> {
    load_from(mem, kernel, initramfs, spec)
}

fn load_from<K: ImageSource, I: ImageSource>(
    mem: &GuestMemory,
    kernel: &mut K,
    initramfs: Option<&mut I>,
    spec: &BootSpec<'_>,
) -> Result<BootEntry, BootError> {
    let mut kernel = ImageReader::new(kernel, Image::Kernel)?;
    let entry = match detect(&mut kernel)? {
        Format::Elf => boot_pvh(mem, &mut kernel, initramfs, spec)?,
        Format::BzImage => boot_linux64(mem, &mut kernel, initramfs, spec)?,
    };
    write(mem, &regs::boot_gdt_bytes(&entry), layout::BOOT_GDT_GPA, "the boot GDT")?;
    write(mem, &[0; 8], layout::BOOT_IDT_GPA, "the boot IDT")?;
    let ebda_segment = u16::try_from(spec.rsdp_gpa >> 4).unwrap_or(0);
    write(mem, &ebda_segment.to_le_bytes(), layout::EBDA_POINTER_GPA, "the EBDA pointer")?;
    write(mem, &reset::vector(), layout::RESET_VECTOR_GPA, "the reset vector")?;
    Ok(entry)
}

fn boot_pvh<K: ImageSource, I: ImageSource>(
    mem: &GuestMemory,
    kernel: &mut ImageReader<'_, K>,
    initramfs: Option<&mut I>,
    spec: &BootSpec<'_>,
) -> Result<BootEntry, BootError> {
    let cmdline = checked_cmdline(spec.cmdline, layout::CMDLINE_MAX_BYTES - 1)?;
    let map = memmap::memory_map(mem, spec.reserved, spec.later)?;
    let loaded = elf::load(mem, kernel, spec.ram_is_zero)?;
    // A module's address is given with 64 bits, but kernels read it before they have page tables.
    let limits = [layout::LOW_RAM_END_GPA];
    let initramfs = load_initramfs(mem, spec.later, initramfs, loaded.extent, &limits)?;
    write(mem, &cmdline, layout::CMDLINE_GPA, "the command line")?;
    pvh::write_start_info(mem, &map, initramfs, spec.rsdp_gpa)?;
    Ok(BootEntry::Pvh {
        entry_gpa: u64::from(loaded.entry_gpa),
        start_info_gpa: layout::PVH_START_INFO_GPA,
    })
}

fn boot_linux64<K: ImageSource, I: ImageSource>(
    mem: &GuestMemory,
    kernel: &mut ImageReader<'_, K>,
    initramfs: Option<&mut I>,
    spec: &BootSpec<'_>,
) -> Result<BootEntry, BootError> {
    let map = memmap::memory_map(mem, spec.reserved, spec.later)?;
    let loaded = bzimage::load(mem, kernel)?;
    let header = &loaded.header;
    let max_bytes = u64::from(header.cmdline_max_bytes).min(layout::CMDLINE_MAX_BYTES - 1);
    let cmdline = checked_cmdline(spec.cmdline, max_bytes)?;
    let initramfs = if header.initrd_above_4g {
        // Below 4 GiB if it fits: then the kernel's own page tables reach it from the first.
        load_initramfs(
            mem,
            spec.later,
            initramfs,
            loaded.extent,
            &[layout::LOW_RAM_END_GPA, u64::MAX],
        )?
    } else {
        let limit_gpa = layout::LOW_RAM_END_GPA.min(header.initrd_last_gpa.saturating_add(1));
        load_initramfs(mem, spec.later, initramfs, loaded.extent, &[limit_gpa])?
    };
    write(mem, &cmdline, layout::CMDLINE_GPA, "the command line")?;
    linux64::write_zero_page(mem, header, loaded.extent.gpa, &map, initramfs, spec.rsdp_gpa)?;
    linux64::write_identity_page_tables(mem)?;
    Ok(BootEntry::Linux64 {
        entry_gpa: loaded.entry_gpa,
        zero_page_gpa: layout::ZERO_PAGE_GPA,
        page_table_gpa: layout::BOOT_PAGE_TABLES_GPA,
    })
}

enum Format {
    Elf,
    BzImage,
}

fn detect<K: ImageSource>(kernel: &mut ImageReader<'_, K>) -> Result<Format, BootError> {
    let mut start = [0; bzimage::HEADER_MAX_END];
    let len = usize::try_from(kernel.len_bytes()).unwrap_or(usize::MAX).min(start.len());
    kernel.read_at(0, &mut start[..len], "the first sector")?;
    if start.starts_with(&elf::ELF_MAGIC) {
        Ok(Format::Elf)
    } else if bzimage::is_bzimage(&start) {
        Ok(Format::BzImage)
    } else {
        Err(BootError::UnknownFormat)
    }
}

/// Loads the initramfs as high as the first of `limits_gpa` allows under which there is room.
fn load_initramfs<I: ImageSource>(
    mem: &GuestMemory,
    later: &[GpaRange],
    initramfs: Option<&mut I>,
    kernel: GpaRange,
    limits_gpa: &[u64],
) -> Result<Option<GpaRange>, BootError> {
    let Some(source) = initramfs else { return Ok(None) };
    let mut image = ImageReader::new(source, Image::Initramfs)?;
    let len_bytes = image.len_bytes();
    if len_bytes == 0 {
        return Err(BootError::InitramfsEmpty);
    }
    let ram = memmap::merged_ram(mem, later);
    let gpa = limits_gpa
        .iter()
        .find_map(|&limit_gpa| memmap::place_high(&ram, kernel, len_bytes, limit_gpa))
        .ok_or(BootError::InitramfsTooLarge { len_bytes })?;
    image.load(mem, 0, len_bytes, gpa, "the initramfs")?;
    Ok(Some(GpaRange { gpa, len_bytes }))
}

/// The command line with its terminator.
fn checked_cmdline(cmdline: &str, max_bytes: u64) -> Result<Vec<u8>, BootError> {
    if let Some(position) = cmdline.bytes().position(|byte| !matches!(byte, b' '..=b'~')) {
        return Err(BootError::CmdlineNotAscii { position });
    }
    let len_bytes = cmdline.len() as u64;
    if len_bytes > max_bytes {
        return Err(BootError::CmdlineTooLong { len_bytes, max_bytes });
    }
    Ok([cmdline.as_bytes(), &[0]].concat())
}

fn write(mem: &GuestMemory, bytes: &[u8], gpa: u64, what: &'static str) -> Result<(), BootError> {
    mem.write_slice(bytes, GuestAddress(gpa)).map_err(|source| BootError::Write {
        what,
        gpa,
        source,
    })
}

/// Boots arbitrary bytes as kernel and, in part, as initramfs, in a small guest; returns whether that could be entered.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz_kernel_image(bytes: &[u8]) -> bool {
    use std::io::Cursor;

    const RAM_BYTES: usize = 32 << 20;
    let Ok(mem) = GuestMemory::from_ranges(&[(GuestAddress(0), RAM_BYTES)]) else { return false };
    let spec = BootSpec {
        cmdline: "console=hvc0",
        rsdp_gpa: layout::RSDP_GPA,
        reserved: &[],
        later: &[],
        // As after a reboot, so that clearing is covered too.
        ram_is_zero: false,
    };
    let mut kernel = Cursor::new(bytes);
    let mut initramfs = Cursor::new(&bytes[bytes.len() / 2..]);
    // Any refusal is right here, as a panic, a hang or an access outside guest memory is not. What is taken is entered
    // within RAM, and nothing lies over its command line.
    let Ok(entry) = load_from(&mem, &mut kernel, Some(&mut initramfs), &spec) else { return false };
    let (BootEntry::Pvh { entry_gpa, .. } | BootEntry::Linux64 { entry_gpa, .. }) = entry;
    assert!(entry_gpa < RAM_BYTES as u64, "entered at {entry_gpa:#x}");
    let mut cmdline = vec![0xff; spec.cmdline.len() + 1];
    let read = mem.read_slice(&mut cmdline, GuestAddress(layout::CMDLINE_GPA));
    assert!(read.is_ok() && cmdline == [spec.cmdline.as_bytes(), &[0]].concat(), "{cmdline:?}");
    true
}
