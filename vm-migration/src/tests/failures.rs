// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Machines that fail at each step, and cancels in each phase: one guest runs, on the right side,
//! and the source reports the reason.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_in_order, assert_whole, have_uffd, loopback,
    memory, migrate, options, send,
};
use crate::progress::{Event, Observer, Phase};
use crate::source::SendFailure;
use crate::testing::{FakeMemory, Inject};
use crate::{Cancel, Cause, Convergence, GuestLocation, MemoryMode, Progress, Side};

struct Rig {
    from: Arc<FakeMemory>,
    to: Arc<FakeMemory>,
    guest: Arc<Guest>,
    mode: MemoryMode,
}

impl Rig {
    fn new(mode: MemoryMode) -> Self {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 31);
        guest.fill(&from, 50);
        Self { from, to, guest, mode }
    }

    fn vm(&self, inject: Inject) -> FakeVm {
        FakeVm::new(&self.from, &self.guest).inject(inject).running()
    }

    fn target(&self, inject: Inject) -> Target {
        let builder = Builder::new(&self.to, &self.guest).inject(inject);
        Target::start(&loopback(), builder, LIMITS)
    }

    fn options(&self, target: &Target) -> crate::SendOptions {
        let mut options = options(&target.address);
        options.memory_mode = self.mode;
        options
    }

    /// Asserts that the guest continues, whole, at the source.
    fn assert_continues(&self, vm: &mut FakeVm) {
        assert!(vm.runs());
        let before = self.guest.visits();
        while self.guest.visits() < before + 1000 {
            std::thread::yield_now();
        }
        vm.stop();
        assert_whole(&self.guest, &self.from);
    }
}

fn modes() -> Vec<MemoryMode> {
    let mut modes = vec![MemoryMode::Precopy];
    if have_uffd() {
        modes.push(MemoryMode::Postcopy);
    }
    modes
}

#[test]
fn a_source_that_fails_at_any_step_keeps_its_guest() {
    for mode in modes() {
        for inject in [
            Inject::Config,
            Inject::StartLog,
            Inject::PrepareStop,
            Inject::Pause,
            Inject::State,
            Inject::Release,
        ] {
            let rig = Rig::new(mode);
            let target = rig.target(Inject::Nothing);
            let options = rig.options(&target);
            let failure = *send(rig.vm(inject), &options).unwrap_err();
            let SendFailure::Resumed { mut vm, error } = failure else {
                panic!("{mode:?} {inject:?}: {failure:?}")
            };
            assert_eq!(error.guest, GuestLocation::OnSource);
            assert!(
                error_text::chain(&error).contains("injected failure"),
                "{}",
                error_text::chain(&error)
            );
            rig.assert_continues(&mut vm);
            let error = target.join().unwrap_err().error;
            let told = error_text::chain(&error);
            assert!(told.contains("injected failure"), "{mode:?} {inject:?}: {told}");
        }
    }
}

/// Where the kernel has large tables, ending the dirty log takes seconds; the guest must not be
/// stopped for that on either side.
#[test]
fn the_dirty_log_ends_when_the_guest_does_not_wait() {
    for mode in modes() {
        for (inject, before) in [(Inject::Nothing, "handed over"), (Inject::Apply, "resume")] {
            let rig = Rig::new(mode);
            let target = rig.target(inject);
            let vm = rig.vm(Inject::Nothing);
            let calls = vm.calls();
            let options = rig.options(&target);
            let sender = std::thread::spawn(move || send(vm, &options));
            if let Ok(received) = target.join()
                && let Some(faults) = received.faults
            {
                faults.wait().unwrap();
            }
            assert_eq!(sender.join().unwrap().is_ok(), inject == Inject::Nothing);
            assert_in_order(&calls, &[before, "log ends"]);
        }
    }
}

#[test]
fn a_machine_settles_while_its_guest_runs_and_is_not_waited_for_for_ever() {
    let rig = Rig::new(MemoryMode::Precopy);
    let target = rig.target(Inject::Nothing);
    let options = rig.options(&target);
    let vm = rig.vm(Inject::PreparesStopSlowly);
    let calls = vm.calls();
    send(vm, &options).unwrap();
    target.join().unwrap();
    let calls = calls.lock().clone();
    let settles = calls.iter().filter(|call| **call == "prepare_stop").count();
    let pause = calls.iter().position(|call| *call == "pause").unwrap();
    assert!((1..=4).contains(&settles), "{calls:?}");
    assert_eq!(calls.get(pause - 1), Some(&"prepare_stop"), "{calls:?}");
}

#[test]
fn a_machine_that_does_not_settle_can_be_cancelled() {
    for mode in modes() {
        let rig = Rig::new(mode);
        let target = rig.target(Inject::Nothing);
        let options = rig.options(&target);
        let vm = rig.vm(Inject::NeverPreparesStop);
        let (calls, cancel) = (vm.calls(), Cancel::new().unwrap());
        let failure = std::thread::scope(|scope| {
            let sending = scope
                .spawn(|| migrate(vm, &options, &Arc::new(Progress::new(Side::Source)), &cancel));
            while !calls.lock().contains(&"prepare_stop") {
                std::thread::yield_now();
            }
            cancel.cancel();
            *sending.join().unwrap().unwrap_err()
        });
        let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
        assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
        rig.assert_continues(&mut vm);
        target.join().unwrap_err();
    }
}

#[test]
fn a_guest_that_cannot_be_resumed_comes_back_paused() {
    let rig = Rig::new(MemoryMode::Precopy);
    let target = rig.target(Inject::Apply);
    let options = rig.options(&target);
    let failure = *send(rig.vm(Inject::Resume), &options).unwrap_err();
    assert!(matches!(failure, SendFailure::StillPaused { .. }), "{failure:?}");
    assert_eq!(failure.error().guest, GuestLocation::PausedOnSource);
    target.join().unwrap_err();
}

#[test]
fn the_reason_of_the_destination_reaches_the_source() {
    for mode in modes() {
        for inject in [Inject::Map, Inject::Prepare, Inject::Apply] {
            let rig = Rig::new(mode);
            let target = rig.target(inject);
            let options = rig.options(&target);
            let failure = *send(rig.vm(Inject::Nothing), &options).unwrap_err();
            let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
            assert!(
                matches!(&error.cause, Cause::Refused(why) if why.contains("injected failure"))
            );
            rig.assert_continues(&mut vm);
            let error = target.join().unwrap_err().error;
            assert_eq!((error.side, error.guest), (Side::Destination, GuestLocation::NotHere));
        }
    }
}

#[test]
fn a_guest_that_does_not_start_at_the_destination_is_not_resumed_at_the_source() {
    let rig = Rig::new(MemoryMode::Precopy);
    let target = rig.target(Inject::Run);
    let options = rig.options(&target);
    let failure = *send(rig.vm(Inject::Nothing), &options).unwrap_err();
    assert!(matches!(failure, SendFailure::HandedOver { .. }), "{failure:?}");
    assert!(error_text::chain(failure.error()).contains("injected failure"));
    let failure = *target.join().unwrap_err();
    assert_eq!(failure.error.guest, GuestLocation::OnDestination);
    assert!(failure.vm.is_some(), "the machine is kept for another try");
    assert_whole(&rig.guest, &rig.to);
}

#[test]
fn different_memory_layouts_are_refused_with_both_named() {
    let rig = Rig::new(MemoryMode::Precopy);
    let other =
        FakeMemory::new(&[(0, 64)], crate::layout::Backing::Shared, crate::layout::PAGE_BYTES);
    let builder = Builder::new(&other.unwrap(), &rig.guest);
    let target = Target::start(&loopback(), builder, LIMITS);
    let failure = *send(rig.vm(Inject::Nothing), &rig.options(&target)).unwrap_err();
    let text = error_text::chain(failure.error());
    assert!(text.contains("0x0+0x40000 here") && text.contains("0x0+0x800000"), "{text}");
    target.join().unwrap_err();
}

#[test]
fn no_listener_is_an_error_that_says_so() {
    let rig = Rig::new(MemoryMode::Precopy);
    // Bound but not listening: no other process gets the port, and nothing answers on it.
    let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    held.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    let port = held.local_addr().unwrap().as_socket().unwrap().port();
    let address: crate::Address = format!("tcp:127.0.0.1:{port}").parse().unwrap();
    let failure = *send(rig.vm(Inject::Nothing), &options(&address)).unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert_eq!(error.phase, Phase::Connect);
    assert!(
        error_text::chain(&error).contains(&address.to_string()),
        "{}",
        error_text::chain(&error)
    );
    rig.assert_continues(&mut vm);
}

/// Cancels when a phase begins.
struct CancelAt(Phase, Cancel);

impl Observer for CancelAt {
    fn event(&self, _: Side, event: Event) {
        if event == Event::Begin(self.0) {
            self.1.cancel();
        }
    }
}

#[test]
fn a_cancel_in_any_phase_leaves_the_guest_at_the_source() {
    let phases = [Phase::Connect, Phase::Negotiate, Phase::Precopy, Phase::Stop, Phase::Handover];
    for mode in modes() {
        for phase in phases {
            let rig = Rig::new(mode);
            let target = rig.target(Inject::Nothing);
            let options = rig.options(&target);
            let cancel = Cancel::new().unwrap();
            let observer = Box::new(CancelAt(phase, cancel.clone()));
            let progress = Arc::new(Progress::observed(Side::Source, observer));
            let result = migrate(rig.vm(Inject::Nothing), &options, &progress, &cancel);
            let failure = *result.unwrap_err();
            let SendFailure::Resumed { mut vm, error } = failure else {
                panic!("{mode:?} {phase}: {failure:?}")
            };
            assert!(matches!(error.cause, Cause::Cancelled), "{mode:?} {phase}: {error:?}");
            assert_eq!(progress.phase(), Phase::Failed);
            rig.assert_continues(&mut vm);
            // Before the connection is made, the destination is told nothing.
            target.cancel.cancel();
            target.join().unwrap_err();
        }
    }
}

/// A device may keep the machine from stopping before long, or at all.
#[test]
fn a_stop_that_fails_after_a_cancel_was_cancelled() {
    let rig = Rig::new(MemoryMode::Precopy);
    let target = rig.target(Inject::Nothing);
    let cancel = Cancel::new().unwrap();
    let observer = Box::new(CancelAt(Phase::Stop, cancel.clone()));
    let progress = Arc::new(Progress::observed(Side::Source, observer));
    let options = rig.options(&target);
    let failure = *migrate(rig.vm(Inject::Pause), &options, &progress, &cancel).unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
    rig.assert_continues(&mut vm);
    target.join().unwrap_err();
}

#[test]
fn a_cancel_at_the_destination_is_told_to_the_source() {
    let rig = Rig::new(MemoryMode::Precopy);
    let listener = crate::destination::Listener::bind(&loopback()).unwrap();
    let options = options(listener.address());
    let cancel = Cancel::new().unwrap();
    let observer = Box::new(CancelAt(Phase::Receive, cancel.clone()));
    let progress = Arc::new(Progress::observed(Side::Destination, observer));
    let builder = Builder::new(&rig.to, &rig.guest);
    let receiver = std::thread::spawn(move || {
        let options = crate::ReceiveOptions { limits: LIMITS, ..Default::default() };
        listener.receive(builder, &options, &progress, &cancel).unwrap_err().error
    });
    let failure = *send(rig.vm(Inject::Nothing), &options).unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(error_text::chain(&error).contains("cancelled"), "{}", error_text::chain(&error));
    rig.assert_continues(&mut vm);
    assert!(matches!(receiver.join().unwrap().cause, Cause::Cancelled));
}

#[test]
fn a_guest_that_never_converges_stays_when_it_must_not_be_stopped_for_long() {
    let rig = Rig::new(MemoryMode::Precopy);
    let target = rig.target(Inject::Nothing);
    let mut options = rig.options(&target);
    (options.convergence, options.downtime) = (Convergence::None, Duration::ZERO);
    options.timeout = Duration::from_millis(300);
    let failure = *send(rig.vm(Inject::Busy), &options).unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(matches!(error.cause, Cause::NotConverging { .. }), "{error:?}");
    rig.assert_continues(&mut vm);
    target.join().unwrap_err();
}

/// Records the events of a migration in order.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Vec<Event>>>);

impl Observer for Record {
    fn event(&self, _: Side, event: Event) {
        self.0.lock().push(event);
    }
}

#[test]
fn every_phase_is_announced_with_its_begin_and_its_end() {
    let rig = Rig::new(MemoryMode::Precopy);
    let target = rig.target(Inject::Nothing);
    let record = Record::default();
    let progress = Arc::new(Progress::observed(Side::Source, Box::new(record.clone())));
    let cancel = Cancel::new().unwrap();
    migrate(rig.vm(Inject::Nothing), &rig.options(&target), &progress, &cancel).unwrap();
    drop(target.join().unwrap());
    let mut seen = Vec::new();
    for event in record.0.lock().iter() {
        match event {
            Event::Begin(phase) => seen.push((*phase, true)),
            Event::End(phase, _) => seen.push((*phase, false)),
            Event::Fail(phase, _) => panic!("{phase} failed"),
            Event::Round { round, .. } | Event::Stalled { round, .. } => assert!(*round > 0),
            // A busy machine may be slower than its guest.
            Event::DowntimeAllowed { .. } => {}
            Event::Throttled { .. } | Event::PageServerFailed => panic!("it was not asked for"),
        }
    }
    let phases = [Phase::Connect, Phase::Negotiate, Phase::Precopy, Phase::Stop, Phase::Handover];
    let mut expected: Vec<_> =
        phases.into_iter().flat_map(|phase| [(phase, true), (phase, false)]).collect();
    expected.push((Phase::Done, true));
    assert_eq!(seen, expected);
    assert!(serde_json::to_string(&progress.snapshot()).unwrap().contains("\"phase\":\"done\""));
}
