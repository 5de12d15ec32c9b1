// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio devices' own states: what the guest reads of a device's configuration, and the state that is saved here.

use std::ops::Range;

use cloud_hypervisor_state::{
    Balloon, BalloonConfig, Block, BlockConfig, BlockGeometry, Console, ConsoleConfig, Fixed, List,
    Mem, MemBlocks, MemConfig, Net, NetConfig, Plain, Pmem, PmemConfig, Virtio, Vsock, Watchdog,
};
use devices::virtio::DeviceSnapshot;
use serde::Deserialize;

use super::error::{ExportError, ensure, fits};
use super::legacy::read;
use crate::adopt::{MemoryLayout, PartKind};
use crate::config::VmConfig;
use crate::machine::SeenDevice;

/// Bytes in which a memory device adds memory there.
const MEM_BLOCK_BYTES: u64 = 2 << 20;
/// Feature bits of a network that a driver may change at run time: checksums, segmentation.
const GUEST_OFFLOADS: u64 = 1 << 1 | 0b1111 << 7;
const CONSOLE_PORTS: u32 = 1;

/// A device that is converted.
pub struct Source<'a> {
    /// What it is called in errors.
    pub what: &'a str,
    /// Its id.
    pub id: &'a str,
    /// Its type.
    pub device_type: u16,
    /// Its state.
    pub state: &'a DeviceSnapshot,
    /// What the guest sees of it.
    pub seen: &'a SeenDevice,
    /// Features that its driver has accepted; none without a driver.
    pub accepted: u64,
    /// Whether it runs.
    pub active: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Disk {
    writeback: bool,
    capacity_sectors: u64,
    #[expect(dead_code, reason = "it is among the features")]
    readonly: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    mac: [u8; 6],
    offloads: u64,
    active_pairs: u16,
    #[expect(dead_code, reason = "every arrival is announced there")]
    announce_pending: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Terminal {
    columns: u16,
    rows: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ballooned {
    target_pages: u32,
    actual_pages: u32,
    poison: u32,
    #[expect(dead_code, reason = "hints are not offered on this platform")]
    hint_command: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocks {
    block_bytes: u64,
    requested_bytes: u64,
    plugged: Vec<(u64, u64)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Persistent {
    gpa: u64,
    len_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Armed {
    is_armed: bool,
}

/// What the documents have of a memory device beside its own state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaterMemory {
    /// What the guest is to have.
    pub requested_bytes: u64,
    /// Guest addresses of what it has.
    pub plugged: Vec<Range<u64>>,
}

impl Source<'_> {
    fn what(&self) -> String {
        self.what.to_owned()
    }

    fn read<T: serde::de::DeserializeOwned>(&self, kind: &str) -> Result<T, ExportError> {
        read(self.what, self.state, kind, 1)
    }

    /// A number of the device's configuration; what is beyond its end is zero.
    fn number<const BYTES: usize>(&self, at: usize) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes.iter_mut().zip(self.seen.config.iter().skip(at)).for_each(|(to, from)| *to = *from);
        bytes
    }

    fn byte(&self, at: usize) -> u8 {
        u8::from_le_bytes(self.number(at))
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.number(at))
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.number(at))
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.number(at))
    }

    fn plain(&self, kind: &str) -> Result<Plain, ExportError> {
        self.read::<Nothing>(kind)?;
        let (avail_features, acked_features) = (self.seen.features, self.accepted);
        Ok(Plain { avail_features, acked_features })
    }

    /// The device; what it loses is added to `losses`. `layout` is where memory is.
    ///
    /// # Errors
    /// v53 has no such device, or not in this state.
    pub fn convert(
        &self,
        config: &VmConfig,
        layout: &MemoryLayout,
        losses: &mut Vec<String>,
    ) -> Result<Virtio, ExportError> {
        let (avail_features, acked_features) = (self.seen.features, self.accepted);
        Ok(match self.device_type {
            1 => Virtio::Net(self.network()?),
            2 => Virtio::Block(self.disk(config)?),
            3 => {
                let Terminal { columns, rows } = self.read("virtio-console")?;
                let config =
                    ConsoleConfig { cols: columns, rows, max_nr_ports: CONSOLE_PORTS, emerg_wr: 0 };
                let in_buffer = List::default();
                Virtio::Console(Console { avail_features, acked_features, config, in_buffer })
            }
            4 => Virtio::Rng(self.plain("virtio-rng")?),
            5 => Virtio::Balloon(self.balloon()?),
            17 => Virtio::Rtc(self.plain("virtio-rtc")?),
            19 => {
                self.read::<Nothing>("virtio-vsock")?;
                if self.active {
                    let id = self.id;
                    losses.push(format!(
                        "connections that are open over '{id}' end there without notice to the guest"
                    ));
                }
                let connections = List::default();
                Virtio::Vsock(Vsock { avail_features, acked_features, connections })
            }
            24 => Virtio::Mem(self.memory(layout)?),
            27 => {
                let Persistent { gpa, len_bytes } = self.read("virtio-pmem")?;
                let config = PmemConfig { start: gpa, size: len_bytes };
                Virtio::Pmem(Pmem { avail_features, acked_features, config })
            }
            35 => {
                let Armed { is_armed } = self.read("virtio-watchdog")?;
                Virtio::Watchdog(Watchdog { avail_features, acked_features, enabled: is_armed })
            }
            other => {
                let problem = format!("a device of type {other} cannot be written");
                return Err(ExportError::refused(self.what, problem));
            }
        })
    }

    fn network(&self) -> Result<Net, ExportError> {
        let Network { mac, offloads, active_pairs, .. } = self.read("virtio-net")?;
        let pairs = self.half(8);
        if self.active {
            // There, both follow from what the driver has accepted.
            let accepted = self.accepted & GUEST_OFFLOADS;
            let problem = || {
                format!("its driver has changed its offloads from {accepted:#x} to {offloads:#x}")
            };
            ensure(offloads == accepted, || self.what(), problem)?;
            let problem = || format!("its driver uses {active_pairs} of {pairs} queue pairs");
            ensure(pairs <= 1 || active_pairs == pairs, || self.what(), problem)?;
        }
        let config = NetConfig {
            mac: Fixed::from(mac),
            // Link and announcement are shown there all the same.
            status: 0,
            max_virtqueue_pairs: pairs,
            mtu: self.half(10),
            speed: self.word(12),
            duplex: self.byte(16),
        };
        let sizes = List::try_from(self.seen.queue_sizes.clone());
        Ok(Net {
            avail_features: self.seen.features,
            acked_features: self.accepted,
            config,
            queue_size: fits(sizes, || self.what())?,
        })
    }

    fn disk(&self, config: &VmConfig) -> Result<Block, ExportError> {
        let Disk { writeback, capacity_sectors, .. } = self.read("virtio-block")?;
        let mut disks = config.disks.iter().flatten();
        let disk = disks.find(|disk| disk.id.as_deref() == Some(self.id));
        let path = disk.and_then(|disk| disk.path.as_ref()).and_then(|path| path.to_str());
        let no_path = || ExportError::refused(self.what, "it has no path, or one that is no text");
        let config = BlockConfig {
            capacity: capacity_sectors,
            size_max: self.word(8),
            seg_max: self.word(12),
            geometry: BlockGeometry {
                cylinders: self.half(16),
                heads: self.byte(18),
                sectors: self.byte(19),
            },
            blk_size: self.word(20),
            physical_block_exp: self.byte(24),
            alignment_offset: self.byte(25),
            min_io_size: self.half(26),
            opt_io_size: self.word(28),
            writeback: writeback.into(),
            unused: 0,
            num_queues: self.half(34),
            max_discard_sectors: self.word(36),
            max_discard_seg: self.word(40),
            discard_sector_alignment: self.word(44),
            max_write_zeroes_sectors: self.word(48),
            max_write_zeroes_seg: self.word(52),
            write_zeroes_may_unmap: self.byte(56),
            unused1: Fixed::from([0; 3]),
        };
        Ok(Block {
            avail_features: self.seen.features,
            acked_features: self.accepted,
            disk_path: path.ok_or_else(no_path)?.to_owned(),
            disk_nsectors: capacity_sectors,
            config,
        })
    }

    fn balloon(&self) -> Result<Balloon, ExportError> {
        let Ballooned { target_pages, actual_pages, poison, .. } = self.read("virtio-balloon")?;
        let problem = || "its pages are to be filled with a pattern".to_owned();
        ensure(poison == 0, || self.what(), problem)?;
        Ok(Balloon {
            avail_features: self.seen.features,
            acked_features: self.accepted,
            config: BalloonConfig { num_pages: target_pages, actual: actual_pages },
        })
    }

    /// What the documents have of a memory device elsewhere.
    ///
    /// # Errors
    /// Its state is not one of such a device.
    pub fn later_memory(&self, layout: &MemoryLayout) -> Result<LaterMemory, ExportError> {
        let Blocks { block_bytes, requested_bytes, plugged } = self.read("virtio-mem")?;
        let problem = || format!("it adds {block_bytes:#x} bytes at a time, and there 2 MiB");
        ensure(block_bytes == MEM_BLOCK_BYTES, || self.what(), problem)?;
        let gpa = self.region(layout)?;
        let at = |block: u64| gpa.start.saturating_add(block.saturating_mul(MEM_BLOCK_BYTES));
        let runs = plugged.into_iter();
        let runs = runs.map(|(first, count)| at(first)..at(first.saturating_add(count)));
        Ok(LaterMemory { requested_bytes, plugged: runs.collect() })
    }

    fn region(&self, layout: &MemoryLayout) -> Result<Range<u64>, ExportError> {
        let zone = super::memory::zone_of(self.id);
        let is_its = |kind| kind == PartKind::VirtioMem;
        let part = layout.parts.iter().find(|part| part.zone == zone && is_its(part.kind));
        let missing = || ExportError::refused(self.what, "it has no memory");
        part.map(|part| part.gpa.clone()).ok_or_else(missing)
    }

    fn memory(&self, layout: &MemoryLayout) -> Result<Mem, ExportError> {
        let LaterMemory { requested_bytes, plugged } = self.later_memory(layout)?;
        let gpa = self.region(layout)?;
        let region_size = gpa.end.saturating_sub(gpa.start);
        let blocks = usize::try_from(region_size / MEM_BLOCK_BYTES).unwrap_or(0);
        let mut bitmap = vec![false; blocks];
        let mut plugged_size = 0_u64;
        for run in plugged {
            let [first, end] = [run.start, run.end].map(|at| {
                let block = at.saturating_sub(gpa.start) / MEM_BLOCK_BYTES;
                usize::try_from(block).unwrap_or(usize::MAX)
            });
            let beyond = || ExportError::refused(self.what, "more is plugged than it has");
            bitmap.get_mut(first..end).ok_or_else(beyond)?.fill(true);
            plugged_size = plugged_size.saturating_add(run.end.saturating_sub(run.start));
        }
        let config = MemConfig {
            block_size: MEM_BLOCK_BYTES,
            node_id: self.half(8),
            padding: Fixed::from([0; 6]),
            addr: gpa.start,
            region_size,
            usable_region_size: self.long(32),
            plugged_size,
            requested_size: requested_bytes,
        };
        Ok(Mem {
            avail_features: self.seen.features,
            acked_features: self.accepted,
            config,
            blocks_state: MemBlocks { bitmap: fits(List::try_from(bitmap), || self.what())? },
        })
    }
}
