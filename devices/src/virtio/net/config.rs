// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Features, configuration space and the driver's choices of a network device (virtio 1.3, 5.1.3
//! and 5.1.4).

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use virtio_bindings::virtio_net as abi;

use super::slot::{Settings, TapSlot};
use super::tap::MacAddress;
use crate::virtio::device::VirtioInterrupt;

/// Length of the supported part of the configuration.
const CONFIG_BYTES: usize = 12;

/// Guest offloads that the driver may change at run time.
pub(super) const GUEST_OFFLOADS: u64 = 1 << abi::VIRTIO_NET_F_GUEST_CSUM
    | 1 << abi::VIRTIO_NET_F_GUEST_TSO4
    | 1 << abi::VIRTIO_NET_F_GUEST_TSO6
    | 1 << abi::VIRTIO_NET_F_GUEST_ECN
    | 1 << abi::VIRTIO_NET_F_GUEST_UFO;

/// The tap's flags for guest offloads, given as feature bits.
pub(super) fn tun_flags(offloads: u64) -> u32 {
    let flags = [
        (abi::VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
        (abi::VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (abi::VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        (abi::VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
        (abi::VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
    ];
    // A tap does not support segmentation without checksums.
    if offloads & 1 << abi::VIRTIO_NET_F_GUEST_CSUM == 0 {
        return 0;
    }
    let flags = flags.iter().filter(|(bit, _)| offloads & 1 << bit != 0);
    let all = flags.fold(0, |all, (_, flag)| all | flag);
    // Nor ECN without segmentation.
    if all & (libc::TUN_F_TSO4 | libc::TUN_F_TSO6) == 0 { all & !libc::TUN_F_TSO_ECN } else { all }
}

/// Settings of the driver, and the state reported to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkState {
    pub(super) mac: MacAddress,
    /// Guest offloads as feature bits.
    pub(super) offloads: u64,
    pub(super) active_pairs: u16,
    /// Whether the driver was asked to announce itself and has not acknowledged that.
    pub(super) announce_pending: bool,
}

fn settings(state: &LinkState) -> Settings {
    Settings { offloads: tun_flags(state.offloads), active_pairs: state.active_pairs }
}

/// State shared by all parts of a network device.
pub(crate) struct Link {
    pub(super) tap: Arc<TapSlot>,
    pub(super) max_pairs: u16,
    pub(super) mtu: Option<u16>,
    /// Locked to read, and to change together with the tap.
    state: Mutex<LinkState>,
    /// Set while there is a driver that can be asked to announce itself; locked while it is asked.
    pub(super) interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
}

impl Link {
    pub(crate) fn new(
        tap: Arc<TapSlot>,
        mac: MacAddress,
        max_pairs: u16,
        mtu: Option<u16>,
    ) -> Self {
        let state = LinkState { mac, offloads: 0, active_pairs: 1, announce_pending: false };
        let link =
            Self { tap, max_pairs, mtu, state: Mutex::new(state), interrupt: Mutex::new(None) };
        link.change(|_| ());
        link
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock()
    }

    pub(super) fn state(&self) -> LinkState {
        *self.lock()
    }

    /// Changes driver settings, and the tap as far as the host allows.
    pub(super) fn change(&self, change: impl FnOnce(&mut LinkState)) {
        let mut state = self.lock();
        change(&mut state);
        if let Err(error) = self.tap.set(settings(&state)) {
            self.tap.complain(&error);
        }
    }

    /// Changes driver settings if the tap can be changed accordingly; returns whether it was. Otherwise
    /// nothing changes.
    pub(super) fn try_change(&self, change: impl FnOnce(&mut LinkState)) -> bool {
        let mut state = self.lock();
        let mut wanted = *state;
        change(&mut wanted);
        match self.tap.set(settings(&wanted)) {
            Ok(()) => {
                *state = wanted;
                true
            }
            Err(error) => {
                self.tap.complain(&error);
                if let Err(error) = self.tap.set(settings(&state)) {
                    self.tap.complain(&error);
                }
                false
            }
        }
    }

    /// Asks the driver to announce itself, if there is one that can. A reset waits meanwhile, so that no
    /// later driver is asked.
    pub(super) fn ask_to_announce(&self) {
        let interrupt = self.interrupt.lock();
        if let Some(interrupt) = &*interrupt {
            self.lock().announce_pending = true;
            interrupt.config_changed();
        }
    }

    /// Sets the interrupt for configuration changes, while there is a driver.
    pub(super) fn set_interrupt(&self, interrupt: Option<Arc<dyn VirtioInterrupt>>) {
        *self.interrupt.lock() = interrupt;
    }

    pub(super) fn config(&self) -> [u8; CONFIG_BYTES] {
        let state = self.state();
        let announce = if state.announce_pending { abi::VIRTIO_NET_S_ANNOUNCE } else { 0 };
        let status = u16::try_from(abi::VIRTIO_NET_S_LINK_UP | announce).unwrap_or(0);
        let mut config = [0; CONFIG_BYTES];
        config[..6].copy_from_slice(&state.mac.0);
        config[6..8].copy_from_slice(&status.to_le_bytes());
        config[8..10].copy_from_slice(&self.max_pairs.to_le_bytes());
        config[10..12].copy_from_slice(&self.mtu.unwrap_or(0).to_le_bytes());
        config
    }
}
