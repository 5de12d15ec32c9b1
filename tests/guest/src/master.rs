// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device on the first PCI bus that is allowed DMA before anything else is done.
//!
//! Owns that one write, and when it was made and came back. Must never make the device do anything.

use crate::abi::control;
use crate::clock;
use crate::mem::{self, Block};

const FUNCTION_BYTES: u64 = 4096;
const FUNCTIONS: u64 = 8;
const DEVICES: u64 = 32;
const COMMAND: u64 = 0x04;
const BUS_MASTER: u32 = 4;
/// The registers alongside it are cleared by ones.
const COMMAND_BITS: u32 = 0xffff;

/// Sets Bus Master Enable of function 0 of `device`, and notes it in the control page.
pub fn enable(ecam: u64, device: u64, control_page: Block) {
    let command = ecam + device % DEVICES * FUNCTIONS * FUNCTION_BYTES + COMMAND;
    let before = mem::load32(command) & COMMAND_BITS;
    control_page.set(control::MASTER_ASKED_TSC, clock::now());
    mem::store32(command, before | BUS_MASTER);
    control_page.set(control::MASTER_GRANTED_TSC, clock::now());
    control_page.set(control::MASTER_COMMAND, mem::load32(command).into());
}
