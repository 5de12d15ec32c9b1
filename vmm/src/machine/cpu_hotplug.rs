// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPUs that come and go while the guest runs.
//!
//! Owns the order of things: a vCPU exists, and waits for the guest to start it, before the guest hears of it; it is
//! parked only when the guest has ejected it. KVM keeps a vCPU as long as its VM, so one that was removed is parked
//! and used again.
//!
//! vCPUs are removed from the highest index down, so that those of a machine are always the first ones: one that the
//! guest has ejected before a higher one stays until that has gone, too. The guest ejects on a vCPU's thread; the
//! rest happens when the owner of the machine comes to it ([`Machine::take_ejected_vcpus`]), here or, if the guest
//! has moved meanwhile, where it runs then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arch::acpi::{HotplugProtocol, HotplugRegisters};
use arch::cpuid::VmCpuid;
use devices::Snapshot as _;
use devices::bus::BusDevice;
use devices::legacy::{self, CPU_HOTPLUG_LEN_BYTES, CPU_SELECTOR_LEN_BYTES, CpuSelector};
use devices::virtio::DeviceSnapshot;
use hypervisor::{KvmError, NotAdded, SharedTsc, Vcpu, VcpuStateError};
use thiserror::Error;

use super::core_scheduling::isolate;
use super::events::{EventSink, GuestEvent};
use super::space::AddressSpace;
use super::{CancelToken, Machine, MachineError, boot, features};
use crate::config::VmConfig;
use crate::events;

/// Index of the vCPU that boots, which always stays.
const BOOT_VCPU: u32 = 0;
/// Time within which a vCPU has to leave the guest, or a device, to tell or set its time stamp counter.
const BUSY_TIME_MAX: Duration = Duration::from_secs(10);

/// Why a machine does not get another number of vCPUs.
#[derive(Debug, Error)]
pub enum ResizeVcpusError {
    /// Not a number that it can have.
    #[error("the VM can have 1 to {max} vCPUs (--cpus max), not {wanted}")]
    Number {
        /// What is wanted.
        wanted: u32,
        /// How many it can have.
        max: u32,
    },
    /// One that was removed has not left the guest or its device.
    #[error("vCPU {index} is still on its way out after its removal; try again later")]
    StillLeaving {
        /// Index of the vCPU.
        index: u32,
    },
    /// KVM does not make it.
    #[error("cannot make vCPU {index}")]
    Create {
        /// Index of the vCPU.
        index: u32,
        /// The cause.
        #[source]
        source: KvmError,
    },
    /// The VM was to end before all were added.
    #[error("the VM was to end before all vCPUs were added")]
    Withdrawn,
    /// A vCPU does not leave the guest or its device.
    #[error("the time stamp counter of a vCPU that runs cannot be reached")]
    Busy(#[source] hypervisor::ThreadsError),
}

/// The hot-plug registers of the vCPUs.
pub struct CpuHotplug {
    registers: Arc<legacy::CpuHotplug>,
}

impl CpuHotplug {
    /// Places the registers in `space`; ejections are reported to `sink`.
    ///
    /// # Errors
    /// The addresses are taken.
    pub fn wire(
        space: &AddressSpace,
        vcpus: u32,
        at: HotplugRegisters,
        sink: EventSink,
    ) -> Result<Self, MachineError> {
        let on_eject = Box::new(move || sink(GuestEvent::Ejected));
        let registers = Arc::new(legacy::CpuHotplug::new(vcpus, on_eject));
        let state = Arc::clone(&registers);
        let (device, len_bytes): (Arc<dyn BusDevice>, _) = match at.protocol {
            HotplugProtocol::Events => (state, CPU_HOTPLUG_LEN_BYTES),
            HotplugProtocol::Selector => {
                (Arc::new(CpuSelector::over(state)), CPU_SELECTOR_LEN_BYTES)
            }
        };
        space.insert_registers(at.place, len_bytes, "vCPU hotplug", device)?;
        Ok(Self { registers })
    }

    /// Saves the registers of a machine with `vcpus` vCPUs; `None` if the guest has nothing to do and sees them all.
    pub fn save(&self, vcpus: u32) -> Option<DeviceSnapshot> {
        (!self.registers.is_at_rest(vcpus)).then(|| self.registers.save())
    }

    /// Restores what [`Self::save`] returned.
    ///
    /// # Errors
    /// The state is malformed, or has a vCPU that the machine does not have.
    pub fn restore(&self, state: Option<&DeviceSnapshot>, vcpus: u32) -> Result<(), MachineError> {
        let Some(state) = state else {
            self.registers.rest(vcpus);
            return Ok(());
        };
        self.registers.restore(state)?;
        match self.registers.last_present() {
            last if last < vcpus => Ok(()),
            last => {
                let what = format!("its guest sees vCPU {last}, and it has {vcpus}");
                Err(MachineError::StateMismatch(what))
            }
        }
    }

    /// Whether a vCPU stays: the guest sees it, and was not asked to eject it.
    fn stays(&self, index: u32) -> bool {
        self.registers.is_present(index) && !self.registers.is_leaving(index)
    }

    /// Number of vCPUs of `vcpus` that are left when all have gone that are to go.
    pub fn lasting(&self, vcpus: u32) -> u32 {
        let last = (0..vcpus).rev().find(|index| self.stays(*index));
        last.map_or(1, |last| last + 1)
    }
}

impl Machine {
    /// Whether the machine can have `wanted` vCPUs.
    ///
    /// # Errors
    /// It cannot.
    pub fn check_vcpus(&self, wanted: u32) -> Result<(), ResizeVcpusError> {
        let max = self.config.cpus.max_vcpus;
        if (1..=max).contains(&wanted) {
            Ok(())
        } else {
            Err(ResizeVcpusError::Number { wanted, max })
        }
    }

    /// Whether the machine has `wanted` vCPUs, all of which stay.
    pub fn has_vcpus(&self, wanted: u32) -> bool {
        let vcpus = self.config.cpus.boot_vcpus;
        vcpus == wanted && (0..vcpus).all(|index| self.parts.cpu_hotplug.stays(index))
    }

    /// Gives the machine another number of vCPUs: adds those that are missing, and asks the guest to eject those that
    /// are too many. Asking again is harmless.
    ///
    /// # Errors
    /// The number is impossible, or a vCPU cannot be added; the machine has those that were added before.
    pub fn resize_vcpus(&mut self, wanted: u32, cancel: &CancelToken) -> Result<(), MachineError> {
        self.check_vcpus(wanted)?;
        let now = self.config.cpus.boot_vcpus;
        let registers = Arc::clone(&self.parts.cpu_hotplug.registers);
        for index in 0..wanted.min(now) {
            if !self.parts.cpu_hotplug.stays(index) {
                registers.add(index);
            }
        }
        for index in wanted..now {
            registers.request_unplug(index);
        }
        let added = if wanted > now { self.add_vcpus(wanted, cancel) } else { Ok(()) };
        // Also those that came before one failed. Others may have parked themselves, for a reset.
        if !self.paused {
            self.vcpus.resume_after(usize::try_from(now).unwrap_or(usize::MAX));
        }
        for index in now..self.config.cpus.boot_vcpus {
            registers.add(index);
        }
        self.parts.legacy.notify_cpus_changed();
        // The guest may have ejected some before it was asked to keep them.
        self.take_ejected_vcpus();
        added
    }

    /// Makes vCPUs up to `wanted`, which wait for the guest to start them.
    fn add_vcpus(&mut self, wanted: u32, cancel: &CancelToken) -> Result<(), MachineError> {
        let busy = |error| MachineError::from(ResizeVcpusError::Busy(error));
        let boot_vcpu = self.parts.topology.apic_id(BOOT_VCPU);
        let began = Instant::now();
        let wait_on = || !cancel.is_cancelled() && began.elapsed() < BUSY_TIME_MAX;
        let tsc =
            self.vcpus.interrupt(boot_vcpu, |vcpu| vcpu.shared_tsc(), wait_on).map_err(busy)??;
        let cpuid = features::as_shown(&self.shown, self.parts.topology);
        let before = self.config.cpus.boot_vcpus;
        let mut result = Ok(());
        while self.config.cpus.boot_vcpus < wanted {
            match self.add_vcpu_again() {
                Ok(true) => self.config.cpus.boot_vcpus += 1,
                Ok(false) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let (mut made, mut is_scaled) = (Vec::new(), false);
        for index in self.config.cpus.boot_vcpus..wanted {
            if result.is_err() {
                break;
            }
            if cancel.is_cancelled() {
                result = Err(ResizeVcpusError::Withdrawn.into());
                break;
            }
            match self.make_vcpu(index, &cpuid, &tsc) {
                Ok((vcpu, has_other_frequency)) => {
                    made.push(vcpu);
                    is_scaled |= has_other_frequency;
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let mut count = made.len();
        if let Err(NotAdded { error, added, unused }) = self.vcpus.add(made) {
            count = added;
            self.spare_vcpus.extend(unused.into_iter().map(|vcpu| (vcpu.index(), vcpu)));
            result = Err(error.into());
        }
        self.config.cpus.boot_vcpus += u32::try_from(count).unwrap_or(0);
        // Also what was added again, whose thread may never have had a cookie.
        let added = self.config.cpus.boot_vcpus.saturating_sub(before);
        if let Err(error) = isolate(&self.vcpus, self.config.cpus.core_scheduling, added) {
            // Parked, and unknown to the guest: the next request adds them again.
            for _ in 0..added {
                self.vcpus.remove_last();
            }
            self.config.cpus.boot_vcpus = before;
            return Err(error.into());
        }
        if is_scaled {
            self.match_tscs(tsc, wait_on)?;
        }
        result
    }

    /// Makes a vCPU; true if its time stamp counter had to get another frequency than the host's.
    fn make_vcpu(
        &mut self,
        index: u32,
        cpuid: &VmCpuid,
        tsc: &SharedTsc,
    ) -> Result<(Vcpu, bool), MachineError> {
        let apic_id = self.parts.topology.apic_id(index);
        let spare = self.spare_vcpus.remove(&apic_id);
        // It may have got that frequency, and the others have not been matched to it.
        let was_spare = spare.is_some();
        let vcpu =
            match spare.map_or_else(|| self.parts.create_vcpu(apic_id, &self.config.cpus), Ok) {
                Ok(vcpu) => vcpu,
                Err(source) => return Err(ResizeVcpusError::Create { index, source }.into()),
            };
        let init = boot::vcpu_init(cpuid.for_vcpu(index)?, None);
        let set_up = || -> Result<bool, VcpuStateError> {
            vcpu.init(&init)?;
            vcpu.adopt_msrs(&self.feature_msrs)?;
            vcpu.follow_tsc(tsc)
        };
        match set_up() {
            Ok(is_scaled) => Ok((vcpu, is_scaled || was_spare)),
            Err(source) => {
                // KVM makes no second vCPU of a number.
                self.spare_vcpus.insert(apic_id, vcpu);
                Err(MachineError::Vcpu { index, source })
            }
        }
    }

    /// Sets the time stamp counters of all vCPUs to what they are. A new vCPU begins at the host's frequency: until all
    /// have been set since, KVM takes their counters for different ones, and gives the guest a clock that its programs
    /// cannot read without its kernel.
    fn match_tscs(&self, tsc: SharedTsc, wait_on: impl Fn() -> bool) -> Result<(), MachineError> {
        for index in 0..self.config.cpus.boot_vcpus {
            let apic_id = self.parts.topology.apic_id(index);
            let set = move |vcpu: &mut Vcpu| vcpu.follow_tsc(&tsc);
            let set = self.vcpus.interrupt(apic_id, set, &wait_on);
            set.map_err(ResizeVcpusError::Busy)?
                .map_err(|source| MachineError::Vcpu { index, source })?;
        }
        Ok(())
    }

    /// Adds the next vCPU again if it was removed; false if it was not.
    fn add_vcpu_again(&mut self) -> Result<bool, MachineError> {
        let index = self.config.cpus.boot_vcpus;
        let apic_id = self.parts.topology.apic_id(index);
        let added = self.vcpus.add_again(apic_id, |vcpu| vcpu.wait_for_start()).map_err(
            |error| match error {
                hypervisor::ThreadsError::NotParked { .. } => {
                    ResizeVcpusError::StillLeaving { index }.into()
                }
                error => MachineError::from(error),
            },
        )?;
        added.map_err(|source| MachineError::Vcpu { index, source })
    }

    /// Parks the vCPUs that the guest has ejected.
    pub(super) fn take_ejected_vcpus(&mut self) {
        let before = self.config.cpus.boot_vcpus;
        while let Some(last) = self.config.cpus.boot_vcpus.checked_sub(1)
            && last > BOOT_VCPU
            && !self.parts.cpu_hotplug.registers.is_present(last)
        {
            self.vcpus.remove_last();
            self.held_msrs
                .retain(|(index, _)| u32::try_from(*index).is_ok_and(|index| index != last));
            self.config.cpus.boot_vcpus = last;
        }
        let now = self.config.cpus.boot_vcpus;
        let registers = &self.parts.cpu_hotplug.registers;
        let kept = (0..now).filter(|index| !registers.is_present(*index)).count();
        if kept > 0 {
            log::info!(
                "{kept} vCPUs that the guest has ejected are kept until it ejects those above them, too"
            );
        }
        if now != before {
            log::info!("the guest has ejected vCPUs: {now} of {before} are left");
            events::emit("vm", "vcpus-removed", &[("vcpus", &now.to_string())]);
        }
    }

    /// The configuration without the vCPUs that are to be removed.
    pub(super) fn with_lasting_vcpus(&self, mut config: VmConfig) -> VmConfig {
        config.cpus.boot_vcpus = self.parts.cpu_hotplug.lasting(config.cpus.boot_vcpus);
        config
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use arch::acpi::cpu_hotplug as aml;
    use devices::bus::BusDevice as _;

    use arch::layout;

    use super::*;

    fn hotplug(vcpus: u32) -> CpuHotplug {
        let registers = Arc::new(legacy::CpuHotplug::new(vcpus, Box::new(|| ())));
        CpuHotplug { registers }
    }

    fn read(hotplug: &CpuHotplug, offset: u64) -> u32 {
        let mut word = [0; 4];
        hotplug.registers.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    /// The AML and the device are written in crates that do not know each other.
    #[test]
    fn the_device_speaks_as_the_aml_expects() {
        let hotplug = hotplug(2);
        assert_eq!(CPU_HOTPLUG_LEN_BYTES, u64::from(aml::REGISTERS_LEN_BYTES));
        assert_eq!(legacy::CPU_HOTPLUG_PORT, layout::CPU_HOTPLUG_PORT);
        hotplug.registers.add(2);
        hotplug.registers.request_unplug(1);
        let event = |uid: u32, notification: u8| uid | u32::from(notification) << 16;
        assert_eq!(read(&hotplug, aml::NEXT_EVENT_OFFSET), event(2, aml::NOTIFY_CHECK));
        assert_eq!(read(&hotplug, aml::NEXT_EVENT_OFFSET), event(1, aml::NOTIFY_EJECT));
        assert_eq!(read(&hotplug, aml::NEXT_EVENT_OFFSET), aml::NO_EVENT);
        assert_eq!(read(&hotplug, aml::PRESENT_OFFSET), 0b111);
        hotplug.registers.write(aml::EJECT_OFFSET, &1_u32.to_le_bytes());
        assert_eq!(read(&hotplug, aml::PRESENT_OFFSET), 0b101);
        let last = aml::CPUS_MAX - 1;
        hotplug.registers.add(last);
        hotplug.registers.add(last + 1);
        assert_eq!(hotplug.registers.last_present(), last);
    }

    #[test]
    fn what_lasts_ends_with_the_highest_that_stays() {
        let hotplug = hotplug(4);
        hotplug.registers.request_unplug(2);
        assert_eq!(hotplug.lasting(4), 4);
        hotplug.registers.request_unplug(3);
        assert_eq!(hotplug.lasting(4), 2);
        hotplug.registers.request_unplug(1);
        assert_eq!(hotplug.lasting(4), 1);
    }

    #[test]
    fn a_state_with_a_vcpu_that_the_machine_lacks_is_refused() {
        let source = hotplug(2);
        assert!(source.save(2).is_none(), "nothing is pending");
        source.registers.add(2);
        let state = source.save(3).unwrap();
        let destination = hotplug(1);
        destination.restore(Some(&state), 3).unwrap();
        assert_eq!(read(&destination, aml::PRESENT_OFFSET), 0b111);
        let refused = destination.restore(Some(&state), 2).unwrap_err().to_string();
        assert!(refused.contains("vCPU 2"), "{refused}");
        destination.restore(None, 2).unwrap();
        assert!(destination.save(2).is_none());
    }
}
