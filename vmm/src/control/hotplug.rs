// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.add-device`, `vm.add-disk`, `vm.add-net`, `vm.add-fs`, `vm.add-generic-vhost-user`, `vm.add-user-device`, `vm.add-vdpa`, `vm.add-vsock`, `vm.add-pmem` and `vm.remove-device`.
//!
//! Owns their answers. Before the guest runs they change its configuration, afterwards its machine.

use super::pausing::TransitionKind;
use super::{VmLifecycle, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, PciDeviceInfo};
use crate::config::{ConfigError, NewDevice, VmConfig};
use crate::machine::RemoveError;

fn refused(error: &ConfigError) -> ApiError {
    let kind = match error {
        ConfigError::DuplicateId { .. }
        | ConfigError::DuplicateSlot { .. }
        | ConfigError::DuplicatePath { .. }
        | ConfigError::SecondVsock { .. }
        | ConfigError::InUse { .. } => ApiErrorKind::Conflict,
        _ => ApiErrorKind::BadConfig,
    };
    ApiError::from_error(kind, error)
}

impl Vmm {
    /// Adds a device; a thread opens it, which has no time limit.
    pub(super) fn add_device_for(&mut self, device: NewDevice, responder: Responder) {
        let (config, device) = match self.with_device(device) {
            Ok(Some(added)) => added,
            Ok(None) => return responder.answer(Ok(ApiReply::Empty)),
            Err(error) => return responder.answer(Err(error)),
        };
        let id = device.id().to_owned();
        self.begin_transition_with(TransitionKind::Add, Some(responder), move |machine, cancel| {
            let bdf = machine.add_device(&device, config, cancel)?;
            let (id, bdf) = (device.id().to_owned(), bdf.to_string());
            Ok(ApiReply::Device(PciDeviceInfo { id, bdf }))
        });
        self.note_adding(id);
    }

    /// The configuration of the live machine with the device added. If no machine exists, the device is
    /// added to the configuration only.
    fn with_device(
        &mut self,
        device: NewDevice,
    ) -> Result<Option<(VmConfig, NewDevice)>, ApiError> {
        if let VmLifecycle::Created(config) = &mut self.vm {
            **config = device.add_to(config).map_err(|error| refused(&error))?.0;
            return Ok(None);
        }
        self.machine_mut()?;
        self.refuse_while_memory_arrives("given devices")?;
        let added = device.add_to_running(self.machine_mut()?.config());
        added.map(Some).map_err(|error| refused(&error))
    }

    /// `vm.remove-device`, also for a device that is still being added.
    pub(super) fn remove_device_for(&mut self, id: &str, responder: Responder) {
        if let Some(responder) = self.cancel_adding(id, responder) {
            responder.answer(self.remove_device(id).map(|()| ApiReply::Empty));
        }
    }

    /// Removes a device from the configuration, or asks the guest to eject it.
    pub(super) fn remove_device(&mut self, id: &str) -> Result<(), ApiError> {
        let refused = |error: &RemoveError| {
            let kind = match error {
                RemoveError::Unknown(_) => ApiErrorKind::NotFound,
                RemoveError::Fixed(_) | RemoveError::BehindIommu(_) => ApiErrorKind::BadRequest,
            };
            ApiError::from_error(kind, error)
        };
        if let VmLifecycle::Created(config) = &mut self.vm {
            let without = config.without(id);
            let unknown = || refused(&RemoveError::Unknown(id.to_owned()));
            **config = without.ok_or_else(unknown)?;
            return Ok(());
        }
        self.machine_mut()?.ask_to_remove(id).map_err(|error| refused(&error))
    }

    /// Handles the ejection of devices by the guest. A thread waits for their requests in flight.
    pub(super) fn devices_ejected(&mut self) {
        if matches!(self.vm, VmLifecycle::Live(_)) {
            self.begin_transition(TransitionKind::Eject, None);
        }
    }
}
