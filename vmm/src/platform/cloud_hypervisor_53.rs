// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The machine that guests of cloud-hypervisor v53 see.
//!
//! Owns its values. The facts behind them, with the sections that tests name, are in docs/cloud-hypervisor-state.md;
//! docs/platforms.md says what of them is not so here.

use arch::acpi::TableRules;
use arch::cpuid::{CpuidRules, FlatCount, TimingLeaf};
use arch::windows::{ShareRule, WindowRules};
use devices::virtio::Offer;
use devices::virtio::block::BlockLimits;
use hypervisor::InterruptRules;
use pci::{
    BarRules, BarStructure, BusMastering, FilledFrom, PanicDeviceRules, VirtioCapability,
    VirtioPciRules,
};

use super::{
    DeviceKind, KindOffers, NumberRules, Platform, PlatformName, PortRules, RefusedOption,
    RegisterRules, Unlisted,
};

const fn at(offset: u32, len_bytes: u32) -> BarStructure {
    BarStructure { offset, len_bytes }
}

const VIRTIO_PCI: VirtioPciRules = VirtioPciRules {
    bar_len_bytes: 512 << 10,
    common: at(0x0, 0x38),
    isr: at(0x2000, 0x1),
    device: at(0x4000, 0x1000),
    notify: at(0x6000, 0x1000),
    msix_table: at(0x8000, 0x4_0000),
    msix_pba: at(0x4_8000, 0x800),
    capabilities: &[
        VirtioCapability::Common,
        VirtioCapability::Isr,
        VirtioCapability::Device,
        VirtioCapability::Notify,
        VirtioCapability::Access,
        VirtioCapability::MsiX,
    ],
    // Entropy device, clock, watchdog.
    without_device_config: &[4, 17, 35],
    classes: &[(1, 0x02_00_00), (2, 0x01_80_00)],
    other_class: 0xff_ff_00,
    command_writable: 0xffff,
    bus_mastering: BusMastering::Ignored,
};

const _: () = assert!(VIRTIO_PCI.are_sound());

// Feature bits, as in the virtio standard.
const VERSION_1: u64 = 1 << 32;
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const IN_ORDER: u64 = 1 << 35;

const fn bits(numbers: &[u32]) -> u64 {
    let (mut bits, mut at) = (0, 0);
    while at < numbers.len() {
        bits |= 1 << numbers[at];
        at += 1;
    }
    bits
}

/// SEG_MAX, RO, BLK_SIZE, FLUSH, TOPOLOGY, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES.
const BLOCK: u64 = bits(&[2, 5, 6, 9, 10, 11, 12, 13, 14]);
/// CSUM, GUEST_CSUM, CTRL_GUEST_OFFLOADS, MTU, MAC, GUEST_TSO4 TSO6 ECN UFO, HOST_TSO4 TSO6 ECN UFO, STATUS, CTRL_VQ,
/// GUEST_ANNOUNCE, MQ.
const NET: u64 = bits(&[0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 21, NET_MQ]);
const NET_MQ: u32 = 22;

/// Features of a device, of which it offers those that its options give it.
const fn only(features: u64) -> Offer {
    Offer { keep: VERSION_1 | features, add: 0, queue_sizes: None }
}

const fn with_queues(features: u64, queue_sizes: &'static [u16]) -> Offer {
    Offer { queue_sizes: Some(queue_sizes), ..only(features) }
}

const OFFERS: KindOffers = KindOffers {
    console: with_queues(bits(&[0]), &[256, 256]),
    disk: only(INDIRECT_DESC | EVENT_IDX | BLOCK),
    disk_limits: BlockLimits {
        discard_ranges_max: 1,
        discard_sectors_max: u32::MAX,
        zero_ranges_max: 1,
        zero_sectors_max: u32::MAX,
    },
    // Also with one pair of queues.
    net: Offer { add: 1 << NET_MQ, ..only(EVENT_IDX | NET) },
    rng: with_queues(0, &[256]),
    pmem: with_queues(0, &[256]),
    // Used buffers are in the order of the available ones, whether this is offered or not.
    vsock: Offer { add: IN_ORDER, ..with_queues(0, &[256, 256, 256]) },
    // ACPI_PXM.
    mem: with_queues(bits(&[0]), &[128]),
    // DEFLATE_ON_OOM, REPORTING.
    balloon: with_queues(bits(&[2, 5]), &[128, 128, 32]),
    silent_balloon_queues: Some(&[128, 128]),
    watchdog: with_queues(0, &[8]),
    rtc: with_queues(0, &[256]),
    iommu: with_queues(0, &[256, 256]),
};

const REFUSED: &[RefusedOption] = &[
    RefusedOption { path: "iommu", why: "its virtual IOMMU is not that of cloud-hypervisor" },
    RefusedOption { path: "devices", why: "routes and BARs of passed-through devices differ" },
    RefusedOption { path: "user_devices", why: "routes and BARs of such devices differ" },
    RefusedOption { path: "vdpa", why: "vDPA devices have not been compared" },
    RefusedOption { path: "balloon.free_page_hinting", why: "its balloon has no such feature" },
    RefusedOption { path: "balloon.statistics_interval_s", why: "its balloon has no statistics" },
    RefusedOption { path: "balloon.prezero_hints", why: "its balloon has no such feature" },
];

/// The definition.
pub static CLOUD_HYPERVISOR_53: Platform = Platform {
    name: PlatformName::CloudHypervisor53,
    virtio_pci: VIRTIO_PCI,
    panic_device: PanicDeviceRules { command_at_reset: 0x103, command_writable: 0xffff },
    bars: BarRules { wide_window: FilledFrom::End, wide_align_bytes: 8 << 20 },
    windows: WindowRules {
        start_align_bytes: 1,
        end_bytes: 0x11_0000,
        shares: ShareRule::Units,
        later_memory_align_bytes: 128 << 20,
    },
    numbers: NumberRules {
        order: &[
            DeviceKind::Console,
            DeviceKind::Disk,
            DeviceKind::Net,
            DeviceKind::Rng,
            DeviceKind::GenericVhostUser,
            DeviceKind::Fs,
            DeviceKind::Pmem,
            DeviceKind::Vsock,
            DeviceKind::Mem,
            DeviceKind::Balloon,
            DeviceKind::Watchdog,
            DeviceKind::Vdpa,
            DeviceKind::Rtc,
            DeviceKind::Iommu,
        ],
        unlisted: Unlisted::LowestFree,
    },
    offers: OFFERS,
    registers: RegisterRules::Pages { first_below_end: 0x1_1000 },
    ports: PortRules { keyboard_data: false, firmware_output: Some(0x402) },
    ged_gsi: 13,
    first_intx_gsi: 5,
    tables: TableRules {
        event_device: "GEC_",
        wide_apic_ids: true,
        all_may_come: true,
        has_nmi: false,
        // The serial port.
        identity_overrides: &[4],
        has_legacy_flags: false,
        has_generation_id: false,
    },
    interrupts: InterruptRules { hides_pics: true, extended_destinations: true },
    cpuid: CpuidRules {
        flat_count: FlatCount::AtBoot,
        guest_address_bits: true,
        timing_leaf: TimingLeaf::InvariantTsc,
        msi_ext_dest_id: true,
    },
    keeps_address_bits: true,
    // Drivers may use queue_size - 2 segments in a request, of which at most 1024 descriptors are taken here.
    disk_queue_size_max: 1024,
    refused: REFUSED,
};

#[cfg(test)]
#[path = "cloud_hypervisor_53_tests.rs"]
mod tests;
