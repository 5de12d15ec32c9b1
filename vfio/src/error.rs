// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of passed-through functions.
//!
//! Owns the messages only.

use std::io;
use std::path::PathBuf;

use hypervisor::KvmError;
use hypervisor::irq::IrqError;
use iommufd_ioctls::IommufdError;
use memory::{AccessError, PrefaultError};
use thiserror::Error;

use super::user_error::UserError;

use pci::ConfigError;
use pci::MsixError;

/// Why a function cannot be passed through.
#[derive(Debug, Error)]
pub enum VfioError {
    /// No device exists at the path.
    #[error("there is no PCI device at {path}; give its directory in /sys/bus/pci/devices")]
    NoDevice {
        /// The path as given.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The device has no IOMMU group.
    #[error(
        "the device at {path} is in no IOMMU group: switch the IOMMU on in the firmware and with \
         intel_iommu=on on the host's kernel command line"
    )]
    NoGroup {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device is bound to another driver.
    #[error(
        "the device at {path} belongs to {driver}; bind it to vfio-pci first (write vfio-pci to \
         its driver_override, then unbind it and write its address to \
         /sys/bus/pci/drivers_probe)"
    )]
    Driver {
        /// Path of the device.
        path: PathBuf,
        /// The driver that it is bound to.
        driver: String,
    },
    /// The device was left to a call that does not return.
    #[error(
        "the device at {path} hangs in a call of an earlier migration: it can be opened again once that call has returned"
    )]
    Left {
        /// Path of the device.
        path: PathBuf,
    },
    /// The VFIO container cannot be opened.
    #[error(
        "cannot use VFIO: the modules vfio-pci and vfio_iommu_type1 have to be loaded, and \
         /dev/vfio/vfio to be accessible"
    )]
    Container(#[source] io::Error),
    /// KVM's VFIO device failed.
    #[error("KVM cannot be informed of passed-through devices")]
    Kvm(#[from] KvmError),
    /// The group or the device cannot be opened.
    #[error(
        "cannot open the device at {path}: every device of its IOMMU group {group} has to be \
         bound to vfio-pci or to no driver, no other process may use the group, and this one \
         needs access to /dev/vfio/{group}"
    )]
    Open {
        /// Path of the device.
        path: PathBuf,
        /// Its IOMMU group.
        group: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A driver of the host uses another function of the group.
    #[error(
        "cannot open the device at {path}, as the host uses {members} of its IOMMU group {group}: bind that to \
         vfio-pci, or to no driver, first"
    )]
    NotViable {
        /// Path of the device.
        path: PathBuf,
        /// Its IOMMU group.
        group: String,
        /// The functions that are in the way.
        members: String,
    },
    /// The group cannot be put into the container.
    #[error(
        "the IOMMU does not take the device at {path}, of IOMMU group {group}{}",
        join_hint(source)
    )]
    Join {
        /// Path of the device.
        path: PathBuf,
        /// Its IOMMU group.
        group: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// iommufd cannot be opened.
    #[error(
        "cannot use iommufd: the host's kernel has to be Linux 6.6 or newer with CONFIG_IOMMUFD and \
         CONFIG_VFIO_DEVICE_CDEV, the module iommufd to be loaded, and /dev/iommu to be accessible; \
         without iommufd=on devices are passed through by type1, which every kernel with VFIO has"
    )]
    Iommufd(#[source] io::Error),
    /// An address space cannot be allocated.
    #[error("iommufd provides no address space")]
    AddressSpace(#[source] vfio_ioctls::VfioError),
    /// An address space of which this process has the number only cannot be allocated.
    #[error("iommufd provides no address space")]
    OwnSpace(#[source] IommufdError),
    /// The address space is kept for a VM that is still to be made.
    #[error("the address space belongs to no VM now")]
    NoVm,
    /// A reset of the function has failed.
    #[error(
        "the device cannot be reset, so it may hold what it was used for before; the host's kernel log \
         may say why"
    )]
    Reset(#[source] io::Error),
    /// The device has no VFIO character device.
    #[error(
        "the device at {path} has no character device for iommufd: the host's kernel lacks \
         CONFIG_VFIO_DEVICE_CDEV (Linux 6.6 or newer); leave iommufd=on out to use type1"
    )]
    NoNode {
        /// Path of the device.
        path: PathBuf,
    },
    /// The character device cannot be opened.
    #[error("cannot open the device at {path}: this process needs access to {node}")]
    OpenNode {
        /// Path of the device.
        path: PathBuf,
        /// Path of its character device.
        node: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The descriptor is not a VFIO character device.
    #[error("the opened file is not a device in /dev/vfio/devices")]
    NotANode(#[source] KvmError),
    /// The device cannot be attached through iommufd.
    #[error("cannot use the device through iommufd{}", attach_hint(source))]
    Attach {
        /// The cause.
        #[source]
        source: vfio_ioctls::VfioError,
    },
    /// Memory mapped by a pool is not the VM's.
    #[error("the memory mapped for the device is not that of this VM: {0}")]
    OtherMemory(String),
    /// The pool's iommufd does not know the device.
    #[error("the device is not bound to the iommufd that was passed with it")]
    NotInSlot(#[source] iommufd_ioctls::IommufdError),
    /// The pool's device is not the VM's.
    #[error("the open device that was passed is not the one at {path}")]
    OtherDevice {
        /// Path of the VM's device.
        path: PathBuf,
    },
    /// A descriptor is given instead of a path, without iommufd.
    #[error("a device can be given by its descriptor only with iommufd")]
    NeedsIommufd,
    /// Guest memory is at addresses that the IOMMU does not map.
    #[error(
        "guest memory at {gpa:#x} cannot be mapped for it: the host's IOMMU keeps the addresses from \
         {first:#x} to {last:#x} for other purposes{remedy}"
    )]
    ReservedAddress {
        /// Guest physical address.
        gpa: u64,
        /// First address that is kept.
        first: u64,
        /// Last address that is kept.
        last: u64,
        /// The end of the sentence, if there is an option that helps.
        remedy: &'static str,
    },
    /// Guest memory is above all addresses of the IOMMU.
    #[error(
        "guest memory at {gpa:#x} cannot be mapped for it: the last address that the host's IOMMU \
         reaches is {last:#x}; give the VM less memory"
    )]
    BeyondIommu {
        /// Guest physical address.
        gpa: u64,
        /// Last address that can be mapped.
        last: u64,
    },
    /// A system call on an open device failed.
    #[error("cannot {what}")]
    Io {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A VFIO call failed.
    #[error("the kernel refused to {what}")]
    Refused {
        /// What was attempted, as an infinitive clause.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The function is not an endpoint, or does not respond.
    #[error("the function has a header of type {found:#x}; only endpoints can be passed through")]
    Header {
        /// The header type.
        found: u8,
    },
    /// A BAR cannot be emulated.
    #[error("BAR {index} of {len_bytes} bytes cannot be exposed to the guest")]
    Bar {
        /// Its index.
        index: u8,
        /// Its length.
        len_bytes: u64,
        /// The cause.
        #[source]
        source: ConfigError,
    },
    /// The function is not one of those that have cliques.
    #[error(
        "x_nv_gpudirect_clique is for GPUs of NVIDIA's (vendor 0x10de, class 0x03), and this function has vendor \
         {vendor:#06x}, class {class:#04x}"
    )]
    CliqueOfOther {
        /// Its vendor.
        vendor: u16,
        /// Its base class.
        class: u8,
    },
    /// There is no clique of this number.
    #[error("there is no GPUDirect clique {clique}; cliques are numbered from 0 to 15")]
    CliqueNumber {
        /// The number.
        clique: u8,
    },
    /// Configuration space has no room for the capability of cliques.
    #[error(
        "x_nv_gpudirect_clique needs 8 free bytes in the function's list of capabilities, and it has none"
    )]
    NoRoomForClique,
    /// MSI-X cannot be set up.
    #[error("MSI-X cannot be set up")]
    Msix(#[from] MsixError),
    /// MSI cannot be set up.
    #[error("MSI cannot be set up")]
    Msi(#[source] IrqError),
    /// The interrupt line is not available.
    #[error("it gets no interrupt line")]
    Line(#[source] IrqError),
    /// The process that emulates the function is of no use.
    #[error(transparent)]
    User(#[from] UserError),
}

/// Why guest memory cannot be mapped for DMA.
#[derive(Debug, Error)]
pub enum PinError {
    /// RLIMIT_MEMLOCK is too low.
    #[error(
        "{needed_bytes} bytes of guest memory have to be locked for DMA, and this process may lock \
         {limit_bytes} bytes and has locked {used_bytes}: raise the limit (ulimit -l, LimitMEMLOCK= \
         of a systemd unit) by what is missing, or give the process CAP_IPC_LOCK"
    )]
    LockedMemory {
        /// Bytes of guest memory.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// Bytes already counted against it.
        used_bytes: u64,
    },
    /// The type 1 limit on mappings is too low.
    #[error(
        "{needed} DMA mappings are needed, and the kernel allows {limit}: raise \
         /sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
    )]
    Entries {
        /// Number of mappings needed.
        needed: u64,
        /// The limit.
        limit: u64,
    },
    /// A cgroup's memory limit is too low.
    #[error(
        "{needed_bytes} bytes of guest memory have to be there at once for DMA, and the cgroup's \
         limit {path} is {limit_bytes} bytes: raise it (MemoryMax= of a systemd unit)"
    )]
    Cgroup {
        /// Bytes of guest memory on ordinary pages.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// File that sets the limit.
        path: PathBuf,
    },
    /// The IOMMU refused a range.
    #[error("cannot map {len_bytes:#x} bytes of guest memory at {gpa:#x} for DMA{}", hint(source))]
    Map {
        /// Guest physical address.
        gpa: u64,
        /// Length in bytes.
        len_bytes: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The memory could not be populated, or another error occurred meanwhile.
    #[error("guest memory could not be prepared for DMA")]
    Populate(#[from] PrefaultError),
    /// Memory released by the balloon could not be populated again.
    #[error(
        "guest memory that was in the balloon could not be made ready for DMA again: the host needs \
         as much free memory as the guest may take out of its balloon"
    )]
    Repopulate {
        /// The cause.
        #[source]
        source: AccessError,
    },
    /// A thread could not be started.
    #[error("could not start a thread to map guest memory for DMA")]
    Thread(#[source] io::Error),
    /// Mapping was cancelled.
    #[error("mapping guest memory for DMA was cancelled")]
    Cancelled,
}

fn attach_hint(error: &vfio_ioctls::VfioError) -> &'static str {
    use vfio_ioctls::VfioError as Ioctl;
    match error {
        Ioctl::VfioDeviceBindIommufd(errno) => match errno.errno() {
            libc::EINVAL => ": another process, or another VM, has it",
            libc::EBUSY => {
                ": every device of its IOMMU group has to be bound to vfio-pci or to no driver, and \
                 no process may have the group in /dev/vfio open"
            }
            libc::EPERM => {
                ": another VM has a device of its IOMMU group, or the host's IOMMU does not keep \
                 interrupts of devices apart; if this guest is to be trusted with that, set \
                 /sys/module/iommufd/parameters/allow_unsafe_interrupts"
            }
            _ => "",
        },
        Ioctl::VfioDeviceAttachIommufdPt(errno) if errno.errno() == libc::ENOMEM => {
            ": the limit on locked memory (ulimit -l, LimitMEMLOCK= of a systemd unit) is reached, \
             or memory has run out"
        }
        _ => "",
    }
}

fn join_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            ": the host's IOMMU does not keep interrupts of devices apart; if this guest is to be trusted with that, set \
             /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
        }
        Some(libc::EBUSY) => ", which another process, or a driver of the host, uses",
        _ => "",
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            " (the limit on locked memory, ulimit -l, is reached, which iommufd counts for all \
             processes of the user; or memory has run out)"
        }
        Some(libc::ENOSPC) => {
            " (more mappings than /sys/module/vfio_iommu_type1/parameters/dma_entry_limit allows)"
        }
        Some(libc::EINVAL) => " (the IOMMU of this host cannot reach that address)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use vfio_ioctls::VfioError as Ioctl;
    use vmm_sys_util::errno::Error as Errno;

    use super::*;

    #[test]
    fn what_stands_in_the_way_of_a_group_is_named() {
        let text = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            VfioError::Join { path: "/d".into(), group: "7".to_owned(), source }.to_string()
        };
        assert!(text(libc::EPERM).contains("allow_unsafe_interrupts"));
        assert!(text(libc::EBUSY).contains("a driver of the host"));
        assert_eq!(text(libc::EIO), "the IOMMU does not take the device at /d, of IOMMU group 7");
    }

    #[test]
    fn what_stands_in_the_way_of_iommufd_is_named() {
        let text = |source| VfioError::Attach { source }.to_string();
        let bind = |errno| text(Ioctl::VfioDeviceBindIommufd(Errno::new(errno)));
        let attach = |errno| text(Ioctl::VfioDeviceAttachIommufdPt(Errno::new(errno)));
        assert!(bind(libc::EINVAL).contains("another VM, has it"));
        assert!(bind(libc::EBUSY).contains("vfio-pci"));
        assert!(bind(libc::EPERM).contains("allow_unsafe_interrupts"));
        assert!(attach(libc::ENOMEM).contains("LimitMEMLOCK"));
        assert_eq!(attach(libc::EIO), "cannot use the device through iommufd");
    }
}
