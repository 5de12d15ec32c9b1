// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio transport: registers and queues.
//!
//! Owns the position of a queue, which no document has: its device has returned what it took, so that both positions are
//! the index in its used ring. For back ends that gave their state, the next available entry is in it.

use std::ops::RangeInclusive;

use cloud_hypervisor_state::{Queue, Transport, Virtio};
use devices::virtio::DeviceSnapshot;
use pci::{
    BarWidth, CommonState, NARROW_BAR_VERSION, PciDeviceState, QueueProgressState,
    QueueRegisterState, VIRTIO_PCI_KIND, VirtioPciState,
};

use super::ReadGuest;
use super::error::{AdoptError, ensure};
use super::functions::{self, Windows};
use super::memory::MemoryLayout;
use super::topology::Place;
use crate::machine::PciFunctionState;

/// Bits of the status register.
const DRIVER: u8 = 2;
const FEATURES_OK: u8 = 8;
const DRIVER_OK: u8 = 4;
const FAILED: u8 = 0x80;
const KNOWN_STATUS: u8 = 1 | DRIVER | DRIVER_OK | FEATURES_OK;
/// Maximum number of queues of a device that has as many as its options say.
const QUEUES_MAX: usize = 1024;
/// A vector that is none.
const NO_VECTOR: u16 = 0xffff;
const ISR_BITS: u64 = 3;
/// Capability offsets are given from the byte after its two-byte header on.
const CAPABILITY_HEADER: usize = 2;
/// Where capabilities begin and end.
const FIRST_CAPABILITY: usize = 0x40;
const STANDARD_CONFIG_BYTES: usize = 0x100;
const CAPABILITY_BYTES: usize = 18;
const VENDOR_CAPABILITY: u8 = 9;
/// Id, length and type of the PCI configuration access capability.
const ACCESS_HEADER: [u8; 3] = [VENDOR_CAPABILITY, 20, 5];
/// Feature bit of a disk that says how many segments a request may have, and descriptors that are no segments.
const BLOCK_SEG_MAX: u64 = 1 << 2;
const BLOCK_OVERHEAD: u16 = 2;
/// Offset of the index in a ring.
const RING_INDEX: u64 = 2;

/// A device with its transport.
pub struct Input<'a> {
    /// Its id there.
    pub id: &'a str,
    /// Its transport.
    pub transport: &'a Transport,
    /// The device.
    pub device: &'a Virtio,
    /// Where it is.
    pub place: &'a Place,
    /// Where its BARs may be.
    pub windows: &'a Windows,
    /// Length of BAR 0 on the platform.
    pub bar_len_bytes: u64,
}

impl Input<'_> {
    fn path(&self) -> String {
        format!("device-manager/_virtio-pci-{}", self.id)
    }

    fn at(&self, field: &str) -> String {
        format!("{}: {field}", self.path())
    }

    fn at_common(&self, field: &str) -> String {
        format!("{}/virtio_pci_common_config: {field}", self.path())
    }
}

/// The features that the present driver has accepted, of all that drivers have: these outlive a reset there.
pub fn accepted_now(transport: &Transport, accepted: u64) -> u64 {
    if transport.common.driver_status & DRIVER == 0 { 0 } else { accepted }
}

/// The numbers of queues that such a device may have.
fn queue_counts(device: &Virtio) -> RangeInclusive<usize> {
    match device {
        Virtio::Rng(_)
        | Virtio::Rtc(_)
        | Virtio::Pmem(_)
        | Virtio::Watchdog(_)
        | Virtio::Mem(_) => 1..=1,
        Virtio::Console(_) => 2..=2,
        Virtio::Balloon(_) => 2..=3,
        Virtio::Vsock(_) => 3..=3,
        Virtio::Block(_) => 1..=QUEUES_MAX,
        Virtio::Net(_) | Virtio::VhostUserNet(_) | Virtio::Fs(_) => 2..=QUEUES_MAX,
    }
}

/// The state of the function; `accepted` are the features that its driver has accepted, `device` is its own state.
///
/// # Errors
/// Names the register.
pub fn convert(
    input: &Input<'_>,
    accepted: u64,
    device: DeviceSnapshot,
    memory: &MemoryLayout,
    guest: &dyn ReadGuest,
) -> Result<PciFunctionState, AdoptError> {
    let Transport { data, configuration, common, msix } = input.transport;
    check(input)?;
    let (status, active) = (common.driver_status, data.device_activated);
    let apart = Some((access_offset(input)?, data.cap_pci_cfg.as_slice()));
    let config =
        functions::config_space(&input.path(), configuration, apart, input.place, input.windows)?;
    let msix = functions::msix(&input.path(), msix, configuration)?;
    let mut queues = Vec::new();
    for (index, (queue, vector)) in data.queues.iter().zip(common.msix_queues.iter()).enumerate() {
        let position = Position { input, index, queue, memory, guest };
        let progress = if active && queue.ready { Some(position.progress()?) } else { None };
        queues.push(QueueRegisterState {
            size: queue.size,
            enabled: queue.ready,
            desc_gpa: queue.desc_table,
            driver_gpa: queue.avail_ring,
            device_gpa: queue.used_ring,
            vector: *vector,
            progress,
        });
    }
    let version = match BarWidth::of(&config) {
        BarWidth::Bits32 => NARROW_BAR_VERSION,
        BarWidth::Bits64 => 1,
    };
    let state = VirtioPciState {
        version,
        device_id: input.transport.device_type(),
        config,
        msix,
        common: CommonState {
            device_feature_select: common.device_feature_select,
            driver_feature_select: common.driver_feature_select,
            driver_features: accepted,
            driver_features_beyond: false,
            queue_select: common.queue_select,
            status,
            active,
            config_generation: common.config_generation,
            isr: u8::try_from(data.interrupt_status).unwrap_or(0),
            config_vector: common.msix_config,
        },
        queues,
        device,
    };
    let data = serde_json::to_value(&state).map_err(AdoptError::Malformed)?;
    let state = PciDeviceState { kind: VIRTIO_PCI_KIND.to_owned(), version, data };
    Ok(PciFunctionState { bdf: input.place.bdf.to_string(), state })
}

/// Checks the registers that are not those of a queue.
fn check(input: &Input<'_>) -> Result<(), AdoptError> {
    let Transport { data, common, msix, .. } = input.transport;
    let (status, active) = (common.driver_status, data.device_activated);
    // Of a driver that has given up before it started the device; the next one resets it.
    let known = if active { KNOWN_STATUS } else { KNOWN_STATUS | FAILED };
    ensure(
        status & !known == 0,
        || input.at_common("driver_status"),
        || format!("{status:#x}: the device has failed or needs a reset"),
    )?;
    ensure(
        active == (status & DRIVER_OK != 0),
        || input.at("device_activated"),
        || format!("{active}, and the status is {status:#x}"),
    )?;
    ensure(
        data.interrupt_status & !ISR_BITS == 0,
        || input.at("interrupt_status"),
        || format!("{:#x}", data.interrupt_status),
    )?;
    let vectors = msix.table_entries.len();
    ensure(
        vectors == data.queues.len().saturating_add(1),
        || input.at("queues"),
        || format!("{} of them, and {vectors} vectors", data.queues.len()),
    )?;
    let counts = queue_counts(input.device);
    ensure(
        counts.contains(&data.queues.len()),
        || input.at("queues"),
        || format!("{}, and such a device has at least {}", data.queues.len(), counts.start()),
    )?;
    let len_bytes = input.place.bars.iter().find(|(index, ..)| *index == 0).map(|bar| bar.2);
    ensure(
        len_bytes == Some(input.bar_len_bytes),
        || format!("{}/pci_configuration: bars[0]", input.path()),
        || format!("{:#x} bytes, not {:#x}", len_bytes.unwrap_or(0), input.bar_len_bytes),
    )?;
    if let Virtio::Block(disk) = input.device {
        let seg_max = disk.config.seg_max;
        let is_so = |queue: &Queue| {
            queue.max_size.checked_sub(BLOCK_OVERHEAD).map(u32::from) == Some(seg_max)
        };
        ensure(
            disk.avail_features & BLOCK_SEG_MAX == 0 || data.queues.iter().all(is_so),
            || format!("device-manager/{}: config.seg_max", input.id),
            || format!("{seg_max}, which does not follow from the size of its queues"),
        )?;
    }
    if let Virtio::Net(net) = input.device {
        let sizes = data.queues.iter().map(|queue| queue.max_size);
        ensure(
            net.queue_size.iter().copied().eq(sizes),
            || format!("device-manager/{}: queue_size", input.id),
            || "other sizes than those of its queues".to_owned(),
        )?;
    }
    let is_vector = |vector: u16| vector == NO_VECTOR || usize::from(vector) < vectors;
    let strange =
        common.msix_queues.iter().chain([&common.msix_config]).find(|it| !is_vector(**it));
    ensure(
        strange.is_none(),
        || input.at_common("msix_queues, msix_config"),
        || format!("there is no vector {}", strange.copied().unwrap_or_default()),
    )?;
    Ok(())
}

/// Where the bytes of the PCI configuration access capability are: nothing else may be overwritten with them.
fn access_offset(input: &Input<'_>) -> Result<usize, AdoptError> {
    let data = &input.transport.data;
    let [length, kind, ..] = *data.cap_pci_cfg;
    let registers = &input.transport.configuration.registers;
    let byte_at = |offset: usize| {
        let register = registers.get(offset / 4)?.to_le_bytes();
        register.get(offset % 4).copied()
    };
    let offset = usize::try_from(data.cap_pci_cfg_offset).ok().filter(|offset| {
        let header = [offset.checked_sub(CAPABILITY_HEADER), Some(*offset), offset.checked_add(1)];
        let header = header.map(|offset| offset.and_then(byte_at));
        *offset >= FIRST_CAPABILITY + CAPABILITY_HEADER
            && *offset <= STANDARD_CONFIG_BYTES - CAPABILITY_BYTES
            && header == ACCESS_HEADER.map(Some)
    });
    let offset = offset.filter(|_| [VENDOR_CAPABILITY, length, kind] == ACCESS_HEADER);
    let other =
        || AdoptError::refused(input.at("cap_pci_cfg_offset, cap_pci_cfg"), "not that capability");
    offset.ok_or_else(other)
}

/// A queue whose position is found out.
struct Position<'a> {
    input: &'a Input<'a>,
    index: usize,
    queue: &'a Queue,
    memory: &'a MemoryLayout,
    guest: &'a dyn ReadGuest,
}

impl Position<'_> {
    fn at(&self, field: &str) -> String {
        self.input.at(&format!("queues[{}].{field}", self.index))
    }

    fn progress(&self) -> Result<QueueProgressState, AdoptError> {
        let Queue { max_size, size, desc_table, avail_ring, used_ring, .. } = *self.queue;
        let is_size = size.is_power_of_two() && size <= max_size;
        ensure(is_size, || self.at("size"), || format!("{size}, of at most {max_size}"))?;
        let entries = u64::from(size);
        for (field, gpa, align, bytes) in [
            ("desc_table", desc_table, 16, 16 * entries),
            ("avail_ring", avail_ring, 2, 6 + 2 * entries),
            ("used_ring", used_ring, 4, 6 + 8 * entries),
        ] {
            let is_there = gpa.is_multiple_of(align) && self.memory.holds(gpa, bytes);
            ensure(
                is_there,
                || self.at(field),
                || format!("{bytes} bytes at {gpa:#x} are not in memory, or not aligned"),
            )?;
        }
        let used = self.read("used_ring", used_ring)?;
        let available = self.read("avail_ring", avail_ring)?;
        let next_avail = self.base()?.unwrap_or(used);
        let waiting = available.wrapping_sub(next_avail);
        let taken = next_avail.wrapping_sub(used);
        ensure(
            waiting <= size && taken <= size,
            || self.at("used_ring"),
            || format!("its index is {used}, with {available} available and {next_avail} taken"),
        )?;
        Ok(QueueProgressState { next_avail, next_used: used })
    }

    /// The position that a back end has given.
    fn base(&self) -> Result<Option<u16>, AdoptError> {
        let (bases, rings) = match self.input.device {
            Virtio::Fs(fs) => (&fs.vring_bases, fs.vu_num_queues),
            Virtio::VhostUserNet(net) => (&net.vring_bases, net.vu_num_queues),
            _ => return Ok(None),
        };
        let Some(bases) = bases else { return Ok(None) };
        let path = |what: String| format!("device-manager/{}: vring_bases{what}", self.input.id);
        let count = u64::try_from(bases.len()).ok();
        ensure(
            count == Some(rings),
            || path(String::new()),
            || format!("{} of them, and the back end has {rings} rings", bases.len()),
        )?;
        if self.index >= bases.len() {
            // The control queue of a network, which the VMM serves itself.
            return Ok(None);
        }
        let base = bases.get(self.index).and_then(|base| u16::try_from(*base).ok());
        let none =
            || AdoptError::refused(path(format!("[{}]", self.index)), "no position of a ring");
        base.map(Some).ok_or_else(none)
    }

    fn read(&self, field: &str, ring_gpa: u64) -> Result<u16, AdoptError> {
        // The ring is in memory.
        let gpa = ring_gpa.saturating_add(RING_INDEX);
        self.guest.read_u16(gpa).map_err(|source| AdoptError::Guest {
            path: self.at(field),
            gpa,
            source,
        })
    }
}
