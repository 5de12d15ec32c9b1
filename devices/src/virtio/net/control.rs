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

/// What the commands of a driver change.
pub(crate) trait ControlTarget {
    /// The most queue pairs that the driver may use.
    fn pairs_max(&self) -> u16;
    /// Uses this many pairs, which are 1 to [`pairs_max`](Self::pairs_max); returns whether it was possible.
    fn set_pairs(&mut self, pairs: u16) -> bool;
    /// The driver has announced itself.
    fn announced(&mut self);
    /// Sets the address of the guest's end; returns whether it was possible.
    fn set_mac(&mut self, _mac: MacAddress) -> bool {
        false
    }
    /// Sets the guest offloads, as feature bits that the driver has accepted; returns whether it was possible.
    fn set_offloads(&mut self, _offloads: u64) -> bool {
        false
    }
}

impl ControlTarget for Arc<Link> {
    fn pairs_max(&self) -> u16 {
        self.max_pairs
    }

    fn set_pairs(&mut self, pairs: u16) -> bool {
        self.try_change(|state| state.active_pairs = pairs)
    }

    fn announced(&mut self) {
        self.change(|state| state.announce_pending = false);
    }

    fn set_mac(&mut self, mac: MacAddress) -> bool {
        self.change(|state| state.mac = mac);
        true
    }

    fn set_offloads(&mut self, offloads: u64) -> bool {
        self.try_change(|state| state.offloads = offloads)
    }
}

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

/// Index of the control queue, which depends on whether the driver uses several pairs (virtio 1.3, 5.1.2).
pub(crate) fn control_index(pairs_max: u16, features: u64) -> u16 {
    let has_pairs = features & 1 << abi::VIRTIO_NET_F_MQ != 0;
    if has_pairs { pairs_max.saturating_mul(2) } else { 2 }
}

/// Serves available commands.
///
/// # Errors
/// The driver broke a rule of the queue.
pub(crate) fn serve(
    queue: &mut WorkQueue,
    target: &mut impl ControlTarget,
    features: u64,
) -> Result<(), Broken> {
    let mut commands = Commands { target, features };
    queue.serve(BUDGET, |memory, chain| commands.execute(memory, chain))
}

/// Executes commands of the control queue.
struct Commands<'a, T> {
    target: &'a mut T,
    features: u64,
}

impl<T: ControlTarget> Commands<'_, T> {
    /// Executes a command; returns the number of bytes written.
    fn execute(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<u64, &'static str> {
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
    fn command(&mut self, class: u32, command: u8, data: &[u8]) -> bool {
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
                    self.target.announced();
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

    fn set_mac(&mut self, data: &[u8]) -> bool {
        let Ok(mac) = <[u8; 6]>::try_from(data) else { return false };
        self.has(abi::VIRTIO_NET_F_CTRL_MAC_ADDR) && self.target.set_mac(MacAddress(mac))
    }

    fn set_pairs(&mut self, pairs: u16) -> bool {
        let known =
            self.has(abi::VIRTIO_NET_F_MQ) && (1..=self.target.pairs_max()).contains(&pairs);
        known && self.target.set_pairs(pairs)
    }

    fn set_offloads(&mut self, data: &[u8]) -> bool {
        let Ok(offloads) = <[u8; 8]>::try_from(data) else { return false };
        let offloads = u64::from_le_bytes(offloads);
        let known = self.has(abi::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)
            && offloads & !(self.features & GUEST_OFFLOADS) == 0;
        known && self.target.set_offloads(offloads)
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
        serve(queue, link, *features)
    }
}
