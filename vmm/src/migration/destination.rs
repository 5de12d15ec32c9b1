// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine that arrives.
//!
//! Owns the machine from the configuration that the source sent to the moment it runs. The
//! configuration and the state come from a peer: both are checked as if a stranger had sent them.

use std::sync::Arc;

use vm_migration::VmError;
use vm_migration::vm::{DestinationBuilder, DestinationVm};

use super::memory::MigratingRam;
use crate::config::VmConfig;
use crate::machine::{Consoles, EventSink, Host, Machine, MachineState};

/// Builds the machine that arrives.
pub struct ArrivingBuilder {
    host: Arc<Host>,
    sink: EventSink,
}

impl ArrivingBuilder {
    /// On this host; events of the guest go to `sink`.
    pub fn new(host: Arc<Host>, sink: EventSink) -> Self {
        Self { host, sink }
    }
}

/// A machine that has not run here yet.
pub struct ArrivingMachine {
    machine: Machine,
    memory: Arc<MigratingRam>,
}

impl ArrivingMachine {
    /// The machine, to be described.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }
}

impl DestinationBuilder for ArrivingBuilder {
    type Vm = ArrivingMachine;

    fn prepare(self, config_json: &[u8]) -> Result<ArrivingMachine, VmError> {
        let config: VmConfig = serde_json::from_slice(config_json)?;
        let mut config = config.complete()?;
        let consoles = Consoles::open(&mut config)?;
        let machine = Machine::arriving(config, consoles, &self.host, self.sink)?;
        let memory = Arc::new(MigratingRam::new(Arc::clone(machine.ram()))?);
        Ok(ArrivingMachine { machine, memory })
    }
}

impl DestinationVm for ArrivingMachine {
    type Memory = MigratingRam;
    type Running = Machine;

    fn memory(&self) -> Arc<MigratingRam> {
        Arc::clone(&self.memory)
    }

    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError> {
        let state: MachineState = serde_json::from_slice(state_json)?;
        Ok(self.machine.restore(state)?)
    }

    fn run(self, resume: bool) -> Result<Machine, (Self, VmError)> {
        let Self { mut machine, memory } = self;
        let running =
            machine.take_exclusive().and_then(|()| if resume { machine.resume() } else { Ok(()) });
        match running {
            Ok(()) => {
                machine.announce();
                Ok(machine)
            }
            Err(error) => Err((Self { machine, memory }, error.into())),
        }
    }
}
