// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Taps of network devices.
//!
//! Owns which error is which lack. It must never open a tap, nor decide whether it can be had: `devices::virtio::net` does.

use std::error::Error as _;

use devices::virtio::net::{TapError, TapOutlook};

use super::definitions as of;
use super::finding::{Finding, Lack};
use super::host_files::HostFiles;
use super::rights::{CAP_NET_ADMIN, Rights};
use crate::config::{NetConfig, VmConfig};
use crate::machine::ahead;

/// What is known of the host's interfaces, and of this process's rights to them.
#[derive(Clone, Debug)]
pub struct NetFacts {
    pub outlook: TapOutlook,
}

impl NetFacts {
    pub fn read(files: &HostFiles, rights: &Rights) -> Self {
        let outlook = TapOutlook {
            interfaces: files.path("/sys/class/net"),
            refusal: files.refusal("/dev/net/tun"),
            may_administer: rights.has(CAP_NET_ADMIN),
            user: rights.user,
            groups: rights.groups.clone(),
        };
        Self { outlook }
    }
}

/// What is lacking for taps.
pub fn findings(facts: &NetFacts, config: &VmConfig) -> Vec<Finding> {
    let outlook = &facts.outlook;
    let rights = if outlook.may_administer { "has" } else { "does not have" };
    let mut findings = vec![match outlook.refusal {
        None => Finding::ok(
            &of::TUN,
            format!("/dev/net/tun may be used; the process {rights} CAP_NET_ADMIN"),
        ),
        Some(errno) => {
            let lack = if errno == libc::EACCES { &of::TUN_DENIED } else { &of::NO_TUN };
            let why = std::io::Error::from_raw_os_error(errno);
            Finding::lack(lack, format!("/dev/net/tun: {why}"))
        }
    }];
    let nets = config.net.iter().flatten();
    // Descriptors are open already, and other processes serve vhost-user.
    let with_taps = nets.filter(|net| !net.vhost_user && net.fds.is_none());
    findings.extend(with_taps.map(|net| tap(net, outlook)));
    findings
}

fn tap(net: &NetConfig, outlook: &TapOutlook) -> Finding {
    let id = net.id.as_deref().unwrap_or_default();
    let name = net.tap.as_deref().unwrap_or("vmtap0");
    let Err(error) = ahead::tap(net, outlook) else {
        let is_there = outlook.interfaces.join(name).exists();
        let found = if is_there { "can be used" } else { "is not there, and can be made" };
        return Finding::ok(&of::TAP, format!("tap {name} {found}")).about(id);
    };
    let tap_error = error.source().and_then(|source| source.downcast_ref::<TapError>());
    let lack: &Lack = match tap_error {
        Some(TapError::Missing { .. }) => &of::TAP_MISSING,
        Some(TapError::Permission { .. }) => &of::TAP_DENIED,
        Some(TapError::InUse { .. }) => &of::TAP_IN_USE,
        Some(TapError::Driver(_)) => &of::TAP_DRIVER,
        Some(TapError::Configure { .. }) => &of::TAP_CONFIGURE,
        Some(TapError::Kind { .. } | TapError::Name { .. } | TapError::NotTap { .. }) | None => {
            &of::TAP_KIND
        }
    };
    let program = std::env::current_exe().unwrap_or_else(|_| "cloud-hypervisor".into());
    let mut finding = Finding::lack(lack, error_text::chain(&error)).about(id);
    if net.num_queues > 2 {
        for command in finding.mend.iter_mut().filter(|command| command.contains("tuntap")) {
            *command = command.replace("mode tap", "mode tap multi_queue");
        }
    }
    finding.with("NAME", name).with("PROGRAM", &program.display().to_string())
}
