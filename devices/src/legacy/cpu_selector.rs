// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The registers of vCPU hotplug as some platforms have them: of one vCPU at a time.
//!
//! Owns no state: that is what [`CpuHotplug`] has, whichever registers a guest knows. The registers and their meaning
//! are described beside the AML that uses them, in the crate `arch`.

use std::sync::Arc;

use super::CpuHotplug;
use crate::bus::BusDevice;

/// Length of the registers.
pub const CPU_SELECTOR_LEN_BYTES: u64 = 12;

const SELECT_OFFSET: u64 = 0;
const STATE_OFFSET: u64 = 4;
const ACTIVE: u8 = 1 << 0;
const INSERTING: u8 = 1 << 1;
const REMOVING: u8 = 1 << 2;
const EJECT: u8 = 1 << 3;

/// The registers.
pub struct CpuSelector(Arc<CpuHotplug>);

impl CpuSelector {
    /// Registers over this state.
    pub fn over(state: Arc<CpuHotplug>) -> Self {
        Self(state)
    }
}

impl BusDevice for CpuSelector {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (offset, &mut *data) {
            (SELECT_OFFSET, [_, _, _, _]) => data.copy_from_slice(&self.0.selected().to_le_bytes()),
            (STATE_OFFSET, [byte]) => {
                let bits = self.0.selected_state().into_iter().zip([ACTIVE, INSERTING, REMOVING]);
                *byte = bits.filter(|(is_set, _)| *is_set).fold(0, |all, (_, bit)| all | bit);
            }
            _ => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (SELECT_OFFSET, [a, b, c, d]) => self.0.select(u32::from_le_bytes([*a, *b, *c, *d])),
            (STATE_OFFSET, [byte]) => {
                self.0.notice_selected(byte & INSERTING != 0, byte & REMOVING != 0);
                if byte & EJECT != 0 {
                    self.0.eject(self.0.selected());
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Snapshot as _;

    fn state(registers: &CpuSelector) -> u8 {
        let mut byte = [0xee];
        registers.read(4, &mut byte);
        byte[0]
    }

    fn select(registers: &CpuSelector, index: u32) -> u8 {
        registers.write(0, &index.to_le_bytes());
        state(registers)
    }

    /// docs/cloud-hypervisor-state.md, section 5.3, PRES.
    #[test]
    fn a_guest_goes_through_the_vcpus_and_acknowledges_what_it_finds() {
        let ejections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&ejections);
        let on_eject = Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let hotplug = Arc::new(CpuHotplug::new(2, on_eject));
        let registers = CpuSelector::over(Arc::clone(&hotplug));
        hotplug.add(2);
        hotplug.request_unplug(1);
        let seen = [0, 1, 2, 3, u32::MAX].map(|index| select(&registers, index));
        assert_eq!(seen, [1, 5, 3, 0, 0]);
        assert_eq!(select(&registers, 2), 3, "until it is acknowledged");
        registers.write(4, &[2]);
        assert_eq!(state(&registers), 1);
        assert_eq!(select(&registers, 1), 5);
        registers.write(4, &[4]);
        assert_eq!(state(&registers), 1);
        // One that was not asked for stays.
        select(&registers, 2);
        registers.write(4, &[8]);
        assert_eq!((state(&registers), ejections.load(Ordering::Relaxed)), (1, 0));
        select(&registers, 1);
        registers.write(4, &[8]);
        assert_eq!((state(&registers), ejections.load(Ordering::Relaxed)), (0, 1));
    }

    #[test]
    fn accesses_of_another_width_are_ignored() {
        let hotplug = Arc::new(CpuHotplug::new(2, Box::new(|| ())));
        let registers = CpuSelector::over(Arc::clone(&hotplug));
        hotplug.add(1);
        select(&registers, 1);
        for data in [&[0_u8][..], &[0, 0], &[0; 8]] {
            registers.write(0, data);
        }
        registers.write(4, &[2, 0, 0, 0]);
        let mut word = [0xee; 4];
        registers.read(4, &mut word);
        assert_eq!((word, state(&registers)), ([0; 4], 3));
        registers.read(8, &mut word);
        assert_eq!(word, [0; 4]);
    }

    #[test]
    fn the_selected_vcpu_is_saved() {
        let hotplug = Arc::new(CpuHotplug::new(2, Box::new(|| ())));
        assert_eq!(
            hotplug.save().version,
            1,
            "a guest without such registers needs no later version"
        );
        CpuSelector::over(Arc::clone(&hotplug)).write(0, &1_u32.to_le_bytes());
        assert!(!hotplug.is_at_rest(2));
        let other = Arc::new(CpuHotplug::new(1, Box::new(|| ())));
        other.restore(&hotplug.save()).expect("its own state");
        let mut word = [0; 4];
        CpuSelector::over(other).read(0, &mut word);
        assert_eq!(u32::from_le_bytes(word), 1);
    }
}
