// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a device server's answers say.
//!
//! Owns every check of a payload: its length, that it is about what was asked, that numbers are possible and places are
//! inside what they are in. The error of each is the end of a sentence about the answer. Knows no socket.

use std::fs::File;
use std::ops::Range;

use serde::Deserialize;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_AUTOMASKED,
    VFIO_IRQ_INFO_EVENTFD, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE,
};

use super::protocol::{
    ACCESS_LEN_BYTES, Fields, MAJOR, MINOR, REGION_INFO_LEN_BYTES, TRANSFER_LEN_BYTES_MAX,
};
use super::session::Answer;

/// Length of a greeting with all that it may say.
pub const VERSION_LEN_BYTES_MAX: usize = 16 << 10;
/// Length of a region's information with its capabilities: that of the areas below, and some more.
pub const REGION_LEN_BYTES_MAX: u32 = 8 << 10;
/// Length of the information of devices and of interrupts.
pub const INFO_LEN_BYTES: usize = 16;
/// Areas of a region that can be mapped, at most.
const AREAS_MAX: u32 = 256;
/// Capabilities of a region that are looked at.
const CAPABILITIES_MAX: usize = 16;
/// Descriptors that fit into one message (SCM_MAX_FD of Linux).
const FDS_SENT_MAX: u32 = 253;
/// The longest access of a guest's processor in bytes, which may not fall apart.
const ACCESS_MAX: u32 = 8;
/// Lengths that configuration space may have.
const CONFIG_LENS: [u64; 2] = [256, 4096];
/// The longest region: the addresses of a guest.
const REGION_MAX: u64 = 1 << 46;

/// What a server takes in one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors.
    pub fds: u32,
    /// Bytes of a region.
    pub transfer_len_bytes: u32,
}

impl Default for Limits {
    /// What counts where a server names none.
    fn default() -> Self {
        Self { fds: 1, transfer_len_bytes: TRANSFER_LEN_BYTES_MAX }
    }
}

#[derive(Default, Deserialize)]
struct Capabilities {
    max_msg_fds: Option<u64>,
    max_data_xfer_size: Option<u64>,
}

#[derive(Default, Deserialize)]
struct VersionData {
    #[serde(default)]
    capabilities: Capabilities,
}

fn short() -> String {
    "it is too short".to_owned()
}

/// The answer to a greeting.
///
/// # Errors
/// What is wrong with it.
pub fn version(payload: &[u8]) -> Result<Limits, String> {
    let mut fields = Fields(payload);
    let (major, minor) = (fields.word().ok_or_else(short)?, fields.word().ok_or_else(short)?);
    if major != MAJOR || minor > MINOR {
        return Err(format!("version {major}.{minor} is not spoken here, {MAJOR}.{MINOR} is"));
    }
    let data = match fields.rest() {
        [] => VersionData::default(),
        [text @ .., 0] => serde_json::from_slice(text)
            .map_err(|error| format!("its capabilities are no such JSON ({error})"))?,
        _ => return Err("its capabilities do not end with a zero".to_owned()),
    };
    let defaults = Limits::default();
    let bounded = |said: Option<u64>, otherwise: u32, most: u32| {
        said.map_or(otherwise, |said| u32::try_from(said).unwrap_or(u32::MAX).min(most))
    };
    let VersionData { capabilities: Capabilities { max_msg_fds, max_data_xfer_size } } = data;
    let fds = bounded(max_msg_fds, defaults.fds, FDS_SENT_MAX);
    let transfer_len_bytes =
        bounded(max_data_xfer_size, defaults.transfer_len_bytes, TRANSFER_LEN_BYTES_MAX);
    if fds == 0 {
        return Err("it takes no descriptors (max_msg_fds), so no guest memory".to_owned());
    }
    if transfer_len_bytes < ACCESS_MAX {
        return Err(format!("it takes accesses of {transfer_len_bytes} bytes at most"));
    }
    Ok(Limits { fds, transfer_len_bytes })
}

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// It can be reset.
    pub has_reset: bool,
    /// Kinds of interrupts that it knows.
    pub irqs: u32,
}

/// The answer to what the device is.
///
/// # Errors
/// What is wrong with it.
pub fn device(payload: &[u8]) -> Result<Device, String> {
    let mut fields = Fields(payload);
    let mut next = || fields.double_word().ok_or_else(short);
    let (_needed, flags, regions, irqs) = (next()?, next()?, next()?, next()?);
    if flags & VFIO_DEVICE_FLAGS_PCI == 0 {
        return Err("the device is not a PCI device".to_owned());
    }
    if regions <= VFIO_PCI_CONFIG_REGION_INDEX {
        return Err(format!("{regions} regions are too few for configuration space"));
    }
    Ok(Device { has_reset: flags & VFIO_DEVICE_FLAGS_RESET != 0, irqs })
}

/// A region: a BAR, or configuration space.
#[derive(Debug, Default)]
pub struct Region {
    /// Length in bytes; zero if there is none.
    pub len_bytes: u64,
    /// It can be read.
    pub is_readable: bool,
    /// It can be written.
    pub is_writable: bool,
    /// The file behind it, if it can be mapped, and where it begins there.
    pub file: Option<(File, u64)>,
    /// The parts that can be mapped.
    pub mappable: Vec<Range<u64>>,
    /// It could be mapped, but its file is not memory.
    pub has_other_file: bool,
}

/// The answer to what the region `index` is; the file is that which came along.
///
/// # Errors
/// What is wrong with it.
pub fn region(index: u32, answer: Answer) -> Result<Region, String> {
    let Answer { payload, fds } = answer;
    let mut fields = Fields(&payload);
    let mut next = || fields.double_word().ok_or_else(short);
    let (needed, flags, described, capabilities) = (next()?, next()?, next()?, next()?);
    let mut next = || fields.quad_word().ok_or_else(short);
    let (len_bytes, offset) = (next()?, next()?);
    if described != index {
        return Err(format!("it is about region {described}, not {index}"));
    }
    if needed < REGION_INFO_LEN_BYTES {
        return Err(format!("its argsz is {needed}"));
    }
    if index == VFIO_PCI_CONFIG_REGION_INDEX && !CONFIG_LENS.contains(&len_bytes) {
        return Err(format!("configuration space has {len_bytes} bytes"));
    }
    if len_bytes > REGION_MAX {
        return Err(format!("region {index} has {len_bytes:#x} bytes"));
    }
    let has = |flag: u32| flags & flag != 0;
    let mut region = Region {
        len_bytes,
        is_readable: has(VFIO_REGION_INFO_FLAG_READ),
        is_writable: has(VFIO_REGION_INFO_FLAG_WRITE),
        file: None,
        mappable: Vec::new(),
        has_other_file: false,
    };
    if !has(VFIO_REGION_INFO_FLAG_MMAP) {
        return Ok(region);
    }
    // With more to say than there is room for, what is said of areas is not known.
    let is_whole = usize::try_from(needed).is_ok_and(|needed| needed <= payload.len());
    let areas = if has(VFIO_REGION_INFO_FLAG_CAPS) && is_whole {
        sparse_areas(&payload, capabilities, len_bytes)?
    } else {
        None
    };
    let areas = match areas {
        Some(areas) => areas,
        None if is_whole && len_bytes > 0 => std::iter::once(0..len_bytes).collect(),
        None => Vec::new(),
    };
    // One that can be mapped, it says, comes with its file; without, accesses are messages.
    if let Some(fd) = fds.into_iter().next() {
        let Some(file) = fd.into_memory() else {
            region.has_other_file = true;
            return Ok(region);
        };
        check_file(&file, offset, &areas)?;
        region.file = Some((file, offset));
        region.mappable = areas;
    }
    Ok(region)
}

/// That the file has all that is said to be mappable.
fn check_file(file: &File, offset: u64, areas: &[Range<u64>]) -> Result<(), String> {
    let file_len_bytes = file.metadata().map_or(0, |data| data.len());
    let last = areas.iter().map(|area| area.end).max().unwrap_or(0);
    match offset.checked_add(last) {
        Some(end) if end <= file_len_bytes => Ok(()),
        _ => Err(format!(
            "its file of {file_len_bytes:#x} bytes has no {last:#x} bytes from {offset:#x} on"
        )),
    }
}

/// The parts that can be mapped, of a region for which they are listed, as the host's kernel lists them, too. `payload` is all
/// that describes it.
///
/// # Errors
/// What is wrong with the list.
pub(crate) fn sparse_areas(
    payload: &[u8],
    first: u32,
    region_len_bytes: u64,
) -> Result<Option<Vec<Range<u64>>>, String> {
    let mut at = first;
    for _ in 0..CAPABILITIES_MAX {
        if at == 0 {
            return Ok(None);
        }
        let outside = || format!("a capability at {at} is not inside");
        if at < REGION_INFO_LEN_BYTES {
            return Err(outside());
        }
        let rest = usize::try_from(at).ok().and_then(|at| payload.get(at..));
        let mut fields = Fields(rest.ok_or_else(outside)?);
        let id = fields.word().ok_or_else(outside)?;
        let _version = fields.word().ok_or_else(outside)?;
        let next = fields.double_word().ok_or_else(outside)?;
        if u32::from(id) == VFIO_REGION_INFO_CAP_SPARSE_MMAP {
            return areas(fields, region_len_bytes).map(Some);
        }
        at = next;
    }
    Err("its list of capabilities does not end".to_owned())
}

fn areas(mut fields: Fields<'_>, region_len_bytes: u64) -> Result<Vec<Range<u64>>, String> {
    let count = fields.double_word().ok_or_else(short)?;
    let _reserved = fields.double_word().ok_or_else(short)?;
    if count > AREAS_MAX {
        return Err(format!("{count} areas of a region are too many"));
    }
    let mut areas = Vec::new();
    for _ in 0..count {
        let start = fields.quad_word().ok_or_else(short)?;
        let len_bytes = fields.quad_word().ok_or_else(short)?;
        let end = start.checked_add(len_bytes).filter(|end| *end <= region_len_bytes);
        let end = end.ok_or_else(|| {
            format!("an area of {len_bytes:#x} bytes at {start:#x} is not in the region")
        })?;
        areas.push(start..end);
    }
    Ok(areas)
}

/// Interrupts of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Irq {
    /// How many there are.
    pub count: u32,
    /// One masks itself, and has to be unmasked.
    pub is_automasked: bool,
}

/// The answer to how many interrupts of kind `index` there are, of which `most` are possible.
///
/// # Errors
/// What is wrong with it.
pub fn irq(index: u32, most: u32, payload: &[u8]) -> Result<Irq, String> {
    let mut fields = Fields(payload);
    let mut next = || fields.double_word().ok_or_else(short);
    let (_needed, flags, described, count) = (next()?, next()?, next()?, next()?);
    if described != index {
        return Err(format!("it is about interrupts {described}, not {index}"));
    }
    if count > most {
        return Err(format!("{count} interrupts of kind {index} are more than {most}"));
    }
    let has = |flag: u32| flags & flag != 0;
    let count = if has(VFIO_IRQ_INFO_EVENTFD) { count } else { 0 };
    Ok(Irq { count, is_automasked: has(VFIO_IRQ_INFO_AUTOMASKED) })
}

/// The answer to a read, which is `data` from then on, or to a write, without.
///
/// # Errors
/// What is wrong with it.
pub fn access(
    (region, offset, count): (u32, u64, u32),
    payload: &[u8],
    data: Option<&mut [u8]>,
) -> Result<(), String> {
    let mut fields = Fields(payload);
    let at = fields.quad_word().ok_or_else(short)?;
    let of = fields.double_word().ok_or_else(short)?;
    let said = fields.double_word().ok_or_else(short)?;
    if (of, at, said) != (region, offset, count) {
        return Err(format!("it is about {said} bytes of region {of} at {at:#x}"));
    }
    let bytes = fields.rest();
    let wanted = data.as_ref().map_or(0, |data| data.len());
    if bytes.len() != wanted {
        return Err(format!("it brings {} bytes, not {wanted}", bytes.len()));
    }
    if let Some(data) = data {
        data.copy_from_slice(bytes);
    }
    Ok(())
}

/// Length of the answer to a read or write of so many bytes.
pub fn access_len_bytes(count: usize) -> usize {
    count.saturating_add(ACCESS_LEN_BYTES as usize)
}

/// The answer to a command that has none.
///
/// # Errors
/// It has one.
pub fn nothing(payload: &[u8]) -> Result<(), String> {
    if payload.is_empty() { Ok(()) } else { Err(format!("it has {} bytes", payload.len())) }
}

/// The answer to taking memory back, which repeats what is taken, or not.
///
/// # Errors
/// It repeats something else.
pub fn unmapped(gpa: u64, len_bytes: u64, payload: &[u8]) -> Result<(), String> {
    if payload.is_empty() {
        return Ok(());
    }
    let mut fields = Fields(payload);
    let _argsz_and_flags: [u8; 8] = fields.take().ok_or_else(short)?;
    let at = fields.quad_word().ok_or_else(short)?;
    let len = fields.quad_word().ok_or_else(short)?;
    if (at, len) == (gpa, len_bytes) {
        Ok(())
    } else {
        Err(format!("it is about {len:#x} bytes at {at:#x}"))
    }
}

/// Length of that answer.
pub const UNMAPPED_LEN_BYTES: usize = 24;
