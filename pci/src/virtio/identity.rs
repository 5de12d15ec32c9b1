// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Identity of a virtio device in configuration space (virtio 1.3, 4.1.2).

use virtio_bindings::virtio_ids as ids;

use crate::config_space::Identity;

const VENDOR_ID_VIRTIO: u16 = 0x1af4;
/// PCI device id of the modern virtio device with id 0.
const DEVICE_ID_BASE: u16 = 0x1040;
/// Modern devices have revision 1 or above.
const REVISION: u8 = 1;

const CLASS_NETWORK_ETHERNET: u32 = 0x02_00_00;
const CLASS_STORAGE_SCSI: u32 = 0x01_00_00;
const CLASS_STORAGE_OTHER: u32 = 0x01_80_00;
const CLASS_COMMUNICATION_OTHER: u32 = 0x07_80_00;
const CLASS_UNASSIGNED: u32 = 0xff_00_00;

/// The identification registers of a virtio device; `None` if the device id exceeds 16 bits.
pub fn identity(virtio_device_id: u16) -> Option<Identity> {
    let device_id = DEVICE_ID_BASE.checked_add(virtio_device_id)?;
    Some(Identity {
        vendor_id: VENDOR_ID_VIRTIO,
        device_id,
        revision: REVISION,
        class: class(virtio_device_id),
        subsystem_vendor_id: VENDOR_ID_VIRTIO,
        subsystem_id: device_id,
    })
}

/// Class code by device type, for people and firmware; drivers only use the device id.
fn class(virtio_device_id: u16) -> u32 {
    match u32::from(virtio_device_id) {
        ids::VIRTIO_ID_NET => CLASS_NETWORK_ETHERNET,
        ids::VIRTIO_ID_BLOCK | ids::VIRTIO_ID_SCSI => CLASS_STORAGE_SCSI,
        ids::VIRTIO_ID_FS | ids::VIRTIO_ID_PMEM => CLASS_STORAGE_OTHER,
        ids::VIRTIO_ID_CONSOLE | ids::VIRTIO_ID_VSOCK => CLASS_COMMUNICATION_OTHER,
        _ => CLASS_UNASSIGNED,
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn ids_are_the_modern_ones() {
        let block = identity(2).unwrap();
        assert_eq!((block.vendor_id, block.device_id, block.class), (0x1af4, 0x1042, 0x01_00_00));
        assert_eq!(identity(1).unwrap().class, 0x02_00_00);
        assert!(block.revision >= 1);
        assert!(identity(0xefff).is_none());
    }
}
