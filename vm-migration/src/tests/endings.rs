// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Machines at the destination whose end takes long: the source gets the reason of a failure before
//! they have ended, because its guest may be stopped until then. And a host that does not release
//! memory at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};

use parking_lot::Mutex;

use super::hostile::agree;
use super::recovery::wait_until;
use super::{
    Builder, FakeDestination, FakeMemory, FakeVm, Guest, LIMITS, have_uffd, loopback, memory,
    options, send,
};
use crate::channel::Channel;
use crate::commit::destination::InDoubt;
use crate::destination::Listener;
use crate::fault::{Fault, FaultSource, FaultSourceKind, FaultWait};
use crate::layout::PageRun;
use crate::options::ReceiveOptions;
use crate::protocol::message::{Message, Role};
use crate::source::SendFailure;
use crate::testing::{FakeMapped, Inject};
use crate::transport::Connection;
use crate::uffd::{Uffd, UffdError};
use crate::vm::{DestinationBuilder, DestinationVm, GivenMemory, MappedMachine, VmError};
use crate::{Cancel, Cause, MemoryMode, Progress, Side};

/// A machine whose drop takes until the test opens the gate, or has ended.
struct Heavy<M> {
    machine: M,
    fails: Fails,
    faults: Option<Arc<dyn FaultSource>>,
    end: End,
}

/// What it cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    Nothing,
    Watch,
    Apply,
}

/// Waits when it is dropped.
struct End(Mutex<Receiver<()>>);

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.0.get_mut().recv();
    }
}

impl DestinationBuilder for Heavy<Builder> {
    type Vm = Heavy<FakeDestination>;
    type Mapped = Heavy<FakeMapped>;

    fn map_memory(
        self,
        config: &[u8],
        given: Vec<GivenMemory>,
        mode: MemoryMode,
    ) -> Result<Self::Mapped, VmError> {
        let Self { machine, fails, faults, end } = self;
        Ok(Heavy { machine: machine.map_memory(config, given, mode)?, fails, faults, end })
    }
}

impl MappedMachine for Heavy<FakeMapped> {
    type Vm = Heavy<FakeDestination>;

    fn memory(&self) -> Arc<FakeMemory> {
        self.machine.memory()
    }

    fn build(self) -> Result<Self::Vm, VmError> {
        let Self { machine, fails, faults, end } = self;
        Ok(Heavy { machine: machine.build()?, fails, faults, end })
    }

    fn build_from_state(self, _: &[u8]) -> Result<Self::Vm, VmError> {
        unreachable!("it is built without its state")
    }
}

impl DestinationVm for Heavy<FakeDestination> {
    type Memory = FakeMemory;
    type Running = FakeVm;

    fn fault_source(&mut self) -> Result<Option<Arc<dyn FaultSource>>, VmError> {
        if self.fails == Fails::Watch {
            return Err("injected failure in watching".into());
        }
        Ok(self.faults.take())
    }

    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError> {
        self.machine.apply_state(state_json)
    }

    fn in_doubt(&mut self, doubt: InDoubt, lasts: bool) {
        self.machine.in_doubt(doubt, lasts);
    }

    fn run(self, resume: bool) -> Result<FakeVm, (Self, VmError)> {
        let Self { machine, fails, faults, end } = self;
        let back = |(machine, error)| (Self { machine, fails, faults, end }, error);
        machine.run(resume).map_err(back)
    }
}

#[test]
fn the_source_hears_of_a_failure_before_the_machine_ends() {
    let modes = [MemoryMode::Precopy, MemoryMode::Postcopy, MemoryMode::Auto];
    for (mode, fails) in modes.into_iter().flat_map(|mode| {
        let to_watch = mode.may_postcopy().then_some((mode, Fails::Watch));
        [Some((mode, Fails::Apply)), to_watch].into_iter().flatten()
    }) {
        if mode.may_postcopy() && !have_uffd() {
            continue;
        }
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 55);
        guest.fill(&from, 50);
        let (open, end) = channel();
        let inject = if fails == Fails::Apply { Inject::Apply } else { Inject::Nothing };
        let machine = Builder::new(&to, &guest).inject(inject);
        let builder = Heavy { machine, fails, faults: None, end: End(Mutex::new(end)) };
        let listener = Listener::bind(&loopback()).unwrap();
        let mut options = options(listener.address());
        options.memory_mode = mode;
        if mode == MemoryMode::Auto {
            options.postcopy_after = Some(std::time::Duration::ZERO);
        }
        let target = std::thread::spawn(move || {
            let options = ReceiveOptions { limits: LIMITS, ..ReceiveOptions::default() };
            let progress = Arc::new(Progress::new(Side::Destination));
            listener.receive(builder, &options, &progress, &Cancel::new().unwrap())
        });
        let failure = *send(FakeVm::new(&from, &guest).running(), &options).unwrap_err();
        assert!(!target.is_finished(), "the machine has ended before: {mode:?} {fails:?}");
        let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
        vm.stop();
        let told = error_text::chain(&error);
        assert!(matches!(error.cause, Cause::Refused(_)), "{mode:?} {fails:?}: {told}");
        assert!(told.contains("injected failure"), "{told}");
        drop(open);
        target.join().unwrap().unwrap_err();
    }
}

/// A host that lacks memory for releasing watched memory, several times.
struct RefusesRelease {
    faults: Uffd<FakeMemory>,
    refusals: AtomicU32,
}

impl FaultSource for RefusesRelease {
    fn kind(&self) -> FaultSourceKind {
        self.faults.kind()
    }

    fn readers(&self) -> usize {
        self.faults.readers()
    }

    fn next_faults(&self, reader: usize, faults: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        self.faults.next_faults(reader, faults)
    }

    fn stop_readers(&self) {
        self.faults.stop_readers();
    }

    fn receives_in_place(&self, region: usize) -> bool {
        self.faults.receives_in_place(region)
    }

    fn make_present(&self, run: PageRun) -> Result<(), UffdError> {
        self.faults.make_present(run)
    }

    fn copy_in(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        self.faults.copy_in(run, bytes)
    }

    fn make_zero(&self, run: PageRun) -> Result<(), UffdError> {
        self.faults.make_zero(run)
    }

    fn wake(&self, run: PageRun) -> Result<(), UffdError> {
        self.faults.wake(run)
    }

    fn release(&self) -> Result<(), UffdError> {
        let fewer = |left: u32| left.checked_sub(1);
        match self.refusals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer) {
            Ok(_) => Err(UffdError::Events(std::io::Error::from_raw_os_error(libc::ENOMEM))),
            Err(_) => self.faults.release(),
        }
    }
}

#[test]
fn a_wait_for_a_page_ends_although_the_host_does_not_release_at_once() {
    if !have_uffd() {
        return;
    }
    let to = memory();
    let guest = Guest::new(&to, 57);
    let faults = Uffd::register(Arc::clone(&to), 1).unwrap();
    let faults = Arc::new(RefusesRelease { faults, refusals: AtomicU32::new(3) });
    let (_, end) = channel();
    let builder = Heavy {
        machine: Builder::new(&to, &guest).touch(vec![(0, 0)]),
        fails: Fails::Nothing,
        faults: Some(faults),
        end: End(Mutex::new(end)),
    };
    let listener = Listener::bind(&loopback()).unwrap();
    let (address, cancel) = (listener.address().clone(), Cancel::new().unwrap());
    let cancelled = cancel.clone();
    let target = std::thread::spawn(move || {
        let options = ReceiveOptions { limits: LIMITS, ..ReceiveOptions::default() };
        let progress = Arc::new(Progress::new(Side::Destination));
        listener.receive(builder, &options, &progress, &cancelled)
    });
    let never = Cancel::new().unwrap();
    let connection = Connection::connect(&address, &never, LIMITS.connect, LIMITS.answer);
    let mut control = Channel::new(connection.unwrap());
    let token = agree(&mut control, &to, MemoryMode::Postcopy);
    control.ask(&Message::Config(b"{}".to_vec()), LIMITS.answer).unwrap();
    let mut links = [Role::Memory, Role::Fault]
        .map(|role| Channel::open_extra(&address, role, Some(&token), &never, &LIMITS).unwrap());
    control.ask(&Message::Pending(vec![0, 1, 0, 1, 0, 0]), LIMITS.answer).unwrap();
    control.tell(&Message::State(b"{}".to_vec())).unwrap();
    let request = links[1].timed(Message::read).unwrap();
    assert!(matches!(request, Message::PageFault(_)), "{request:?}");
    cancel.cancel();
    wait_until("the end", || target.is_finished());
    let error = target.join().unwrap().unwrap_err().error;
    assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
}
