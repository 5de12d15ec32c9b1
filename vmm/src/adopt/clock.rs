// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's clock.

use cloud_hypervisor_state::{Clock, VmData};
use hypervisor::ClockState;

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
