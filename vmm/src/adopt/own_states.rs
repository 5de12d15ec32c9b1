// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio devices' own states, as version 1 of this program's, which every version reads.

use std::ops::Range;

use cloud_hypervisor_state::{Block, Mem, Net, Virtio};
use devices::virtio::DeviceSnapshot;
use serde_json::{Value, json};

use super::error::{AdoptError, ensure};
use super::legacy::state;
use super::memory::{MemoryLayout, PartKind};

/// Block size of most images.
const SECTOR_BYTES: u32 = 512;
/// Feature bit of a disk that cannot be written.
const BLOCK_RO: u64 = 1 << 5;
/// Feature bits of a network that a driver may change at run time: checksums, segmentation.
const GUEST_OFFLOADS: u64 = 1 << 1 | 0b1111 << 7;
const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
const GUEST_ANNOUNCE: u64 = 1 << 21;
const NET_MTU: u64 = 1 << 3;
/// Bytes in which a memory device adds memory.
pub const MEM_BLOCK_BYTES: u64 = 2 << 20;
/// Maximum number of runs of plugged blocks: a snapshot has a range for each, and can have so many.
const MEM_RUNS_MAX: usize = 1 << 16;

/// The state of a device of which the present driver has accepted these features; what it loses is added to `losses`.
///
/// # Errors
/// Names the value.
pub fn convert(
    id: &str,
    device: &Virtio,
    memory: &MemoryLayout,
    accepted: u64,
    losses: &mut Vec<String>,
) -> Result<DeviceSnapshot, AdoptError> {
    let at = |field: &str| format!("device-manager/{id}: {field}");
    Ok(match device {
        Virtio::Net(net) => {
            if accepted & CTRL_GUEST_OFFLOADS != 0 {
                losses.push(format!(
                    "network '{id}' has all offloads that its driver has accepted, as cloud-hypervisor does not save which \
                     of them it has switched off since"
                ));
            }
            state("virtio-net", network(net, accepted, &at)?)
        }
        Virtio::VhostUserNet(net) => {
            let pairs = net.config.max_virtqueue_pairs.max(1);
            let mtu = (net.avail_features & NET_MTU != 0).then_some(net.config.mtu);
            let pending = accepted & GUEST_ANNOUNCE != 0;
            let data = json!({"active_pairs": pairs, "announce_pending": pending, "mtu": mtu});
            state("vhost-user-net", data)
        }
        Virtio::Block(block) => {
            let sector_bytes = block.config.blk_size;
            if sector_bytes != SECTOR_BYTES {
                losses.push(format!(
                    "disk '{id}' had blocks of {sector_bytes} bytes, and has those of its image here"
                ));
            }
            state("virtio-block", disk(block, &at)?)
        }
        Virtio::Console(console) => {
            let waiting = console.in_buffer.len();
            if waiting > 0 {
                losses.push(format!(
                    "console '{id}' loses {waiting} bytes that the guest has not read"
                ));
            }
            let (columns, rows) = (console.config.cols, console.config.rows);
            state("virtio-console", json!({"columns": columns, "rows": rows}))
        }
        Virtio::Rng(_) => state("virtio-rng", json!({})),
        Virtio::Rtc(_) => state("virtio-rtc", json!({})),
        Virtio::Vsock(_) => state("virtio-vsock", json!({})),
        Virtio::Balloon(balloon) => {
            let config = &balloon.config;
            let data = json!({
                "target_pages": config.num_pages,
                "actual_pages": config.actual,
                "poison": 0,
                "hint_command": 0,
            });
            state("virtio-balloon", data)
        }
        Virtio::Mem(mem) => state("virtio-mem", memory_device(id, mem, memory, &at)?),
        Virtio::Pmem(pmem) => {
            let data = json!({"gpa": pmem.config.start, "len_bytes": pmem.config.size});
            state("virtio-pmem", data)
        }
        Virtio::Watchdog(watchdog) => {
            state("virtio-watchdog", json!({"is_armed": watchdog.enabled}))
        }
        Virtio::Fs(fs) => {
            let Some(bytes) = fs.backend_state.as_ref().filter(|bytes| !bytes.is_empty()) else {
                let problem = "the back end has given no state, so that it cannot be moved";
                return Err(AdoptError::refused(at("backend_state"), problem));
            };
            ensure(
                fs.vring_bases.is_some(),
                || at("vring_bases"),
                || "the back end has given a state and no positions".to_owned(),
            )?;
            let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or('0');
            let digits: String =
                bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
            state("vhost-user-fs", json!({"back_end": digits}))
        }
    })
}

fn network(net: &Net, accepted: u64, at: &dyn Fn(&str) -> String) -> Result<Value, AdoptError> {
    let pairs = net.config.max_virtqueue_pairs;
    ensure(pairs >= 1, || at("config.max_virtqueue_pairs"), || "no queue pair".to_owned())?;
    // All pairs are served there, whatever the driver has asked for.
    Ok(json!({
        "mac": *net.config.mac,
        "offloads": accepted & GUEST_OFFLOADS,
        "active_pairs": pairs,
        "announce_pending": accepted & GUEST_ANNOUNCE != 0,
    }))
}

fn disk(block: &Block, at: &dyn Fn(&str) -> String) -> Result<Value, AdoptError> {
    let capacity = block.config.capacity;
    ensure(
        capacity == block.disk_nsectors,
        || at("config.capacity"),
        || format!("{capacity} sectors of an image with {}", block.disk_nsectors),
    )?;
    Ok(json!({
        "writeback": block.config.writeback != 0,
        "capacity_sectors": capacity,
        "readonly": block.avail_features & BLOCK_RO != 0,
    }))
}

/// The runs of plugged blocks of a memory device: first block and number.
fn plugged_runs(id: &str, mem: &Mem) -> Result<Vec<(u64, u64)>, AdoptError> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let blocks = (0_u64..).zip(mem.blocks_state.bitmap.iter());
    for (block, _) in blocks.filter(|(_, is_plugged)| **is_plugged) {
        match runs.last_mut() {
            Some((first, count)) if first.saturating_add(*count) == block => {
                *count = count.saturating_add(1);
            }
            _ => runs.push((block, 1)),
        }
        ensure(
            runs.len() <= MEM_RUNS_MAX,
            || format!("device-manager/{id}: blocks_state.bitmap"),
            || format!("more than {MEM_RUNS_MAX} runs of plugged blocks"),
        )?;
    }
    Ok(runs)
}

/// Offsets of the plugged memory in the region of a memory device.
///
/// # Errors
/// It is in too many pieces.
pub fn plugged_blocks(id: &str, mem: &Mem) -> Result<Vec<Range<u64>>, AdoptError> {
    let bytes = |blocks: u64| blocks.saturating_mul(MEM_BLOCK_BYTES);
    let range = |(first, count): (u64, u64)| bytes(first)..bytes(first.saturating_add(count));
    Ok(plugged_runs(id, mem)?.into_iter().map(range).collect())
}

fn memory_device(
    id: &str,
    mem: &Mem,
    memory: &MemoryLayout,
    at: &dyn Fn(&str) -> String,
) -> Result<Value, AdoptError> {
    let config = &mem.config;
    let region =
        memory.parts.iter().find(|part| part.kind == PartKind::VirtioMem && part.zone == id);
    let is_there = region.is_some_and(|part| {
        part.gpa.start == config.addr
            && part.gpa.end.saturating_sub(part.gpa.start) == config.region_size
    });
    ensure(
        is_there,
        || at("config.addr"),
        || format!("{:#x} bytes at {:#x} are not its region", config.region_size, config.addr),
    )?;
    ensure(
        config.block_size == MEM_BLOCK_BYTES,
        || at("config.block_size"),
        || format!("{:#x}, not 2 MiB", config.block_size),
    )?;
    let blocks = u64::try_from(mem.blocks_state.bitmap.len()).unwrap_or(u64::MAX);
    let is_whole = Some(config.region_size) == blocks.checked_mul(MEM_BLOCK_BYTES);
    ensure(is_whole, || at("blocks_state.bitmap"), || format!("{blocks} blocks"))?;
    let plugged: Vec<(u64, u64)> = plugged_runs(id, mem)?;
    let count = plugged.iter().fold(0, |sum: u64, (_, count)| sum.saturating_add(*count));
    let bytes = count.saturating_mul(MEM_BLOCK_BYTES);
    ensure(
        config.plugged_size == bytes,
        || at("config.plugged_size"),
        || format!("{:#x}, and {bytes:#x} bytes are plugged", config.plugged_size),
    )?;
    ensure(
        config.requested_size <= config.region_size
            && config.requested_size.is_multiple_of(MEM_BLOCK_BYTES),
        || at("config.requested_size"),
        || format!("{:#x}", config.requested_size),
    )?;
    Ok(json!({
        "block_bytes": MEM_BLOCK_BYTES,
        "requested_bytes": config.requested_size,
        "plugged": plugged,
    }))
}
