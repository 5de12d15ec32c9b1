// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The registers of memory hotplug as some platforms have them: of one memory device at a time.
//!
//! Owns no state: that is what [`MemoryHotplug`] has, whichever registers a guest knows. The registers and their meaning
//! are described beside the AML that uses them, in the crate `arch`.

use std::sync::Arc;

use super::MemoryHotplug;
use crate::bus::BusDevice;

/// Length of the registers.
pub const MEMORY_SELECTOR_LEN_BYTES: u64 = 0x18;

const SELECT_OFFSET: u64 = 0;
const RANGE_END: u64 = 16;
const STATE_OFFSET: u64 = 20;
const ACTIVE: u8 = 1 << 0;
const INSERTING: u8 = 1 << 1;

/// The registers.
pub struct MemorySelector(Arc<MemoryHotplug>);

impl MemorySelector {
    /// Registers over this state.
    pub fn over(state: Arc<MemoryHotplug>) -> Self {
        Self(state)
    }
}

impl BusDevice for MemorySelector {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (offset, &mut *data) {
            (..RANGE_END, [_, _, _, _]) if offset.is_multiple_of(4) => {
                data.copy_from_slice(&self.0.selected_word(offset).to_le_bytes());
            }
            (STATE_OFFSET, [byte]) => {
                let bits = self.0.selected_state().into_iter().zip([ACTIVE, INSERTING]);
                *byte = bits.filter(|(is_set, _)| *is_set).fold(0, |all, (_, bit)| all | bit);
            }
            _ => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (SELECT_OFFSET, [number] | [number, _, _, _]) => self.0.select(*number),
            (STATE_OFFSET, [byte]) if byte & INSERTING != 0 => self.0.notice_selected(),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Snapshot as _;
    use crate::legacy::MemoryDevice;

    fn state(registers: &MemorySelector) -> u8 {
        let mut byte = [0xee];
        registers.read(20, &mut byte);
        byte[0]
    }

    /// docs/cloud-hypervisor-state.md, section 5.3, MHPC.
    #[test]
    fn a_guest_goes_through_the_devices_and_acknowledges_what_it_finds() {
        let first = MemoryDevice { gpa: 0x1_8000_0000, len_bytes: 0x1_4000_0000 };
        let hotplug = Arc::new(MemoryHotplug::new(Some(first)));
        let registers = MemorySelector::over(Arc::clone(&hotplug));
        let second = MemoryDevice { gpa: 0x2_c000_0000, len_bytes: 0x1800_0000 };
        assert!(hotplug.add(second));
        assert_eq!(state(&registers), 1);
        registers.write(0, &1_u32.to_le_bytes());
        assert_eq!(state(&registers), 3);
        let mut words = [0_u32; 4];
        for (at, word) in (0..).step_by(4).zip(&mut words) {
            let mut bytes = [0; 4];
            registers.read(at, &mut bytes);
            *word = u32::from_le_bytes(bytes);
        }
        assert_eq!(words, [0xc000_0000, 2, 0x1800_0000, 0]);
        registers.write(20, &[8]);
        assert_eq!(state(&registers), 3, "no guest gives memory back");
        let other = Arc::new(MemoryHotplug::new(None));
        other.restore(&hotplug.save()).expect("its own state");
        assert_eq!(state(&MemorySelector::over(other)), 3, "what was selected is saved");
        registers.write(20, &[2]);
        assert_eq!(state(&registers), 1);
        registers.write(0, &[7]);
        assert_eq!(state(&registers), 0);
        registers.write(0, &[255]);
        assert_eq!(state(&registers), 0);
    }
}
