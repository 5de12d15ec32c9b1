// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The IOMMU backend of a machine, type1 or iommufd, and the host paths of its devices.
//!
//! Owns the translation from the configuration to the address space and to a device's path on the host.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vfio::{DmaLimits, DmaSpace, HostPlace, IommufdSpace, Type1Container, VfioError};

use crate::config::{ConfigFd, DeviceConfig, VmConfig};
use crate::machine::virtio::PciContext;

/// How devices are attached to the IOMMU.
pub enum Backend {
    /// VFIO groups and a type 1 container.
    Type1,
    /// iommufd.
    Iommufd {
        /// The iommufd that the process was given, if any.
        given: Option<ConfigFd>,
    },
}

impl Backend {
    /// The configured backend.
    pub fn of(config: &VmConfig) -> Self {
        match &config.platform {
            Some(platform) if platform.iommufd => {
                Self::Iommufd { given: platform.iommufd_fd.clone() }
            }
            _ => Self::Type1,
        }
    }

    /// The limits of this process on what is mapped in such a space.
    pub fn limits(&self) -> DmaLimits {
        match self {
            Self::Type1 => DmaLimits::of_type1(),
            Self::Iommufd { .. } => DmaLimits::of_iommufd(),
        }
    }

    /// A new, empty DMA address space.
    ///
    /// # Errors
    /// Names what the host lacks.
    pub fn new_space(&self, context: &PciContext<'_>) -> Result<Arc<dyn DmaSpace>, VfioError> {
        let (vm, ram) = (context.vm, Arc::clone(context.ram));
        Ok(match self {
            Self::Type1 => Arc::new(Type1Container::new(vm, ram)?),
            Self::Iommufd { given } => {
                let given = given.as_ref().map(duplicate).transpose()?;
                Arc::new(IommufdSpace::new(vm, ram, given)?)
            }
        })
    }
}

/// Location of a device, for messages.
pub fn shown_place(config: &DeviceConfig) -> String {
    match (&config.fd, &config.path) {
        (Some(fd), _) => format!("descriptor {}", fd.number()),
        (None, Some(path)) => path.display().to_string(),
        (None, None) => String::new(),
    }
}

/// Location of a device as a path without symbolic links, to compare devices by.
pub fn real_place(config: &DeviceConfig) -> String {
    match config.path.as_deref().map(std::fs::canonicalize) {
        Some(Ok(path)) => path.display().to_string(),
        _ => shown_place(config),
    }
}

/// Location of a device.
///
/// # Errors
/// Its descriptor is not open.
pub fn place_of(config: &DeviceConfig) -> Result<HostPlace, VfioError> {
    config.fd.as_ref().map_or_else(
        || Ok(HostPlace::Sysfs(config.path.clone().unwrap_or_default())),
        |fd| duplicate(fd).map(HostPlace::Descriptor),
    )
}

/// A duplicate of a configured descriptor, for the device.
fn duplicate(fd: &ConfigFd) -> Result<OwnedFd, VfioError> {
    let what = "use the descriptor that was given";
    fd.duplicate().map_err(|source| VfioError::Io { what, source })
}
