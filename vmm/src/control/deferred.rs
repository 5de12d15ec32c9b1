// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests deferred until a transition of the VM has ended: a pause that meets a reboot, or the end of a postcopy
//! migration, say.
//!
//! Owns them for as long as a transition takes on a working host, so that such a request is carried out
//! instead of being refused for its timing. If it takes longer, they are answered according to the state of the VM
//! then; for the VM of the command line, however, they wait as long as it takes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pausing::TransitionKind;
use super::{Next, VmLifecycle, Vmm};
use crate::api::{ApiCall, VmmRequest};

/// Time that a request is deferred at most: a client expects its answer within a second.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// Time that `vm.info` waits for the VM of the command line. A script reads the terminals and addresses
/// from the answer, which do not exist before the VM does.
const LAUNCH_INFO_WAIT: Duration = Duration::from_secs(10);

/// Time that a request is deferred while the end of a postcopy migration is processed, which ends the threads of
/// all its connections. Its progress says already that all pages are here, so a refusal would contradict it.
const ARRIVED_WAIT: Duration = Duration::from_secs(5);

/// Maximum number of deferred requests. The API has twice as many connection slots, so that a request that
/// ends the process still finds one.
const CALLS_MAX: usize = 64;

/// Whether the VM of the command line is being created. Requests wait for it without a limit: no client has
/// been told yet that it does not exist.
fn is_launching(vm: &VmLifecycle) -> bool {
    match vm {
        VmLifecycle::Starting(starting) => starting.at_launch,
        VmLifecycle::Busy(busy) => busy.at_launch,
        _ => false,
    }
}

/// When `vm.info` is answered although the VM of the command line is being started: its memory is being populated,
/// which takes milliseconds to minutes, and the terminals of the VM are known.
fn info_due(vm: &VmLifecycle) -> Option<Instant> {
    let VmLifecycle::Starting(starting) = vm else { return None };
    starting.populating_since()?.checked_add(WAIT_MAX)
}

/// Whether the request is not carried out while pages of the VM arrive, or differently.
const fn needs_pages(request: &VmmRequest) -> bool {
    !matches!(
        request,
        VmmRequest::Counters
            | VmmRequest::PowerButton
            | VmmRequest::Nmi
            | VmmRequest::RemoveDevice(_)
            | VmmRequest::MigrationRecover(_)
    )
}

/// What decides whether a request is deferred.
#[derive(Clone, Copy)]
pub struct Between<'a> {
    /// The state of the VM.
    pub vm: &'a VmLifecycle,
    /// The progress of an incoming migration says that all pages are here, and the VMM thread has not been told yet.
    pub has_arrived: bool,
}

impl Between<'_> {
    /// Whether the request has to wait for the VM to leave its current transition.
    pub fn waits(self, request: &VmmRequest) -> bool {
        let cancels = matches!(request, VmmRequest::Shutdown | VmmRequest::Delete { .. });
        let is_received = matches!(self.vm, VmLifecycle::Receiving(_));
        let is_between = match self.vm {
            VmLifecycle::TearingDown(_) => true,
            VmLifecycle::Starting(_) => !cancels,
            VmLifecycle::Transitioning(transition) => match request {
                VmmRequest::Resume { .. } => transition.kind != TransitionKind::Pause,
                VmmRequest::MigrationRecover(_) => false,
                VmmRequest::RemoveDevice(data) => !transition.is_adding(&data.id),
                _ => true,
            },
            VmLifecycle::Busy(busy) => busy.at_launch && !cancels,
            // A guest that has just arrived is not ended by a request that did not know of it.
            VmLifecycle::Receiving(_) => self.has_arrived && !cancels,
            _ => self.has_arrived && needs_pages(request),
        };
        is_between
            && match request {
                VmmRequest::Info => {
                    is_received
                        || is_launching(self.vm)
                            && info_due(self.vm).is_none_or(|due| Instant::now() < due)
                }
                VmmRequest::VmmShutdown { force } => self.has_arrived && !is_received && !force,
                VmmRequest::Ping
                | VmmRequest::Metrics
                | VmmRequest::MigrationProgress
                | VmmRequest::MigrationReport
                | VmmRequest::MigrationCancel
                | VmmRequest::SnapshotCancel => false,
                _ => true,
            }
    }

    /// When a request that comes now is answered whatever the state is; `None`: only once the VM exists.
    fn until(self, request: &VmmRequest) -> Option<Instant> {
        let now = Instant::now();
        match (is_launching(self.vm), request) {
            (true, VmmRequest::Info) => Some(info_due(self.vm).unwrap_or(now + LAUNCH_INFO_WAIT)),
            (true, _) => None,
            (false, _) if self.has_arrived => Some(now + ARRIVED_WAIT),
            (false, _) => Some(now + WAIT_MAX),
        }
    }
}

struct Waiting {
    /// When the request is answered whatever the state of the VM; `None`: only once the VM exists.
    until: Option<Instant>,
    call: ApiCall,
}

/// Deferred requests, in order of arrival.
#[derive(Default)]
pub struct Deferred {
    calls: VecDeque<Waiting>,
}

impl Deferred {
    /// Appends a request.
    pub fn push(&mut self, between: Between, call: ApiCall) {
        let is_full = self.calls.len() >= CALLS_MAX;
        let until = if is_full { Some(Instant::now()) } else { between.until(call.request()) };
        self.calls.push_back(Waiting { until, call });
    }

    /// Memory of the VM of the command line is being populated: `vm.info` waits for less.
    pub fn populating(&mut self, vm: &VmLifecycle) {
        let Some(due) = info_due(vm) else { return };
        let is_info = |waiting: &&mut Waiting| matches!(waiting.call.request(), VmmRequest::Info);
        for waiting in self.calls.iter_mut().filter(is_info) {
            waiting.until = waiting.until.map(|until| until.min(due));
        }
    }

    /// When the next deferred request has to be answered at the latest.
    pub fn until(&self) -> Option<Instant> {
        self.calls.iter().filter_map(|waiting| waiting.until).min()
    }

    /// The first request that this state of the VM no longer defers, or whose time has passed. Requests of
    /// clients that have disconnected are dropped.
    fn next(&mut self, between: Between, now: Instant) -> Option<ApiCall> {
        self.calls.retain(|waiting| !waiting.call.is_abandoned());
        if !is_launching(between.vm) {
            let latest = now + if between.has_arrived { ARRIVED_WAIT } else { WAIT_MAX };
            for waiting in &mut self.calls {
                waiting.until = Some(waiting.until.map_or(latest, |until| until.min(latest)));
            }
        }
        let is_due = |waiting: &Waiting| {
            waiting.until.is_some_and(|until| until <= now)
                || !between.waits(waiting.call.request())
        };
        let first = self.calls.iter().position(is_due)?;
        self.calls.remove(first).map(|waiting| waiting.call)
    }
}

impl Vmm {
    /// Carries out the deferred requests that are due.
    pub(super) fn call_deferred(&mut self) -> Next {
        loop {
            let has_arrived = self.has_unprocessed_arrival();
            let between = Between { vm: &self.vm, has_arrived };
            let Some(call) = self.deferred.next(between, Instant::now()) else {
                return Next::Continue;
            };
            match self.call_now(call) {
                Next::Continue => {}
                other => return other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memory::{PrefaultEvent, PrefaultProgress};
    use vm_migration::{Cancel, Progress, Side, Steering};

    use super::*;
    use crate::api::{ApiHandle, ApiQueue};
    use crate::control::receiving::Receiving;
    use crate::control::starting::Starting;
    use crate::machine::BootPrefault;

    #[test]
    fn the_vm_of_the_command_line_is_described_soon_after_populating_began() {
        let prefault = BootPrefault::default();
        let vm = VmLifecycle::Starting(Starting::at_launch(prefault.clone()));
        let waits = |request| Between { vm: &vm, has_arrived: false }.waits(&request);
        assert!(waits(VmmRequest::Info) && info_due(&vm).is_none());
        let progress = PrefaultProgress { done_bytes: 0, total_bytes: 1 };
        let before = Instant::now();
        prefault.observer()(PrefaultEvent::Progress(progress));
        let due = info_due(&vm);
        assert!(
            due.is_some_and(|due| due >= before + WAIT_MAX && due <= Instant::now() + WAIT_MAX)
        );
        assert!(waits(VmmRequest::Info), "a start that takes less answers with a running VM");
        while due.is_some_and(|due| Instant::now() < due) {
            std::thread::yield_now();
        }
        assert!(!waits(VmmRequest::Info) && !waits(VmmRequest::Metrics));
        assert!(waits(VmmRequest::Pause));
    }

    /// Asks on a thread, and takes the request from the queue.
    fn asked<'scope>(
        scope: &'scope std::thread::Scope<'scope, '_>,
        handle: &'scope ApiHandle,
        queue: &ApiQueue,
    ) -> ApiCall {
        scope.spawn(|| handle.ask_blocking("vm.pause", VmmRequest::Pause));
        loop {
            if let Some(call) = queue.take() {
                return call;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_needs_all_pages_waits_for_the_end_that_was_told_and_not_for_ever() {
        let vm = VmLifecycle::None;
        let ended = Between { vm: &vm, has_arrived: false };
        let between = Between { has_arrived: true, ..ended };
        assert!(between.waits(&VmmRequest::Pause) && !ended.waits(&VmmRequest::Pause));
        for force in [false, true] {
            assert_eq!(between.waits(&VmmRequest::VmmShutdown { force }), !force);
            assert!(!ended.waits(&VmmRequest::VmmShutdown { force }));
        }
        for request in [VmmRequest::Info, VmmRequest::MigrationProgress, VmmRequest::Nmi] {
            assert!(!between.waits(&request), "{request:?}");
        }
        let (handle, queue) = crate::api::channel().expect("a queue");
        std::thread::scope(|scope| {
            let mut deferred = Deferred::default();
            let now = Instant::now();
            deferred.push(between, asked(scope, &handle, &queue));
            let early = now + ARRIVED_WAIT / 2;
            assert!(deferred.next(between, now).is_none());
            assert!(deferred.next(between, early).is_none());
            assert!(deferred.next(ended, early).is_some(), "all pages are here");
            deferred.push(between, asked(scope, &handle, &queue));
            assert!(deferred.next(between, Instant::now() + 2 * ARRIVED_WAIT).is_some());
            // What follows the end, as a reset of the guest, takes no more of its time than of another request's.
            deferred.push(between, asked(scope, &handle, &queue));
            let mut starting = Starting::at_launch(BootPrefault::default());
            starting.at_launch = false;
            let starting = VmLifecycle::Starting(starting);
            let reset = Between { vm: &starting, has_arrived: false };
            let now = Instant::now();
            assert!(deferred.next(reset, now).is_none());
            assert!(deferred.next(reset, now + WAIT_MAX).is_some());
        });
    }

    #[test]
    fn a_guest_that_has_just_arrived_is_not_ended_by_who_did_not_know_of_it() {
        let vm = VmLifecycle::Receiving(Receiving {
            progress: Arc::new(Progress::new(Side::Destination)),
            cancel: Cancel::new().expect("a descriptor"),
            steering: Steering::new(),
            cancellers: Vec::new(),
            doubt: None,
            decision_requests: Vec::new(),
        });
        for has_arrived in [false, true] {
            let waits = |request| Between { vm: &vm, has_arrived }.waits(&request);
            for request in [VmmRequest::Pause, VmmRequest::Info, VmmRequest::Nmi] {
                assert_eq!(waits(request), has_arrived);
            }
            assert!(
                !waits(VmmRequest::Shutdown) && !waits(VmmRequest::VmmShutdown { force: false })
            );
        }
    }

    #[test]
    fn so_many_requests_wait_and_the_next_is_answered_as_things_are() {
        let (handle, queue) = crate::api::channel().expect("a queue");
        let vm = VmLifecycle::Starting(Starting::at_launch(BootPrefault::default()));
        let between = Between { vm: &vm, has_arrived: false };
        std::thread::scope(|scope| {
            let mut deferred = Deferred::default();
            for number in 0..=CALLS_MAX {
                deferred.push(between, asked(scope, &handle, &queue));
                let due = deferred.next(between, Instant::now());
                assert_eq!(due.is_some(), number == CALLS_MAX, "request {number}");
            }
            assert_eq!(deferred.calls.len(), CALLS_MAX);
        });
    }
}
