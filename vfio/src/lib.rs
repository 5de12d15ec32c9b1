// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Passed-through PCI functions (VFIO), and guest memory made reachable for their DMA.
//!
//! Owns what a guest sees of a host function, the delivery of its interrupts, the mapping of
//! its BARs into the guest, and the gate that keeps it from DMA until all guest memory is mapped in
//! the IOMMU. Never knows which device it is, and never interferes with what the device does.
//!
//! ```text
//!   config write ──> ShadowConfig ──> (Bus Master Enable? wait at DmaGate) ──> HostFunction
//!   BAR access   ──> memory slot (BarSlots), or trapped: MSI-X table, or HostFunction
//!   interrupt    <── irqfd of a vector <── eventfd <── HostFunction
//!   DMA          ──> guest memory that Pinning has mapped through a DmaTarget, in Pieces; the target is
//!                    a DmaSpace: Type1Container or IommufdSpace
//!                ──> BARs of the VM's other functions that P2pBars has mapped through a P2pTarget
//! ```
//!
//! The kernel clears Bus Master Enable when it opens a function, and DMA needs it. So the guest may
//! run while memory is still being populated and mapped: all of it has to be mapped only when the guest
//! sets the bit.

mod bars;
mod capabilities;
mod clique;
mod config;
mod container;
mod device;
mod device_events;
mod dma;
mod dma_map;
#[cfg(test)]
mod dma_map_tests;
mod entries;
#[cfg(test)]
mod entries_tests;
mod error;
mod express;
#[cfg(any(test, feature = "testing"))]
pub mod fakes;
mod function;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod gate;
mod groups;
mod host;
#[cfg(test)]
mod huge_bar_tests;
mod interrupts;
mod ioctl;
mod iommufd;
mod last;
mod limits;
mod mapping;
pub mod migration;
mod msi;
mod p2p;
pub mod pin_time;
mod pinning;
#[cfg(test)]
mod pinning_tests;
mod prepinned;
mod ranges;
mod reach;
mod rom;
mod space;
mod sysfs;
#[cfg(test)]
mod tests;
mod unmasking;
pub mod user;
mod user_error;

pub use clique::CLIQUE_MAX;
pub use container::Type1Container;
pub use device::{
    BarSlots, DmaLog, StateReader, StateWriter, VFIO_PCI_KIND, VfioPciDevice, VfioWiring,
};
pub use device_events::{DeviceEvents, OnDeviceEvent};
pub use dma::{
    DmaTarget, GuestRamPopulator, LanesQuery, PopulateBegun, PopulateHelper, Populating, Populator,
};
pub use dma_map::{DmaMap, KeptMappings, OnLost};
pub use error::{PinError, VfioError};
pub use function::VfioFunction;
pub use gate::{DmaGate, GateClosed, OnWaited};
pub use host::{DeviceEvent, HostBar, HostFunction, InterruptKind};
pub use interrupts::IntxLine;
pub use ioas::HYPERTRANSPORT;
pub use iommufd::IommufdSpace;
pub use limits::{DmaLimits, LockedMemory};
pub use mapping::BarMapping;
pub use migration::{INTEGRATED_ENDPOINT_VERSION, ROM_VERSION};
pub use p2p::{P2pBars, P2pTarget, Peer};
pub use pinning::{OnAbandoned, OnLong, PinProgress, PinState, Pinning, PinningAbort};
pub use prepinned::mapped_pieces;
pub use reach::{bars_bytes_of, reach_of};
pub use space::{DmaSpace, OpenedFunction, SpaceHold};
pub use sysfs::{GroupMember, HostPlace, group_of, host_nodes};
