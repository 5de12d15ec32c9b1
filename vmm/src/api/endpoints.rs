// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of API endpoints, from which routing, the OpenAPI description and the refusal of
//! unsupported endpoints are derived.
//!
//! Owns paths, which are also the names of requests, methods, request and response bodies. It must never know
//! sockets.

use serde::de::DeserializeOwned;

use super::body::{Body, BodySchema, counters, derived, schema};
use super::request::{ApiError, ApiErrorKind, VmmRequest};
use super::types::{
    MigrationCancelled, MigrationCheck, MigrationReport, PciDeviceInfo, ProgressDocument, VmInfo,
    VmmPingResponse,
};
use crate::config::{
    DeviceConfig, DiskConfig, ForceData, FsConfig, GenericVhostUserConfig, MigrationRecoverData,
    NetConfig, NewDevice, PmemConfig, ReceiveMigrationData, RestoreConfig, SendMigrationData,
    UserDeviceConfig, VdpaConfig, VmConfig, VmCoredumpData, VmRemoveDevice, VmResize, VmResizeDisk,
    VmResizeZone, VmSnapshotConfig, VsockConfig,
};
use crate::metrics;

/// Prefix of all paths.
pub const API_ROOT: &str = "/api/v1/";

/// Path of metrics, which are asked for on their own socket as well.
pub(super) const METRICS: &str = "vm.metrics";

/// HTTP methods in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET.
    Get,
    /// PUT.
    Put,
}

impl Method {
    /// Name as in the HTTP request line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
        }
    }
}

/// A supported endpoint.
#[derive(Debug)]
pub struct Endpoint {
    /// Path without [`API_ROOT`].
    pub path: &'static str,
    /// HTTP method.
    pub method: Method,
    /// Summary for the API description.
    pub summary: &'static str,
    /// Name of the operation in generated clients.
    pub operation: Option<&'static str>,
    /// Body of the request.
    pub takes: Body,
    /// Body of the response.
    pub gives: Body,
    /// Possible failures in addition to 400 and 500.
    pub errors: &'static [ApiErrorKind],
    /// Decodes the body into a request.
    pub decode: fn(&[u8]) -> Result<VmmRequest, ApiError>,
}

use ApiErrorKind::{AlreadyCreated, Conflict, NotBooted, NotCreated, NotFound, NotNow};
use Method::{Get, Put};

const LIVE: &[ApiErrorKind] = &[NotCreated, NotBooted, Conflict];

/// The supported endpoints.
pub const ENDPOINTS: &[Endpoint] = &[
    Endpoint {
        path: "vmm.ping",
        method: Get,
        summary: "Checks that the VMM responds, and returns its version.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Schema(schema!(VmmPingResponse)),
        errors: &[],
        decode: |_| Ok(VmmRequest::Ping),
    },
    Endpoint {
        path: "vmm.shutdown",
        method: Put,
        summary: "Shuts the VM down and ends the VMM process.",
        operation: Some("shutdownVMM"),
        takes: Body::Optional(schema!(ForceData)),
        gives: Body::Empty,
        errors: &[],
        decode: |body| Ok(VmmRequest::VmmShutdown { force: decode_force(body)? }),
    },
    Endpoint {
        path: "vm.info",
        method: Get,
        summary: "Returns the configuration and state of the VM.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Schema(schema!(VmInfo)),
        errors: &[NotCreated],
        decode: |_| Ok(VmmRequest::Info),
    },
    Endpoint {
        path: "vm.counters",
        method: Get,
        summary: "Returns the counters of the VM's devices.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Schema(BodySchema { name: "VmCounters", collect: counters }),
        errors: LIVE,
        decode: |_| Ok(VmmRequest::Counters),
    },
    Endpoint {
        path: METRICS,
        method: Get,
        summary: "Returns metrics of the VMM and its VM as OpenMetrics text, in the older format of Prometheus if the \
                  client prefers that (Accept: text/plain). Answered also without a VM, and while it migrates.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Text(metrics::CONTENT_TYPE),
        errors: &[],
        decode: |_| Ok(VmmRequest::Metrics),
    },
    Endpoint {
        path: "vm.create",
        method: Put,
        summary: "Creates the VM without booting it.",
        operation: Some("createVM"),
        takes: Body::Schema(schema!(VmConfig)),
        gives: Body::Empty,
        errors: &[AlreadyCreated],
        decode: decode_create,
    },
    Endpoint {
        path: "vm.delete",
        method: Put,
        summary: "Deletes the VM, if there is one.",
        operation: Some("deleteVM"),
        takes: Body::Optional(schema!(ForceData)),
        gives: Body::Empty,
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(VmmRequest::Delete { force: decode_force(body)? }),
    },
    Endpoint {
        path: "vm.boot",
        method: Put,
        summary: "Boots the VM that was created.",
        operation: Some("bootVM"),
        takes: Body::Empty,
        gives: Body::Empty,
        errors: &[NotCreated, Conflict],
        decode: |_| Ok(VmmRequest::Boot),
    },
    Endpoint {
        path: "vm.pause",
        method: Put,
        summary: "Stops the vCPUs of the running VM.",
        operation: Some("pauseVM"),
        takes: Body::Empty,
        gives: Body::Empty,
        errors: LIVE,
        decode: |_| Ok(VmmRequest::Pause),
    },
    Endpoint {
        path: "vm.resume",
        method: Put,
        summary: "Resumes the vCPUs of the paused VM.",
        operation: Some("resumeVM"),
        takes: Body::Optional(schema!(ForceData)),
        gives: Body::Empty,
        errors: LIVE,
        decode: |body| Ok(VmmRequest::Resume { force: decode_force(body)? }),
    },
    Endpoint {
        path: "vm.shutdown",
        method: Put,
        summary: "Shuts the VM down and keeps its configuration.",
        operation: Some("shutdownVM"),
        takes: Body::Empty,
        gives: Body::Empty,
        errors: LIVE,
        decode: |_| Ok(VmmRequest::Shutdown),
    },
    Endpoint {
        path: "vm.reboot",
        method: Put,
        summary: "Reboots the VM.",
        operation: Some("rebootVM"),
        takes: Body::Empty,
        gives: Body::Empty,
        errors: LIVE,
        decode: |_| Ok(VmmRequest::Reboot),
    },
    Endpoint {
        path: "vm.power-button",
        method: Put,
        summary: "Presses the VM's power button.",
        operation: Some("power-buttonVM"),
        takes: Body::Empty,
        gives: Body::Empty,
        errors: LIVE,
        decode: |_| Ok(VmmRequest::PowerButton),
    },
    Endpoint {
        path: "vm.nmi",
        method: Put,
        summary: "Sends a non-maskable interrupt to each vCPU.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Empty,
        errors: LIVE,
        decode: |_| Ok(VmmRequest::Nmi),
    },
    Endpoint {
        path: "vm.add-device",
        method: Put,
        summary: "Adds a passed-through host device to the VM. If the VM is running, it is hot-plugged \
                  and its PCI address returned; otherwise it is present at the next boot.",
        operation: None,
        takes: Body::Schema(schema!(DeviceConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Host(json("DeviceConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-disk",
        method: Put,
        summary: "Adds a disk to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(DiskConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Disk(json("DiskConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-net",
        method: Put,
        summary: "Adds a network device to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(NetConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Net(json("NetConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-fs",
        method: Put,
        summary: "Adds a shared directory to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(FsConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Fs(json("FsConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-generic-vhost-user",
        method: Put,
        summary: "Adds a vhost-user device of any type to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(GenericVhostUserConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::GenericVhostUser(json("GenericVhostUserConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-user-device",
        method: Put,
        summary: "Adds a device that another process emulates (vfio-user) to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(UserDeviceConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::User(json("UserDeviceConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-vdpa",
        method: Put,
        summary: "Adds a vDPA device to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(VdpaConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Vdpa(json("VdpaConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-vsock",
        method: Put,
        summary: "Adds a vsock device to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(VsockConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Vsock(json("VsockConfig", body)?))),
    },
    Endpoint {
        path: "vm.add-pmem",
        method: Put,
        summary: "Adds persistent memory to the VM, as vm.add-device does.",
        operation: None,
        takes: Body::Schema(schema!(PmemConfig)),
        gives: Body::Optional(schema!(PciDeviceInfo)),
        errors: &[NotCreated, Conflict],
        decode: |body| Ok(add(NewDevice::Pmem(json("PmemConfig", body)?))),
    },
    Endpoint {
        path: "vm.remove-device",
        method: Put,
        summary: "Removes a disk, network, file system, vsock, vhost-user, vfio-user, vDPA, persistent memory or passed-through device. If the VM is \
                  running, the guest is asked to eject it; otherwise it is removed from the configuration.",
        operation: None,
        takes: Body::Schema(schema!(VmRemoveDevice)),
        gives: Body::Empty,
        errors: &[NotFound, Conflict],
        decode: |body| Ok(VmmRequest::RemoveDevice(json("VmRemoveDevice", body)?)),
    },
    Endpoint {
        path: "vm.resize",
        method: Put,
        summary: "Changes the number of vCPUs, up to the maximum, the size of the VM's memory, up to hotplug_size, or \
                  of its balloon. Before the VM is booted, changes what it is booted with.",
        operation: None,
        takes: Body::Schema(schema!(VmResize)),
        gives: Body::Empty,
        // `NotNow` is kept because clients of cloud-hypervisor expect it of this request; nothing returns
        // it here.
        errors: &[NotCreated, NotBooted, Conflict, NotNow],
        decode: |body| Ok(VmmRequest::Resize(Box::new(json("VmResize", body)?))),
    },
    Endpoint {
        path: "vm.resize-disk",
        method: Put,
        summary: "Changes the size of a disk with a raw image, and notifies the guest; what is cut off is lost. A block \
                  device of the host must have the size already.",
        operation: None,
        takes: Body::Schema(schema!(VmResizeDisk)),
        gives: Body::Empty,
        errors: &[NotCreated, NotBooted, NotFound, Conflict],
        decode: |body| Ok(VmmRequest::ResizeDisk(json("VmResizeDisk", body)?)),
    },
    Endpoint {
        path: "vm.resize-zone",
        method: Put,
        summary: "Changes the size of a memory zone, up to its hotplug_size; before the VM is booted, any.",
        operation: None,
        takes: Body::Schema(schema!(VmResizeZone)),
        gives: Body::Empty,
        errors: &[NotCreated, NotBooted, Conflict, NotNow],
        decode: |body| Ok(VmmRequest::ResizeZone(json("VmResizeZone", body)?)),
    },
    Endpoint {
        path: "vm.send-migration",
        method: Put,
        summary: "Starts migrating the VM to another VMM.",
        operation: None,
        takes: Body::Schema(schema!(SendMigrationData)),
        gives: Body::Empty,
        errors: LIVE,
        decode: |body| Ok(VmmRequest::SendMigration(decode_send_data(body)?)),
    },
    Endpoint {
        path: "vm.migrate-check",
        method: Put,
        summary: "Checks whether a migration would succeed, and what it would take; nothing is moved, the guest runs, \
                  and the destination goes on waiting.",
        operation: None,
        takes: Body::Schema(schema!(SendMigrationData)),
        gives: Body::Schema(BodySchema {
            name: "MigrationCheck",
            collect: derived::<MigrationCheck>,
        }),
        errors: LIVE,
        decode: |body| Ok(VmmRequest::MigrateCheck(decode_send_data(body)?)),
    },
    Endpoint {
        path: "vm.receive-migration",
        method: Put,
        summary: "Receives a VM from another VMM; answered when the migration has completed.",
        operation: None,
        takes: Body::Schema(schema!(ReceiveMigrationData)),
        gives: Body::Empty,
        errors: &[AlreadyCreated, Conflict],
        decode: decode_receive,
    },
    Endpoint {
        path: "vm.migration-progress",
        method: Get,
        summary: "Returns the progress of the current migration, or the result of the last one.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Schema(BodySchema {
            name: "MigrationProgress",
            collect: derived::<ProgressDocument>,
        }),
        errors: &[NotCreated],
        decode: |_| Ok(VmmRequest::MigrationProgress),
    },
    Endpoint {
        path: "vm.migration-report",
        method: Get,
        summary: "Returns the progress document of the current or last migration, with its phases, \
                  a timeline, and the time that each thread waited for pages.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Schema(BodySchema {
            name: "MigrationReport",
            collect: derived::<MigrationReport>,
        }),
        errors: &[NotCreated],
        decode: |_| Ok(VmmRequest::MigrationReport),
    },
    Endpoint {
        path: "vm.migration-cancel",
        method: Put,
        summary: "Cancels the current migration; answered when it has ended and the guest runs at \
                  the source. Refused once the destination owns the guest.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Schema(schema!(MigrationCancelled)),
        errors: &[NotCreated, Conflict],
        decode: |_| Ok(VmmRequest::MigrationCancel),
    },
    Endpoint {
        path: "vm.migration-start-postcopy",
        method: Put,
        summary: "Switches a migration with memory_mode=auto to postcopy now.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Empty,
        errors: &[NotCreated, Conflict],
        decode: |_| Ok(VmmRequest::MigrationStartPostcopy),
    },
    Endpoint {
        path: "vm.migration-recover",
        method: Put,
        summary: "Re-establishes the lost connections of a postcopy migration; at the destination, \
                  listens at another address.",
        operation: None,
        takes: Body::Schema(schema!(MigrationRecoverData)),
        gives: Body::Empty,
        errors: &[NotCreated, Conflict],
        decode: decode_recover,
    },
    Endpoint {
        path: "vm.snapshot",
        method: Put,
        summary: "Saves a snapshot of the paused VM to a directory.",
        operation: None,
        takes: Body::Schema(schema!(VmSnapshotConfig)),
        gives: Body::Empty,
        errors: LIVE,
        decode: decode_snapshot,
    },
    Endpoint {
        path: "vm.coredump",
        method: Put,
        summary: "Writes registers and memory of the paused VM to a file for debuggers.",
        operation: None,
        takes: Body::Schema(schema!(VmCoredumpData)),
        gives: Body::Empty,
        errors: LIVE,
        decode: decode_core_dump,
    },
    Endpoint {
        path: "vm.snapshot-cancel",
        method: Put,
        summary: "Cancels the snapshot or core dump being written; answered when the VM is paused as before, \
                  without waiting for storage that does not respond.",
        operation: None,
        takes: Body::Empty,
        gives: Body::Empty,
        errors: &[NotCreated, Conflict],
        decode: |_| Ok(VmmRequest::SnapshotCancel),
    },
    Endpoint {
        path: "vm.restore",
        method: Put,
        summary: "Restores a VM from a snapshot.",
        operation: None,
        takes: Body::Schema(schema!(RestoreConfig)),
        gives: Body::Empty,
        errors: &[NotCreated, AlreadyCreated, Conflict],
        decode: decode_restore,
    },
];

/// Result of looking up a path and a method.
#[derive(Debug)]
pub enum Route {
    /// An endpoint.
    Found(&'static Endpoint),
    /// The path exists, with another method.
    WrongMethod(&'static Endpoint),
    /// The path is unknown.
    Unknown,
}

/// Finds the endpoint of a request.
pub fn route(method: &str, path: &str) -> Route {
    let Some(name) = path.strip_prefix(API_ROOT) else { return Route::Unknown };
    if let Some(endpoint) = ENDPOINTS.iter().find(|endpoint| endpoint.path == name) {
        return if endpoint.method.as_str() == method {
            Route::Found(endpoint)
        } else {
            Route::WrongMethod(endpoint)
        };
    }
    Route::Unknown
}

/// The name of the endpoint at a path, whatever the method.
pub fn name_of(path: &str) -> Option<&'static str> {
    let name = path.strip_prefix(API_ROOT)?;
    ENDPOINTS.iter().find(|endpoint| endpoint.path == name).map(|endpoint| endpoint.path)
}

fn json<T: DeserializeOwned>(what: &str, body: &[u8]) -> Result<T, ApiError> {
    let bad = |reason: String| ApiError {
        kind: ApiErrorKind::BadRequest,
        chain: vec![format!("the body is not a valid {what}"), reason],
    };
    if body.is_empty() {
        return Err(bad("it is empty".to_owned()));
    }
    serde_json::from_slice(body).map_err(|error| bad(error.to_string()))
}

fn add(device: NewDevice) -> VmmRequest {
    VmmRequest::AddDevice(Box::new(device))
}

fn bad_config(error: &crate::config::ConfigError) -> ApiError {
    ApiError::from_error(ApiErrorKind::BadConfig, error).context("the request is not valid")
}

fn decode_create(body: &[u8]) -> Result<VmmRequest, ApiError> {
    let config = json::<VmConfig>("VmConfig", body)?;
    Ok(VmmRequest::Create(Box::new(config.complete().map_err(|error| bad_config(&error))?)))
}

fn decode_recover(body: &[u8]) -> Result<VmmRequest, ApiError> {
    let data = json::<MigrationRecoverData>("MigrationRecoverData", body)?;
    data.validate().map_err(|error| bad_config(&error))?;
    Ok(VmmRequest::MigrationRecover(Box::new(data)))
}

/// Decodes the optional body of a request with a `force` flag. Generated clients in Go send `null` for a body that
/// they were not given.
fn decode_force(body: &[u8]) -> Result<bool, ApiError> {
    if body.is_empty() {
        return Ok(false);
    }
    let data = json::<Option<ForceData>>("ForceData", body)?;
    Ok(data.is_some_and(|data| data.force))
}

fn decode_send_data(body: &[u8]) -> Result<Box<SendMigrationData>, ApiError> {
    let data = json::<SendMigrationData>("SendMigrationData", body)?;
    data.validate().map_err(|error| bad_config(&error))?;
    Ok(Box::new(data))
}

fn decode_receive(body: &[u8]) -> Result<VmmRequest, ApiError> {
    let data = json::<ReceiveMigrationData>("ReceiveMigrationData", body)?;
    data.validate().map_err(|error| bad_config(&error))?;
    Ok(VmmRequest::ReceiveMigration(Box::new(data)))
}

fn decode_snapshot(body: &[u8]) -> Result<VmmRequest, ApiError> {
    let config = json::<VmSnapshotConfig>("VmSnapshotConfig", body)?;
    config.directory().map_err(|error| bad_config(&error))?;
    Ok(VmmRequest::Snapshot(Box::new(config)))
}

fn decode_core_dump(body: &[u8]) -> Result<VmmRequest, ApiError> {
    let config = json::<VmCoredumpData>("VmCoredumpData", body)?;
    config.file().map_err(|error| bad_config(&error))?;
    Ok(VmmRequest::CoreDump(Box::new(config)))
}

fn decode_restore(body: &[u8]) -> Result<VmmRequest, ApiError> {
    let config = json::<RestoreConfig>("RestoreConfig", body)?;
    config.directory().map_err(|error| bad_config(&error))?;
    Ok(VmmRequest::Restore(Box::new(config)))
}
