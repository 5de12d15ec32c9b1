// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver of the panic device (pvpanic-pci), which reports one event.
//!
//! Owns nothing but the register. Must never end the guest.

use crate::abi::balloon_failure;
use crate::mem;
use crate::virtio::{BARS_GPA, functions, place_bars};

/// Device and vendor of pvpanic-pci.
const ID: u32 = 0x0011_1b36;
const BAR_0: u64 = 0x10;

/// Reports `events` where the device supports them; fails where there is none, or if it does not.
pub fn report(ecam: u64, events: u8) -> Result<(), u64> {
    let function = functions(ecam).find(|at| mem::load32(*at) == ID);
    let function = function.ok_or(balloon_failure::DEVICE)?;
    place_bars(function, BARS_GPA, 0);
    let register = u64::from(mem::load32(function + BAR_0) & !0xf);
    if mem::load8(register) & events != events {
        return Err(balloon_failure::FEATURES);
    }
    mem::store8(register, events);
    Ok(())
}
