// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Presents KVM as Hyper-V, for Windows guests.
//!
//! Owns the Hyper-V leaves and the move of KVM's own to the next hundred, where guests and KVM
//! look for them by signature. Promises only what KVM does without a device: the reference
//! counter and TSC page, synthetic interrupts and timers, hypercall and VP index registers, and the
//! frequencies of TSC and APIC, which a guest cannot measure on a machine without an older timer.
//!
//! Format: Hypervisor Top Level Functional Specification, section 2.4.

use super::LEAF_KVM;
use super::table::Table;

const LEAF_HYPERV: u32 = 0x4000_0000;
/// Where KVM's leaves go.
const LEAF_KVM_MOVED: u32 = 0x4000_0100;
const MAX_LEAF: u32 = LEAF_HYPERV + 6;

const REFERENCE_COUNTER: u32 = 1 << 1;
const SYNTHETIC_INTERRUPTS: u32 = 1 << 2;
const SYNTHETIC_TIMERS: u32 = 1 << 3;
const HYPERCALL_MSRS: u32 = 1 << 5;
const VP_INDEX: u32 = 1 << 6;
const REFERENCE_TSC: u32 = 1 << 9;
const FREQUENCY_MSRS: u32 = 1 << 11;
/// In EDX: the guest may rely on them.
const FREQUENCY_MSRS_AVAILABLE: u32 = 1 << 8;
/// Recommendation: do not take a missed tick for a hang.
const RELAXED_TIMING: u32 = 1 << 5;
/// Recommendation: end interrupts explicitly, as processors cannot deliver them by themselves otherwise.
const NO_AUTO_EOI: u32 = 1 << 9;
/// Never report a long spin.
const SPIN_FOR_EVER: u32 = u32::MAX;

/// Replaces the leaves.
pub fn present(table: &mut Table, max_vcpus: u32) {
    for entry in &mut table.0 {
        if (LEAF_KVM..LEAF_KVM_MOVED).contains(&entry.function) {
            entry.function += LEAF_KVM_MOVED - LEAF_KVM;
        }
    }
    table.edit(LEAF_KVM_MOVED, 0, |leaf| leaf.eax = leaf.eax.max(LEAF_KVM) | 0x100);

    let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
    table.set(LEAF_HYPERV, [MAX_LEAF, word(b"Micr"), word(b"osof"), word(b"t Hv")]);
    table.set(LEAF_HYPERV + 1, [word(b"Hv#1"), 0, 0, 0]);
    // Version 10.0, build 14393.
    table.set(LEAF_HYPERV + 2, [14393, 10 << 16, 0, 0]);
    let privileges = REFERENCE_COUNTER
        | SYNTHETIC_INTERRUPTS
        | SYNTHETIC_TIMERS
        | HYPERCALL_MSRS
        | VP_INDEX
        | REFERENCE_TSC
        | FREQUENCY_MSRS;
    table.set(LEAF_HYPERV + 3, [privileges, 0, 0, FREQUENCY_MSRS_AVAILABLE]);
    table.set(LEAF_HYPERV + 4, [RELAXED_TIMING | NO_AUTO_EOI, SPIN_FOR_EVER, 0, 0]);
    table.set(LEAF_HYPERV + 5, [max_vcpus, max_vcpus, 0, 0]);
    table.set(MAX_LEAF, [0; 4]);
}
