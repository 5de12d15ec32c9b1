// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI functions: configuration space, addresses of BARs, MSI-X.
//!
//! Owns what is kept of a register that the guest was changing: of a BAR that it has just sized, the address.

use std::ops::Range;

use arch::layout::{ECAM_GPA, MMIO32_GPA};
use cloud_hypervisor_state::{BarRegion, MsixConfig, PciConfiguration, Pvpanic};
use pci::{ConfigSpaceState, MsixEntryState, MsixState, PANIC_DEVICE_KIND, PciDeviceState};
use serde_json::json;

use super::error::{AdoptError, ensure};
use super::memory::MemoryLayout;
use super::topology::Place;
use crate::config::vm::PVPANIC_ID;
use crate::machine::PciFunctionState;

/// Bytes at the end of the guest's addresses that are no window: platform devices, and a last page.
const END_BYTES: u64 = 0x11_0000;
const STANDARD_REGISTERS: usize = 64;
const BAR0: usize = 4;
const BARS: usize = 6;
const BYTES_OF_REGISTER: usize = 4;
/// Bits of a BAR that say its type.
const BAR_TYPE_BITS: u32 = 0xf;
const BAR_TYPE_64: u32 = 0x4;
/// Events that a panic device lists.
const PANIC_EVENTS: u8 = 3;
/// Control bits of MSI-X, in the upper half of its first register.
const MSIX_ENABLE: u32 = 1 << 31;
const MSIX_MASK: u32 = 1 << 30;
const VECTOR_MASKED: u32 = 1;
/// Id of a capability, and that of MSI-X.
const CAPABILITY_ID_BITS: u32 = 0xff;
const MSIX_ID: u32 = 0x11;

/// Where BARs may be.
#[derive(Clone, Debug)]
pub struct Windows {
    low: Range<u64>,
    high: Range<u64>,
    memory: MemoryLayout,
}

impl Windows {
    /// The windows of a guest with this memory and these address bits.
    ///
    /// # Errors
    /// Memory leaves no room.
    pub fn of(memory: &MemoryLayout, address_bits: u8) -> Result<Self, AdoptError> {
        let end =
            1_u64.checked_shl(address_bits.into()).unwrap_or(u64::MAX).saturating_sub(END_BYTES);
        let high = memory.device_area_gpa..end;
        ensure(
            high.start < high.end,
            || "memory-manager: start_of_device_area".to_owned(),
            || format!("{:#x} is beyond what {address_bits} address bits reach", high.start),
        )?;
        Ok(Self { low: MMIO32_GPA..ECAM_GPA, high, memory: memory.clone() })
    }

    /// Whether a BAR of this kind may be there.
    pub fn hold(&self, bar: &Range<u64>, is_wide: bool) -> bool {
        let within = |window: &Range<u64>| window.start <= bar.start && bar.end <= window.end;
        let fits = within(&self.low) || is_wide && within(&self.high);
        fits && !self.memory.overlaps(bar)
    }
}

/// Bytes that are kept apart from the registers: where they belong.
pub type Apart<'a> = Option<(usize, &'a [u8])>;

/// The configuration space of a function; `path` is that of its node.
///
/// # Errors
/// Names the register.
pub fn config_space(
    path: &str,
    theirs: &PciConfiguration,
    apart: Apart<'_>,
    place: &Place,
    windows: &Windows,
) -> Result<ConfigSpaceState, AdoptError> {
    let path = format!("{path}/pci_configuration");
    let at = |field: &str| format!("{path}: {field}");
    ensure(
        theirs.pending_bar_reprogram.is_empty(),
        || at("pending_bar_reprogram"),
        || "a BAR is being moved".to_owned(),
    )?;
    ensure(!theirs.rom_bar_used, || at("rom_bar_used"), || "an expansion ROM".to_owned())?;
    let mut registers = *theirs.registers;
    let bars = settle_bars(&path, theirs, &mut registers)?;
    check_places(&path, &bars, place, windows)?;
    if let Some((offset, bytes)) = apart {
        for (at_byte, byte) in (offset..).zip(bytes) {
            let shift = u32::try_from(at_byte % BYTES_OF_REGISTER * 8).unwrap_or(0);
            if let Some(register) = registers.get_mut(at_byte / BYTES_OF_REGISTER) {
                *register = *register & !(0xff << shift) | u32::from(*byte) << shift;
            }
        }
    }
    let (standard, extended) = registers.split_at(STANDARD_REGISTERS);
    let extended = (STANDARD_REGISTERS..).zip(extended).filter(|(_, value)| **value != 0);
    let offset = |register: usize| u16::try_from(register.saturating_mul(BYTES_OF_REGISTER));
    let extended_registers = extended
        .map(|(register, value)| offset(register).map(|offset| (offset, *value)))
        .collect::<Result<_, _>>()
        .map_err(|_| AdoptError::refused(at("registers"), "too many"))?;
    Ok(ConfigSpaceState { version: 1, registers: standard.to_vec(), extended_registers })
}

/// A BAR with its address.
struct Bar {
    index: usize,
    gpa: u64,
    /// By its mask.
    len_bytes: u64,
    is_wide: bool,
}

/// Puts the address of each BAR into its register, and returns the BARs.
fn settle_bars(
    path: &str,
    theirs: &PciConfiguration,
    registers: &mut [u32; 1024],
) -> Result<Vec<Bar>, AdoptError> {
    let mut bars = Vec::new();
    let mut upper_of: Option<(u32, u32)> = None;
    for (index, bar) in theirs.bars.iter().enumerate() {
        let at = || format!("{path}: bars[{index}]");
        if !bar.used {
            let is_none = bar.region.is_none() && upper_of.is_none();
            ensure(is_none, at, || "a half of a BAR".to_owned())?;
            continue;
        }
        let number = BAR0.saturating_add(index);
        let register = registers.get_mut(number);
        let (Some(register), Some(writable)) = (register, theirs.writable_bits.get(number)) else {
            return Err(AdoptError::refused(at(), "no such register"));
        };
        // All address bits set: it was sized, and has the address that it had.
        let is_sized = *register & writable == *writable;
        ensure(*register == bar.addr || is_sized, at, || {
            format!("the register has {:#x}, and the BAR {:#x}", *register, bar.addr)
        })?;
        *register = bar.addr;
        match (upper_of.take(), bar.region) {
            (Some((low, low_mask)), None) => bars.push(Bar {
                index: index.saturating_sub(1),
                gpa: u64::from(bar.addr) << 32 | u64::from(low & !BAR_TYPE_BITS),
                len_bytes: (!(u64::from(bar.size) << 32 | u64::from(low_mask))).wrapping_add(1),
                is_wide: true,
            }),
            (None, Some(BarRegion::Memory32BitRegion)) => {
                ensure(bar.addr & BAR_TYPE_BITS == 0, at, || format!("{:#x}", bar.addr))?;
                let len_bytes = u64::from(!bar.size).saturating_add(1);
                bars.push(Bar { index, gpa: bar.addr.into(), len_bytes, is_wide: false });
            }
            (None, Some(BarRegion::Memory64BitRegion)) => {
                ensure(bar.addr & BAR_TYPE_BITS == BAR_TYPE_64, at, || format!("{:#x}", bar.addr))?;
                upper_of = Some((bar.addr, bar.size));
            }
            _ => return Err(AdoptError::refused(at(), "a BAR of a kind that is not known")),
        }
    }
    ensure(upper_of.is_none(), || format!("{path}: bars[{BARS}]"), || "missing".to_owned())?;
    Ok(bars)
}

/// Checks that the BARs are those of the tree, and in the windows.
fn check_places(
    path: &str,
    bars: &[Bar],
    place: &Place,
    windows: &Windows,
) -> Result<(), AdoptError> {
    for bar in bars {
        let at = || format!("{path}: bars[{}]", bar.index);
        let listed = place.bars.iter().find(|(index, ..)| usize::try_from(*index) == Ok(bar.index));
        let (_, base, size) = *listed
            .ok_or_else(|| AdoptError::refused(at(), "the tree of devices does not have it"))?;
        ensure((base, size) == (bar.gpa, bar.len_bytes), at, || {
            let (gpa, len_bytes) = (bar.gpa, bar.len_bytes);
            format!(
                "{len_bytes:#x} bytes at {gpa:#x}, in the tree of devices {size:#x} at {base:#x}"
            )
        })?;
        let range = base..base.saturating_add(size);
        ensure(windows.hold(&range, bar.is_wide), at, || {
            format!("{size:#x} bytes at {base:#x} are not in a window for devices")
        })?;
    }
    ensure(
        place.bars.len() == bars.len(),
        || format!("{path}: bars"),
        || format!("{} of them, and in the tree of devices {}", bars.len(), place.bars.len()),
    )
}

/// The MSI-X table of a function.
///
/// # Errors
/// It is not that of its configuration space.
pub fn msix(
    path: &str,
    theirs: &MsixConfig,
    configuration: &PciConfiguration,
) -> Result<MsixState, AdoptError> {
    let path = format!("{path}/msix_config");
    let register =
        configuration.msix_cap_reg_idx.and_then(|register| usize::try_from(register).ok());
    let control = register.and_then(|register| configuration.registers.get(register));
    let control = control.filter(|control| *control & CAPABILITY_ID_BITS == MSIX_ID);
    let control = control.ok_or_else(|| AdoptError::refused(&path, "no capability of MSI-X"))?;
    let (is_enabled, is_masked) = (control & MSIX_ENABLE != 0, control & MSIX_MASK != 0);
    // Without MSI-X the mask means nothing. At reset the register says that it is on, and it is not: all vectors are masked
    // then, so that it makes no difference.
    let are_masked = theirs.table_entries.iter().all(|it| it.vector_ctl & VECTOR_MASKED != 0);
    let is_at_reset = is_enabled && !is_masked && !theirs.enabled && theirs.masked && are_masked;
    let agree = is_enabled == theirs.enabled && (!is_enabled || is_masked == theirs.masked);
    let agree = agree || is_at_reset;
    ensure(
        agree,
        || format!("{path}: enabled, masked"),
        || format!("{}, {}, and the register has {control:#010x}", theirs.enabled, theirs.masked),
    )?;
    let pending = |vector: usize| {
        let word = theirs.pba_entries.get(vector / 64).copied().unwrap_or(0);
        word >> (vector % 64) & 1 == 1
    };
    let beyond = (theirs.table_entries.len()..theirs.pba_entries.len().saturating_mul(64))
        .find(|it| pending(*it));
    ensure(
        beyond.is_none(),
        || format!("{path}: pba_entries"),
        || format!("a bit of vector {}, which does not exist", beyond.unwrap_or_default()),
    )?;
    let entries = theirs.table_entries.iter().enumerate().map(|(vector, entry)| MsixEntryState {
        address: u64::from(entry.msg_addr_hi) << 32 | u64::from(entry.msg_addr_lo),
        data: entry.msg_data,
        masked: entry.vector_ctl & VECTOR_MASKED != 0,
        pending: pending(vector),
    });
    Ok(MsixState { version: 1, entries: entries.collect() })
}

/// The panic device.
///
/// # Errors
/// Names the register.
pub fn panic_device(
    theirs: &Pvpanic,
    place: &Place,
    windows: &Windows,
) -> Result<PciFunctionState, AdoptError> {
    let path = format!("device-manager/{PVPANIC_ID}");
    let events = theirs.data.events;
    ensure(events == PANIC_EVENTS, || format!("{path}: events"), || format!("{events:#x}"))?;
    let msix = theirs.configuration.msix_cap_reg_idx;
    ensure(
        msix.is_none(),
        || format!("{path}/pci_configuration: msix_cap_reg_idx"),
        || "a panic device has no interrupts".to_owned(),
    )?;
    let config = config_space(&path, &theirs.configuration, None, place, windows)?;
    let state = PciDeviceState {
        kind: PANIC_DEVICE_KIND.to_owned(),
        version: 1,
        data: json!({"config": config}),
    };
    Ok(PciFunctionState { bdf: place.bdf.to_string(), state })
}
