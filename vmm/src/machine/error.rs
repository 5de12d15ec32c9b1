// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The errors of a machine: why it cannot be made, run, stopped, saved or restored.
//!
//! Owns one sentence for each part that can fail; the part's own error says more.

use std::time::Duration;

use arch::cpuid::CpuidTooLong;
use devices::bus::BusError;
use devices::virtio::StateError;
use hypervisor::{AmxError, IrqchipStateError, KvmError, ThreadsError, VcpuStateError};
use pci::{PciError, PciStateError};
use thiserror::Error;

use super::boot::MachineBootError;
use super::exclusive::{ExclusiveError, WriteBackFailed};
use super::full_disks::DisksFull;
use super::generation::GenerationError;
use super::legacy::{LegacyError, LegacyStateError};
use super::passthrough::PassthroughError;
use super::ram::MachineRamError;
use super::state::MACHINE_STATE_VERSION;
use super::virtio::{HotAddError, VirtioError};
use super::write_back::WriteBackError;

/// Why a machine cannot be made, run, stopped, saved or restored.
#[derive(Debug, Error)]
pub enum MachineError {
    /// Memory.
    #[error("cannot give the VM its memory")]
    Ram(#[from] MachineRamError),
    /// KVM.
    #[error("cannot make the VM")]
    Kvm(#[from] KvmError),
    /// What boots.
    #[error("cannot boot the VM")]
    Boot(#[from] MachineBootError),
    /// A feature that the kernel gives on request.
    #[error(transparent)]
    Amx(#[from] AmxError),
    /// Features of vCPUs.
    #[error("cannot describe the vCPUs")]
    Cpuid(#[from] CpuidTooLong),
    /// The initial or saved state of a vCPU.
    #[error("cannot set up vCPU {index}")]
    Vcpu {
        /// Its number.
        index: u32,
        /// Why.
        #[source]
        source: VcpuStateError,
    },
    /// Storage or a network that does not answer.
    #[error(
        "'{id}' has not finished its requests within {} ms: what is behind it does not answer",
        .within.as_millis()
    )]
    DeviceBusy {
        /// The device.
        id: String,
        /// How long it was waited for.
        within: Duration,
    },
    /// A pause was taken back before it was done.
    #[error("the pause was taken back before all devices had finished their requests")]
    PauseWithdrawn,
    /// A device was removed before it was open.
    #[error("'{id}' was removed before it could be opened")]
    AddWithdrawn {
        /// The device.
        id: String,
    },
    /// A device that is to be added.
    #[error("cannot start a thread that opens '{id}'")]
    OpenThread {
        /// The device.
        id: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The threads of vCPUs.
    #[error("cannot control the vCPUs")]
    Threads(#[from] ThreadsError),
    /// Legacy devices.
    #[error("cannot make the legacy devices")]
    Legacy(#[from] LegacyError),
    /// Virtio devices.
    #[error("cannot make the virtio devices")]
    Virtio(#[from] VirtioError),
    /// A disk or network device for a machine that is there.
    #[error(transparent)]
    HotAdd(#[from] HotAddError),
    /// Devices that come and go.
    #[error("cannot restore the state of PCI hotplug")]
    HotplugState(#[from] StateError),
    /// Passed-through devices.
    #[error(transparent)]
    Passthrough(#[from] PassthroughError),
    /// The PCI bus.
    #[error("cannot make the PCI bus")]
    Pci(#[from] PciError),
    /// A place on a bus.
    #[error("cannot place the PCI configuration space")]
    Bus(#[from] BusError),
    /// Locks and taps.
    #[error("a resource that only one VM may use is not free")]
    Exclusive(#[from] ExclusiveError),
    /// A flush has failed.
    #[error(transparent)]
    WriteBackFailed(#[from] WriteBackFailed),
    /// A disk.
    #[error(transparent)]
    WriteBack(#[from] WriteBackError),
    /// The host has no room for what the guest has written.
    #[error(transparent)]
    DisksFull(#[from] DisksFull),
    /// State of a version that is not known.
    #[error(
        "the machine state has version {0}, and the newest known here is {MACHINE_STATE_VERSION}"
    )]
    StateVersion(u32),
    /// The guest relies on what this processor does not have.
    #[error(
        "this host lacks processor features that the guest has been shown: {0}; use a host that \
         has them"
    )]
    Features(String),
    /// State of another machine.
    #[error("the machine state does not fit this machine: {0}")]
    StateMismatch(String),
    /// State of the interrupt controllers.
    #[error("cannot restore the interrupt controllers")]
    Irqchips(#[from] IrqchipStateError),
    /// The generation ID.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// State of legacy devices.
    #[error("cannot restore the legacy devices")]
    LegacyState(#[from] LegacyStateError),
    /// State of PCI devices.
    #[error("cannot save or restore a PCI device")]
    PciState(#[from] PciStateError),
}
