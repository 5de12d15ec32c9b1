// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI: bus, configuration space, BARs, MSI-X, and the virtio transport.
//!
//! Owns configuration space, the placement and mapping of BARs, MSI-X and the virtio transport over
//! PCI. Knows nothing of what a device does, of the host's devices, of KVM or of configuration files:
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
//!
//! The order in which locks nest is: arrivals on a segment, segment slots, placement, transport,
//! configuration space, MSI-X table or notification state.

mod bar;
mod bar_placement;
mod bus;
mod config_space;
mod device;
#[cfg(any(test, feature = "testing"))]
pub mod fakes;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod msix;
mod pvpanic;
mod virtio;

pub use bar::{BarDecode, BarDescription, BarKind, ROM_INDEX};
pub use bar_placement::{
    BarMapper, BarRules, BarWindow, FilledFrom, GODWIT_BARS, MapError, MmioRange, MmioWindows,
    PlacementError, PortWindow, RangeWish,
};
pub use bus::{
    ConfigAddress, ECAM_SEGMENT_LEN_BYTES, HostBridge, OnWaited, PciConfigIo, PciEcam, PciError,
    PciSegment, PciSegmentOptions,
};
pub use config_space::{
    BAR_PORTS_LENS, BARS_COUNT, CONFIG_SPACE_LEN_BYTES, ConfigError, ConfigSpace, ConfigSpaceState,
    ConfigStateError, Identity, ROM_LENS, register,
};
pub use device::{PciDevice, PciDeviceState, PciStateError};
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::{fuzz_config_space, fuzz_state, fuzz_transport};
pub use msix::{ENTRY_LEN_BYTES, Msix, MsixEntryState, MsixError, MsixState, NO_VECTOR};
pub use pci_address::{Bdf, BdfError, DEVICES_PER_BUS_COUNT, DeviceNumber};
pub use pvpanic::{
    GODWIT_PANIC_DEVICE, PANIC_DEVICE_KIND, PanicDevice, PanicDeviceRules, PanicEvent, PanicSink,
};
pub use virtio::{
    BarStructure, BarWidth, BusMastering, CommonState, GODWIT_VIRTIO_PCI, NARROW_BAR_VERSION,
    QueueError, QueueProgressState, QueueRegisterState, Rings, RunningQueues, VIRTIO_PCI_KIND,
    VIRTIO_QUEUES_MAX_COUNT, VirtioCapability, VirtioPciDevice, VirtioPciError, VirtioPciForm,
    VirtioPciRules, VirtioPciState, VirtioStateError,
};
