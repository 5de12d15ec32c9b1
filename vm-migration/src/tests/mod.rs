// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whole migrations in one process: fake guests, real sockets, real userfaultfd.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the set-up that all share |
//! | `acknowledged` | the commit of plain version 0 |
//! | `blobs` | state of devices that is sent as bytes |
//! | `auto` | precopy that switches to postcopy |
//! | `moves` | successful migrations |
//! | `early` | building the machine while memory is sent |
//! | `endings` | machines whose end takes long |
//! | `sharing` | connections of different speed |
//! | `converging` | guests that write too fast, and the measures against that |
//! | `by_hand` | a destination of any version, message by message |
//! | `check` | checks of a migration, which move nothing |
//! | `compressed` | compressed memory |
//! | `handed_on` | postcopy whose last pages a page server sends |
//! | `hints` | pages that the guest reports as unused |
//! | `holes` | memory that the guest discards during the migration |
//! | `local` | memory handed over as descriptors |
//! | `own` | vCPUs that resolve their own faults |
//! | `pieces` | large host pages that are assembled from pieces |
//! | `plain` | peers that know only version 0 |
//! | `ready` | outdated contents in memory that was populated before |
//! | `figures` | figures of both sides at the end |
//! | `failures` | machines that fail, cancels |
//! | `cuts` | a peer that closes, sends garbage or stalls at every message |
//! | `descriptors` | processes without descriptors for all connections |
//! | `threads` | processes that may start few threads, and when they are started |
//! | `recovery` | postcopy that loses its connections |
//! | `commit` | what ends the doubt after a loss at the commit, and what does not |
//! | `ended` | a last message that the source has not received |
//! | `hostile` | a source that sends invalid data |
//! | `tls` | tests of the other files over TLS |
//! | `strangers` | connections of other clients |
//! | `scale` | computations of a recovery for a large guest |
//! | `waits` | faults and arrivals of their pages at the same moment |

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

mod acknowledged;
mod auto;
mod blobs;
mod by_hand;
mod check;
mod commit;
mod compressed;
mod converging;
mod cuts;
mod descriptors;
mod early;
mod ended;
mod endings;
mod failures;
mod figures;
mod formats;
mod handed_on;
mod hints;
mod holes;
mod hostile;
mod local;
mod moves;
mod other;
mod own;
mod pieces;
mod plain;
mod ready;
mod recovery;
mod relay;
mod scale;
mod sharing;
mod strangers;
mod threads;
mod tls;
mod waits;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::destination::{Listener, ReceiveFailure, Received};
use crate::layout::{Backing, PAGE_BYTES};
use crate::options::{Convergence, Limits, ReceiveOptions, SendOptions};
use crate::source::{self, Finished, SendFailure};
use crate::testing::{Builder, FakeDestination, FakeMemory, FakeVm, Guest};
use crate::{Address, Cancel, Progress, Side};

/// Two regions around a hole, 8 MiB and 4 MiB and one page.
pub(super) const REGIONS: &[(u64, u64)] = &[(0, 2048), (1 << 32, 1025)];

/// Limits short enough to detect a stalled peer soon, long enough for a loaded machine.
pub(super) const LIMITS: Limits = Limits {
    connect: Duration::from_secs(5),
    answer: Duration::from_secs(20),
    prepare: Duration::from_secs(20),
    device_leave: Duration::from_secs(5),
    stall: Duration::from_secs(5),
    rejoin: Duration::from_secs(5),
};

pub(super) fn memory() -> Arc<FakeMemory> {
    FakeMemory::new(REGIONS, Backing::Shared, PAGE_BYTES).unwrap()
}

pub(super) fn loopback() -> Address {
    "tcp:127.0.0.1:0".parse().unwrap()
}

/// True when this process may use userfaultfd; otherwise the test is reported as skipped.
pub(super) fn have_uffd() -> bool {
    match crate::uffd::check(memory().layout_regions()) {
        Ok(()) => true,
        Err(error) => {
            test_skip::skip!("{error}");
            false
        }
    }
}

impl FakeMemory {
    fn layout_regions(&self) -> &[crate::layout::RegionInfo] {
        crate::ram::GuestMemoryMap::layout(self).regions()
    }
}

pub(super) type ReceiveResult =
    Result<Received<FakeDestination>, Box<ReceiveFailure<FakeDestination>>>;
pub(super) type SendResult = Result<Finished<Arc<FakeMemory>>, Box<SendFailure<FakeVm>>>;

/// A destination that waits on a thread.
pub(super) struct Target {
    pub address: Address,
    pub cancel: Cancel,
    pub progress: Arc<Progress>,
    thread: JoinHandle<ReceiveResult>,
}

impl Target {
    pub(super) fn start(at: &Address, builder: Builder, limits: Limits) -> Self {
        Self::steered(at, builder, limits, crate::Steering::new())
    }

    pub(super) fn steered(
        at: &Address,
        builder: Builder,
        limits: Limits,
        steering: crate::Steering,
    ) -> Self {
        let tls = tls::of_this_thread(at).map(|(_, destination)| destination);
        let listener = Listener::bind(at).unwrap().with_tls(tls);
        let address = listener.address().clone();
        let cancel = Cancel::new().unwrap();
        let progress = Arc::new(Progress::new(Side::Destination));
        let thread = {
            let (cancel, progress) = (cancel.clone(), Arc::clone(&progress));
            let options = ReceiveOptions {
                limits,
                steering,
                prepare_threads: Some(1),
                ..ReceiveOptions::default()
            };
            std::thread::spawn(move || listener.receive(builder, &options, &progress, &cancel))
        };
        Self { address, cancel, progress, thread }
    }

    /// True when the reception has ended, successfully or not.
    pub(super) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    pub(super) fn join(self) -> ReceiveResult {
        self.thread.join().unwrap()
    }
}

/// Options for a test's source. On a loaded machine a guest may write faster than its memory is
/// sent; it is then stopped for longer, or the test would never end.
pub(super) fn options(to: &Address) -> SendOptions {
    SendOptions {
        limits: LIMITS,
        convergence: Convergence::RaiseDowntime,
        downtime_max: Some(Duration::from_secs(10)),
        tls: tls::of_this_thread(to).map(|(source, _)| source),
        ..SendOptions::new(to.clone())
    }
}

/// Sends with these options, without those of [`options`] that do not apply to the mode of the test.
pub(super) fn migrate(
    vm: FakeVm,
    options: &SendOptions,
    progress: &Arc<Progress>,
    cancel: &Cancel,
) -> SendResult {
    let mut options = options.clone();
    if options.mode() == crate::MemoryMode::Postcopy {
        options.convergence = Convergence::None;
    }
    if options.convergence != Convergence::RaiseDowntime {
        options.downtime_max = None;
    }
    source::migrate(vm, &options, progress, cancel)
}

/// Sends with new progress and cancel handles.
pub(super) fn send(vm: FakeVm, options: &SendOptions) -> SendResult {
    let progress = Arc::new(Progress::new(Side::Source));
    migrate(vm, options, &progress, &Cancel::new().unwrap())
}

/// Asserts that these calls came one after the other, each for the first time.
pub(super) fn assert_in_order(calls: &crate::testing::Calls, names: &[&str]) {
    let calls = calls.lock();
    let places: Vec<_> =
        names.iter().map(|name| calls.iter().position(|call| call == name).unwrap()).collect();
    assert!(places.is_sorted_by(|one, next| one < next), "{names:?} in {calls:?}");
}

/// Asserts that a guest is whole.
pub(super) fn assert_whole(guest: &Guest, memory: &FakeMemory) {
    let wrong = guest.wrong_pages(memory);
    assert!(wrong.is_empty(), "{} wrong pages, the first {:?}", wrong.len(), wrong.first());
    assert_eq!(guest.errors(), 0, "a vCPU found stale pages");
}
