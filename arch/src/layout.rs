// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The physical address space of the guest: where RAM, boot data, tables and device windows are.
//!
//! Owns every fixed address, port and interrupt number of the machine, with the reason for it. It must never
//! depend on what is configured: a number that varies between two VMs belongs to the caller.
//!
//! ```text
//!            0  zero page, GDT, page tables, PVH start info, command line
//!       A_0000  ACPI tables (RSDP first), then SMBIOS at F_0000, the reset vector at F_FFF0
//!      10_0000  RAM: kernel, initramfs at the top
//!    C000_0000  32-bit device window
//!    E800_0000  PCI ECAM, one MiB for each bus
//!    F800_0000  unassigned; FEC0_0000 I/O APIC, FED4_0000 TPM, FEE0_0000 local APIC, FFFB_C000 KVM's own pages
//!  1_0000_0000  RAM again (what did not fit below 3 GiB)
//! FD_0000_0000  12 GiB without RAM and devices where an IOMMU of AMD's cannot map them, then RAM again
//!   after RAM   64-bit device window, up to the end of the guest's address space
//! ```

/// 4 KiB, the page size everything here is aligned to.
pub const PAGE_BYTES: u64 = 0x1000;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

// ---- Boot data in the first 640 KiB. A kernel takes over the boot vCPU with these in place and
// ---- is done with them before it allocates memory.

/// GDT of the boot vCPU. Above the real mode interrupt vectors and the BIOS data area.
pub const BOOT_GDT_GPA: u64 = 0x500;
/// An empty IDT: the boot protocols start with interrupts off.
pub const BOOT_IDT_GPA: u64 = 0x520;
/// Word with the segment of the extended BIOS data area, where a guest that was not told the
/// RSDP's address looks for it.
pub const EBDA_POINTER_GPA: u64 = 0x40e;
/// `hvm_start_info` of the PVH protocol.
pub const PVH_START_INFO_GPA: u64 = 0x6000;
/// Module list of the PVH protocol (one entry: the initramfs).
pub const PVH_MODLIST_GPA: u64 = 0x6040;
/// Memory map of the PVH protocol.
pub const PVH_MEMMAP_GPA: u64 = 0x7000;
/// `struct boot_params` of the 64-bit Linux protocol. The two protocols never boot together, so
/// the address may be that of the PVH memory map.
pub const ZERO_PAGE_GPA: u64 = 0x7000;
/// Stack for the few instructions before a kernel sets up its own.
pub const BOOT_STACK_GPA: u64 = 0x8ff0;
/// Top of the identity page tables for the 64-bit entry: a PML4, a PDPT and four page directories.
pub const BOOT_PAGE_TABLES_GPA: u64 = 0x9000;
/// Command line, NUL included in the length that follows.
pub const CMDLINE_GPA: u64 = 0x2_0000;
/// Room for the command line, as much as cloud-hypervisor gives it.
pub const CMDLINE_MAX_BYTES: u64 = 0x1_0000;

/// End of conventional memory. The RSDP is the first thing here; the other ACPI tables follow it.
pub const ACPI_GPA: u64 = 0xa_0000;
/// Same address by the name that says what a guest finds there.
pub const RSDP_GPA: u64 = ACPI_GPA;
/// The virtual machine's generation ID: 16 bytes, alone in the last page before the SMBIOS tables. The
/// memory map keeps guests' allocators off it, as off the tables around it.
pub const GENERATION_ID_GPA: u64 = SMBIOS_GPA - PAGE_BYTES;
/// SMBIOS entry point: Linux scans `F_0000` to `10_0000` for its anchor.
pub const SMBIOS_GPA: u64 = 0xf_0000;
/// First byte after the SMBIOS tables.
pub const SMBIOS_END_GPA: u64 = RESET_VECTOR_GPA;
/// Where a real mode processor restarts a PC (F000:FFF0); see [`crate::boot`].
pub const RESET_VECTOR_GPA: u64 = 0xf_fff0;
/// Kernels load at one MiB or above.
pub const HIGH_RAM_GPA: u64 = 0x10_0000;

// ---- Below 4 GiB.

/// End of RAM below 4 GiB: 3 GiB leave one for what must be reachable with 32 bits.
pub const LOW_RAM_END_GPA: u64 = 0xc000_0000;
/// 32-bit device window: BARs that cannot be placed above 4 GiB.
pub const MMIO32_GPA: u64 = LOW_RAM_END_GPA;
/// 640 MiB, up to the ECAM.
pub const MMIO32_BYTES: u64 = ECAM_GPA - MMIO32_GPA;
/// PCI configuration space, memory mapped.
pub const ECAM_GPA: u64 = 0xe800_0000;
/// 256 buses of one MiB. Every PCI segment has one bus, so segment n lies n MiB in.
pub const ECAM_BYTES: u64 = 256 * ECAM_BYTES_PER_BUS;
/// 32 devices, 8 functions, 4 KiB of configuration space each.
pub const ECAM_BYTES_PER_BUS: u64 = MIB;
/// I/O APIC, where KVM's in-kernel one answers.
pub const IOAPIC_GPA: u64 = 0xfec0_0000;
/// Number of I/O APIC pins that KVM emulates.
pub const IOAPIC_PINS: u32 = 24;
/// TPM: registers and buffer of locality 0 of its command response buffer, where PCs have it.
pub const TPM_GPA: u64 = 0xfed4_0000;
/// Length of that.
pub const TPM_BYTES: u64 = PAGE_BYTES;
/// Offset of the registers that start a command.
pub const TPM_CONTROL_OFFSET: u64 = 0x40;
/// Local APIC, the address every x86 CPU resets to. Interrupt messages (MSI) go here as well.
pub const LAPIC_GPA: u64 = 0xfee0_0000;
/// One page that Intel's real mode emulation uses as page table; KVM wants it outside RAM.
pub const KVM_IDENTITY_MAP_GPA: u64 = 0xfffb_c000;
/// Three pages for the same purpose. Both lie below the top 256 KiB, where firmware may be mapped.
pub const KVM_TSS_GPA: u64 = 0xfffb_d000;
/// Size of the KVM task state area.
pub const KVM_TSS_BYTES: u64 = 3 * PAGE_BYTES;
/// RAM continues here.
pub const HIGH_RAM_64_GPA: u64 = 4 * GIB;

// ---- Above 4 GiB.

/// First address of the range that AMD processors with an IOMMU keep for HyperTransport: DMA to a
/// guest address in it fails, so a VM with passed-through devices must not have RAM there.
pub const AMD_HT_GPA: u64 = 0xfd_0000_0000;
/// First address after that range.
pub const AMD_HT_END_GPA: u64 = 0x100_0000_0000;

// ---- Ports.

/// Sleep control, sleep status and reset register (ACPI), one byte each at the same port.
pub const ACPI_POWER_PORT: u16 = 0x600;
/// Ports that device claims.
pub const ACPI_POWER_PORT_COUNT: u16 = 8;
/// What an ACPI guest writes to [`ACPI_POWER_PORT`] to power off: sleep type S5 and sleep enable.
pub const ACPI_POWER_S5_VALUE: u8 = (ACPI_S5_SLEEP_TYPE << 2) | (1 << 5);
/// Sleep type of S5 in the `\_S5` package.
pub const ACPI_S5_SLEEP_TYPE: u8 = 5;
/// What an ACPI guest writes to [`ACPI_POWER_PORT`] to reset the machine.
pub const ACPI_POWER_RESET_VALUE: u8 = 1;
/// ACPI PM timer, four bytes, 3.579545 MHz.
pub const ACPI_PM_TIMER_PORT: u16 = 0x608;
/// Event status register of the generic event device; see [`crate::acpi::ged`].
pub const GED_PORT: u16 = 0x60c;
/// Registers of PCI hotplug; see [`crate::acpi::hotplug`].
pub const PCI_HOTPLUG_PORT: u16 = 0x610;
/// Registers of vCPU hotplug; see [`crate::acpi::cpu_hotplug`].
pub const CPU_HOTPLUG_PORT: u16 = 0x640;
/// Registers of memory hotplug; see [`crate::acpi::memory_hotplug`].
pub const MEMORY_HOTPLUG_PORT: u16 = 0x680;
/// COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Registers of a 16550.
pub const SERIAL_PORT_COUNT: u16 = 8;
/// i8042: data port at 0x60, command port at 0x64 (the reset pulse is command 0xfe).
pub const I8042_PORT: u16 = 0x60;
/// CMOS index port; data port is the next one.
pub const CMOS_PORT: u16 = 0x70;
/// Boot progress codes of firmware.
pub const POST_PORT: u16 = 0x80;
/// Where the test of a guest writes characters without a driver.
pub const DEBUG_CONSOLE_PORT: u16 = 0xe9;
/// PCI configuration mechanism 1: address at 0xcf8, data at 0xcfc.
pub const PCI_CONFIG_PORT: u16 = 0xcf8;
/// Ports that mechanism claims.
pub const PCI_CONFIG_PORT_COUNT: u16 = 8;
/// First port of the window for I/O BARs, above all fixed ports.
pub const PCI_IO_PORT: u16 = 0x1000;
/// Last port of that window.
pub const PCI_IO_LAST_PORT: u16 = 0xffff;

// ---- Global system interrupts (pins of the I/O APIC).

/// COM1.
pub const SERIAL_GSI: u32 = 4;
/// Generic event device. ISA interrupt 5 has no fixed user.
pub const GED_GSI: u32 = 5;
/// First interrupt free for others; 0 to 15 are those of the ISA bus.
pub const FIRST_FREE_GSI: u32 = 16;
/// First interrupt number that is not an I/O APIC pin, so free for MSI routes.
pub const FIRST_MSI_GSI: u32 = IOAPIC_PINS;

/// A range of guest physical addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpaRange {
    /// First address.
    pub gpa: u64,
    /// Length; a range never reaches past the end of the 64-bit address space.
    pub len_bytes: u64,
}

impl GpaRange {
    /// The range from `gpa` to `end_gpa`, which is not part of it.
    pub const fn between(gpa: u64, end_gpa: u64) -> Self {
        Self { gpa, len_bytes: end_gpa.saturating_sub(gpa) }
    }

    /// First address after the range.
    pub const fn end_gpa(&self) -> u64 {
        self.gpa.saturating_add(self.len_bytes)
    }

    /// Whether the two have an address in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.gpa < other.end_gpa() && other.gpa < self.end_gpa()
    }
}

/// Guest addresses above 4 GiB that are left out: neither RAM nor a device has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HighHole {
    /// None: RAM above 4 GiB is one range. What cloud-hypervisor does.
    #[default]
    None,
    /// [`AMD_HT_GPA`] to [`AMD_HT_END_GPA`]: for passed-through devices on an AMD host.
    AmdHyperTransport,
}

impl HighHole {
    /// The addresses that are left out.
    pub const fn range(self) -> Option<GpaRange> {
        match self {
            Self::None => None,
            Self::AmdHyperTransport => Some(GpaRange::between(AMD_HT_GPA, AMD_HT_END_GPA)),
        }
    }
}

/// Shortest share of a window; see [`shares`]. A PCI segment with less could hold no BAR worth having.
pub const SHARE_MIN_BYTES: u64 = 0x1_0000;

/// Shares a window out: one range for each weight, in order, without gaps, and as long as its part of the sum of
/// the weights, but for the rounding of the bounds to a power of two of a quarter of the shortest share at most. A
/// large BAR, which has to start at a multiple of its length, fits into such a share where it might not into one
/// of the same length elsewhere. A single weight gets the window as it is.
///
/// `None` if there is no weight, a weight is zero, or a share is shorter than [`SHARE_MIN_BYTES`].
pub fn shares(window: GpaRange, weights: &[u32]) -> Option<Vec<GpaRange>> {
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let least = u128::from(*weights.iter().min()?);
    let shortest = u128::from(window.len_bytes).checked_mul(least)?.checked_div(sum)?;
    if shortest < u128::from(SHARE_MIN_BYTES) {
        return None;
    }
    if weights.len() == 1 {
        return Some(vec![window]);
    }
    let granule = 1_u128.checked_shl(shortest.ilog2())? / 4;
    let mut bounds = vec![window.gpa];
    let mut before = 0_u128;
    for weight in weights.iter().take(weights.len() - 1) {
        before += u128::from(*weight);
        let bound = u128::from(window.gpa) + u128::from(window.len_bytes) * before / sum;
        let nearest = (bound + granule / 2) / granule * granule;
        bounds.push(u64::try_from(nearest).ok()?);
    }
    bounds.push(window.end_gpa());
    Some(bounds.array_windows().map(|[gpa, end_gpa]| GpaRange::between(*gpa, *end_gpa)).collect())
}

// The boot data areas follow one another and none reaches into the next.
const _: () = {
    assert!(PVH_MODLIST_GPA >= PVH_START_INFO_GPA + 56);
    assert!(PVH_MODLIST_GPA < PVH_MEMMAP_GPA);
    assert!(BOOT_STACK_GPA > ZERO_PAGE_GPA + PAGE_BYTES);
    assert!(BOOT_PAGE_TABLES_GPA + 6 * PAGE_BYTES <= CMDLINE_GPA);
    assert!(CMDLINE_GPA + CMDLINE_MAX_BYTES <= ACPI_GPA);
    assert!(ECAM_GPA + ECAM_BYTES <= IOAPIC_GPA);
    assert!(KVM_IDENTITY_MAP_GPA + PAGE_BYTES == KVM_TSS_GPA);
};

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;
    use crate::windows::mmio64_window;
    use proptest::prelude::*;

    #[test]
    fn device_window_follows_ram() {
        let window = mmio64_window(5 * GIB + 1, 39, HighHole::None).unwrap();
        assert_eq!(window.gpa, 6 * GIB);
        assert_eq!(window.end_gpa(), (1 << 39) - 0x1_0000);
        assert_eq!(mmio64_window(0, 36, HighHole::None).unwrap().gpa, 4 * GIB);
        assert_eq!(mmio64_window(64 * GIB, 36, HighHole::None), None);
        assert_eq!(mmio64_window(0, 32, HighHole::None), None);
        assert_eq!(mmio64_window(u64::MAX, 52, HighHole::None), None);
    }

    #[test]
    fn device_window_avoids_hypertransport() {
        assert_eq!(
            mmio64_window(8 * GIB, 40, HighHole::AmdHyperTransport).unwrap().end_gpa(),
            AMD_HT_GPA
        );
        assert_eq!(
            mmio64_window(8 * GIB, 48, HighHole::AmdHyperTransport).unwrap().gpa,
            AMD_HT_END_GPA
        );
        assert_eq!(
            mmio64_window(2048 * GIB, 48, HighHole::AmdHyperTransport).unwrap().gpa,
            2048 * GIB
        );
    }

    #[test]
    fn one_segment_has_the_whole_window() {
        let window = GpaRange::between(5 * GIB, (1 << 46) - 0x1_0000);
        assert_eq!(shares(window, &[7]), Some(vec![window]));
    }

    #[test]
    fn shares_follow_the_weights_and_suit_large_bars() {
        let window = mmio64_window(5 * GIB, 40, HighHole::None).unwrap();
        let parts = shares(window, &[1; 4]).unwrap();
        let starts: Vec<_> = parts.iter().map(|part| part.gpa / GIB).collect();
        assert_eq!(starts, [5, 256, 512, 768]);
        let parts = shares(window, &[1, 6, 1]).unwrap();
        assert_eq!(parts[1], GpaRange::between(128 * GIB, 896 * GIB), "six BARs of 128 GiB");
        assert_eq!(parts[2].end_gpa(), window.end_gpa());
        let low = GpaRange::between(MMIO32_GPA, ECAM_GPA);
        let parts = shares(low, &[1; 96]).unwrap();
        assert!(parts.iter().all(|part| part.len_bytes >= 5 * MIB), "{parts:x?}");
    }

    #[test]
    fn impossible_shares_are_none() {
        let low = GpaRange::between(MMIO32_GPA, ECAM_GPA);
        assert_eq!(shares(low, &[]), None);
        assert_eq!(shares(low, &[0]), None);
        assert_eq!(shares(low, &[1, 0]), None);
        assert_eq!(shares(low, &[1, u32::MAX]), None);
        assert_eq!(shares(GpaRange::between(0, SHARE_MIN_BYTES - 1), &[1]), None);
    }

    proptest! {
        #[test]
        fn shares_fill_the_window_without_overlap(
            gpa in 0_u64..1 << 52,
            len_bytes in 0_u64..1 << 52,
            weights in proptest::collection::vec(0_u32..40, 1..97),
        ) {
            let window = GpaRange { gpa, len_bytes };
            let Some(parts) = shares(window, &weights) else { return Ok(()) };
            prop_assert_eq!(parts.len(), weights.len());
            let mut next = window.gpa;
            let sum = weights.iter().map(|weight| u64::from(*weight)).sum::<u64>();
            for (part, weight) in parts.iter().zip(&weights) {
                prop_assert_eq!(part.gpa, next);
                next = part.end_gpa();
                let fair = len_bytes / sum * u64::from(*weight);
                let least = len_bytes / sum * u64::from(*weights.iter().min().unwrap());
                prop_assert!(part.len_bytes.abs_diff(fair) <= least / 4 + sum, "{part:x?}");
                prop_assert!(part.len_bytes >= SHARE_MIN_BYTES / 2);
            }
            prop_assert_eq!(next, window.end_gpa());
        }

        #[test]
        fn any_window_is_inside_the_address_space(ram_end_gpa: u64, phys_bits in 0_u8..=70, avoid: bool) {
            let hole = if avoid { HighHole::AmdHyperTransport } else { HighHole::None };
            if let Some(window) = mmio64_window(ram_end_gpa, phys_bits, hole) {
                prop_assert!(window.gpa >= ram_end_gpa && window.gpa >= HIGH_RAM_64_GPA);
                let reserved = GpaRange::between(AMD_HT_GPA, AMD_HT_END_GPA);
                prop_assert!(!avoid || !window.overlaps(&reserved));
                prop_assert!(window.gpa.checked_add(window.len_bytes).is_some());
            }
        }
    }
}
