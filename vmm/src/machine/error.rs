// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The errors of a machine: why it cannot be made, run, stopped, saved or restored.
//!
//! Owns one sentence for each part that can fail; the part's own error says more.

use std::time::Duration;

use arch::cpuid::{BelowBaseline, CpuidTooLong};
use devices::bus::BusError;
use devices::tpm::TpmError;
use devices::virtio::StateError;
use hypervisor::{AmxError, IrqchipStateError, KvmError, NoHyperv, ThreadsError, VcpuStateError};
use pci::PciStateError;
use thiserror::Error;

use super::boot::MachineBootError;
use super::core_scheduling::CoreSchedulingError;
use super::cpu_hotplug::ResizeVcpusError;
use super::disk_sizes::DiskSizeError;
use super::exclusive::{ExclusiveError, WriteBackFailed};
use super::full_disks::DisksFull;
use super::generation::GenerationError;
use super::legacy::{LegacyError, LegacyStateError};
use super::mems::ResizeMemoryError;
use super::passthrough::PassthroughError;
use super::pmems::PmemNotMovable;
use super::ram::MachineRamError;
use super::segments::SegmentsError;
use super::state::MACHINE_STATE_VERSION;
use super::user_devices::{UserDeviceError, UserNotMovable};
use super::vdpas::VdpaNotMovable;
use super::vhost_users::{NotMovable, StateNotGiven};
use super::virtio::{HotAddError, VirtioError};
use super::write_back::WriteBackError;
use crate::config::cpu_baseline::BaselineError;

/// Why a machine cannot be created, run, paused, saved or restored.
#[derive(Debug, Error)]
pub enum MachineError {
    /// Guest memory cannot be set up.
    #[error("cannot set up guest memory")]
    Ram(#[from] MachineRamError),
    /// The CPU baseline is none.
    #[error("cannot limit the vCPUs to the CPU baseline")]
    Baseline(#[from] BaselineError),
    /// The host lacks features of the CPU baseline.
    #[error("this host is below the CPU baseline")]
    BelowBaseline(#[source] BelowBaseline),
    /// The vCPUs cannot be kept apart from others on their cores.
    #[error("cannot start the vCPUs")]
    CoreScheduling(#[from] CoreSchedulingError),
    /// A KVM call failed.
    #[error("cannot make the VM")]
    Kvm(#[from] KvmError),
    /// A device of the VM cannot be migrated or saved.
    #[error(transparent)]
    VhostUser(#[from] NotMovable),
    /// A vDPA device of the VM cannot be migrated or saved.
    #[error(transparent)]
    Vdpa(#[from] VdpaNotMovable),
    /// A device that another process emulates cannot be migrated or saved.
    #[error(transparent)]
    UserNotMovable(#[from] UserNotMovable),
    /// A device that another process emulates cannot be used.
    #[error(transparent)]
    User(#[from] UserDeviceError),
    /// The state of a device is not given by its back end.
    #[error(transparent)]
    StateNotGiven(#[from] StateNotGiven),
    /// Persistent memory of the VM cannot be migrated or saved.
    #[error(transparent)]
    Pmem(#[from] PmemNotMovable),
    /// The payload cannot be booted.
    #[error("cannot boot the VM")]
    Boot(#[from] MachineBootError),
    /// The kernel does not permit AMX.
    #[error(transparent)]
    Amx(#[from] AmxError),
    /// This KVM has no Hyper-V.
    #[error(transparent)]
    Hyperv(#[from] NoHyperv),
    /// The CPUID has too many entries.
    #[error("cannot describe the vCPUs")]
    Cpuid(#[from] CpuidTooLong),
    /// The initial or saved state of a vCPU cannot be set or read.
    #[error("cannot set up vCPU {index}")]
    Vcpu {
        /// Index of the vCPU.
        index: u32,
        /// The cause.
        #[source]
        source: VcpuStateError,
    },
    /// A device does not finish its requests, as its storage or network does not respond.
    #[error(
        "'{id}' has not finished its requests within {} ms: its backend does not answer",
        .within.as_millis()
    )]
    DeviceBusy {
        /// Id of the device.
        id: String,
        /// The time limit.
        within: Duration,
    },
    /// A pause was cancelled before it was complete.
    #[error("the pause was cancelled before all devices had finished their requests")]
    PauseWithdrawn,
    /// A device was removed before it had been opened.
    #[error("'{id}' was removed before it could be opened")]
    AddWithdrawn {
        /// Id of the device.
        id: String,
    },
    /// The thread that opens a device cannot be started.
    #[error("cannot start a thread that opens '{id}'")]
    OpenThread {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The machine does not get another number of vCPUs.
    #[error(transparent)]
    Vcpus(#[from] ResizeVcpusError),
    /// The machine does not get more memory.
    #[error(transparent)]
    Memory(#[from] ResizeMemoryError),
    /// A disk does not get another size.
    #[error(transparent)]
    DiskSize(#[from] DiskSizeError),
    /// The thread that activates devices cannot be started.
    #[error("cannot start the thread that activates devices")]
    ActivationThread(#[source] std::io::Error),
    /// The vCPU threads cannot be started or stopped.
    #[error("cannot control the vCPUs")]
    Threads(#[from] ThreadsError),
    /// The TPM cannot be used, saved or restored.
    #[error(transparent)]
    Tpm(#[from] TpmError),
    /// A legacy device cannot be created.
    #[error("cannot make the legacy devices")]
    Legacy(#[from] LegacyError),
    /// A virtio device cannot be created.
    #[error("cannot make the virtio devices")]
    Virtio(#[from] VirtioError),
    /// A virtio device cannot be added to the running machine.
    #[error(transparent)]
    HotAdd(#[from] HotAddError),
    /// The state of the hot-plug registers is invalid.
    #[error("cannot restore the state of hotplug")]
    HotplugState(#[from] StateError),
    /// A passed-through device has failed.
    #[error(transparent)]
    Passthrough(#[from] PassthroughError),
    /// The PCI segments cannot be made.
    #[error("cannot make the PCI bus")]
    Segments(#[from] SegmentsError),
    /// A range of ports or addresses is taken.
    #[error("cannot place the PCI configuration space")]
    Bus(#[from] BusError),
    /// A lock, tap or socket cannot be taken or released.
    #[error("a resource that only one VM may use is not free")]
    Exclusive(#[from] ExclusiveError),
    /// A flush has failed earlier.
    #[error(transparent)]
    WriteBackFailed(#[from] WriteBackFailed),
    /// A disk cannot be written back.
    #[error(transparent)]
    WriteBack(#[from] WriteBackError),
    /// The host has no space for what the guest has written.
    #[error(transparent)]
    DisksFull(#[from] DisksFull),
    /// The state has an unknown version.
    #[error(
        "the machine state has version {0}, and the newest known here is {MACHINE_STATE_VERSION}"
    )]
    StateVersion(u32),
    /// The guest relies on processor features that this host lacks.
    #[error(
        "this host lacks processor features that the guest has been shown: {0}; use a host that \
         has them"
    )]
    Features(String),
    /// The state is that of a machine with another configuration.
    #[error("the machine state does not fit this machine: {0}")]
    StateMismatch(String),
    /// The state of the interrupt controllers cannot be set or read.
    #[error("cannot restore the interrupt controllers")]
    Irqchips(#[from] IrqchipStateError),
    /// The generation ID cannot be renewed.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// The state of a legacy device is refused.
    #[error("cannot restore the legacy devices")]
    LegacyState(#[from] LegacyStateError),
    /// The state of a PCI device is refused.
    #[error("cannot save or restore a PCI device")]
    PciState(#[from] PciStateError),
}
