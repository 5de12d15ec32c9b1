// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of interrupt routes.
//!
//! Owns which global system interrupt (GSI) goes where: the fixed lines of PIC and IOAPIC, and the
//! numbers handed out to message-signalled vectors. Pure: it builds the table that the kernel gets
//! and never calls the kernel.

use std::collections::BTreeMap;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, kvm_irq_routing_entry, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
    kvm_irq_routing_msi__bindgen_ty_1,
};

use crate::irq::MsiMessage;

/// Number of IOAPIC lines, which are GSIs 0 to 23.
pub const IOAPIC_LINES: u32 = 24;
/// Number of lines of the two PICs, which are GSIs 0 to 15.
const PIC_LINES: u32 = 16;
const PIC_LINES_EACH: u32 = 8;
/// Number of table entries for the fixed lines.
const FIXED_ROUTES: u32 = IOAPIC_LINES + PIC_LINES;
/// Maximum that every kernel since 5.9 accepts (`KVM_MAX_IRQ_ROUTES`) and the bindings can carry.
const ROUTES_MAX: u32 = 4096;

/// What a platform decides about interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptRules {
    /// Guests have no PICs. The kernel's are there all the same: all their lines are masked, and no GSI reaches them, as
    /// one would reach the guest through LINT0.
    pub hides_pics: bool,
    /// The extended destination of a message (bits 11 to 5 of its address) counts, as bits 14 to 8 of the APIC id.
    pub extended_destinations: bool,
}

/// The rules for this program's own guests.
pub const GODWIT_INTERRUPTS: InterruptRules =
    InterruptRules { hides_pics: false, extended_destinations: false };

/// Bits of a message's address with the extended destination.
const EXTENDED_DESTINATION: u64 = 0x7f << 5;

/// The interrupt routes of one VM.
#[derive(Debug)]
pub struct RouteTable {
    rules: InterruptRules,
    /// Maximum number of entries, including the fixed ones.
    limit: u32,
    /// Vectors by GSI; `None` until they have a message.
    vectors: BTreeMap<u32, Option<MsiMessage>>,
    /// Lower bound of the free GSIs below `end`.
    next: u32,
}

impl RouteTable {
    /// A table with only the fixed lines, for this program's own guests. `limit` is the maximum that the kernel reports.
    #[cfg(test)]
    pub fn new(limit: u32) -> Self {
        Self::with_rules(limit, GODWIT_INTERRUPTS)
    }

    /// A table with only the fixed lines. `limit` is the maximum that the kernel reports.
    pub fn with_rules(limit: u32, rules: InterruptRules) -> Self {
        Self { rules, limit: limit.min(ROUTES_MAX), vectors: BTreeMap::new(), next: IOAPIC_LINES }
    }

    /// Maximum number of entries.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Maximum number of vectors.
    fn capacity(&self) -> u32 {
        self.limit.saturating_sub(FIXED_ROUTES)
    }

    /// Allocates a GSI for a vector.
    pub fn allocate(&mut self) -> Option<u32> {
        let end = IOAPIC_LINES + self.capacity();
        let free = |table: &Self, range: std::ops::Range<u32>| {
            range.into_iter().find(|gsi| !table.vectors.contains_key(gsi))
        };
        let gsi = free(self, self.next..end).or_else(|| free(self, IOAPIC_LINES..self.next))?;
        self.next = gsi + 1;
        self.vectors.insert(gsi, None);
        Some(gsi)
    }

    /// Frees a GSI; one that is not allocated is ignored.
    pub fn free(&mut self, gsi: u32) {
        self.vectors.remove(&gsi);
    }

    /// Sets the route of a vector; returns whether the table changed.
    pub fn set(&mut self, gsi: u32, message: MsiMessage) -> bool {
        match self.vectors.get_mut(&gsi) {
            Some(route) if *route != Some(message) => {
                *route = Some(message);
                true
            }
            _ => false,
        }
    }

    /// Removes the route of a vector, as after a failed update.
    pub fn unset(&mut self, gsi: u32) {
        if let Some(route) = self.vectors.get_mut(&gsi) {
            *route = None;
        }
    }

    /// The table as kernel entries.
    pub fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let pic_lines = if self.rules.hides_pics { 0 } else { PIC_LINES };
        let pic = (0..pic_lines).map(|gsi| {
            let chip =
                if gsi < PIC_LINES_EACH { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE };
            line(gsi, chip, gsi % PIC_LINES_EACH)
        });
        let ioapic = (0..IOAPIC_LINES).map(|gsi| line(gsi, KVM_IRQCHIP_IOAPIC, gsi));
        let vectors = self.vectors.iter().filter_map(|(gsi, message)| {
            message.map(|message| vector(*gsi, self.as_kernel(message)))
        });
        pic.chain(ioapic).chain(vectors).collect()
    }
}

impl RouteTable {
    /// The message as the kernel takes it: bits 31 to 8 of an APIC id are in the upper half of the address.
    pub fn as_kernel(&self, message: MsiMessage) -> MsiMessage {
        let extended = message.address & EXTENDED_DESTINATION;
        if !self.rules.extended_destinations || extended == 0 {
            return message;
        }
        let address = message.address & !EXTENDED_DESTINATION | extended << (32 + 8 - 5);
        MsiMessage { address, ..message }
    }
}

fn line(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry =
        kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
    entry
}

fn vector(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let word = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
    entry.u.msi = kvm_irq_routing_msi {
        address_lo: word(message.address),
        address_hi: word(message.address >> 32),
        data: message.data,
        __bindgen_anon_1: kvm_irq_routing_msi__bindgen_ty_1 { pad: 0 },
    };
    entry
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fixed_lines_are_those_of_a_pc() {
        let entries = RouteTable::new(4096).entries();
        // SAFETY: all entries of an empty table are of the irqchip kind.
        let lines: Vec<_> = entries
            .iter()
            .map(|entry| (entry.gsi, unsafe { (entry.u.irqchip.irqchip, entry.u.irqchip.pin) }))
            .collect();
        assert_eq!(lines.len(), 40);
        assert!(entries.iter().all(|entry| entry.type_ == KVM_IRQ_ROUTING_IRQCHIP));
        for expected in
            [(0, (0, 0)), (7, (0, 7)), (8, (1, 0)), (15, (1, 7)), (0, (2, 0)), (23, (2, 23))]
        {
            assert!(lines.contains(&expected), "{expected:?}");
        }
    }

    #[test]
    fn a_vector_without_a_message_has_no_entry_and_an_address_is_split() {
        let mut table = RouteTable::new(4096);
        let gsi = table.allocate().unwrap();
        assert_eq!(table.entries().len(), 40);
        let message = MsiMessage { address: 0x1_fee0_1000, data: 0x4041 };
        assert!(table.set(gsi, message));
        assert!(!table.set(gsi, message), "an unchanged message must not reach the kernel");
        let entry = *table.entries().last().unwrap();
        assert_eq!((entry.gsi, entry.type_), (gsi, KVM_IRQ_ROUTING_MSI));
        // SAFETY: the entry is of the MSI kind.
        let msi = unsafe { entry.u.msi };
        assert_eq!((msi.address_lo, msi.address_hi, msi.data), (0xfee0_1000, 1, 0x4041));
    }

    #[test]
    fn numbers_run_out_at_the_kernels_limit_and_come_back() {
        let mut table = RouteTable::new(4096);
        let all: Vec<u32> = std::iter::from_fn(|| table.allocate()).collect();
        assert_eq!(all.len(), 4096 - 40);
        assert!(all.iter().all(|gsi| *gsi >= IOAPIC_LINES && *gsi < 4096));
        for gsi in &all {
            table.set(*gsi, MsiMessage { address: 0xfee0_0000, data: *gsi });
        }
        assert_eq!(table.entries().len(), 4096);
        table.free(100);
        assert_eq!(table.allocate(), Some(100));
        assert_eq!(RouteTable::new(8).allocate(), None);
    }

    proptest! {
        #[test]
        fn no_number_is_handed_out_twice(steps in prop::collection::vec(any::<Option<u8>>(), 0..200)) {
            let mut table = RouteTable::new(40 + 16);
            let mut held = BTreeSet::new();
            for step in steps {
                if let Some(pick) = step {
                    let gsi = IOAPIC_LINES + u32::from(pick % 16);
                    held.remove(&gsi);
                    table.free(gsi);
                } else if let Some(gsi) = table.allocate() {
                    prop_assert!(held.insert(gsi));
                } else {
                    prop_assert_eq!(held.len(), 16);
                }
            }
        }
    }

    #[test]
    fn a_platform_without_pics_has_no_route_to_them() {
        let rules = InterruptRules { hides_pics: true, ..GODWIT_INTERRUPTS };
        let entries = RouteTable::with_rules(4096, rules).entries();
        assert_eq!(entries.len(), 24);
        assert!(entries.iter().zip(0..).all(|(entry, gsi)| entry.gsi == gsi));
    }

    #[test]
    fn an_extended_destination_becomes_the_upper_bits_of_the_apic_id() {
        let address = 0xfee0_0000 | 0x34 << 12 | 0x5 << 5;
        let addresses = |extended_destinations| {
            let rules = InterruptRules { extended_destinations, ..GODWIT_INTERRUPTS };
            let mut table = RouteTable::with_rules(4096, rules);
            let gsi = table.allocate().unwrap();
            table.set(gsi, MsiMessage { address, data: 0x41 });
            let entry = *table.entries().last().unwrap();
            // SAFETY: the entry is that of a message.
            let message = unsafe { entry.u.msi };
            (message.address_lo, message.address_hi)
        };
        assert_eq!(addresses(true), (0xfee3_4000, 0x500));
        assert_eq!(addresses(false), (0xfee3_40a0, 0));
        // A message that is not sent by way of a route is translated alike.
        let rules = InterruptRules { extended_destinations: true, ..GODWIT_INTERRUPTS };
        let sent = RouteTable::with_rules(4096, rules).as_kernel(MsiMessage { address, data: 1 });
        assert_eq!(sent, MsiMessage { address: 0x500_fee3_4000, data: 1 });
    }
}
