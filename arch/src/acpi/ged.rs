// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The contract between the generic event device's AML and the device behind it.
//!
//! A hardware-reduced ACPI machine has no fixed power button and no SCI. Events come through the
//! generic event device (ACPI 6.5, section 5.6.9): an edge-triggered interrupt, and a method that
//! asks what happened. Ours asks one register:
//!
//! - one byte, I/O port [`crate::layout::GED_PORT`], read only; writes are ignored;
//! - bit n set means that event n happened since the register was last read;
//! - reading returns all bits **and clears them**, as one atomic step (several vCPUs may read);
//! - the device that sets a bit then raises interrupt [`crate::layout::GED_GSI`] once (an edge). Setting a
//!   bit that is already set raises it again, which is harmless: the guest finds nothing the
//!   second time. Bits first, then the interrupt, so that none is lost.
//! - at reset the register is 0. It is part of the machine's state: a migration carries it.
//!
//! Owns the bit numbers. Their order is that of cloud-hypervisor. Must never give a bit a second
//! meaning: guests keep the AML they booted with across a migration.

/// vCPUs were added or are to be removed; see [`super::cpu_hotplug`].
pub const EVENT_CPU: u8 = 1 << 0;
/// Memory was added; see [`super::memory_hotplug`]. Only the AML of guests that may get some looks at it.
pub const EVENT_MEMORY: u8 = 1 << 1;
/// PCI devices were added or are to be removed; see [`super::hotplug`].
pub const EVENT_PCI: u8 = 1 << 2;
/// The power button was pressed: the guest is asked to shut down.
pub const EVENT_POWER_BUTTON: u8 = 1 << 3;
/// The generation ID is another one: the guest is a copy that was restored. Only the AML of guests that
/// have one looks at it.
pub const EVENT_GENERATION: u8 = 1 << 4;
