// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PCI room: how a guest finds a device, reaches its registers and is interrupted by it.
//!
//! Owns configuration space, the placement and mapping of BARs, MSI-X, the virtio transport over
//! PCI, and passed-through functions with their DMA mappings ([`vfio`]). Knows nothing of what a
//! device does or of configuration files, and of KVM only that it has to be told of VFIO groups:
//! interrupts and I/O events come through the traits of `hypervisor::irq`, mappings go out through
//! [`BarMapper`].
//!
//! ```text
//!   vCPU ── ECAM / 0xCF8 ──> PciSegment ──> PciDevice::write_config
//!                               │                 (BAR or command register changed)
//!                               └─> BarPlacement ──> BarMapper (the MMIO bus) ─┐
//!   vCPU ── MMIO ──> BarWindow ──> PciDevice::read_bar / write_bar             │
//!                                        └─ VirtioPciDevice ── VirtioDevice    │
//!   KVM  ── ioeventfd ──────────────────────────────────────> queue kick <─────┘
//! ```

mod address;
mod bar;
mod bus;
mod config_space;
mod device;
#[doc(hidden)]
pub mod fakes;
mod fuzzing;
mod locks;
mod msix;
pub mod vfio;
mod virtio;

pub use address::{Bdf, BdfError, DEVICES_PER_BUS_COUNT, DeviceNumber};
pub use bar::{
    BarDecode, BarDescription, BarKind, BarMapper, BarWindow, MapError, MmioRange, MmioWindows,
    PlacementError, PortWindow,
};
pub use bus::{
    ConfigAddress, ECAM_SEGMENT_LEN_BYTES, HostBridge, PciConfigIo, PciEcam, PciError, PciSegment,
    PciSegmentOptions,
};
pub use config_space::{
    CONFIG_SPACE_LEN_BYTES, ConfigError, ConfigSpace, ConfigSpaceState, ConfigStateError, Identity,
};
pub use device::{PciDevice, PciDeviceState, PciStateError};
#[doc(hidden)]
pub use fuzzing::{fuzz_config_space, fuzz_state, fuzz_transport};
pub use msix::{Msix, MsixEntryState, MsixError, MsixState, NO_VECTOR};
pub use virtio::{
    BarWidth, CommonState, NARROW_BAR_VERSION, QueueError, QueueProgressState, QueueRegisterState,
    VIRTIO_PCI_KIND, VIRTIO_QUEUES_MAX_COUNT, VirtioPciDevice, VirtioPciError, VirtioPciState,
    VirtioStateError,
};
