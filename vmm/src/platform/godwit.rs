// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The machine that this program's own guests see.
//!
//! Owns its values, in the form of every platform's. The crates that obey them have them as their defaults.

use arch::acpi::GODWIT_TABLES;
use arch::cpuid::GODWIT_CPUID;
use arch::layout;
use arch::windows::GODWIT_WINDOWS;
use hypervisor::GODWIT_INTERRUPTS;
use pci::{GODWIT_BARS, GODWIT_PANIC_DEVICE, GODWIT_VIRTIO_PCI};

use super::{
    DeviceKind, KindOffers, NumberRules, Platform, PlatformName, PortRules, RegisterRules, Unlisted,
};

/// The definition.
pub static GODWIT: Platform = Platform {
    name: PlatformName::Godwit,
    virtio_pci: GODWIT_VIRTIO_PCI,
    panic_device: GODWIT_PANIC_DEVICE,
    bars: GODWIT_BARS,
    windows: GODWIT_WINDOWS,
    numbers: NumberRules {
        order: &[
            DeviceKind::Console,
            DeviceKind::Disk,
            DeviceKind::Net,
            DeviceKind::Fs,
            DeviceKind::GenericVhostUser,
            // Before the balloon, which offers less while nothing is discarded.
            DeviceKind::Vdpa,
            DeviceKind::Rng,
            DeviceKind::Rtc,
            DeviceKind::Pmem,
            DeviceKind::Vsock,
            // Before the balloon, here and after a restore: they determine its maximum size.
            DeviceKind::Mem,
            DeviceKind::Watchdog,
            DeviceKind::Iommu,
            DeviceKind::Balloon,
        ],
        unlisted: Unlisted::FromHighest,
    },
    offers: KindOffers::AS_THE_DEVICES,
    registers: RegisterRules::Ports,
    ports: PortRules { keyboard_data: true, firmware_output: None },
    ged_gsi: layout::GED_GSI,
    first_intx_gsi: layout::FIRST_FREE_GSI,
    tables: GODWIT_TABLES,
    interrupts: GODWIT_INTERRUPTS,
    cpuid: GODWIT_CPUID,
    keeps_address_bits: false,
    disk_queue_size_max: 32768,
    refused: &[],
};
