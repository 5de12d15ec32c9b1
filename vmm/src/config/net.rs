// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--net`: network devices.
//!
//! Owns the family and the rules within it. It must never open a tap.

use std::net::IpAddr;

use super::codec::{Address, Choice, Id, Int, One, Opt, Text, Toggle};
use super::descriptor::{ConfigFds, Fds};
use super::enums::option_enum;
use super::error::ConfigError;
use super::family::option_family;
use super::rate_limiter::{RateLimiterConfig, RateLimiterKeys};
use super::value::MacAddr;

/// Smallest MTU that the virtio specification lets a device offer together with IPv6.
pub const MIN_MTU: u16 = 1280;

/// Maximum length of the name of a network interface in Linux.
pub const MAX_IFNAME_BYTES: usize = 15;

option_enum! {
    /// Which side listens on a vhost-user socket.
    VhostMode = "client|server", default Client {
        /// The other process.
        Client = "client",
        /// The VMM.
        Server = "server",
    }
}

option_family! {
    /// A network device.
    NetConfig "net" {
        /// Name of the tap interface; created if not given.
        tap: Option<String> = None, "tap" as Opt<Id>;
        /// IP address of the host's end.
        ip: Option<IpAddr> = None, "ip" as Opt<Address>;
        /// Netmask of the host's end.
        mask: Option<IpAddr> = None, "mask" as Opt<Address>;
        /// MAC address of the guest's end; random if not given.
        mac: Option<MacAddr> = None, "mac" as Opt<Address>;
        /// MAC address of the host's end.
        host_mac: Option<MacAddr> = None, "host_mac" as Opt<Address>;
        /// Maximum transmission unit.
        mtu: Option<u16> = None, "mtu" as Opt<Int>, range(1280, 65535);
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>;
        /// Number of queues, two for each queue pair.
        num_queues: u16 = 2, "num_queues" as One<Int>, range(2, 508);
        /// Descriptors of each queue, a power of two.
        queue_size: u16 = 256, "queue_size" as One<Int>, range(2, 32768);
        /// Served by another process over vhost-user.
        vhost_user: bool = false, "vhost_user" as One<Toggle>;
        /// Socket at which that process listens, or the VMM with vhost_mode=server.
        vhost_socket: Option<String> = None, "socket" as Opt<Text>;
        /// Which side listens on the socket.
        vhost_mode: VhostMode = VhostMode::Client, "vhost_mode" as One<Choice>;
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// Open tap descriptors, one for each queue pair.
        fds: Option<ConfigFds> = None, "fd" as Opt<Fds>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
        /// Limits on bandwidth and operations.
        rate_limiter_config: Option<RateLimiterConfig> = None, "" as RateLimiterKeys;
        /// TCP segmentation offload.
        offload_tso: bool = true, "offload_tso" as One<Toggle>;
        /// UDP fragmentation offload.
        offload_ufo: bool = true, "offload_ufo" as One<Toggle>;
        /// Checksum offload.
        offload_csum: bool = true, "offload_csum" as One<Toggle>;
    }
}

impl NetConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self, max_vcpus: u32) -> Result<(), ConfigError> {
        let name = self.id.clone().unwrap_or_default();
        let refuse =
            |problem: String| Err(ConfigError::Device { what: "net", id: name.clone(), problem });
        if !self.num_queues.is_multiple_of(2) {
            return refuse(format!("num_queues {} is not even", self.num_queues));
        }
        self.check_vhost_user().or_else(|problem| refuse(problem.to_owned()))?;
        let pairs = self.num_queues / 2;
        if u32::from(pairs) > max_vcpus {
            return refuse(format!("{pairs} queue pairs exceed the number of vCPUs ({max_vcpus})"));
        }
        if !self.queue_size.is_power_of_two() {
            return refuse(format!("queue_size {} is not a power of two", self.queue_size));
        }
        if let Some(tap) = &self.tap
            && (tap.is_empty() || tap.len() > MAX_IFNAME_BYTES || tap.contains(['/', '\0', ' ']))
        {
            return refuse(format!("'{tap}' cannot be the name of an interface"));
        }
        for mac in [self.mac, self.host_mac].into_iter().flatten() {
            if mac.is_multicast() {
                return refuse(format!("{mac} is a multicast address"));
            }
        }
        match (self.ip, self.mask) {
            (None, Some(_)) => return refuse("mask needs ip".into()),
            (Some(ip), Some(mask)) if ip.is_ipv4() != mask.is_ipv4() => {
                return refuse("ip and mask are not of the same kind".into());
            }
            (Some(IpAddr::V4(_)), Some(IpAddr::V4(mask)))
                if mask.to_bits().leading_ones() + mask.to_bits().trailing_zeros() < 32 =>
            {
                return refuse(format!("{mask} is not a netmask"));
            }
            _ => {}
        }
        let Some(ConfigFds(fds)) = &self.fds else { return Ok(()) };
        if self.tap.is_some() {
            return refuse("tap and fd exclude each other".into());
        }
        if fds.len() != usize::from(pairs) {
            return refuse(format!("{} descriptors for {pairs} queue pairs", fds.len()));
        }
        if let Some(problem) = fds.iter().find_map(|fd| fd.check().err()) {
            return refuse(problem.to_owned());
        }
        Ok(())
    }
}

impl NetConfig {
    /// Validates the options of a device that another process serves: those of taps have no effect there.
    fn check_vhost_user(&self) -> Result<(), &'static str> {
        let has_socket = self.vhost_socket.as_ref().is_some_and(|socket| !socket.is_empty());
        let problems = if self.vhost_user {
            &[
                (!has_socket, "vhost_user=on needs a socket"),
                (self.tap.is_some(), "tap and vhost_user=on exclude each other"),
                (self.fds.is_some(), "fd and vhost_user=on exclude each other"),
                (self.ip.is_some(), "ip is for the vhost-user back end to say"),
                (self.mask.is_some(), "mask is for the vhost-user back end to say"),
                (self.host_mac.is_some(), "host_mac is for the vhost-user back end to say"),
                (self.rate_limiter_config.is_some(), "limits and vhost_user=on exclude each other"),
            ][..]
        } else {
            &[
                (self.vhost_socket.is_some(), "socket needs vhost_user=on"),
                (self.vhost_mode != VhostMode::Client, "vhost_mode=server needs vhost_user=on"),
            ]
        };
        problems.iter().find(|(is_so, _)| *is_so).map_or(Ok(()), |(_, problem)| Err(*problem))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;
    use crate::config::{Family as _, VmConfig};

    fn complete(net: &str, shared: bool) -> Result<VmConfig, String> {
        let net = NetConfig::parse(net).map_err(|error| error.to_string())?;
        let json = json!({ "payload": { "kernel": "/k" },
            "memory": { "size": 1 << 30, "shared": shared },
            "cpus": { "boot_vcpus": 4, "max_vcpus": 4 } });
        let mut config = serde_json::from_value::<VmConfig>(json).unwrap();
        config.net = Some(vec![net]);
        config.complete().map_err(|error| error.to_string())
    }

    #[test]
    fn a_vhost_user_network_has_an_address_that_stays() {
        let config =
            complete("vhost_user=on,socket=/s,vhost_mode=server,mtu=1400,num_queues=8", true)
                .unwrap();
        assert_eq!(config.vhost_user_devices(), [("net", "_net0")]);
        let mac = config.net.as_ref().unwrap()[0].mac;
        assert!(mac.is_some());
        assert_eq!(config.complete().unwrap().net.unwrap()[0].mac, mac);
    }

    #[test]
    fn what_a_vhost_user_network_cannot_be_is_refused_by_name() {
        let net = "vhost_user=on,socket=/s";
        for (more, why) in [
            (",num_queues=3", "is not even"),
            (",num_queues=10", "5 queue pairs exceed the number of vCPUs"),
            (",tap=t", "tap and vhost_user=on"),
            (",ip=10.0.0.1", "ip is for"),
            (",host_mac=02:00:00:00:00:01", "host_mac is for"),
            (",fd=[3]", "fd and vhost_user=on"),
        ] {
            let error = complete(&format!("{net}{more}"), true).unwrap_err();
            assert!(error.contains(why), "{more}: {error}");
        }
        for (net, why) in [
            ("vhost_user=on", "needs a socket"),
            ("socket=/s", "socket needs vhost_user=on"),
            ("vhost_mode=server", "vhost_mode=server needs"),
        ] {
            let error = complete(net, true).unwrap_err();
            assert!(error.contains(why), "{net}: {error}");
        }
        assert!(complete(net, false).unwrap_err().contains("shared=on"));
    }
}
