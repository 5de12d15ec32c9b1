// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The documents in which cloud-hypervisor (v53, x86-64, KVM) writes the state and the configuration of a VM.
//!
//! Owns their form: which nodes, fields, tags and lengths there are. A document comes from a peer or a file and is
//! untrusted: its length, its number of values (also of the documents inside its strings), the depth of its tree and
//! the length of each list are bounded, and whatever is unknown or missing is refused by its path. It knows nothing of
//! what a value does to a machine, and must never drop one silently.
//!
//! | module | what it is |
//! | --- | --- |
//! | `document` | the whole document, from bytes and back |
//! | `tree`, `text`, `place` | nodes; JSON inside JSON strings; where in a text an error is |
//! | `lists` | lists of bounded or fixed length, structures of the kernel as bytes |
//! | `config` | the message that comes before the state |
//! | `vm`, `vcpu`, `memory`, `device_tree`, `legacy`, `pci`, `transport`, `virtio`, `vhost_user` | the state of each part |
//!
//! The types are read and written by the same definitions, so what is written has the form that is read.

mod config;
mod device_tree;
mod document;
mod error;
mod legacy;
mod lists;
mod memory;
mod pci;
mod place;
mod text;
mod transport;
mod tree;
mod vcpu;
mod vhost_user;
mod virtio;
mod vm;

#[cfg(test)]
mod recorded_tests;

pub use config::ConfigMessage;
pub use device_tree::{BarType, DeviceManagerData, DeviceNode, Resource};
pub use document::{DOCUMENT_BYTES_MAX, DeviceManager, Document, TRANSPORT_PREFIX};
pub use error::DocumentError;
pub use legacy::{IOAPIC_PINS_COUNT, Ioapic, PvpanicData, Serial};
pub use lists::{Fixed, List, Named, Structure, TooLong};
pub use memory::{
    ArchRegion, ArchRegionKind, HotplugSlot, MemoryManager, MemoryRange, MemoryRanges, RamMapping,
};
pub use pci::{BarMove, BarRegion, MsixConfig, MsixEntry, PciBar, PciConfiguration, Pvpanic};
pub use transport::{CommonConfig, Queue, Transport, TransportData};
pub use vcpu::{Fpu, KvmVcpu, Lapic, Msr, Vcpu, Xsave};
pub use vhost_user::{FsConfig, VhostUser};
pub use virtio::{
    Balloon, BalloonConfig, Block, BlockConfig, BlockGeometry, Console, ConsoleConfig, Mem,
    MemBlocks, MemConfig, Net, NetConfig, Plain, Pmem, PmemConfig, Virtio, Vsock, Watchdog,
};
pub use vm::{Clock, CpuidEntry, VmData};

#[cfg(any(test, feature = "testing"))]
pub use document::fuzz_document;
