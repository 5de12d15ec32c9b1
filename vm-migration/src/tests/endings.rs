// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Machines at the destination that take long to end: the source hears why the migration is over
//! before they do, as its guest may stand still until then.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use super::{
    Builder, FakeDestination, FakeMemory, FakeVm, Guest, LIMITS, have_uffd, loopback, memory,
    options, send,
};
use crate::commit::destination::InDoubt;
use crate::destination::Listener;
use crate::fault::FaultSource;
use crate::options::ReceiveOptions;
use crate::source::SendFailure;
use crate::testing::{FakeMapped, Inject};
use crate::vm::{DestinationBuilder, DestinationVm, GivenMemory, MappedMachine, VmError};
use crate::{Cancel, Cause, MemoryMode, Progress, Side};

/// A machine that ends when the test says so, or has gone.
struct Heavy<M> {
    machine: M,
    fails: Fails,
    end: End,
}

/// What it cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    ToWatch,
    ToApply,
}

/// Waits in its drop.
struct End(Mutex<Receiver<()>>);

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.0.get_mut().unwrap().recv();
    }
}

impl DestinationBuilder for Heavy<Builder> {
    type Vm = Heavy<FakeDestination>;
    type Mapped = Heavy<FakeMapped>;

    fn map_memory(self, config: &[u8], given: Vec<GivenMemory>) -> Result<Self::Mapped, VmError> {
        let Self { machine, fails, end } = self;
        Ok(Heavy { machine: machine.map_memory(config, given)?, fails, end })
    }
}

impl MappedMachine for Heavy<FakeMapped> {
    type Vm = Heavy<FakeDestination>;

    fn memory(&self) -> Arc<FakeMemory> {
        self.machine.memory()
    }

    fn build(self) -> Result<Self::Vm, VmError> {
        let Self { machine, fails, end } = self;
        Ok(Heavy { machine: machine.build()?, fails, end })
    }
}

impl DestinationVm for Heavy<FakeDestination> {
    type Memory = FakeMemory;
    type Running = FakeVm;

    fn fault_source(&mut self) -> Result<Option<Arc<dyn FaultSource>>, VmError> {
        if self.fails == Fails::ToWatch {
            return Err("injected failure in watching".into());
        }
        self.machine.fault_source()
    }

    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError> {
        self.machine.apply_state(state_json)
    }

    fn in_doubt(&mut self, doubt: InDoubt, lasts: bool) {
        self.machine.in_doubt(doubt, lasts);
    }

    fn run(self, resume: bool) -> Result<FakeVm, (Self, VmError)> {
        let Self { machine, fails, end } = self;
        machine.run(resume).map_err(|(machine, error)| (Self { machine, fails, end }, error))
    }
}

#[test]
fn the_source_hears_of_a_failure_before_the_machine_ends() {
    let modes = [MemoryMode::Precopy, MemoryMode::Postcopy, MemoryMode::Auto];
    for (mode, fails) in modes.into_iter().flat_map(|mode| {
        let to_watch = mode.may_postcopy().then_some((mode, Fails::ToWatch));
        [Some((mode, Fails::ToApply)), to_watch].into_iter().flatten()
    }) {
        if mode.may_postcopy() && !have_uffd() {
            continue;
        }
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 55);
        guest.fill(&from, 50);
        let (open, end) = channel();
        let inject = if fails == Fails::ToApply { Inject::Apply } else { Inject::Nothing };
        let machine = Builder::new(&to, &guest).inject(inject);
        let builder = Heavy { machine, fails, end: End(Mutex::new(end)) };
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
