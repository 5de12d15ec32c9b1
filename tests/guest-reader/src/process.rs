// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a VMM process keeps guest RAM: its memfds, or a private anonymous mapping.
//!
//! Owns what is found in `/proc/PID`. Files are opened again rather than shared, so positions
//! are our own. Must never read a page that is not there: see [`Backing::resident`].

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use rustix::fs::{SeekFrom, seek};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

use crate::abi::PAGE_BYTES;

/// Names that VMMs give the memfds of guest RAM; the last is a prefix.
const RAM_NAMES: [&str; 2] = ["memory-backend-memfd", "ch_ram"];
const RAM_PREFIX: &str = "ram-";
/// Anonymous mappings smaller than this are not guest RAM.
const LEAST_RAM_BYTES: u64 = 8 << 20;
/// Bit 63 of a pagemap entry: the page is present.
const PAGEMAP_PRESENT: u64 = 1 << 63;
/// Bit 62: it is in swap.
const PAGEMAP_SWAPPED: u64 = 1 << 62;

/// Why guest RAM was not found or not read.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// A file of `/proc` could not be used.
    #[error("cannot use {path}, is the process alive and may it be inspected?")]
    Proc {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No memfd with a known name and no large anonymous mapping.
    #[error("process {pid} has no memory that looks like guest RAM")]
    NoRam {
        /// Which process.
        pid: u32,
    },
    /// Reading or writing guest RAM failed.
    #[error("cannot access guest RAM in {name} at offset {offset:#x}")]
    Access {
        /// Name of the backing.
        name: String,
        /// Where in it.
        offset: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// One piece of host memory that holds guest RAM.
#[derive(Debug)]
pub enum Backing {
    /// A memfd or file that the VMM has mapped.
    File {
        /// Its name, as in `/proc/PID/fd`.
        name: String,
        /// Opened again, for reading and writing where that is allowed.
        file: File,
        /// Its size.
        len_bytes: u64,
    },
    /// A private mapping, anonymous or of a snapshot's memory file.
    Anonymous {
        /// Its address in the process.
        address: u64,
        /// Its size.
        len_bytes: u64,
        /// `/proc/PID/mem`.
        memory: File,
        /// `/proc/PID/pagemap`; `None` for the mapping of a file, of which all is there.
        pagemap: Option<File>,
    },
}

impl Backing {
    /// Its size, bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::File { len_bytes, .. } | Self::Anonymous { len_bytes, .. } => *len_bytes,
        }
    }

    /// What to call it.
    pub fn name(&self) -> String {
        match self {
            Self::File { name, .. } => name.clone(),
            Self::Anonymous { address, .. } => format!("anonymous memory at {address:#x}"),
        }
    }

    /// How many bytes from `offset` on are of one kind, at most `limit_bytes`, and whether they
    /// are resident. For files that cannot tell (hugetlb), everything is.
    pub fn resident(&self, offset: u64, limit_bytes: u64) -> Result<(bool, u64), ProcessError> {
        let end = offset.saturating_add(limit_bytes).min(self.len_bytes());
        let outcome = match self {
            Self::File { file, .. } => resident_in_file(file, offset, end),
            Self::Anonymous { address, pagemap: Some(pagemap), .. } => {
                resident_in_pagemap(pagemap, address + offset, address + end)
            }
            Self::Anonymous { .. } => Ok((true, end - offset)),
        };
        outcome.map_err(|source| self.access_error(offset, source))
    }

    /// Reads bytes. Call [`Backing::resident`] first where a hole must not be touched.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), ProcessError> {
        match self {
            Self::File { file, .. } => file.read_exact_at(buffer, offset),
            Self::Anonymous { memory, address, .. } => {
                memory.read_exact_at(buffer, address + offset)
            }
        }
        .map_err(|source| self.access_error(offset, source))
    }

    /// Writes bytes.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ProcessError> {
        match self {
            Self::File { file, .. } => match file.write_all_at(bytes, offset) {
                // Files of huge pages can be read, and written only in memory.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
                {
                    write_mapped(file, offset, bytes)
                }
                written => written,
            },
            Self::Anonymous { memory, address, .. } => memory.write_all_at(bytes, address + offset),
        }
        .map_err(|source| self.access_error(offset, source))
    }

    fn access_error(&self, offset: u64, source: io::Error) -> ProcessError {
        ProcessError::Access { name: self.name(), offset, source }
    }
}

/// Writes bytes of one page to a file by mapping that page.
fn write_mapped(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let page_bytes = file.metadata()?.blksize();
    let start = offset / page_bytes * page_bytes;
    let at = usize::try_from(offset - start).map_err(io::Error::other)?;
    let len = usize::try_from(page_bytes).map_err(io::Error::other)?;
    if at.checked_add(bytes.len()).is_none_or(|end| end > len) {
        return Err(io::Error::other("the bytes lie in more than one page"));
    }
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address that the kernel chooses; nothing refers to it.
    let page = unsafe { mmap(std::ptr::null_mut(), len, access, flags, file, start) }?;
    // SAFETY: checked above: the bytes lie in the page, which is mapped writable. The guest may use it meanwhile,
    // which is no concern of this program: nothing of it is read here.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), page.cast::<u8>().add(at), bytes.len());
    };
    // SAFETY: the mapping made above, which nothing refers to.
    unsafe { munmap(page, len) }?;
    Ok(())
}

/// Asks page by page. `SEEK_HOLE` would give a whole run at once, but it walks to the end of that
/// run however little of it is wanted, which for full memory makes every question a long one.
fn resident_in_file(file: &File, offset: u64, end: u64) -> io::Result<(bool, u64)> {
    let mut at = offset;
    while at < end {
        match seek(file, SeekFrom::Data(at)) {
            Ok(data) if data > at => {
                return Ok(if at > offset {
                    (true, at - offset)
                } else {
                    (false, data.min(end) - at)
                });
            }
            Ok(_) => at = at / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES,
            // Nothing but a hole up to the end of the file.
            Err(rustix::io::Errno::NXIO) if at > offset => return Ok((true, at - offset)),
            Err(rustix::io::Errno::NXIO) => return Ok((false, end - at)),
            Err(rustix::io::Errno::INVAL) => return Ok((true, end - offset)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok((true, end.saturating_sub(offset)))
}

fn resident_in_pagemap(pagemap: &File, address: u64, end: u64) -> io::Result<(bool, u64)> {
    let mut first = None;
    let mut at = address;
    while at < end {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, at / PAGE_BYTES * 8)?;
        let here = u64::from_le_bytes(entry) & (PAGEMAP_PRESENT | PAGEMAP_SWAPPED) != 0;
        if *first.get_or_insert(here) != here {
            break;
        }
        at = at / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES;
    }
    Ok((first.unwrap_or(false), at.min(end) - address))
}

/// The files of guest RAM that a process has open, each once: memfds with the names in `order`, and then the
/// others by their descriptors.
pub(crate) fn ram_files(
    pid: u32,
    more_names: &[String],
    order: &[String],
) -> Result<Vec<Backing>, ProcessError> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let proc_error = |path: &PathBuf| {
        let path = path.clone();
        move |source| ProcessError::Proc { path, source }
    };
    let mut descriptors = Vec::new();
    for entry in fs::read_dir(&folder).map_err(proc_error(&folder))? {
        let entry = entry.map_err(proc_error(&folder))?;
        if let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) {
            descriptors.push(number);
        }
    }
    descriptors.sort_unstable();

    let mut seen = Vec::new();
    let mut backings = Vec::new();
    for number in descriptors {
        let path = folder.join(number.to_string());
        // A descriptor may be closed while we look; that is no error.
        let Ok(target) = fs::read_link(&path) else { continue };
        let target = target.to_string_lossy().into_owned();
        if !is_ram_name(&target, more_names) {
            continue;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .or_else(|_| File::open(&path))
            .map_err(proc_error(&path))?;
        let data = file.metadata().map_err(proc_error(&path))?;
        let identity = (data.dev(), data.ino());
        if data.len() >= PAGE_BYTES && !seen.contains(&identity) {
            seen.push(identity);
            let place = memfd_name(&target).and_then(|name| order.iter().position(|at| at == name));
            let backing = Backing::File { name: target, file, len_bytes: data.len() };
            backings.push((place.unwrap_or(order.len()), backing));
        }
    }
    backings.sort_by_key(|(place, _)| *place);
    Ok(backings.into_iter().map(|(_, backing)| backing).collect())
}

/// The name that a memfd was given, by what its descriptor points to.
fn memfd_name(target: &str) -> Option<&str> {
    target.strip_suffix(" (deleted)").unwrap_or(target).strip_prefix("/memfd:")
}

fn is_ram_name(target: &str, more_names: &[String]) -> bool {
    let plain = target.strip_suffix(" (deleted)").unwrap_or(target);
    if more_names.iter().any(|name| plain.contains(name.as_str())) {
        return true;
    }
    let Some(name) = memfd_name(target) else { return false };
    RAM_NAMES.contains(&name) || name.starts_with(RAM_PREFIX)
}

/// Private memory that is large enough, anonymous or of a snapshot's file, as backings to be probed.
pub(crate) fn anonymous_mappings(pid: u32) -> Result<Vec<Backing>, ProcessError> {
    let path = PathBuf::from(format!("/proc/{pid}/maps"));
    let text = fs::read_to_string(&path).map_err(|source| ProcessError::Proc { path, source })?;
    let mut backings = Vec::new();
    let anonymous = anonymous_ranges(&text).into_iter().map(|range| (range, true));
    let images = text.lines().filter_map(image_line).map(|range| (range, false));
    for ((address, end), is_anonymous) in anonymous.chain(images) {
        let open = |name: &str, write: bool| {
            let path = PathBuf::from(format!("/proc/{pid}/{name}"));
            OpenOptions::new()
                .read(true)
                .write(write)
                .open(&path)
                .map_err(|source| ProcessError::Proc { path, source })
        };
        backings.push(Backing::Anonymous {
            address,
            len_bytes: end - address,
            memory: open("mem", true)?,
            pagemap: is_anonymous.then(|| open("pagemap", false)).transpose()?,
        });
    }
    Ok(backings)
}

/// Where guest RAM may begin and how far it may go, by the text of `/proc/PID/maps`.
///
/// The kernel shows one piece of memory as several mappings where their histories differ: parts
/// that were filled through different userfaultfds stay apart. So each mapping is taken to continue as
/// far as others follow without a gap.
#[doc(hidden)]
pub fn anonymous_ranges(maps: &str) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = maps.lines().filter_map(anonymous_line).collect();
    for index in (1..ranges.len()).rev() {
        let (next, end) = ranges[index];
        if ranges[index - 1].1 == next {
            ranges[index - 1].1 = end;
        }
    }
    ranges.retain(|(start, end)| end - start >= LEAST_RAM_BYTES);
    ranges
}

/// Start and end of the mapping that a line of `/proc/PID/maps` describes, if it is private,
/// writable and anonymous.
#[doc(hidden)]
pub fn anonymous_line(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let flags = fields.next()?;
    let inode = fields.nth(2)?;
    let named = fields.next().is_some_and(|name| !name.starts_with("[anon"));
    if !flags.starts_with("rw") || !flags.ends_with('p') || inode != "0" || named {
        return None;
    }
    range(start, end)
}

/// The same for a line of a private and writable mapping of a snapshot's memory file.
#[doc(hidden)]
pub fn image_line(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let flags = fields.next()?;
    let name = fields.nth(3)?;
    let is_image =
        flags.starts_with("rw") && flags.ends_with('p') && name.ends_with("/memory-ranges");
    is_image.then(|| range(start, end)).flatten()
}

fn range(start: &str, end: &str) -> Option<(u64, u64)> {
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok()?;
    (start < end).then_some((start, end))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::os::fd::AsRawFd;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::fcntl_dupfd_cloexec;

    use super::*;

    /// Above all descriptors that the tests beside this one open and close: without it, a file that comes later
    /// may take a lower one that is free again.
    const LEAST_DESCRIPTOR: i32 = 800;

    #[test]
    fn files_come_in_the_order_asked_for_and_then_by_descriptor() {
        let mut least = LEAST_DESCRIPTOR;
        let files = ["third", "first", "second"].map(|name| {
            let file = memfd_create(format!("ram-order-{name}"), MemfdFlags::CLOEXEC).unwrap();
            let file = File::from(fcntl_dupfd_cloexec(&file, least).unwrap());
            least = file.as_raw_fd() + 1;
            file.set_len(PAGE_BYTES).unwrap();
            file
        });
        let order = ["first", "second"].map(|name| format!("ram-order-{name}"));
        let names = |order: &[String]| -> Vec<String> {
            let found = ram_files(std::process::id(), &[], order).unwrap();
            let names = found.iter().map(|file| memfd_name(&file.name()).unwrap().to_owned());
            names.filter_map(|name| Some(name.strip_prefix("ram-order-")?.to_owned())).collect()
        };
        assert_eq!(names(&order), ["first", "second", "third"]);
        assert_eq!(names(&[]), ["third", "first", "second"]);
        drop(files);
    }
}
