// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VMM thread says of the VM for a scrape.
//!
//! Owns the handles by which a machine is read that another thread owns meanwhile: for a migration, a pause, or its end.
//! Must never wait for that thread.

use super::{VmLifecycle, Vmm, describe};
use crate::api::{
    ApiReply, PassthroughInfo, PinningState, PrefaultInfo, PrefaultState, VmInfo, VmState,
};
use crate::machine::MachineMeters;
use crate::metrics::{PinReading, PopulatingReading, VcpuReading, VmReading, states};

/// Handles to the counters of the machine with this number.
pub(super) struct NotedMeters {
    number: u64,
    meters: MachineMeters,
}

fn populating(info: &PrefaultInfo) -> PopulatingReading {
    let state = match info.state {
        PrefaultState::Running => "running",
        PrefaultState::Completed => "completed",
        PrefaultState::Failed => "failed",
        PrefaultState::Cancelled => "cancelled",
    };
    let (done_bytes, total_bytes) = (info.done_bytes, info.total_bytes);
    PopulatingReading { state: state.to_owned(), done_bytes, total_bytes }
}

fn pinning(info: &PassthroughInfo) -> PinReading {
    let state = match info.state {
        PinningState::Pinning => "pinning",
        PinningState::Pinned => "pinned",
        PinningState::Failed => "failed",
    };
    let withheld = info.withheld.as_ref().map_or(0, Vec::len);
    PinReading {
        state: state.to_owned(),
        pinned_bytes: info.pinned_bytes,
        total_bytes: info.total_bytes,
        withheld: u64::try_from(withheld).unwrap_or(u64::MAX),
    }
}

impl Vmm {
    /// Notes handles to the live machine, which may belong to another thread when the next request has been carried
    /// out.
    pub(super) fn note_meters(&mut self) {
        if let VmLifecycle::Live(machine) = &self.vm {
            let (number, meters) = (self.machine_number, machine.meters());
            self.meters = Some(NotedMeters { number, meters });
        }
    }

    /// Handles to the current machine, if there is one that has run here.
    fn current_meters(&self) -> Option<MachineMeters> {
        match &self.vm {
            VmLifecycle::Live(machine) => Some(machine.meters()),
            VmLifecycle::NotStarted { machine, .. } => Some(machine.machine().meters()),
            VmLifecycle::Unanswered(unanswered) => Some(unanswered.machine.meters()),
            // There is none yet, or it is not this process's any more, or its memory is being released.
            VmLifecycle::None
            | VmLifecycle::Created(_)
            | VmLifecycle::Starting(_)
            | VmLifecycle::Receiving(_)
            | VmLifecycle::Serving(_)
            | VmLifecycle::HandedOver { .. }
            | VmLifecycle::TearingDown(_) => None,
            VmLifecycle::Migrating { .. }
            | VmLifecycle::Busy(_)
            | VmLifecycle::Transitioning(_) => {
                let noted = self.meters.as_ref().filter(|it| it.number == self.machine_number);
                noted.map(|noted| noted.meters.clone())
            }
        }
    }

    /// State for a scrape. `info`: what `vm.info` would say.
    fn scraped_state(&self, info: Option<&VmInfo>) -> &'static str {
        match &self.vm {
            VmLifecycle::None => states::NONE,
            VmLifecycle::Created(_) => states::CREATED,
            VmLifecycle::Starting(_) => states::STARTING,
            VmLifecycle::Receiving(_) => states::RECEIVING,
            VmLifecycle::Serving(_) | VmLifecycle::HandedOver { .. } => states::MIGRATED,
            VmLifecycle::Busy(busy) if busy.is_restore() => states::RESTORING,
            _ => match info.map(|info| info.state) {
                Some(VmState::Running) => states::RUNNING,
                _ => states::PAUSED,
            },
        }
    }

    /// What a scrape shows of the VM.
    pub(super) fn metrics(&self) -> VmReading {
        let info = match self.info() {
            Ok(ApiReply::Info(info)) => Some(*info),
            _ => None,
        };
        let meters = self.current_meters();
        let devices = match &self.vm {
            VmLifecycle::Live(machine) => describe::counters(machine),
            _ => meters.as_ref().map(MachineMeters::counters).unwrap_or_default(),
        };
        let config = info.as_ref().map(|info| &info.config);
        let platform = config.and_then(|config| config.platform.as_ref());
        let uuid = platform.and_then(|it| it.system_uuid.as_ref().or(it.uuid.as_ref())).cloned();
        let vcpus = meters.as_ref().map(|meters| VcpuReading {
            present: meters.vcpus(),
            max: config.map_or(0, |config| config.cpus.max_vcpus.into()),
            cpu_ns: meters.vcpu_cpu_ns(),
        });
        let full = info.as_ref().and_then(|info| info.full_disks.as_ref()).into_iter().flatten();
        VmReading {
            state: self.scraped_state(info.as_ref()),
            activity: self.vm.doing(),
            uuid,
            api_socket: self.api_path.as_ref().map(|path| path.display().to_string()),
            vcpus,
            zones: meters.as_ref().map(MachineMeters::zones).unwrap_or_default(),
            actual_bytes: info.as_ref().map(|info| info.memory_actual_size),
            devices,
            full_disks: full.map(|disk| (disk.id.clone(), disk.requests)).collect(),
            populating: info.as_ref().and_then(|info| info.prefault.as_ref()).map(populating),
            pinning: info.as_ref().and_then(|info| info.passthrough.as_ref()).map(pinning),
        }
    }
}
