// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Identity of a virtio device in configuration space (virtio 1.3, 4.1.2).

use super::rules::VirtioPciRules;
use crate::config_space::Identity;

const VENDOR_ID_VIRTIO: u16 = 0x1af4;
/// PCI device id of the modern virtio device with id 0.
const DEVICE_ID_BASE: u16 = 0x1040;
/// Modern devices have revision 1 or above.
const REVISION: u8 = 1;

/// The identification registers of a virtio device; `None` if the device id exceeds 16 bits.
pub fn identity(virtio_device_id: u16, rules: &VirtioPciRules) -> Option<Identity> {
    let device_id = DEVICE_ID_BASE.checked_add(virtio_device_id)?;
    Some(Identity {
        vendor_id: VENDOR_ID_VIRTIO,
        device_id,
        revision: REVISION,
        class: rules.class(virtio_device_id),
        subsystem_vendor_id: VENDOR_ID_VIRTIO,
        subsystem_id: device_id,
    })
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::virtio::rules::GODWIT;

    #[test]
    fn ids_are_the_modern_ones() {
        let block = identity(2, &GODWIT).unwrap();
        assert_eq!((block.vendor_id, block.device_id, block.class), (0x1af4, 0x1042, 0x01_00_00));
        assert_eq!(identity(1, &GODWIT).unwrap().class, 0x02_00_00);
        assert!(block.revision >= 1);
        assert!(identity(0xefff, &GODWIT).is_none());
    }
}
