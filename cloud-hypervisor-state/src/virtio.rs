// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio devices' own states, by type.
//!
//! A node does not say which type it has: its transport does, and whether another process serves it is known by the
//! fields of such a device.

use json_bound::Budget;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::error::DocumentError;
use crate::lists::{Fixed, List};
use crate::text::parse;
use crate::tree::{Node, NodeReader};
use crate::vhost_user::{FsConfig, VhostUser};

/// Maximum number of blocks of a memory device: 8 TiB.
const BLOCKS_MAX: usize = 4 << 20;
/// Maximum number of bytes of input that wait for the guest.
const INPUT_BYTES_MAX: usize = 1 << 20;
/// Maximum number of connections of a socket device.
const CONNECTIONS_MAX: usize = 1 << 16;

/// A device without a state of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plain {
    /// Offered features.
    pub avail_features: u64,
    /// What drivers have accepted since the device was made.
    pub acked_features: u64,
}

/// Defines the state of a device: features, and further fields.
macro_rules! device {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            /// Offered features.
            pub avail_features: u64,
            /// What drivers have accepted since the device was made.
            pub acked_features: u64,
            $($(#[$field_doc])* pub $field: $type,)*
        }
    };
}

/// Defines the configuration of a device, whose fields have the names of the standard.
macro_rules! config {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(missing_docs, reason = "the fields are those of the virtio standard")]
        pub struct $name { $(pub $field: $type,)* }
    };
}

config! {
    /// Geometry of a disk.
    BlockGeometry { cylinders: u16, heads: u8, sectors: u8, }
}
config! {
    /// Configuration of a block device.
    BlockConfig {
        capacity: u64,
        size_max: u32,
        seg_max: u32,
        geometry: BlockGeometry,
        blk_size: u32,
        physical_block_exp: u8,
        alignment_offset: u8,
        min_io_size: u16,
        opt_io_size: u32,
        writeback: u8,
        unused: u8,
        num_queues: u16,
        max_discard_sectors: u32,
        max_discard_seg: u32,
        discard_sector_alignment: u32,
        max_write_zeroes_sectors: u32,
        max_write_zeroes_seg: u32,
        write_zeroes_may_unmap: u8,
        unused1: Fixed<u8, 3>,
    }
}
config! {
    /// Configuration of a network device.
    NetConfig {
        mac: Fixed<u8, 6>,
        status: u16,
        max_virtqueue_pairs: u16,
        mtu: u16,
        speed: u32,
        duplex: u8,
    }
}
config! {
    /// Configuration of a console.
    ConsoleConfig { cols: u16, rows: u16, max_nr_ports: u32, emerg_wr: u32, }
}
config! {
    /// Configuration of a balloon.
    BalloonConfig { num_pages: u32, actual: u32, }
}
config! {
    /// Configuration of a memory device.
    MemConfig {
        block_size: u64,
        node_id: u16,
        padding: Fixed<u8, 6>,
        addr: u64,
        region_size: u64,
        usable_region_size: u64,
        plugged_size: u64,
        requested_size: u64,
    }
}
config! {
    /// Configuration of persistent memory.
    PmemConfig { start: u64, size: u64, }
}

/// Which blocks of a memory device are plugged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemBlocks {
    /// One for each 2 MiB.
    pub bitmap: List<bool, BLOCKS_MAX>,
}

device! {
    /// A block device.
    Block {
        /// Path of its image.
        disk_path: String,
        /// Its length in sectors.
        disk_nsectors: u64,
        /// Configuration.
        config: BlockConfig,
    }
}
device! {
    /// A network device.
    Net {
        /// Configuration.
        config: NetConfig,
        /// Maximum size of each queue.
        queue_size: List<u16, 1024>,
    }
}
device! {
    /// A console.
    Console {
        /// Configuration.
        config: ConsoleConfig,
        /// What the guest has not been given yet.
        in_buffer: List<u8, INPUT_BYTES_MAX>,
    }
}
device! {
    /// A balloon.
    Balloon {
        /// Configuration.
        config: BalloonConfig,
    }
}
device! {
    /// A socket device.
    Vsock {
        /// Its connections: local and peer port.
        connections: List<(u32, u32), CONNECTIONS_MAX>,
    }
}
device! {
    /// A memory device.
    Mem {
        /// Configuration.
        config: MemConfig,
        /// Its blocks.
        blocks_state: MemBlocks,
    }
}
device! {
    /// Persistent memory.
    Pmem {
        /// Configuration.
        config: PmemConfig,
    }
}
device! {
    /// A watchdog.
    Watchdog {
        /// Whether it runs.
        enabled: bool,
    }
}

/// A virtio device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Virtio {
    Net(Net),
    VhostUserNet(VhostUser<NetConfig>),
    Block(Block),
    Console(Console),
    Rng(Plain),
    Balloon(Balloon),
    Rtc(Plain),
    Vsock(Vsock),
    Mem(Mem),
    Fs(VhostUser<FsConfig>),
    Pmem(Pmem),
    Watchdog(Watchdog),
}

/// Fields by which devices that are served elsewhere are known.
#[derive(Deserialize)]
struct Marks {
    vu_num_queues: Option<IgnoredAny>,
    iova_range_first: Option<IgnoredAny>,
    config: Option<IgnoredAny>,
}

impl Virtio {
    /// Reads the state of a device whose transport is of type `device_type`.
    pub(crate) fn read(
        node: NodeReader,
        device_type: u16,
        budget: &mut Budget,
    ) -> Result<Self, DocumentError> {
        // Counted again when it is parsed as what it is.
        let marks: Marks = parse(node.path(), node.text()?, &mut budget.clone())?;
        let unsupported =
            |what| Err(DocumentError::Unsupported { path: node.path().to_owned(), what });
        if marks.iova_range_first.is_some() {
            return unsupported("a vDPA device");
        }
        let device = if marks.vu_num_queues.is_some() {
            match device_type {
                _ if marks.config.is_none() => return unsupported("a generic vhost-user device"),
                1 => Self::VhostUserNet(node.state(budget)?),
                2 => return unsupported("a vhost-user disk"),
                26 => Self::Fs(node.state(budget)?),
                _ => return unsupported("a vhost-user device of this type"),
            }
        } else {
            match device_type {
                1 => Self::Net(node.state(budget)?),
                2 => Self::Block(node.state(budget)?),
                3 => Self::Console(node.state(budget)?),
                4 => Self::Rng(node.state(budget)?),
                5 => Self::Balloon(node.state(budget)?),
                17 => Self::Rtc(node.state(budget)?),
                19 => Self::Vsock(node.state(budget)?),
                23 => return unsupported("a virtual IOMMU"),
                24 => Self::Mem(node.state(budget)?),
                27 => Self::Pmem(node.state(budget)?),
                35 => Self::Watchdog(node.state(budget)?),
                _ => return unsupported("a virtio device of this type"),
            }
        };
        node.end()?;
        Ok(device)
    }

    pub(crate) fn write(&self, path: &str) -> Result<Node, DocumentError> {
        match self {
            Self::Net(state) => Node::of(path, state),
            Self::VhostUserNet(state) => Node::of(path, state),
            Self::Block(state) => Node::of(path, state),
            Self::Console(state) => Node::of(path, state),
            Self::Rng(state) | Self::Rtc(state) => Node::of(path, state),
            Self::Balloon(state) => Node::of(path, state),
            Self::Vsock(state) => Node::of(path, state),
            Self::Mem(state) => Node::of(path, state),
            Self::Fs(state) => Node::of(path, state),
            Self::Pmem(state) => Node::of(path, state),
            Self::Watchdog(state) => Node::of(path, state),
        }
    }

    /// Offered features, and those that drivers have accepted.
    pub fn features(&self) -> (u64, u64) {
        macro_rules! of {
            ($($kind:ident),*) => {
                match self {
                    $(Self::$kind(state) => (state.avail_features, state.acked_features),)*
                }
            };
        }
        of!(Net, VhostUserNet, Block, Console, Rng, Balloon, Rtc, Vsock, Mem, Fs, Pmem, Watchdog)
    }
}
