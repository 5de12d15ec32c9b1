// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of ioctl(2) to KVM, VFIO, iommufd, vhost-vdpa and userfaultfd, by what a thread uses them for.
//!
//! Owns their names and numbers. A filter compares type and number, the lower 16 bits: direction and length, which the
//! kernel checks itself, differ between versions of a structure. Which descriptor a request goes to no filter sees, so
//! a request that must not share its number with another is compared as a whole in `calls`.

/// A request: its name, and type and number as in bits 0 to 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// As in the kernel's headers.
    pub(super) name: &'static str,
    /// Type in bits 8 to 15, number in bits 0 to 7.
    pub(super) value: u32,
}

macro_rules! requests {
    ($(#[$doc:meta])* $ident:ident $kind:literal { $($number:literal $name:ident;)* }) => {
        $(#[$doc])*
        pub(super) const $ident: &[Request] =
            &[$(Request { name: stringify!($name), value: $kind << 8 | $number }),*];
    };
}

requests! {
    /// KVM, of a VM that exists: its vCPUs run, are saved and set, its memory slots and interrupts change. Two names
    /// in one line share a number.
    KVM_OF_A_VM 0xae {
        0x80 KVM_RUN;
        0x03 KVM_CHECK_EXTENSION;
        0x42 KVM_GET_DIRTY_LOG;
        0x46 KVM_SET_USER_MEMORY_REGION;
        0x49 KVM_SET_USER_MEMORY_REGION2;
        0x61 KVM_IRQ_LINE;
        0x62 KVM_GET_IRQCHIP;
        0x63 KVM_SET_IRQCHIP;
        0x6a KVM_SET_GSI_ROUTING;
        0x76 KVM_IRQFD;
        0x79 KVM_IOEVENTFD;
        0x7b KVM_SET_CLOCK;
        0x7c KVM_GET_CLOCK;
        0x81 KVM_GET_REGS;
        0x82 KVM_SET_REGS;
        0x83 KVM_GET_SREGS;
        0x84 KVM_SET_SREGS;
        0x85 KVM_TRANSLATE;
        0x88 KVM_GET_MSRS;
        0x89 KVM_SET_MSRS;
        0x8c KVM_GET_FPU;
        0x8d KVM_SET_FPU;
        0x8e KVM_GET_LAPIC;
        0x8f KVM_SET_LAPIC;
        0x90 KVM_SET_CPUID2;
        0x91 KVM_GET_CPUID2;
        0x98 KVM_GET_MP_STATE;
        0x99 KVM_SET_MP_STATE;
        0x9a KVM_NMI;
        0x9f KVM_GET_VCPU_EVENTS;
        0xa0 KVM_SET_VCPU_EVENTS;
        0xa1 KVM_GET_DEBUGREGS;
        0xa2 KVM_SET_DEBUGREGS_and_KVM_SET_TSC_KHZ;
        0xa4 KVM_GET_XSAVE;
        0xa5 KVM_SET_XSAVE_and_KVM_SIGNAL_MSI;
        0xa6 KVM_GET_XCRS;
        0xa7 KVM_SET_XCRS;
        0xab KVM_GET_ONE_REG;
        0xac KVM_SET_ONE_REG;
        0xad KVM_KVMCLOCK_CTRL;
        0xbe KVM_GET_NESTED_STATE;
        0xbf KVM_SET_NESTED_STATE;
        0xc0 KVM_CLEAR_DIRTY_LOG;
        0xcc KVM_GET_SREGS2;
        0xcd KVM_SET_SREGS2;
        0xcf KVM_GET_XSAVE2;
        0xd5 KVM_PRE_FAULT_MEMORY;
        0xe1 KVM_SET_DEVICE_ATTR;
        0xe2 KVM_GET_DEVICE_ATTR;
    }
}

requests! {
    /// KVM, what makes a VM.
    KVM_NEW_VM 0xae {
        0x00 KVM_GET_API_VERSION;
        0x01 KVM_CREATE_VM;
        0x02 KVM_GET_MSR_INDEX_LIST;
        0x04 KVM_GET_VCPU_MMAP_SIZE;
        0x05 KVM_GET_SUPPORTED_CPUID;
        0x0a KVM_GET_MSR_FEATURE_INDEX_LIST;
        0x41 KVM_CREATE_VCPU;
        0x47 KVM_SET_TSS_ADDR;
        0x48 KVM_SET_IDENTITY_MAP_ADDR;
        0x60 KVM_CREATE_IRQCHIP;
        0xe0 KVM_CREATE_DEVICE;
        0xfe KVM_GET_USERFAULT_INFO;
    }
}

requests! {
    /// VFIO's groups, containers and devices. Some numbers have one meaning for a container and one for a device.
    VFIO 0x3b {
        0x64 VFIO_GET_API_VERSION;
        0x65 VFIO_CHECK_EXTENSION;
        0x66 VFIO_SET_IOMMU;
        0x67 VFIO_GROUP_GET_STATUS;
        0x68 VFIO_GROUP_SET_CONTAINER;
        0x69 VFIO_GROUP_UNSET_CONTAINER;
        0x6a VFIO_GROUP_GET_DEVICE_FD;
        0x6b VFIO_DEVICE_GET_INFO;
        0x6c VFIO_DEVICE_GET_REGION_INFO;
        0x6d VFIO_DEVICE_GET_IRQ_INFO;
        0x6e VFIO_DEVICE_SET_IRQS;
        0x6f VFIO_DEVICE_RESET;
        0x70 VFIO_IOMMU_GET_INFO_and_VFIO_DEVICE_GET_PCI_HOT_RESET_INFO;
        0x71 VFIO_IOMMU_MAP_DMA_and_VFIO_DEVICE_PCI_HOT_RESET;
        0x72 VFIO_IOMMU_UNMAP_DMA;
        0x75 VFIO_IOMMU_DIRTY_PAGES_and_VFIO_DEVICE_FEATURE;
        0x76 VFIO_DEVICE_BIND_IOMMUFD;
        0x77 VFIO_DEVICE_ATTACH_IOMMUFD_PT;
        0x78 VFIO_DEVICE_DETACH_IOMMUFD_PT;
    }
}

requests! {
    /// iommufd: address spaces, their mappings and hardware page tables.
    IOMMUFD 0x3b {
        0x80 IOMMU_DESTROY;
        0x81 IOMMU_IOAS_ALLOC;
        0x83 IOMMU_IOAS_COPY;
        0x84 IOMMU_IOAS_IOVA_RANGES;
        0x85 IOMMU_IOAS_MAP;
        0x86 IOMMU_IOAS_UNMAP;
        0x87 IOMMU_OPTION;
        0x89 IOMMU_HWPT_ALLOC;
        0x8a IOMMU_GET_HW_INFO;
        0x8b IOMMU_HWPT_SET_DIRTY_TRACKING;
        0x8c IOMMU_HWPT_GET_DIRTY_BITMAP;
        0x8f IOMMU_IOAS_MAP_FILE;
    }
}

requests! {
    /// vDPA devices of vhost-vdpa: what they are, their steps, queues and mappings.
    VHOST_VDPA 0xaf {
        0x00 VHOST_GET_FEATURES_and_VHOST_SET_FEATURES;
        0x01 VHOST_SET_OWNER;
        0x10 VHOST_SET_VRING_NUM;
        0x11 VHOST_SET_VRING_ADDR;
        0x12 VHOST_SET_VRING_BASE_and_VHOST_GET_VRING_BASE;
        0x20 VHOST_SET_VRING_KICK;
        0x21 VHOST_SET_VRING_CALL;
        0x25 VHOST_SET_BACKEND_FEATURES;
        0x26 VHOST_GET_BACKEND_FEATURES;
        0x70 VHOST_VDPA_GET_DEVICE_ID;
        0x71 VHOST_VDPA_GET_STATUS;
        0x72 VHOST_VDPA_SET_STATUS;
        0x75 VHOST_VDPA_SET_VRING_ENABLE;
        0x76 VHOST_VDPA_GET_VRING_NUM;
        0x77 VHOST_VDPA_SET_CONFIG_CALL;
        0x78 VHOST_VDPA_GET_IOVA_RANGE;
        0x79 VHOST_VDPA_GET_CONFIG_SIZE;
        0x7d VHOST_VDPA_SUSPEND;
        0x7e VHOST_VDPA_RESUME;
        0x80 VHOST_VDPA_GET_VQS_COUNT;
    }
}

requests! {
    /// The configuration of vDPA devices, which the guest reads and writes.
    VHOST_VDPA_CONFIG 0xaf {
        0x73 VHOST_VDPA_GET_CONFIG;
        0x74 VHOST_VDPA_SET_CONFIG;
    }
}

requests! {
    /// userfaultfd.
    USERFAULTFD 0xaa {
        0x03 UFFDIO_COPY;
        0x07 UFFDIO_CONTINUE;
        0x02 UFFDIO_WAKE;
        0x04 UFFDIO_ZEROPAGE;
        0x00 UFFDIO_REGISTER_and_USERFAULTFD_IOC_NEW;
        0x01 UFFDIO_UNREGISTER;
        0x3f UFFDIO_API;
    }
}

/// Requests that are made for each exit of a vCPU or each page that arrives. A filter compares with them first.
pub(super) const FREQUENT: [u32; 4] = [0xae80, 0xaa03, 0xaa07, 0xaa02];
