// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI functions: configuration space, BARs, MSI-X.
//!
//! Owns what v53 keeps beside the registers: which bits a guest can write, masks of BARs, where capabilities are.

use std::ops::Range;

use cloud_hypervisor_state::{
    BarRegion, Fixed, List, MsixConfig, MsixEntry, PciBar, PciConfiguration, Pvpanic, PvpanicData,
};
use pci::{ConfigSpaceState, MsixState, PANIC_DEVICE_KIND, PciDeviceState};
use serde::Deserialize;

use super::error::{ExportError, ensure, fits};
use super::windows::Windows;

const REGISTERS: usize = 1024;
const REGISTER_BYTES: usize = 4;
const BAR0: usize = 4;
const BAR_TYPE_BITS: u32 = 0xf;
const BAR_TYPE_64: u32 = 0x4;
/// Registers of which a guest can write bits, and which: command, cache line, address bits of BAR 0, interrupt line.
const WRITABLE: [(usize, u32); 4] = [(1, 0xffff), (3, 0xff), (BAR0, !BAR_TYPE_BITS), (15, 0xff)];
/// Bytes of the panic device's BAR, whose register has room for 16.
const PANIC_BAR_BYTES: u64 = 2;
const PANIC_EVENTS: u8 = 3;
const FIRST_CAPABILITY: usize = 0x34;
/// Capabilities that there can be in 256 bytes.
const CAPABILITIES_MAX: usize = 48;
const MSIX_ID: u8 = 0x11;
/// Length of that of MSI-X, as v53 counts it: without its header.
const MSIX_BYTES: u64 = 10;
const MSIX_ENABLE: u32 = 1 << 31;
const MSIX_MASK: u32 = 1 << 30;
const VENDOR_ID: u8 = 9;
const ACCESS_TYPE: u8 = 5;
/// Bytes of the PCI configuration access capability behind its header of two, which v53 keeps apart; what of them the
/// registers have all the same are length and type.
const ACCESS_BYTES: usize = 18;
const ACCESS_IN_REGISTERS: usize = 2;
const HEADER_BYTES: usize = 2;

/// A BAR with its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Its address.
    pub gpa: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Whether it has 64 bits.
    pub is_wide: bool,
}

impl Bar {
    /// Its addresses.
    pub fn range(&self) -> Range<u64> {
        self.gpa..self.gpa.saturating_add(self.len_bytes)
    }
}

/// A configuration space.
pub struct Function {
    /// Its registers, and what goes with them.
    pub configuration: PciConfiguration,
    /// Its BAR 0, the only one.
    pub bar: Bar,
}

/// The bytes that v53 keeps apart, with the offset of the first.
pub struct Access {
    /// Offset of the bytes.
    pub offset: u64,
    /// The bytes.
    pub bytes: [u8; ACCESS_BYTES],
}

/// All registers.
fn registers(what: &str, config: &ConfigSpaceState) -> Result<[u32; REGISTERS], ExportError> {
    let mut registers = [0; REGISTERS];
    let extended = config.extended_registers.iter();
    let extended = extended.map(|(offset, value)| (usize::from(*offset) / REGISTER_BYTES, *value));
    for (number, value) in config.registers.iter().copied().enumerate().chain(extended) {
        let beyond = || ExportError::refused(what, format!("it has a register {number}"));
        *registers.get_mut(number).ok_or_else(beyond)? = value;
    }
    Ok(registers)
}

fn byte(registers: &[u32], offset: usize) -> u8 {
    let register = registers.get(offset / REGISTER_BYTES).copied().unwrap_or(0).to_le_bytes();
    register.get(offset % REGISTER_BYTES).copied().unwrap_or(0)
}

/// Offset and id of each capability.
fn capabilities(registers: &[u32]) -> Vec<(usize, u8)> {
    let mut found = Vec::new();
    let mut at = usize::from(byte(registers, FIRST_CAPABILITY));
    while at != 0 && found.len() < CAPABILITIES_MAX {
        found.push((at, byte(registers, at)));
        at = usize::from(byte(registers, at.saturating_add(1)));
    }
    found
}

/// A function that is converted.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    /// What it is called in errors.
    pub what: &'a str,
    /// Its address.
    pub bdf: &'a str,
    /// Where BARs can be.
    pub windows: &'a Windows,
}

/// The configuration space of a function with a BAR of this length.
///
/// # Errors
/// Its BAR is not where devices of its segment can be: the guest has moved it, or is moving or sizing it.
pub fn configuration(
    site: &Site<'_>,
    config: &ConfigSpaceState,
    bar_len_bytes: u64,
) -> Result<Function, ExportError> {
    let Site { what, bdf, windows } = *site;
    let registers = registers(what, config)?;
    let [low, high] = [BAR0, BAR0 + 1].map(|number| registers.get(number).copied().unwrap_or(0));
    let is_wide = low & BAR_TYPE_BITS == BAR_TYPE_64;
    let address = u64::from(low & !BAR_TYPE_BITS);
    let gpa = if is_wide { u64::from(high) << 32 | address } else { address };
    let bar = Bar { gpa, len_bytes: bar_len_bytes, is_wide };
    let problem = || {
        format!(
            "its BAR is at {gpa:#x}, where no device of its segment can be there: the guest is moving it, or has moved it"
        )
    };
    ensure(windows.hold(bdf, &bar.range(), is_wide), || what.to_owned(), problem)?;
    let [mask_low, mask_high] = halves(!bar_len_bytes.wrapping_sub(1));
    let mut bars = [PciBar::default(); 6];
    let region = if is_wide { BarRegion::Memory64BitRegion } else { BarRegion::Memory32BitRegion };
    let mut writable = [0; REGISTERS];
    let mut set = |number: usize, bits: u32| {
        if let Some(register) = writable.get_mut(number) {
            *register = bits;
        }
    };
    for (number, bits) in WRITABLE {
        set(number, bits);
    }
    let [first, second, ..] = &mut bars;
    *first = PciBar { addr: low, size: mask_low, used: true, region: Some(region) };
    if is_wide {
        *second = PciBar { addr: high, size: mask_high, used: true, region: None };
        set(BAR0 + 1, u32::MAX);
    }
    let capabilities = capabilities(&registers);
    let msix = capabilities.iter().find(|(_, id)| *id == MSIX_ID).map(|(offset, _)| *offset);
    if let Some(offset) = msix {
        set(offset / REGISTER_BYTES, MSIX_ENABLE | MSIX_MASK);
    }
    let last = capabilities.last().map(|(offset, _)| *offset);
    ensure(last == msix, || what.to_owned(), || "its last capability is not MSI-X".to_owned())?;
    let number = |offset: usize| u64::try_from(offset).unwrap_or(0);
    let configuration = PciConfiguration {
        registers: Fixed::from(registers),
        writable_bits: Fixed::from(writable),
        bars: Fixed::from(bars),
        rom_bar_addr: 0,
        rom_bar_size: 0,
        rom_bar_used: false,
        last_capability: msix.map(|offset| (number(offset), MSIX_BYTES)),
        msix_cap_reg_idx: msix.map(|offset| number(offset / REGISTER_BYTES)),
        pending_bar_reprogram: List::default(),
    };
    Ok(Function { configuration, bar })
}

fn halves(number: u64) -> [u32; 2] {
    let half = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0);
    [half(number), half(number >> 32)]
}

/// Takes the bytes of the PCI configuration access capability out of the registers.
///
/// # Errors
/// There is no such capability.
pub fn take_access(
    what: &str,
    configuration: &mut PciConfiguration,
) -> Result<Access, ExportError> {
    let registers = &mut configuration.registers;
    let found = capabilities(registers.as_slice()).into_iter().find(|(offset, id)| {
        *id == VENDOR_ID && byte(registers.as_slice(), offset.saturating_add(3)) == ACCESS_TYPE
    });
    let missing = || ExportError::refused(what, "it has no capability of type 5");
    let (offset, _) = found.ok_or_else(missing)?;
    let first = offset.saturating_add(HEADER_BYTES);
    let bytes = std::array::from_fn(|at| byte(registers.as_slice(), first.saturating_add(at)));
    for at in ACCESS_IN_REGISTERS..ACCESS_BYTES {
        let at = first.saturating_add(at);
        let shift = u32::try_from(at % REGISTER_BYTES * 8).unwrap_or(0);
        if let Some(register) = registers.get_mut(at / REGISTER_BYTES) {
            *register &= !(0xff << shift);
        }
    }
    Ok(Access { offset: u64::try_from(first).unwrap_or(0), bytes })
}

/// The MSI-X table of a function.
///
/// # Errors
/// It has more vectors than a document can have.
pub fn msix(
    what: &str,
    state: &MsixState,
    configuration: &PciConfiguration,
) -> Result<MsixConfig, ExportError> {
    let register = configuration.msix_cap_reg_idx.and_then(|number| usize::try_from(number).ok());
    let control = register.and_then(|number| configuration.registers.get(number)).copied();
    let control = control.unwrap_or(0);
    let mut pending = vec![0_u64; (state.entries.len() / 64).saturating_add(1)];
    for (vector, _) in state.entries.iter().enumerate().filter(|(_, entry)| entry.pending) {
        if let Some(word) = pending.get_mut(vector / 64) {
            *word |= 1 << (vector % 64);
        }
    }
    let entries = state.entries.iter().map(|entry| {
        let [msg_addr_lo, msg_addr_hi] = halves(entry.address);
        MsixEntry {
            msg_addr_lo,
            msg_addr_hi,
            msg_data: entry.data,
            vector_ctl: entry.masked.into(),
        }
    });
    let entries: Vec<MsixEntry> = entries.collect();
    let (is_enabled, is_masked) = (control & MSIX_ENABLE != 0, control & MSIX_MASK != 0);
    // At reset the register says on there, and the state off. As the register says is right for a guest that has enabled it
    // before it fills the table, too: an entry that is unmasked is routed at once, on or off before.
    Ok(MsixConfig {
        table_entries: fits(List::try_from(entries), || what.to_owned())?,
        pba_entries: fits(List::try_from(pending), || what.to_owned())?,
        masked: is_masked,
        enabled: is_enabled,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PanicDevice {
    config: ConfigSpaceState,
}

/// The panic device.
///
/// # Errors
/// Its state is not one of such a device.
pub fn panic_device(
    site: &Site<'_>,
    state: &PciDeviceState,
) -> Result<(Pvpanic, Bar), ExportError> {
    let what = site.what;
    let problem = || format!("its state is version {} of {}", state.version, state.kind);
    ensure(state.kind == PANIC_DEVICE_KIND && state.version == 1, || what.to_owned(), problem)?;
    let PanicDevice { config } = PanicDevice::deserialize(&state.data)?;
    let function = configuration(site, &config, PANIC_BAR_BYTES)?;
    let data = PvpanicData { events: PANIC_EVENTS };
    Ok((Pvpanic { data, configuration: function.configuration }, function.bar))
}
