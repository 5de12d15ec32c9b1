// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reading and writing many model-specific registers, some of which the kernel refuses.
//!
//! Owns the choice of registers to save, and skips those that cannot be read or written.
//! Must never drop a value silently: the caller gets the list of refused registers.

use std::collections::BTreeSet;

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::Error;
use serde::{Deserialize, Serialize};

/// The time-stamp counter, which is saved and restored separately, with the clock.
pub const IA32_TSC: u32 = 0x10;

/// MTRRs, which KVM supports and does not list: variable, fixed, default type.
const MTRRS: [std::ops::RangeInclusive<u32>; 6] =
    [0x200..=0x20f, 0x250..=0x250, 0x258..=0x259, 0x268..=0x26f, 0x2ff..=0x2ff, 0x277..=0x277];
/// Machine check banks, which KVM supports and does not list: 32 banks of four MSRs.
const MCE_BANKS: std::ops::RangeInclusive<u32> = 0x400..=0x47f;

/// An MSR with its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsrValue {
    /// Index of the MSR.
    pub index: u32,
    /// Value of the MSR.
    pub value: u64,
}

impl From<kvm_msr_entry> for MsrValue {
    fn from(entry: kvm_msr_entry) -> Self {
        Self { index: entry.index, value: entry.data }
    }
}

/// Indices of the MSRs to save on a host that lists `host_list`, ascending and without duplicates.
pub fn indices_to_save(host_list: &[u32]) -> Vec<u32> {
    let mut indices: BTreeSet<u32> = host_list.iter().copied().collect();
    indices.extend(MTRRS.into_iter().flatten());
    indices.extend(MCE_BANKS);
    indices.remove(&IA32_TSC);
    indices.into_iter().collect()
}

/// Result of reading MSRs.
#[derive(Debug, Default)]
pub struct ReadMsrs {
    /// Those that were read.
    pub values: Vec<MsrValue>,
    /// Indices that the kernel refused.
    pub refused: Vec<u32>,
}

/// A request for a chunk; the kernel stops at the first MSR that it refuses.
fn chunk(entries: &[kvm_msr_entry]) -> Result<Msrs, Error> {
    Msrs::from_entries(entries).map_err(|_| Error::new(libc::E2BIG))
}

/// Reads `indices` with `get`, which returns how many of a request were read.
pub fn read_all(
    indices: &[u32],
    get: impl Fn(&mut Msrs) -> Result<usize, Error>,
) -> Result<ReadMsrs, Error> {
    let mut read = ReadMsrs { values: Vec::with_capacity(indices.len()), refused: Vec::new() };
    let mut at = 0;
    while at < indices.len() {
        let now = &indices[at..indices.len().min(at + KVM_MAX_MSR_ENTRIES)];
        let entries: Vec<_> = now.iter().map(|index| msr_entry(*index, 0)).collect();
        let mut request = chunk(&entries)?;
        let done = get(&mut request)?.min(now.len());
        let good = request.as_slice().iter().take(done);
        read.values.extend(good.map(|entry| MsrValue { index: entry.index, value: entry.data }));
        read.refused.extend(now.get(done));
        at += if done == now.len() { done } else { done + 1 };
    }
    Ok(read)
}

/// Writes `values` with `set`, which returns how many of a request were written; returns the refused ones.
pub fn write_all(
    values: &[MsrValue],
    set: impl Fn(&Msrs) -> Result<usize, Error>,
) -> Result<Vec<MsrValue>, Error> {
    let mut refused = Vec::new();
    let mut at = 0;
    while at < values.len() {
        let now = &values[at..values.len().min(at + KVM_MAX_MSR_ENTRIES)];
        let entries: Vec<_> = now.iter().map(|msr| msr_entry(msr.index, msr.value)).collect();
        let done = set(&chunk(&entries)?)?.min(now.len());
        refused.extend(now.get(done));
        at += if done == now.len() { done } else { done + 1 };
    }
    Ok(refused)
}

/// A request entry for the MSR `index`.
fn msr_entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry { index, reserved: 0, data }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    fn get(refused: &[u32]) -> impl Fn(&mut Msrs) -> Result<usize, Error> {
        move |msrs| {
            let mut done = 0;
            for entry in msrs.as_mut_slice() {
                if refused.contains(&entry.index) {
                    break;
                }
                entry.data = u64::from(entry.index) + 1;
                done += 1;
            }
            Ok(done)
        }
    }

    proptest! {
        #[test]
        fn each_register_is_either_read_or_reported(
            count in 0_u32..700,
            refused in prop::collection::btree_set(0_u32..700, 0..40),
        ) {
            let indices: Vec<u32> = (0..count).collect();
            let bad: Vec<u32> = refused.into_iter().filter(|index| *index < count).collect();
            let read = read_all(&indices, get(&bad)).unwrap();
            prop_assert_eq!(&read.refused, &bad);
            let good: Vec<MsrValue> = indices
                .iter()
                .filter(|index| !bad.contains(index))
                .map(|index| MsrValue { index: *index, value: u64::from(*index) + 1 })
                .collect();
            prop_assert_eq!(read.values, good);
        }

        #[test]
        fn each_register_is_either_written_or_reported(
            count in 0_u32..700,
            refused in prop::collection::btree_set(0_u32..700, 0..40),
        ) {
            let values: Vec<MsrValue> =
                (0..count).map(|index| MsrValue { index, value: 7 }).collect();
            let written = RefCell::new(Vec::new());
            let left = write_all(&values, |msrs| {
                let entries = msrs.as_slice();
                let done = entries.iter().take_while(|e| !refused.contains(&e.index)).count();
                written.borrow_mut().extend(entries[..done].iter().map(|entry| entry.index));
                Ok(done)
            })
            .unwrap();
            let mut all: Vec<u32> = written.into_inner();
            all.extend(left.iter().map(|msr| msr.index));
            all.sort_unstable();
            prop_assert_eq!(all, (0..count).collect::<Vec<_>>());
            prop_assert!(left.iter().all(|msr| refused.contains(&msr.index)));
        }
    }

    #[test]
    fn registers_of_shadow_stacks_are_saved_where_they_are_listed() {
        let indices = indices_to_save(&crate::shadow_stack::CET_MSRS);
        assert!(crate::shadow_stack::CET_MSRS.iter().all(|index| indices.contains(index)));
    }

    #[test]
    fn the_tsc_is_saved_apart_and_the_unlisted_registers_are_added_once() {
        let indices = indices_to_save(&[IA32_TSC, 0x277, 0x174, 0x200]);
        assert!(!indices.contains(&IA32_TSC));
        for index in [0x174, 0x200, 0x20f, 0x250, 0x26f, 0x2ff, 0x277, 0x400, 0x47f] {
            assert_eq!(indices.iter().filter(|i| **i == index).count(), 1, "{index:#x}");
        }
    }
}
