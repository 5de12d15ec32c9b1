// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's clock, as the kernel's structure.

use cloud_hypervisor_state::{Clock, Structure};
use hypervisor::ClockState;

const CLOCK_BYTES: usize = 48;
const FLAGS: usize = 8;
const REALTIME: usize = 16;
const HOST_TSC: usize = 24;
/// Flags: the TSC is stable, real time is valid, the host's TSC is valid.
const FLAG_TSC_STABLE: u64 = 2;
const FLAG_REALTIME: u64 = 4;
const FLAG_HOST_TSC: u64 = 8;

/// The clock of the last pause.
pub fn convert(clock: &ClockState) -> Clock {
    let mut flags = FLAG_REALTIME;
    if clock.host_tsc.is_some() {
        // KVM reads both at once only while the guest's clock follows the TSC.
        flags |= FLAG_HOST_TSC | FLAG_TSC_STABLE;
    }
    let mut bytes = [0; CLOCK_BYTES];
    for (at, value) in [
        (0, clock.clock_ns),
        (FLAGS, flags),
        (REALTIME, clock.realtime_ns),
        (HOST_TSC, clock.host_tsc.unwrap_or(0)),
    ] {
        bytes.iter_mut().skip(at).zip(value.to_le_bytes()).for_each(|(to, from)| *to = from);
    }
    Clock::Kvm(Structure::from(bytes))
}
