// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving and restoring the state of a machine.
//!
//! Owns the order in which parts are saved and restored, and the checks that a state fits. Must never
//! touch guest memory, which is saved and restored elsewhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hypervisor::{ClockPolicy, TimeBase, VcpuState};
use pci::{Bdf, PciDevice};
use vfio::StateWriter;
use vfio::migration::Hardware;

use super::memory_hotplug::MemoryHotplug;
use super::passthrough::{DeviceStateReader, Patience, StateApart};
use super::{
    MACHINE_STATE_VERSION, Machine, MachineError, MachineState, PciFunctionState, features,
};

impl Machine {
    /// Saves the state of everything except memory. The machine must be paused. `patience` says how long each
    /// passed-through device may take.
    ///
    /// # Errors
    /// Names the vCPU or device, which may hang and is lost to the guest then, or the disk that is full: its waiting requests
    /// are in no state. Nor is it known which requests of its rings a back end that was lost meanwhile has taken.
    pub fn save(&self, patience: &Patience<'_>) -> Result<MachineState, MachineError> {
        self.save_beside(&BTreeMap::new(), patience)
    }

    /// The same without the hardware states of these devices, which were read already and have these lengths.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_beside(
        &self,
        apart: &BTreeMap<&str, u64>,
        patience: &Patience<'_>,
    ) -> Result<MachineState, MachineError> {
        self.check_room()?;
        self.parts.devices.check_back_ends()?;
        // Also those that were added since the pause, and run.
        self.parts.passthrough.stop_within(patience)?;
        let clock = self.parts.vm.clock()?;
        self.parts.legacy.clock_was_read();
        let mut vcpus = Vec::new();
        for (index, state) in (0_u32..).zip(self.vcpus.on_each(|vcpu| vcpu.state())?) {
            vcpus.push(state.map_err(|source| MachineError::Vcpu { index, source })?);
        }
        self.parts.devices.fetch_states()?;
        let mut pci = BTreeMap::new();
        let passthrough = &self.parts.passthrough;
        for (bdf, function) in self.pci_functions() {
            let state = match (passthrough.at(bdf), apart.get(function.id())) {
                (Some(device), Some(len_bytes)) => passthrough.save_beside(device, *len_bytes)?,
                (Some(device), None) => passthrough.save(device, patience)?,
                (None, _) => function.save()?,
            };
            pci.insert(function.id().to_owned(), PciFunctionState { bdf: bdf.to_string(), state });
        }
        let mut legacy = self.parts.legacy.save();
        self.parts.tpm.save_to(&mut legacy)?;
        let mut state = MachineState {
            version: 1,
            platform: self.config.platform_name(),
            shown: self.shown.clone(),
            clock,
            vcpus,
            irqchips: self.parts.vm.irqchips()?,
            legacy,
            pci_config_address: self.parts.config_ports.address(),
            pci_hotplug: Some(self.parts.hotplug.save()),
            cpu_hotplug: self.parts.cpu_hotplug.save(self.config.cpus.boot_vcpus),
            memory_hotplug: self.parts.memory_hotplug.as_ref().and_then(MemoryHotplug::save),
            pci,
        };
        state.version = state.needed_version();
        Ok(state)
    }

    /// The passed-through devices, whose hardware states are to be sent as bytes.
    ///
    /// # Errors
    /// Names those whose state is too long for that.
    pub fn states_apart(&self) -> Result<Vec<StateApart>, MachineError> {
        Ok(self.parts.passthrough.states_apart()?)
    }

    /// Prepares to read the hardware states of these devices. The machine must be paused.
    ///
    /// # Errors
    /// Names the device.
    pub fn read_states(&self, ids: &[String]) -> Result<Vec<DeviceStateReader>, MachineError> {
        self.parts.passthrough.read_states(ids)
    }

    /// Leaves the device to the thread that reads its state and hangs; returns the call that does.
    pub fn leave_device(&self, id: &str) -> String {
        self.parts.passthrough.leave_hung(id)
    }

    /// Prepares to write states of this hardware into the devices with these ids, which a restore completes.
    ///
    /// # Errors
    /// Names the device.
    pub fn write_states(
        &self,
        states: &[(&str, Hardware)],
    ) -> Result<Vec<StateWriter>, MachineError> {
        self.parts.passthrough.write_states(states)
    }

    /// Waits, while the guest runs, for what would hold up [`Self::save`].
    pub fn prepare_save(&self, is_cancelled: &dyn Fn() -> bool) {
        self.parts.tpm.prepare_stop(is_cancelled);
    }

    /// Restores a saved state; `clock` says whether guest time has passed meanwhile, and `patience` how long each
    /// passed-through device may take. The machine stays paused.
    ///
    /// # Errors
    /// Names the part that does not fit, or hangs; the machine is unusable then.
    pub fn restore(
        &mut self,
        mut state: MachineState,
        clock: ClockPolicy,
        patience: &Patience<'_>,
    ) -> Result<(), MachineError> {
        if !(1..=MACHINE_STATE_VERSION).contains(&state.version) {
            return Err(MachineError::StateVersion(state.version));
        }
        let (theirs, ours) = (state.platform, self.config.platform_name());
        if theirs != ours {
            let (theirs, ours) = (theirs.text(), ours.text());
            return Err(mismatch(format!("it is of platform {theirs}, this machine of {ours}")));
        }
        if state.vcpus.len() != self.vcpus.count() {
            let (theirs, ours) = (state.vcpus.len(), self.vcpus.count());
            return Err(mismatch(format!("it has {theirs} vCPUs, this machine {ours}")));
        }
        features::check(&state.shown, &self.cpuid).map_err(MachineError::Features)?;
        self.shown = state.shown;
        let first = state.vcpus.first();
        self.feature_msrs = first.map_or_else(Vec::new, |vcpu| features::describing(&vcpu.msrs));
        let functions = self.pci_functions();
        if state.pci.len() != functions.len() {
            return Err(mismatch("it has another number of PCI devices".to_owned()));
        }
        let time = self.parts.vm.restore_clock(&state.clock, clock)?;
        let time_read_at = Instant::now();
        self.restore_vcpus(state.vcpus, time)?;
        self.parts.vm.set_irqchips(&state.irqchips)?;
        self.parts.tpm.restore_from(&mut state.legacy)?;
        self.parts.legacy.restore(&state.legacy)?;
        self.parts.legacy.advance(Duration::from_nanos(time.elapsed_ns), time_read_at);
        self.parts.config_ports.set_address(state.pci_config_address);
        for (bdf, function) in functions {
            let id = function.id();
            let saved = state
                .pci
                .remove(id)
                .ok_or_else(|| mismatch(format!("it has no PCI device '{id}'")))?;
            if saved.bdf != bdf.to_string() {
                return Err(mismatch(format!("'{id}' is at {}, here at {bdf}", saved.bdf)));
            }
            match self.parts.passthrough.at(bdf) {
                Some(device) => {
                    self.parts.passthrough.restore(device, saved.state, patience)?;
                }
                None => function.restore(&saved.state)?,
            }
        }
        self.parts.segments.iter().for_each(|segment| segment.refresh_mappings());
        if let Some(state) = &state.pci_hotplug {
            self.parts.hotplug.restore(state)?;
        }
        let vcpus = self.config.cpus.boot_vcpus;
        self.parts.cpu_hotplug.restore(state.cpu_hotplug.as_ref(), vcpus)?;
        match (&self.parts.memory_hotplug, &state.memory_hotplug) {
            (Some(hotplug), state) => hotplug.restore(state.as_ref())?,
            (None, None) => {}
            (None, Some(_)) => {
                return Err(mismatch("it has memory devices, this machine has none".to_owned()));
            }
        }
        self.take_ejected();
        Ok(())
    }

    /// All PCI functions; passed-through ones last, as their hardware may use the others' state.
    fn pci_functions(&self) -> Vec<(Bdf, Arc<dyn PciDevice>)> {
        let virtio = self.parts.devices.functions().iter();
        let passed = self.parts.passthrough.devices().iter();
        let virtio = virtio.map(|(bdf, device)| (*bdf, Arc::clone(device) as Arc<dyn PciDevice>));
        let passed = passed.map(|(bdf, device)| (*bdf, Arc::clone(device) as Arc<dyn PciDevice>));
        let panics = self.parts.panics.iter();
        let panics = panics.map(|(bdf, device)| (*bdf, Arc::clone(device) as Arc<dyn PciDevice>));
        virtio.chain(panics).chain(passed).collect()
    }

    fn restore_vcpus(&self, states: Vec<VcpuState>, time: TimeBase) -> Result<(), MachineError> {
        for (index, state) in (0_u32..).zip(states) {
            let apic_id = self.parts.topology.apic_id(index);
            self.vcpus
                .on_one(apic_id, move |vcpu| vcpu.set_state(&state, &time))?
                .map_err(|source| MachineError::Vcpu { index, source })?;
        }
        Ok(())
    }
}

fn mismatch(what: String) -> MachineError {
    MachineError::StateMismatch(what)
}
