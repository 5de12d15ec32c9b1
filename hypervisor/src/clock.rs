// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's paravirtual clock (kvm-clock), and its adjustment after a migration.
//!
//! Owns the clock's saved form and the decision whether the guest sees the time that
//! passed between save and restore. Must never be restored after a vCPU: the TSC of every
//! vCPU is derived from what [`Vm::restore_clock`] found.
//!
//! The clock is read together with the host's TSC, if the host supports that. On the other side, the
//! clock is set and read back with that host's TSC. The difference of the two clock readings is the
//! time that passed for the guest; each vCPU's TSC is advanced by exactly that, so both sources of
//! guest time agree to the nanosecond (the kernel's documentation of KVM_VCPU_TSC_OFFSET gives the
//! reasoning).

use std::time::{SystemTime, UNIX_EPOCH};

use kvm_bindings::{KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, kvm_clock_data};
use serde::{Deserialize, Serialize};

use crate::error::{KvmContext, KvmError};
use crate::vm::Vm;

/// How guest time continues after a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClockPolicy {
    /// From the saved time: for a snapshot that is restored at any later time.
    Continue,
    /// From the saved time plus the real time passed, if positive: for a migration between hosts whose
    /// clocks agree.
    CatchUp,
}

/// State of the guest clock; untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClockState {
    /// Guest clock in nanoseconds.
    pub clock_ns: u64,
    /// Real time of the reading, in nanoseconds since 1970.
    pub realtime_ns: u64,
    /// The host's TSC at the same moment, if known.
    #[serde(default)]
    pub host_tsc: Option<u64>,
    /// Frequency of the host's TSC in kHz.
    #[serde(default)]
    pub host_tsc_khz: Option<u32>,
}

/// Progress of guest time in a restore, by which the TSC of each vCPU is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeBase {
    /// Guest time between the saved reading and the one after the restore.
    pub elapsed_ns: u64,
    /// The saved reading.
    pub source: ClockState,
    /// The reading after the restore.
    pub here: ClockState,
}

impl Vm {
    /// Reads the guest's clock.
    pub fn clock(&self) -> Result<ClockState, KvmError> {
        let shared = self.shared();
        let data = shared.fd.get_clock().context("read the guest's clock")?;
        let realtime_ns =
            if data.flags & KVM_CLOCK_REALTIME != 0 { data.realtime } else { now_ns() };
        Ok(ClockState {
            clock_ns: data.clock,
            realtime_ns,
            host_tsc: (data.flags & KVM_CLOCK_HOST_TSC != 0).then_some(data.host_tsc),
            host_tsc_khz: shared.host_tsc_khz.get().copied(),
        })
    }

    /// Sets the guest's clock to `clock_ns`, from where it runs at once.
    pub fn set_clock(&self, clock_ns: u64) -> Result<(), KvmError> {
        let data = kvm_clock_data { clock: clock_ns, ..Default::default() };
        self.shared().fd.set_clock(&data).context("set the guest's clock")
    }

    /// Sets guest time from `state`. All vCPUs must exist, and none may have its state yet.
    pub fn restore_clock(
        &self,
        state: &ClockState,
        policy: ClockPolicy,
    ) -> Result<TimeBase, KvmError> {
        match policy {
            ClockPolicy::Continue => self.set_clock(state.clock_ns)?,
            ClockPolicy::CatchUp if self.shared().capabilities.clock_realtime => {
                let data = kvm_clock_data {
                    clock: state.clock_ns,
                    flags: KVM_CLOCK_REALTIME,
                    realtime: state.realtime_ns,
                    ..Default::default()
                };
                self.shared().fd.set_clock(&data).context("set the guest's clock")?;
            }
            ClockPolicy::CatchUp => {
                let passed_ns = now_ns().saturating_sub(state.realtime_ns);
                self.set_clock(state.clock_ns.saturating_add(passed_ns))?;
            }
        }
        let here = self.clock()?;
        let elapsed_ns = here.clock_ns.saturating_sub(state.clock_ns);
        Ok(TimeBase { elapsed_ns, source: *state, here })
    }
}

/// This host's real time, in nanoseconds since 1970.
pub fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
