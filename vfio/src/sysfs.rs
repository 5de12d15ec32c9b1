// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Location of a host function in sysfs, and checks before it is opened.
//!
//! Owns the checks that say what the host lacks, before VFIO fails with a less clear error.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::error::VfioError;

/// Location of a function on the host.
#[derive(Debug)]
pub enum HostPlace {
    /// Its directory in sysfs.
    Sysfs(PathBuf),
    /// Its open character device.
    Descriptor(OwnedFd),
    /// Its open character device, bound to an iommufd with memory mapped for it, and the expected location.
    Prepinned {
        /// Its directory in sysfs.
        path: PathBuf,
        /// Its character device.
        node: OwnedFd,
    },
}

impl HostPlace {
    /// Checks the function without opening it.
    ///
    /// # Errors
    /// Names what the host lacks.
    pub fn check(&self) -> Result<(), VfioError> {
        match self {
            Self::Sysfs(path) | Self::Prepinned { path, .. } => {
                SysfsFunction::find(path).map(|_| ())
            }
            Self::Descriptor(_) => Ok(()),
        }
    }

    /// The function's directory in sysfs, if it is known.
    pub(super) fn directory(&self) -> Option<PathBuf> {
        match self {
            Self::Sysfs(path) | Self::Prepinned { path, .. } => Some(path.clone()),
            Self::Descriptor(node) => node_directory(Path::new(CHARACTER_DEVICES), node),
        }
    }

    /// The directory in sysfs of the function's IOMMU group, without symbolic links; `None` if it is in none, or the host does
    /// not say.
    pub fn group(&self) -> Option<PathBuf> {
        self.directory()?.join("iommu_group").canonicalize().ok()
    }

    /// Whether the host knows how to reset the function alone.
    pub fn has_reset(&self) -> bool {
        self.directory().is_some_and(|path| has_reset(&path))
    }
}

/// The kernel lists the ways in `reset_method`. Where that is missing (before Linux 5.15) or cannot be read, there is a
/// file to reset the function by if there is a way.
fn has_reset(path: &Path) -> bool {
    match fs::read_to_string(path.join("reset_method")) {
        Ok(methods) => !methods.trim().is_empty(),
        Err(_) => path.join("reset").exists(),
    }
}

/// A function in sysfs with an IOMMU and a VFIO driver.
#[derive(Clone, Debug)]
pub(super) struct SysfsFunction {
    /// Its directory, without symbolic links.
    pub path: PathBuf,
    /// Its IOMMU group.
    pub group: String,
}

/// Links to all character devices of the host, by their numbers.
const CHARACTER_DEVICES: &str = "/sys/dev/char";
/// The bus of mediated devices: devices that a host driver emulates, or parts of one.
const MEDIATED_BUS: &str = "mdev";
const NO_DRIVER: &str = "no driver";

/// Name of a link's target.
fn link_name(path: &Path) -> Option<String> {
    Some(path.read_link().ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Character devices by which VFIO opens the function at `path` in sysfs: of its IOMMU group, and its own, which an
/// iommufd takes.
pub fn host_nodes(path: &Path) -> Vec<PathBuf> {
    let group = link_name(&path.join("iommu_group"));
    let own = path.join("vfio-dev").read_dir().into_iter().flatten().flatten();
    let own = own.map(|node| Path::new("/dev/vfio/devices").join(node.file_name()));
    group.map(|group| Path::new("/dev/vfio").join(group)).into_iter().chain(own).collect()
}

/// A function in an IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// Its address, or the name of its folder in sysfs.
    pub name: String,
    /// The driver that it is bound to.
    pub driver: Option<String>,
}

impl GroupMember {
    /// Whether the kernel lends no function of the group to a VM because of this one: its driver uses it for DMA.
    pub fn is_in_the_way(&self) -> bool {
        // Drivers that leave DMA of their functions to others (`driver_managed_dma` in the kernel).
        const WITHOUT_DMA: [&str; 2] = ["pci-stub", "pcieport"];
        let stays_out = |driver: &str| driver.contains("vfio") || WITHOUT_DMA.contains(&driver);
        self.driver.as_deref().is_some_and(|driver| !stays_out(driver))
    }
}

/// The IOMMU group of the function at `path` in sysfs, with all functions in it; `None` if it is in none.
pub fn group_of(path: &Path) -> Option<(String, Vec<GroupMember>)> {
    let number = link_name(&path.join("iommu_group"))?;
    let members = path.join("iommu_group/devices").read_dir().into_iter().flatten().flatten();
    let mut members: Vec<_> = members
        .map(|member| GroupMember {
            name: member.file_name().to_string_lossy().into_owned(),
            driver: link_name(&member.path().join("driver")),
        })
        .collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    Some((number, members))
}

/// Directory in sysfs of the function that has this open character device; `devices` has a link for each of the host.
fn node_directory(devices: &Path, node: &OwnedFd) -> Option<PathBuf> {
    let metadata = File::from(node.try_clone().ok()?).metadata().ok()?;
    if !metadata.file_type().is_char_device() {
        return None;
    }
    let number = metadata.rdev();
    let name = format!("{}:{}", libc::major(number), libc::minor(number));
    devices.join(name).join("device").canonicalize().ok()
}

/// Whether an open file is the character device of the function at `path`.
pub(super) fn is_node_of(path: &Path, node: &File) -> bool {
    let Ok(metadata) = node.metadata() else { return false };
    let number = metadata.rdev();
    let text = format!("{}:{}", libc::major(number), libc::minor(number));
    let nodes = path.join("vfio-dev").read_dir();
    let mut numbers = nodes.into_iter().flatten().flatten().map(|node| node.path().join("dev"));
    metadata.file_type().is_char_device()
        && numbers.any(|file| fs::read_to_string(file).is_ok_and(|own| own.trim() == text))
}

impl SysfsFunction {
    /// Examines the sysfs directory.
    ///
    /// # Errors
    /// Names what the host lacks.
    pub fn find(path: &Path) -> Result<Self, VfioError> {
        let path = path
            .canonicalize()
            .map_err(|source| VfioError::NoDevice { path: path.to_owned(), source })?;
        let group = link_name(&path.join("iommu_group"))
            .ok_or_else(|| VfioError::NoGroup { path: path.clone() })?;
        let driver = link_name(&path.join("driver")).unwrap_or_else(|| NO_DRIVER.to_owned());
        // Names of vendors' variant drivers contain vfio too. Mediated devices only have drivers for
        // passthrough, whatever their names.
        let is_mediated = link_name(&path.join("subsystem")).is_some_and(|bus| bus == MEDIATED_BUS);
        let is_for_vfio = driver.contains("vfio") || (is_mediated && driver != NO_DRIVER);
        if !is_for_vfio {
            return Err(VfioError::Driver { path, driver });
        }
        Ok(Self { path, group })
    }

    /// Its character device for iommufd; `None` if the kernel provides none.
    pub fn node(&self) -> Option<PathBuf> {
        let mut nodes = self.path.join("vfio-dev").read_dir().ok()?;
        Some(Path::new("/dev/vfio/devices").join(nodes.next()?.ok()?.file_name()))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn whether_the_host_knows_a_reset() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let knows = || HostPlace::Sysfs(root.as_path().to_owned()).has_reset();
        assert!(!knows());
        fs::write(root.as_path().join("reset"), "").unwrap();
        assert!(knows(), "an older kernel");
        fs::write(root.as_path().join("reset_method"), "\n").unwrap();
        assert!(!knows(), "all were taken away");
        fs::write(root.as_path().join("reset_method"), "flr bus\n").unwrap();
        assert!(knows());
    }

    #[test]
    fn a_descriptor_leads_to_the_function_and_its_group() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let root = root.as_path().canonicalize().unwrap();
        let (device, group) = (root.join("0000:00:03.0"), root.join("iommu_groups/7"));
        for folder in [device.join("vfio-dev/vfio3"), group.clone(), root.join("char")] {
            fs::create_dir_all(folder).unwrap();
        }
        symlink(&group, device.join("iommu_group")).unwrap();
        symlink(&device, device.join("vfio-dev/vfio3/device")).unwrap();
        symlink(device.join("vfio-dev/vfio3"), root.join("char/1:3")).unwrap();
        let of = |path: &str| {
            let node = OwnedFd::from(File::open(path).unwrap());
            node_directory(&root.join("char"), &node)
        };
        assert_eq!(of("/dev/null"), Some(device.clone()));
        assert_eq!(of("/dev/zero"), None, "another device");
        assert_eq!(of("/proc/self/status"), None, "no device");
        assert_eq!(HostPlace::Sysfs(device).group(), Some(group));
        assert_eq!(HostPlace::Sysfs(root).group(), None);
    }

    #[test]
    fn what_the_host_lacks_is_named() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let device = root.as_path().join("0000:00:03.0");
        let why = || SysfsFunction::find(&device).unwrap_err().to_string();
        assert!(why().contains("there is no PCI device"));
        fs::create_dir(&device).unwrap();
        assert!(why().contains("intel_iommu=on"));
        symlink("/sys/kernel/iommu_groups/7", device.join("iommu_group")).unwrap();
        assert!(why().contains("belongs to no driver"));
        symlink("/sys/bus/pci/drivers/nvme", device.join("driver")).unwrap();
        assert!(why().contains("belongs to nvme"));
        fs::remove_file(device.join("driver")).unwrap();
        symlink("/sys/bus/pci/drivers/mlx5_vfio_pci", device.join("driver")).unwrap();

        let function = SysfsFunction::find(&device).unwrap();
        assert_eq!(function.group, "7");
        assert_eq!(function.node(), None);
        fs::create_dir_all(device.join("vfio-dev/vfio3")).unwrap();
        assert_eq!(function.node(), Some("/dev/vfio/devices/vfio3".into()));
        let nodes = ["/dev/vfio/7", "/dev/vfio/devices/vfio3"].map(PathBuf::from);
        assert_eq!(host_nodes(&function.path), nodes);

        let open = |path: &str| File::open(path).unwrap();
        assert!(!is_node_of(&function.path, &open("/dev/null")));
        fs::write(device.join("vfio-dev/vfio3/dev"), "1:3\n").unwrap();
        assert!(is_node_of(&function.path, &open("/dev/null")));
        assert!(!is_node_of(&function.path, &open("/dev/zero")), "another device");
        assert!(!is_node_of(&function.path, &open("/proc/self/status")), "no device");
    }

    #[test]
    fn a_function_of_the_group_with_a_driver_of_its_own_is_in_the_way() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let group = root.as_path().join("iommu_groups/5");
        let device = |name: &str, driver: Option<&str>| {
            let path = root.as_path().join(name);
            fs::create_dir(&path).unwrap();
            symlink(&group, path.join("iommu_group")).unwrap();
            symlink(&path, group.join("devices").join(name)).unwrap();
            if let Some(driver) = driver {
                symlink(Path::new("/sys/bus/pci/drivers").join(driver), path.join("driver"))
                    .unwrap();
            }
            path
        };
        fs::create_dir_all(group.join("devices")).unwrap();
        let first = device("0000:01:00.0", Some("vfio-pci"));
        device("0000:00:1c.0", Some("pcieport"));
        device("0000:01:00.1", Some("snd_hda_intel"));
        device("0000:01:00.2", None);
        let (number, members) = group_of(&first).unwrap();
        assert_eq!((number.as_str(), members.len()), ("5", 4));
        let in_the_way = members.iter().filter(|member| member.is_in_the_way());
        let names: Vec<_> = in_the_way.map(|member| member.name.as_str()).collect();
        assert_eq!(names, ["0000:01:00.1"]);
        assert_eq!(group_of(root.as_path()), None);
    }

    #[test]
    fn a_mediated_device_may_have_any_driver() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let device = root.as_path().join("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001");
        fs::create_dir(&device).unwrap();
        symlink("/sys/kernel/iommu_groups/8", device.join("iommu_group")).unwrap();
        symlink("/sys/bus/mdev", device.join("subsystem")).unwrap();
        assert!(SysfsFunction::find(&device).unwrap_err().to_string().contains("no driver"));
        symlink("/sys/bus/mdev/drivers/mtty", device.join("driver")).unwrap();
        assert_eq!(SysfsFunction::find(&device).unwrap().group, "8");
        fs::remove_file(device.join("subsystem")).unwrap();
        symlink("/sys/bus/pci", device.join("subsystem")).unwrap();
        assert!(SysfsFunction::find(&device).unwrap_err().to_string().contains("mtty"));
    }
}
