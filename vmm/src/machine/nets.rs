// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of network devices.
//!
//! Owns the translation from options to devices, and the handles of their taps. A tap is opened
//! when the machine is about to run, as another VMM may hold it until then.

use std::sync::Arc;

use devices::virtio::Counters;
use devices::virtio::net::{
    Announcer, MacAddress, Net, NetConfig as DeviceConfig, NetCounters, NetError, TapConfig,
    TapError, TapSlot,
};
use thiserror::Error;

use crate::config::NetConfig;

/// Why a network device is not there.
#[derive(Debug, Error)]
pub enum NetWiringError {
    /// A descriptor that is not one.
    #[error("network device '{id}' cannot use descriptor {fd}")]
    Descriptor {
        /// Its id.
        id: String,
        /// The descriptor.
        fd: i32,
        /// The host's answer.
        #[source]
        source: std::io::Error,
    },
    /// The device cannot be made.
    #[error("cannot make network device '{id}'")]
    Make {
        /// Its id.
        id: String,
        /// Why.
        #[source]
        source: NetError,
    },
}

/// What a running VM needs of a network device.
pub struct NetHandle {
    tap: Arc<TapSlot>,
    announcer: Announcer,
    counters: Arc<NetCounters>,
}

impl NetHandle {
    /// Opens the tap, if it is not open.
    ///
    /// # Errors
    /// When it is not ours or does not exist.
    pub fn attach(&self) -> Result<(), TapError> {
        self.tap.acquire()
    }

    /// Whether the tap could be opened, if nobody else had it.
    ///
    /// # Errors
    /// As [`NetHandle::attach`].
    pub fn check(&self) -> Result<(), TapError> {
        self.tap.check()
    }

    /// Whether the tap is open.
    pub fn is_attached(&self) -> bool {
        self.tap.is_open()
    }

    /// Closes the tap.
    pub fn detach(&self) {
        self.tap.release();
    }

    /// Makes the guest's place known.
    pub fn announce(&self) {
        self.announcer.announce();
    }

    /// The device's counters.
    pub fn counters(&self) -> Arc<dyn Counters> {
        self.counters.clone()
    }
}

/// Makes a device; its tap is opened later.
///
/// # Errors
/// Naming the device.
pub fn make(config: &NetConfig) -> Result<(Net, NetHandle), NetWiringError> {
    let id = config.id.clone().unwrap_or_default();
    let fds = config
        .fds
        .iter()
        .flat_map(|fds| &fds.0)
        .map(|fd| {
            let number = fd.number();
            let error = |source| NetWiringError::Descriptor { id: id.clone(), fd: number, source };
            fd.duplicate().map_err(error)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let net = Net::new(DeviceConfig {
        id: id.clone(),
        tap: TapConfig {
            name: config.tap.clone(),
            ip: config.ip,
            mask: config.mask,
            host_mac: config.host_mac.map(|mac| MacAddress(mac.bytes())),
            mtu: config.mtu,
            queue_pairs: config.num_queues / 2,
        },
        fds,
        mac: config.mac.map(|mac| MacAddress(mac.bytes())),
        queue_size: config.queue_size,
        offload_tso: config.offload_tso,
        offload_ufo: config.offload_ufo,
        offload_csum: config.offload_csum,
        open_tap_later: true,
    })
    .map_err(|source| NetWiringError::Make { id, source })?;
    let handle = NetHandle { tap: net.tap(), announcer: net.announcer(), counters: net.counters() };
    Ok((net, handle))
}
