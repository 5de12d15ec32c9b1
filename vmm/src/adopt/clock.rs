// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's clock, and its TSC at the same moment.
//!
//! Owns the moment: the clock is that of the pause, while v53 reads the TSC when it writes its state, after all memory has
//! been sent and as long after the pause as a user likes. Advanced from the clock's moment, that TSC would count the
//! time in between twice.

use cloud_hypervisor_state::{Clock, VmData};
use hypervisor::ClockState;

use super::ReadGuest;
use super::error::AdoptError;

const FLAGS: usize = 8;
const REALTIME: usize = 16;
const HOST_TSC: usize = 24;
/// Flags of the clock: real time and the host's TSC are valid.
const FLAG_REALTIME: u64 = 4;
const FLAG_HOST_TSC: u64 = 8;

/// The clock of the last pause.
///
/// # Errors
/// There is none, or it does not say when it was read.
pub fn convert(vm: &VmData) -> Result<ClockState, AdoptError> {
    let refused = |problem: &str| AdoptError::refused("(root): clock", problem);
    let Some(Clock::Kvm(bytes)) = &vm.clock else {
        return Err(refused("missing: the VM has never run"));
    };
    let number = |at: usize| super::vcpu::u64_at(bytes.as_slice(), at);
    let flags = number(FLAGS) & u64::from(u32::MAX);
    if flags & FLAG_REALTIME == 0 {
        return Err(refused("the real time at which it was read is missing"));
    }
    Ok(ClockState {
        clock_ns: number(0),
        realtime_ns: number(REALTIME),
        host_tsc: (flags & FLAG_HOST_TSC != 0).then(|| number(HOST_TSC)),
        // That of the vCPUs is known, and may be scaled.
        host_tsc_khz: None,
    })
}

/// Length of a page of the paravirtual clock.
const PAGE_BYTES: usize = 32;
/// Limit of the shift in it, beyond what KVM writes for any frequency.
const SHIFT_MAX: u8 = 31;

/// What KVM has told the guest of its clock: its time at one value of the TSC, and how fast both go.
struct Page {
    tsc: u64,
    system_ns: u64,
    /// Nanoseconds in 2^32 shifted cycles.
    mul: u32,
    shift: i8,
}

impl Page {
    /// The page at an address; `None` if it cannot be read, or KVM has not written it.
    fn read(guest: &dyn ReadGuest, gpa: u64) -> Option<Self> {
        const TSC: usize = 8;
        const SYSTEM_TIME: usize = 16;
        const MUL: usize = 24;
        const SHIFT: usize = 28;
        let mut bytes = [0; PAGE_BYTES];
        for (half, at) in bytes.chunks_exact_mut(2).zip((0_u64..).step_by(2)) {
            half.copy_from_slice(&guest.read_u16(gpa.checked_add(at)?).ok()?.to_le_bytes());
        }
        let number = |at: usize| super::vcpu::u64_at(&bytes, at);
        let half = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
        let (version, mul) = (half(0)?, half(MUL)?);
        let shift = bytes.get(SHIFT)?.cast_signed();
        // An odd version is one that is being written.
        let is_written = version != 0 && version & 1 == 0 && mul != 0;
        (is_written && shift.unsigned_abs() <= SHIFT_MAX).then(|| Self {
            tsc: number(TSC),
            system_ns: number(SYSTEM_TIME),
            mul,
            shift,
        })
    }

    /// Cycles from the page's TSC on until the clock shows `clock_ns`.
    fn cycles_until(&self, clock_ns: u64) -> Option<u64> {
        let passed_ns = clock_ns.checked_sub(self.system_ns)?;
        // Rounded up: the clock shows it then.
        let shifted = (u128::from(passed_ns) << 32).div_ceil(u128::from(self.mul));
        let by = self.shift.unsigned_abs();
        let cycles = if self.shift < 0 { shifted << by } else { shifted >> by };
        u64::try_from(cycles).ok()
    }
}

/// The TSC when the clock showed `clock_ns`, as the guest itself computes the one from the other; `later` is a value of it
/// that was read afterwards, and `places` are where vCPUs have their pages. `None` if no page tells.
pub fn tsc_at(
    clock_ns: u64,
    later: u64,
    places: impl Iterator<Item = u64>,
    guest: &dyn ReadGuest,
) -> Option<u64> {
    let pages = places.filter_map(|gpa| Page::read(guest, gpa));
    // That of a vCPU that has been idle for long may be of before the clock was last set.
    let newest = pages.min_by_key(|page| later.wrapping_sub(page.tsc))?;
    let cycles = newest.cycles_until(clock_ns)?;
    (cycles <= later.wrapping_sub(newest.tsc)).then(|| newest.tsc.wrapping_add(cycles))
}
