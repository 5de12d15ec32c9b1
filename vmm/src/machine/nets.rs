// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of network devices.
//!
//! Owns the translation from options to devices, and the handles of their taps. A tap is opened
//! when the machine is about to run, as another VMM may hold it until then.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;

use devices::virtio::Counters;
use devices::virtio::net::{
    Announcer, MacAddress, Net, NetConfig as DeviceConfig, NetCounters, NetError, TapConfig,
    TapError, TapSlot,
};
use thiserror::Error;

use super::limits;
use crate::config::NetConfig;

/// Why a network device cannot be created.
#[derive(Debug, Error)]
pub enum NetWiringError {
    /// A configured descriptor is invalid.
    #[error("network device '{id}' cannot use {fd} as a tap")]
    Descriptor {
        /// Id of the device.
        id: String,
        /// The descriptor, as configured.
        fd: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The device cannot be created.
    #[error("cannot make network device '{id}'")]
    Make {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: NetError,
    },
}

/// Handle to a network device of a running VM.
pub struct NetHandle {
    tap: Arc<TapSlot>,
    announcer: Announcer,
    counters: Arc<NetCounters>,
}

impl NetHandle {
    /// Opens the tap, if it is not open.
    ///
    /// # Errors
    /// The tap does not exist, or is held by another process.
    pub fn attach(&self) -> Result<(), TapError> {
        self.tap.acquire()
    }

    /// Whether the tap could be opened if no other process held it.
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

    /// Has the guest announced on the network.
    pub fn announce(&self) {
        self.announcer.announce();
    }

    /// The device's counters.
    pub fn counters(&self) -> Arc<dyn Counters> {
        self.counters.clone()
    }
}

/// The configuration of its tap.
pub(super) fn tap_config(config: &NetConfig) -> TapConfig {
    TapConfig {
        name: config.tap.clone(),
        ip: config.ip,
        mask: config.mask,
        host_mac: config.host_mac.map(|mac| MacAddress(mac.bytes())),
        mtu: config.mtu,
        queue_pairs: config.num_queues / 2,
    }
}

/// Creates a device; its tap is opened later.
///
/// # Errors
/// Names the device.
pub fn make(config: &NetConfig) -> Result<(Net, NetHandle), NetWiringError> {
    let id = config.id.clone().unwrap_or_default();
    let mut fds = Vec::new();
    let mut given = Vec::new();
    for (place, fd) in config.fds.iter().flat_map(|fds| &fds.0).enumerate() {
        let name = fd.name(place);
        match fd.duplicate() {
            Ok(ours) => {
                given.push((ours.as_raw_fd(), name));
                fds.push(ours);
            }
            Err(source) => return Err(NetWiringError::Descriptor { id, fd: name, source }),
        }
    }
    let (bandwidth, ops) = limits::buckets(config.rate_limiter_config.as_ref());
    let net = Net::new(DeviceConfig {
        id: id.clone(),
        tap: tap_config(config),
        fds,
        mac: config.mac.map(|mac| MacAddress(mac.bytes())),
        queue_size: config.queue_size,
        offload_tso: config.offload_tso,
        offload_ufo: config.offload_ufo,
        offload_csum: config.offload_csum,
        open_tap_later: true,
        bandwidth,
        ops,
    })
    .map_err(|error| unfit(id, error, given))?;
    let handle = NetHandle { tap: net.tap(), announcer: net.announcer(), counters: net.counters() };
    Ok((net, handle))
}

/// Describes why a device cannot be created, with the descriptor as configured: the number of a duplicate
/// means nothing outside this process.
fn unfit(id: String, error: NetError, given: Vec<(RawFd, String)>) -> NetWiringError {
    match error {
        NetError::Tap { source: TapError::NotTap { fd, source }, .. } => {
            let named = given.into_iter().find(|(ours, _)| *ours == fd);
            let fd = named.map_or_else(|| format!("descriptor {fd}"), |(_, name)| name);
            NetWiringError::Descriptor { id, fd, source }
        }
        source => NetWiringError::Make { id, source },
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs::File;

    use super::*;
    use crate::config::{ConfigFd, ConfigFds};

    fn refusal(fds: Vec<ConfigFd>) -> String {
        let num_queues = u16::try_from(fds.len() * 2).unwrap();
        let id = Some("lan".to_owned());
        let fds = Some(ConfigFds(fds));
        match make(&NetConfig { num_queues, id, fds, ..NetConfig::default() }) {
            Ok(_) => panic!("a device"),
            Err(error) => error_text::chain(&error),
        }
    }

    #[test]
    fn what_is_no_tap_is_named_as_it_was_given() {
        let null = File::open("/dev/null").unwrap();
        let number = null.as_raw_fd();
        let error = refusal(vec![ConfigFd::inherited(number)]);
        let expected = format!("network device 'lan' cannot use descriptor {number} as a tap: ");
        assert!(error.starts_with(&expected), "{error}");
        assert_eq!(error.matches("descriptor").count(), 1, "{error}");

        let received = ConfigFd::received(null.into());
        let error = refusal(vec![received]);
        let expected = "cannot use descriptor 1 of those that came with the request as a tap: ";
        assert!(error.contains(expected), "{error}");

        let error = refusal(vec![ConfigFd::inherited(987_654)]);
        assert!(error.contains("descriptor 987654") && error.contains("Bad file"), "{error}");
    }
}
