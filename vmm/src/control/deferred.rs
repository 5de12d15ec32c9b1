// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests deferred until a transition of the VM has ended: a pause that meets a reboot, say.
//!
//! Owns them for as long as a transition takes on a working host, so that such a request is carried out
//! instead of being refused for its timing. If it takes longer, they are answered according to the state of the VM
//! then; for the VM of the command line, however, they wait as long as it takes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pausing::TransitionKind;
use super::{Next, VmLifecycle, Vmm};
use crate::api::{ApiCall, VmmRequest};

/// How long a request waits. A client is to be answered within a second.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// How long `vm.info` waits for the VM of the command line: a script reads its terminals and addresses
/// from it, which are not there before, and clients why it does not come.
const LAUNCH_INFO_WAIT: Duration = Duration::from_secs(10);

/// How many wait at most; the API has connection slots for twice as many clients, and what ends the
/// process has to find one.
const CALLS_MAX: usize = 64;

/// Whether the VM of the command line is being made. No client has been told yet that it is not there, so
/// requests wait for it however long that takes: it is the first command that a script runs.
fn is_launching(vm: &VmLifecycle) -> bool {
    match vm {
        VmLifecycle::Starting(starting) => starting.at_launch,
        VmLifecycle::Busy(busy) => busy.at_launch,
        _ => false,
    }
}

/// Whether a request waits for another state of the VM. One that is about the state between does not.
pub fn waits(vm: &VmLifecycle, request: &VmmRequest) -> bool {
    let cancels = matches!(request, VmmRequest::Shutdown | VmmRequest::Delete { .. });
    let is_between = match vm {
        VmLifecycle::TearingDown(_) => true,
        VmLifecycle::Starting(_) => !cancels,
        VmLifecycle::Transitioning(transition) => match request {
            VmmRequest::Resume => transition.kind != TransitionKind::Pause,
            VmmRequest::MigrationRecover(_) => false,
            VmmRequest::RemoveDevice(data) => !transition.is_adding(&data.id),
            _ => true,
        },
        VmLifecycle::Busy(busy) => busy.at_launch && !cancels,
        _ => false,
    };
    is_between
        && match request {
            VmmRequest::Info => is_launching(vm),
            VmmRequest::Ping
            | VmmRequest::VmmShutdown { .. }
            | VmmRequest::MigrationProgress
            | VmmRequest::MigrationReport
            | VmmRequest::MigrationCancel
            | VmmRequest::SnapshotCancel => false,
            _ => true,
        }
}

struct Waiting {
    /// When it is answered, whatever the VM is then; None: when the VM is there.
    until: Option<Instant>,
    call: ApiCall,
}

/// Those that wait, in the order in which they came.
#[derive(Default)]
pub struct Deferred {
    calls: VecDeque<Waiting>,
}

impl Deferred {
    /// Puts one behind the others.
    pub fn push(&mut self, vm: &VmLifecycle, call: ApiCall) {
        let is_info = matches!(call.request(), VmmRequest::Info);
        let wait = match is_launching(vm) {
            _ if self.calls.len() >= CALLS_MAX => Some(Duration::ZERO),
            true => is_info.then_some(LAUNCH_INFO_WAIT),
            false => Some(WAIT_MAX),
        };
        let until = wait.map(|wait| Instant::now() + wait);
        self.calls.push_back(Waiting { until, call });
    }

    /// When the next is answered, whatever the VM is then.
    pub fn until(&self) -> Option<Instant> {
        self.calls.iter().filter_map(|waiting| waiting.until).min()
    }

    /// The first that need not wait in this state of the VM, or whose time is over. What a client no
    /// longer waits for is not carried out.
    fn next(&mut self, vm: &VmLifecycle, now: Instant) -> Option<ApiCall> {
        self.calls.retain(|waiting| !waiting.call.is_abandoned());
        if !is_launching(vm) {
            for waiting in &mut self.calls {
                waiting.until.get_or_insert(now + WAIT_MAX);
            }
        }
        let is_due = |waiting: &Waiting| {
            waiting.until.is_some_and(|until| until <= now) || !waits(vm, waiting.call.request())
        };
        let first = self.calls.iter().position(is_due)?;
        self.calls.remove(first).map(|waiting| waiting.call)
    }
}

impl Vmm {
    /// Carries out requests that waited long enough.
    pub(super) fn call_deferred(&mut self) -> Next {
        while let Some(call) = self.deferred.next(&self.vm, Instant::now()) {
            match self.call_now(call) {
                Next::Continue => {}
                other => return other,
            }
        }
        Next::Continue
    }
}
