// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests that meet a VM between two states: a guest reboots as it is to be paused, say.
//!
//! Owns them for as long as that takes on a host that works, so that such a request is carried out and
//! not refused for bad luck. If it takes longer they are answered by what the VM is in the middle of.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pausing::Turn;
use super::{Next, Vm, Vmm};
use crate::api::{ApiCall, VmmRequest};

/// How long a request waits. A client is to be answered within a second.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// Whether a request waits for another state of the VM. One that is about the state between does not.
pub fn waits(vm: &Vm, request: &VmmRequest) -> bool {
    let is_between = match vm {
        Vm::Down(_) => true,
        Vm::Starting(_) => !matches!(request, VmmRequest::Shutdown | VmmRequest::Delete { .. }),
        Vm::Turning(turning) => {
            !(turning.turn == Turn::Pause && matches!(request, VmmRequest::Resume))
        }
        _ => false,
    };
    is_between
        && !matches!(
            request,
            VmmRequest::Ping
                | VmmRequest::Info
                | VmmRequest::VmmShutdown { .. }
                | VmmRequest::MigrationProgress
                | VmmRequest::MigrationReport
                | VmmRequest::MigrationCancel
        )
}

/// Those that wait, in the order in which they came.
#[derive(Default)]
pub struct Deferred {
    calls: VecDeque<(Instant, ApiCall)>,
}

impl Deferred {
    /// Puts one behind the others.
    pub fn push(&mut self, call: ApiCall) {
        self.calls.push_back((Instant::now() + WAIT_MAX, call));
    }

    /// When the first is answered, whatever the VM is then.
    pub fn until(&self) -> Option<Instant> {
        self.calls.front().map(|(until, _)| *until)
    }

    /// The next whose time has come, in this state of the VM.
    fn next(&mut self, vm: &Vm, now: Instant) -> Option<ApiCall> {
        let (until, call) = self.calls.front()?;
        if waits(vm, call.request()) && *until > now {
            return None;
        }
        self.calls.pop_front().map(|(_, call)| call)
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
