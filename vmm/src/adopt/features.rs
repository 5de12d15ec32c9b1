// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Features: what a device has offered has to be offered again, so all of it has to be known.
//!
//! Owns which features v53 offers and this program has on that platform, by kind. Bits as in the virtio standard.

use cloud_hypervisor_state::Virtio;

use super::error::{AdoptError, ensure};

const VERSION_1: u64 = 1 << 32;
const ACCESS_PLATFORM: u64 = 1 << 33;
const IN_ORDER: u64 = 1 << 35;
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Size and block limits, read-only, flush, topology, write-back, queues, discard, write zeroes.
const BLOCK: u64 = 1 << 2 | 1 << 5 | 1 << 6 | 0b1_1111 << 9 | 1 << 14;
/// Offloads and MTU, MAC, status, control queue, announcements, queue pairs.
const NET: u64 = 0b1111 | 1 << 5 | 0b1111_1111 << 7 | 1 << 16 | 1 << 17 | 1 << 21 | 1 << 22;
const MERGED_BUFFERS: u64 = 1 << 15;
const CONSOLE_SIZE: u64 = 1;
/// Deflating when memory is short, reporting of free pages.
const BALLOON: u64 = 1 << 2 | 1 << 5;
const MEM_PXM: u64 = 1;

/// Features of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// What it offers.
    pub offered: u64,
    /// What its drivers have accepted.
    pub accepted: u64,
}

fn possible(device: &Virtio) -> u64 {
    let own = match device {
        Virtio::Net(_) => NET | EVENT_IDX,
        Virtio::VhostUserNet(_) => NET | MERGED_BUFFERS | INDIRECT_DESC | EVENT_IDX,
        Virtio::Block(_) => BLOCK | INDIRECT_DESC | EVENT_IDX,
        Virtio::Console(_) => CONSOLE_SIZE,
        Virtio::Balloon(_) => BALLOON,
        Virtio::Vsock(_) => IN_ORDER,
        Virtio::Mem(_) => MEM_PXM,
        Virtio::Fs(_) => INDIRECT_DESC | EVENT_IDX,
        Virtio::Rng(_) | Virtio::Rtc(_) | Virtio::Pmem(_) | Virtio::Watchdog(_) => 0,
    };
    own | VERSION_1
}

/// The features of a device.
///
/// # Errors
/// It has offered one that is not known, or a driver has accepted one that was not offered.
pub fn check(id: &str, device: &Virtio) -> Result<Known, AdoptError> {
    let (offered, mut accepted) = device.features();
    let at = |field: &str| format!("device-manager/{id}: {field}");
    let behind_iommu = (offered | accepted) & ACCESS_PLATFORM;
    ensure(
        behind_iommu == 0,
        || at("avail_features"),
        || "the device is behind the virtual IOMMU".to_owned(),
    )?;
    // A back end may offer more than its driver has accepted, and the guest is offered what the back end here has.
    let is_elsewhere = matches!(device, Virtio::Fs(_) | Virtio::VhostUserNet(_));
    if is_elsewhere {
        // Between a VMM and its back end: no driver is offered it.
        accepted &= !PROTOCOL_FEATURES;
    }
    let looked_at = if is_elsewhere { accepted } else { offered };
    let unknown = looked_at & !possible(device);
    ensure(
        unknown == 0,
        || at("avail_features"),
        || format!("features {unknown:#x}, which such a device does not have here"),
    )?;
    let surplus = accepted & !offered;
    ensure(
        surplus == 0,
        || at("acked_features"),
        || format!("{surplus:#x} were accepted and not offered"),
    )?;
    Ok(Known { offered, accepted })
}
