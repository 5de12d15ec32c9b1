// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue of a network device (virtio 1.3, 5.1.6.5).
//!
//! Filters are best effort in virtio: receive modes and VLANs are accepted, but frames that they
//! would filter out are delivered nevertheless.

use std::sync::Arc;

use memory::GuestMemory;
use virtio_bindings::virtio_net as abi;

use super::config::{GUEST_OFFLOADS, Link};
use super::tap::MacAddress;
use crate::virtio::one_queue::OneQueue;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};

/// Maximum number of chains handled before other events.
const BUDGET: u32 = 64;
/// Maximum length of a command that is parsed; only MAC tables are longer, and not supported.
const COMMAND_BYTES_MAX: usize = 64;
const OK: u8 = 0;
const ERROR: u8 = 1;

/// Serves the control queue.
pub(crate) struct ControlWorker {
    queue: WorkQueue,
    link: Arc<Link>,
    features: u64,
}

impl ControlWorker {
    pub(crate) fn new(queue: WorkQueue, link: Arc<Link>, features: u64) -> Self {
        Self { queue, link, features }
    }
}

/// Executes commands of the control queue.
struct Commands<'a> {
    link: &'a Link,
    features: u64,
}

impl Commands<'_> {
    /// Executes a command; returns the number of bytes written.
    fn execute(&self, memory: &GuestMemory, chain: &Chain) -> Result<u64, &'static str> {
        if chain.writable.len_bytes() == 0 {
            return Err("has no room for an answer");
        }
        let mut command = [0; COMMAND_BYTES_MAX];
        let len_bytes = chain.readable.copy_out(memory, &mut command).map_err(|_| NOT_RAM)?;
        let accepted = match command.get(..len_bytes).unwrap_or_default() {
            [class, command, data @ ..] => self.command(u32::from(*class), *command, data),
            _ => false,
        };
        let answer = if accepted { OK } else { ERROR };
        chain.writable.copy_in(memory, &[answer]).map_err(|_| NOT_RAM)?;
        Ok(1)
    }

    fn has(&self, feature: u32) -> bool {
        self.features & 1 << feature != 0
    }

    /// Executes a command; returns whether it was successful.
    fn command(&self, class: u32, command: u8, data: &[u8]) -> bool {
        let command = u32::from(command);
        match (class, command, data) {
            (abi::VIRTIO_NET_CTRL_RX, mode, [_on]) => match mode {
                abi::VIRTIO_NET_CTRL_RX_PROMISC | abi::VIRTIO_NET_CTRL_RX_ALLMULTI => {
                    self.has(abi::VIRTIO_NET_F_CTRL_RX)
                }
                abi::VIRTIO_NET_CTRL_RX_ALLUNI..=abi::VIRTIO_NET_CTRL_RX_NOBCAST => {
                    self.has(abi::VIRTIO_NET_F_CTRL_RX_EXTRA)
                }
                _ => false,
            },
            (abi::VIRTIO_NET_CTRL_MAC, abi::VIRTIO_NET_CTRL_MAC_TABLE_SET, _) => {
                self.has(abi::VIRTIO_NET_F_CTRL_RX)
            }
            (abi::VIRTIO_NET_CTRL_MAC, abi::VIRTIO_NET_CTRL_MAC_ADDR_SET, data) => {
                self.set_mac(data)
            }
            (
                abi::VIRTIO_NET_CTRL_VLAN,
                abi::VIRTIO_NET_CTRL_VLAN_ADD | abi::VIRTIO_NET_CTRL_VLAN_DEL,
                [_, _],
            ) => self.has(abi::VIRTIO_NET_F_CTRL_VLAN),
            (abi::VIRTIO_NET_CTRL_ANNOUNCE, abi::VIRTIO_NET_CTRL_ANNOUNCE_ACK, _) => {
                let known = self.has(abi::VIRTIO_NET_F_GUEST_ANNOUNCE);
                if known {
                    self.link.change(|state| state.announce_pending = false);
                }
                known
            }
            (abi::VIRTIO_NET_CTRL_MQ, abi::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, [low, high]) => {
                self.set_pairs(u16::from_le_bytes([*low, *high]))
            }
            (
                abi::VIRTIO_NET_CTRL_GUEST_OFFLOADS,
                abi::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET,
                data,
            ) => self.set_offloads(data),
            _ => false,
        }
    }

    fn set_mac(&self, data: &[u8]) -> bool {
        let Ok(mac) = <[u8; 6]>::try_from(data) else { return false };
        let known = self.has(abi::VIRTIO_NET_F_CTRL_MAC_ADDR);
        if known {
            self.link.change(|state| state.mac = MacAddress(mac));
        }
        known
    }

    fn set_pairs(&self, pairs: u16) -> bool {
        let known = self.has(abi::VIRTIO_NET_F_MQ) && (1..=self.link.max_pairs).contains(&pairs);
        known && self.link.try_change(|state| state.active_pairs = pairs)
    }

    fn set_offloads(&self, data: &[u8]) -> bool {
        let Ok(offloads) = <[u8; 8]>::try_from(data) else { return false };
        let offloads = u64::from_le_bytes(offloads);
        let known = self.has(abi::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)
            && offloads & !(self.features & GUEST_OFFLOADS) == 0;
        known && self.link.try_change(|state| state.offloads = offloads)
    }
}

impl OneQueue for ControlWorker {
    fn kind(&self) -> &'static str {
        "device-net"
    }

    fn queue(&self) -> &WorkQueue {
        &self.queue
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let Self { queue, link, features } = self;
        let commands = Commands { link, features: *features };
        queue.serve(BUDGET, |memory, chain| commands.execute(memory, chain))
    }
}
