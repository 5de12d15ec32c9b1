// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why passed-through devices cannot be used.

use std::sync::Arc;

use hypervisor::irq::IrqError;
use thiserror::Error;
use vfio::migration::MigrationError;
use vfio::{GateClosed, PinError, VfioError};

use super::backend::shown_place;
use crate::config::DeviceConfig;
use crate::machine::segments::PlaceError;

/// Why a passed-through device cannot be used.
#[derive(Debug, Error)]
pub enum PassthroughError {
    /// A VFIO call failed.
    #[error("cannot pass devices through")]
    Vfio(#[source] VfioError),
    /// The device cannot be opened or set up.
    #[error("cannot pass through '{id}' ({place})")]
    Device {
        /// Id of the device.
        id: String,
        /// Its location on the host.
        place: String,
        /// The cause.
        #[source]
        source: VfioError,
    },
    /// The interrupt line is not available.
    #[error("cannot give '{id}' an interrupt line")]
    Line {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: IrqError,
    },
    /// The device cannot be placed on the PCI bus.
    #[error("cannot give '{id}' a place on the PCI bus")]
    Bus {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: PlaceError,
    },
    /// Memory cannot be mapped for DMA.
    #[error("cannot make guest memory ready for DMA")]
    Pin(#[from] PinError),
    /// Memory could not be mapped for DMA, so no device can continue here.
    #[error("the passed-through devices cannot continue here")]
    NotMapped(#[from] GateClosed),
    /// Mapping memory has failed earlier, so no device can be used.
    #[error(
        "guest memory could not be made ready for DMA ({0}); remove the passed-through devices that \
         the VM has, then add them again"
    )]
    MemoryFailed(Arc<str>),
    /// Memory that was being mapped is unmapped, as the devices that it was for are removed.
    #[error(
        "guest memory is being unmapped, as the passed-through devices that the VM had are being removed; add the \
         device when they are gone (event device-removed)"
    )]
    Leaving,
    /// A device prevents a migration or snapshot.
    #[error(
        "the VM can be neither migrated nor saved because of its passed-through devices: {0}; remove \
         them first"
    )]
    NotMovable(String),
    /// Hardware states are too long for the document of the state.
    #[error(
        "the states of passed-through devices are too long for a snapshot, and for a destination of an older version, \
         where they are kept with the other state: {0}; remove the devices first"
    )]
    StateTooLong(String),
    /// The device was removed while it was being opened, and is still being opened on the host.
    #[error(
        "'{id}' ({place}) was removed while it was being opened, and the host is still opening it; add it again when \
         it is done"
    )]
    Withdrawn {
        /// Id of the device.
        id: String,
        /// Its location on the host.
        place: String,
    },
    /// The device is still being opened on the host for a machine that has ended, and nothing could end a wait for it.
    #[error(
        "the host is still opening '{id}' ({place}), or a device of its IOMMU group, for a VM that has ended; try again \
         when it is done"
    )]
    LeftOpening {
        /// Id of the device.
        id: String,
        /// Its location on the host.
        place: String,
    },
    /// The VM is to end, or the addition of the device was cancelled.
    #[error("the operation was cancelled before all passed-through devices were ready")]
    Cancelled,
    /// A device whose call into the kernel does not return, and to which it is left.
    #[error(
        "the device '{id}' hangs: {doing} has not ended within {waited_s} s; it and its thread are left behind"
    )]
    Hangs {
        /// Id of the device.
        id: String,
        /// The call.
        doing: String,
        /// How long it takes already.
        waited_s: u64,
    },
    /// No thread could be started that may wait for a device.
    #[error("there is no thread for the calls of passed-through devices")]
    NoThread(#[source] std::io::Error),
    /// A device does not stop.
    #[error("cannot stop passed-through device '{id}'")]
    Stop {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: MigrationError,
    },
}

/// The device cannot be opened or set up.
pub(super) fn no_device(config: &DeviceConfig, id: &str, source: VfioError) -> PassthroughError {
    PassthroughError::Device { id: id.to_owned(), place: shown_place(config), source }
}
