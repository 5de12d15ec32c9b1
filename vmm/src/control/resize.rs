// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Resizing a VM: vCPUs, memory, balloon and disks.
//!
//! Owns the answers to `vm.resize`, `vm.resize-zone` and `vm.resize-disk`. Before the guest runs the first two change
//! its configuration, afterwards its machine.

use super::pausing::{TransitionError, TransitionKind};
use super::{VmLifecycle, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply};
use crate::config::{ConfigError, VmConfig, VmResize, VmResizeDisk, VmResizeZone};
use crate::events;
use crate::machine::{Machine, MachineError, ResizeBalloonError, ResizeMemoryError};

impl Vmm {
    /// `vm.resize`. vCPUs are added on a thread: KVM takes its time for many of them.
    pub(super) fn resize_for(&mut self, wanted: &VmResize, responder: Responder) {
        if let VmLifecycle::Created(config) = &mut self.vm {
            let result = resize_config(config, wanted);
            return responder.answer(result.map(|()| ApiReply::Empty));
        }
        if let Err(error) = self.may_resize(wanted) {
            return responder.answer(Err(error));
        }
        events::emit("vm", "resizing", &[]);
        let result = self.resize_parts(wanted);
        let (vcpus, ram_bytes) = (self.other_vcpus(wanted), self.more_memory(wanted));
        let kind = match (vcpus, ram_bytes, &result) {
            (Some(_), _, Ok(())) => TransitionKind::ResizeVcpus,
            (None, Some(_), Ok(())) => TransitionKind::ResizeMemory,
            _ => {
                report_resize(&result);
                return responder.answer(result.map(|()| ApiReply::Empty));
            }
        };
        self.begin_transition_with(kind, Some(responder), move |machine, cancel| {
            if let Some(wanted_bytes) = ram_bytes {
                let zone = machine.resize_memory(None, wanted_bytes)?;
                report_memory(zone.as_deref(), wanted_bytes);
            }
            if let Some(vcpus) = vcpus {
                machine.resize_vcpus(vcpus, cancel)?;
                events::emit("vm", "vcpus-resized", &[("vcpus", &vcpus.to_string())]);
            }
            Ok(ApiReply::Empty)
        });
    }

    /// The wanted memory in bytes, if a memory device has to be added for it: the host takes its time.
    fn more_memory(&mut self, wanted: &VmResize) -> Option<u64> {
        let machine = self.machine_mut().ok()?;
        let is_more =
            |bytes: &u64| machine.check_memory_devices(*bytes).is_ok_and(|is_more| is_more);
        wanted.desired_ram.filter(is_more)
    }

    /// The wanted number of vCPUs, if the VM does not have it.
    fn other_vcpus(&mut self, wanted: &VmResize) -> Option<u32> {
        let machine = self.machine_mut().ok()?;
        wanted.desired_vcpus.filter(|vcpus| !machine.has_vcpus(*vcpus))
    }

    fn may_resize(&mut self, wanted: &VmResize) -> Result<(), ApiError> {
        self.machine_mut()?;
        if *wanted == VmResize::default() {
            return Err(no_size_wanted());
        }
        if let Some(wanted_bytes) = wanted.desired_ram
            && self
                .machine_mut()?
                .check_memory_devices(wanted_bytes)
                .map_err(|error| memory_refused(&error))?
        {
            self.refuse_while_memory_arrives("given more memory")?;
        }
        let Some(vcpus) = self.other_vcpus(wanted) else { return Ok(()) };
        self.refuse_while_memory_arrives("given another number of vCPUs")?;
        let refused = |error| ApiError::from_error(ApiErrorKind::BadRequest, &error);
        self.machine_mut()?.check_vcpus(vcpus).map_err(refused)
    }

    fn resize_parts(&mut self, wanted: &VmResize) -> Result<(), ApiError> {
        let is_later = self.more_memory(wanted).is_some();
        let machine = self.machine_mut()?;
        // The checks come first; what only shows while vCPUs are added leaves the rest changed.
        if let Some(size_bytes) = wanted.desired_balloon {
            machine.check_balloon(size_bytes).map_err(|error| balloon_refused(&error))?;
        }
        if let Some(wanted_bytes) = wanted.desired_ram.filter(|_| !is_later) {
            resize_memory(machine, None, wanted_bytes)?;
        }
        let Some(size_bytes) = wanted.desired_balloon else { return Ok(()) };
        machine.resize_balloon(size_bytes).map_err(|error| balloon_refused(&error))?;
        events::emit("vm", "balloon-resized", &[("size", &size_bytes.to_string())]);
        Ok(())
    }

    /// `vm.resize-zone`.
    pub(super) fn resize_zone(&mut self, wanted: &VmResizeZone) -> Result<(), ApiError> {
        if let VmLifecycle::Created(config) = &mut self.vm {
            let wanted_bytes = wanted.desired_ram.ok_or_else(|| nothing_wanted("desired_ram"))?;
            let resized = config.with_zone_size(&wanted.id, wanted_bytes);
            **config = resized.map_err(|error| not_bootable(&error))?;
            return Ok(());
        }
        let machine = self.machine_mut()?;
        let Some(wanted_bytes) = wanted.desired_ram else {
            return Err(nothing_wanted("desired_ram"));
        };
        told(|| resize_memory(machine, Some(&wanted.id), wanted_bytes))
    }

    /// `vm.resize-disk`, on a thread: the storage takes its time.
    pub(super) fn resize_disk_for(&mut self, wanted: VmResizeDisk, responder: Responder) {
        let size_bytes = match self.new_disk_size(&wanted) {
            Ok(size_bytes) => size_bytes,
            Err(error) => return responder.answer(Err(error)),
        };
        events::emit("vm", "resizing", &[]);
        let kind = TransitionKind::ResizeDisk;
        self.begin_transition_with(kind, Some(responder), move |machine, cancel| {
            machine.resize_disk(&wanted.id, size_bytes, cancel)?;
            let size = size_bytes.to_string();
            events::emit("vm", "disk-resized", &[("id", &wanted.id), ("size", &size)]);
            Ok(ApiReply::Empty)
        });
    }

    fn new_disk_size(&mut self, wanted: &VmResizeDisk) -> Result<u64, ApiError> {
        self.machine_mut()?;
        self.refuse_while_memory_arrives("given a disk of another size")?;
        let unknown = |error| ApiError::from_error(ApiErrorKind::NotFound, &error);
        self.machine_mut()?.disk_resizer(&wanted.id).map_err(unknown)?;
        wanted.desired_size.ok_or_else(|| nothing_wanted("desired_size"))
    }

    /// The end of a change of size that was made on a thread.
    pub(super) fn resize_over(
        result: Result<ApiReply, TransitionError>,
        responder: Option<Responder>,
    ) {
        let result = result.map_err(|error| {
            let kind = match error {
                TransitionError::Machine(MachineError::PauseWithdrawn) => ApiErrorKind::Conflict,
                _ => ApiErrorKind::Failed,
            };
            ApiError::from_error(kind, &error)
        });
        report_resize(&result);
        if let Some(responder) = responder {
            responder.answer(result);
        }
    }

    /// Handles that all memory is resident: pages that the guest released before are discarded, huge pages
    /// are restored, stage-2 is prefaulted, and the watchdog for stuck guests applies again.
    pub(super) fn memory_has_come(&mut self) {
        if let VmLifecycle::Live(machine) = &mut self.vm {
            machine.start_watchdog();
            machine.retry_discards();
            machine.restore_huge_pages();
            if self.prefault_stage2 {
                machine.prefault_stage2();
            }
        }
    }
}

/// Runs a change of size, with events for its beginning and end.
fn told(change: impl FnOnce() -> Result<(), ApiError>) -> Result<(), ApiError> {
    events::emit("vm", "resizing", &[]);
    let result = change();
    report_resize(&result);
    result
}

fn report_resize<T>(result: &Result<T, ApiError>) {
    match result {
        Ok(_) => events::emit("vm", "resized", &[]),
        Err(error) => events::emit("vm", "resize-failed", &[("error", &error.to_string())]),
    }
}

fn balloon_refused(error: &ResizeBalloonError) -> ApiError {
    let kind = match error {
        ResizeBalloonError::None => ApiErrorKind::BadConfig,
        ResizeBalloonError::Size(_) => ApiErrorKind::BadRequest,
    };
    ApiError::from_error(kind, error)
}

fn nothing_wanted(what: &str) -> ApiError {
    let message = format!("nothing is to have another size: say which with {what}");
    ApiError::new(ApiErrorKind::BadRequest, message)
}

fn no_size_wanted() -> ApiError {
    nothing_wanted("desired_vcpus, desired_ram or desired_balloon")
}

fn not_bootable(error: &ConfigError) -> ApiError {
    ApiError::from_error(ApiErrorKind::BadConfig, error)
}

/// `vm.resize` of a VM that is not booted: it has the sizes when it boots.
fn resize_config(config: &mut VmConfig, wanted: &VmResize) -> Result<(), ApiError> {
    if *wanted == VmResize::default() {
        return Err(no_size_wanted());
    }
    *config = config.resized(wanted).map_err(|error| not_bootable(&error))?;
    Ok(())
}

fn resize_memory(
    machine: &mut Machine,
    zone: Option<&str>,
    wanted_bytes: u64,
) -> Result<(), ApiError> {
    let zone = machine.resize_memory(zone, wanted_bytes).map_err(|error| memory_refused(&error))?;
    report_memory(zone.as_deref(), wanted_bytes);
    Ok(())
}

fn memory_refused(error: &ResizeMemoryError) -> ApiError {
    let kind = match error {
        ResizeMemoryError::Fixed(_)
        | ResizeMemoryError::Zones
        | ResizeMemoryError::NotByZone
        | ResizeMemoryError::MappedForVdpa(_) => ApiErrorKind::BadConfig,
        ResizeMemoryError::NoZone(_)
        | ResizeMemoryError::BelowBoot { .. }
        | ResizeMemoryError::Device { .. }
        | ResizeMemoryError::NoDevice
        | ResizeMemoryError::Size(_) => ApiErrorKind::BadRequest,
        ResizeMemoryError::Insufficient(_)
        | ResizeMemoryError::Plug(_)
        | ResizeMemoryError::Slot(_) => ApiErrorKind::Failed,
    };
    ApiError::from_error(kind, error)
}

/// Reports the size of a zone that has changed.
fn report_memory(zone: Option<&str>, size_bytes: u64) {
    let Some(zone) = zone else { return };
    events::emit("vm", "memory-resized", &[("zone", zone), ("size", &size_bytes.to_string())]);
}
