// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of the host that are passed through: IOMMU, VFIO, groups, nodes, limits.
//!
//! Owns what is looked at beside a device. Whether the device itself can be passed through is asked of
//! `machine::ahead`. Must never open a group or a device: another VM could not open it meanwhile.

use std::error::Error;
use std::path::{Path, PathBuf};

use ::memory::GuestRam;
use rustix::fs::Access;
use vfio::{DmaLimits, GroupMember, HostPlace, PinError, VfioError, group_of, host_nodes};

use super::definitions as of;
use super::finding::{Finding, Lack};
use super::host_files::HostFiles;
use super::kvm::Lacking;
use super::memory::MemoryFacts;
use crate::config::{DeviceConfig, VmConfig};
use crate::machine::ahead;

/// What is known of the IOMMU and of the devices of the VM.
#[derive(Debug, Default)]
pub struct PassthroughFacts {
    /// Names of the IOMMUs.
    pub iommus: Vec<String>,
    /// Number of IOMMU groups.
    pub groups: usize,
    /// Error number with which the container cannot be used.
    pub container: Option<i32>,
    /// The same of iommufd.
    pub iommufd: Option<i32>,
    pub devices: Vec<HostDevice>,
    pub limits: DmaLimits,
}

/// A device of the host that the VM is to have.
#[derive(Clone, Debug)]
pub struct HostDevice {
    pub id: String,
    /// Its directory in sysfs, without links.
    pub path: PathBuf,
    pub checked: Result<(), Lacking>,
    pub group: Option<(String, Vec<GroupMember>)>,
    /// The node that is opened, and the error number with which it cannot be.
    pub node: Option<(PathBuf, Option<i32>)>,
    pub has_reset: bool,
}

impl PassthroughFacts {
    pub fn read(files: &HostFiles, config: &VmConfig, ram: Option<&GuestRam>) -> Self {
        let is_iommufd = uses_iommufd(config);
        let device = |device: &DeviceConfig| {
            let path = device.path.as_deref()?;
            Some(HostDevice::read(device, path, is_iommufd, ram))
        };
        Self {
            iommus: files.names("/sys/class/iommu"),
            groups: files.names("/sys/kernel/iommu_groups").len(),
            container: files.refusal("/dev/vfio/vfio"),
            iommufd: files.refusal("/dev/iommu"),
            // One that is given by its descriptor is open.
            devices: config.devices.iter().flatten().filter_map(device).collect(),
            limits: ahead::dma_limits(config),
        }
    }
}

impl HostDevice {
    fn read(config: &DeviceConfig, path: &Path, is_iommufd: bool, ram: Option<&GuestRam>) -> Self {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let checked = ram.map_or(Ok(()), |ram| {
            let refused = |error| (lack_of(&error), error_text::chain(&error));
            ahead::passthrough(config, ram).map_err(refused)
        });
        let is_wanted = |node: &PathBuf| node.starts_with("/dev/vfio/devices") == is_iommufd;
        let node = host_nodes(&path).into_iter().find(is_wanted);
        let refusal = |node: PathBuf| {
            let errno = ahead::refusal(&node, Access::READ_OK | Access::WRITE_OK);
            (node, errno)
        };
        Self {
            id: config.id.clone().unwrap_or_default(),
            checked,
            group: group_of(&path),
            node: node.map(refusal),
            has_reset: HostPlace::Sysfs(path.clone()).has_reset(),
            path,
        }
    }
}

fn uses_iommufd(config: &VmConfig) -> bool {
    config.platform.as_ref().is_some_and(|platform| platform.iommufd)
}

fn lack_of(error: &(dyn Error + 'static)) -> &'static Lack {
    let mut layers = std::iter::successors(Some(error), |error| (*error).source());
    match layers.find_map(|layer| layer.downcast_ref::<VfioError>()) {
        Some(VfioError::NoDevice { .. }) => &of::DEVICE_MISSING,
        Some(VfioError::NoGroup { .. }) => &of::DEVICE_NO_GROUP,
        Some(VfioError::Driver { .. }) => &of::DEVICE_DRIVER,
        Some(VfioError::ReservedAddress { .. } | VfioError::BeyondIommu { .. }) => {
            &of::DEVICE_REACH
        }
        _ => &of::DEVICE_OTHER,
    }
}

fn why(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

/// What is lacking for passed-through devices.
pub fn findings(facts: &PassthroughFacts, memory: &MemoryFacts, config: &VmConfig) -> Vec<Finding> {
    let has_devices = config.devices.as_ref().is_some_and(|devices| !devices.is_empty());
    let is_iommufd = uses_iommufd(config);
    let is_given = config.platform.as_ref().is_some_and(|platform| platform.iommufd_fd.is_some());
    let mut findings = vec![if facts.iommus.is_empty() && facts.groups == 0 {
        Finding::lack(&of::NO_IOMMU, "the host has no IOMMU that is switched on")
    } else {
        let (names, groups) = (facts.iommus.join(", "), facts.groups);
        Finding::ok(&of::IOMMU, format!("{names} with {groups} groups"))
    }];
    findings.push(match facts.container {
        None => Finding::ok(&of::VFIO, "type1 containers can be made"),
        Some(errno) => {
            let is_wanted = has_devices && !is_iommufd;
            let lack = if is_wanted { &of::VFIO_WANTED } else { &of::NO_VFIO };
            Finding::lack(lack, format!("/dev/vfio/vfio: {}", why(errno)))
        }
    });
    findings.push(match facts.iommufd {
        None => Finding::ok(&of::IOMMUFD, "iommufd can be used"),
        Some(_) if is_given => Finding::ok(&of::IOMMUFD, "it is given by its descriptor"),
        Some(errno) => {
            let is_wanted = has_devices && is_iommufd;
            let lack = if is_wanted { &of::IOMMUFD_WANTED } else { &of::NO_IOMMUFD };
            Finding::lack(lack, format!("/dev/iommu: {}", why(errno)))
        }
    });
    findings.extend(facts.devices.iter().flat_map(of_device));
    findings.push(limits(facts, memory, has_devices));
    findings
}

fn of_device(device: &HostDevice) -> Vec<Finding> {
    let HostDevice { id, path, checked, group, node, has_reset } = device;
    let place = path.display().to_string();
    let address = path.file_name().unwrap_or_default().to_string_lossy();
    let mut findings = Vec::new();
    match checked {
        Ok(()) => findings.push(Finding::ok(&of::DEVICE, format!("{place} can be passed through"))),
        Err((lack, found)) => {
            let finding = Finding::lack(lack, found);
            findings.push(finding.with("PATH", &place).with("ADDRESS", &address));
            // What is not there has no group, and is not to be reset.
            if group.is_none() {
                return findings.into_iter().map(|finding| finding.about(id)).collect();
            }
        }
    }
    match node {
        None => {
            findings.push(Finding::lack(&of::NODE_MISSING, "there is no node in /dev/vfio for it"));
        }
        Some((node, None)) => {
            findings.push(Finding::ok(&of::DEVICE_NODE, format!("{} may be used", node.display())));
        }
        // It comes with the driver, which is said to be missing.
        Some((_, Some(libc::ENOENT))) if checked.is_err() => {}
        Some((node, Some(errno))) => {
            let lack = if *errno == libc::ENOENT { &of::NODE_MISSING } else { &of::NODE_DENIED };
            let found = format!("{}: {}", node.display(), why(*errno));
            findings.push(Finding::lack(lack, found).with("PATH", &node.display().to_string()));
        }
    }
    if let Some((number, members)) = group {
        let own = members.iter().filter(|member| member.name != *address);
        let in_the_way: Vec<_> = own.filter(|member| member.is_in_the_way()).collect();
        for member in &in_the_way {
            let driver = member.driver.as_deref().unwrap_or_default();
            let found = format!("{} of its group {number} is bound to {driver}", member.name);
            findings.push(Finding::lack(&of::GROUP_BOUND, found).with("ADDRESS", &member.name));
        }
        if in_the_way.is_empty() {
            let count = members.len();
            let found = format!("group {number} of {count}, none of which is used by the host");
            findings.push(Finding::ok(&of::DEVICE_GROUP, found));
        }
    }
    findings.push(if *has_reset {
        Finding::ok(&of::DEVICE_RESET, "the host can reset it")
    } else {
        Finding::lack(&of::NO_RESET, "the host knows no way to reset it alone")
    });
    findings.into_iter().map(|finding| finding.about(id)).collect()
}

fn limits(facts: &PassthroughFacts, memory: &MemoryFacts, has_devices: bool) -> Finding {
    let locked = match facts.limits.locked.limit_bytes {
        None => "locked memory is not limited".to_owned(),
        Some(bytes) => format!("this process may lock {bytes} bytes"),
    };
    if !has_devices {
        return Finding::ok(&of::DMA_LIMITS, format!("{locked}; nothing is to be pinned"));
    }
    let (bytes, counted_bytes) = memory.bytes();
    // The number of mappings depends on pieces that a start chooses so that they are not too many.
    let Err(error) = facts.limits.check(0, bytes, counted_bytes) else {
        return Finding::ok(&of::DMA_LIMITS, format!("{locked}; {bytes} bytes are to be pinned"));
    };
    if let PinError::Cgroup { path, .. } = &error {
        let file = path.display().to_string();
        return Finding::lack(&of::PIN_CGROUP_LOW, error.to_string()).with("FILE", &file);
    }
    let number = bytes.saturating_add(facts.limits.locked.used_bytes).to_string();
    Finding::lack(&of::MEMLOCK_LOW, error.to_string()).with("NUMBER", &number)
}
