// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's view of a host function's configuration space.
//!
//! Owns, bit by bit, which part of it is the host's and which is emulated here: the BARs, their
//! decoding, the interrupt line and pin, MSI and the control word of MSI-X, the link, which does not exist in
//! the guest, and whatever concerns more than this one function. Has no side effects: a write returns what has
//! to be written to the host.
//!
//! The host function always decodes memory, whatever the guest's bit says: the guest's
//! mappings are added and removed with its bit, and a mapping of a function that does not decode would end the
//! VM when a vCPU touches it. It decodes ports when the guest's bit says so, if the guest sees its ports.

use hypervisor::irq::MsiMessage;

use super::capabilities::{self, HIDDEN_EXTENDED, double_word, word};
use super::clique::CliqueCapability;
use super::error::VfioError;
use super::express::{Express, Port};
use pci::{BarDecode, BarDescription};
use pci::{
    CONFIG_SPACE_LEN_BYTES, ConfigSpace, ConfigSpaceState, ConfigStateError, Identity, register,
};

const LEN: usize = CONFIG_SPACE_LEN_BYTES as usize;
const CONVENTIONAL_END: u16 = 0x100;

const COMMAND_IO: u8 = 1;
const COMMAND_MEMORY: u8 = 1 << 1;
const COMMAND_BUS_MASTER: u8 = 1 << 2;
const HEADER_TYPE: u16 = 0x0e;
const HEADER_MULTI_FUNCTION: u8 = 1 << 7;
const INTERRUPT_PIN: u16 = 0x3d;
const PIN_A: u8 = 1;

const POWER_STATE: u8 = 0b11;
const POWER_STATE_D3_HOT: u8 = 0b11;

const MSI_ENABLE: u16 = 1;
const MSI_COUNT_SHIFT: u16 = 4;
const MSI_64_BIT: u16 = 1 << 7;
const MSI_MASKABLE: u16 = 1 << 8;
const MSI_CONTROL_WRITABLE: u16 = MSI_ENABLE | 0b111 << MSI_COUNT_SHIFT;
/// Maximum of 32 messages (PCI 3.0, 6.8.1.3).
const MSI_COUNT_LOG2_MAX: u16 = 5;
const MSIX_CONTROL_WRITABLE: u16 = 0b11 << 14;
const MSIX_COUNT_MASK: u16 = 0x7ff;

/// Layout of MSI-X: the capability, table and pending bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsixLayout {
    /// Offset of the capability.
    pub offset: u16,
    /// Number of table entries.
    pub count: u16,
    /// BAR that holds the table.
    pub table_bar: u8,
    /// Offset of the table in the BAR.
    pub table_offset: u32,
    /// BAR that holds the pending bits.
    pub pending_bar: u8,
    /// Offset of the pending bits in the BAR.
    pub pending_offset: u32,
}

impl MsixLayout {
    /// The layout in configuration space; `None` without the capability.
    pub fn find(config: &[u8]) -> Option<Self> {
        let offset = capabilities::find(config, capabilities::MSIX)?;
        let place = |register: u16| {
            let value = double_word(config, offset + register)?;
            Some((u8::try_from(value & 7).ok()?, value & !7))
        };
        let (table_bar, table_offset) = place(4)?;
        let (pending_bar, pending_offset) = place(8)?;
        let count = (word(config, offset + 2)? & MSIX_COUNT_MASK) + 1;
        Some(Self { offset, count, table_bar, table_offset, pending_bar, pending_offset })
    }
}

/// Layout of the MSI registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiLayout {
    offset: u16,
    control: u16,
    data: u16,
    mask: Option<u16>,
    end: u16,
    count_log2: u16,
}

impl MsiLayout {
    /// The layout in configuration space; `None` without the capability, or if it does not fit.
    pub fn find(config: &[u8]) -> Option<Self> {
        let offset = capabilities::find(config, capabilities::MSI)?;
        let control = word(config, offset + 2)?;
        let data = offset + if control & MSI_64_BIT == 0 { 8 } else { 12 };
        let mask = (control & MSI_MASKABLE != 0).then_some(data + 4);
        let end = mask.map_or(data + 2, |mask| mask + 8);
        let count_log2 = (control >> 1 & 0b111).min(MSI_COUNT_LOG2_MAX);
        (end <= CONVENTIONAL_END).then_some(Self { offset, control, data, mask, end, count_log2 })
    }

    /// Number of messages that the function can request.
    pub fn count(&self) -> u16 {
        1 << self.count_log2
    }
}

/// The MSI registers as the guest has set them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiRegisters {
    /// Whether MSI is enabled.
    pub enabled: bool,
    /// Number of messages that are enabled.
    pub count: u16,
    /// The first message; the low bits of the data are the message number.
    pub message: MsiMessage,
    /// Mask bit of each message.
    pub masks: u32,
}

/// Configuration space as the guest sees it: emulated bits over those of the host's function.
pub struct ShadowConfig {
    /// The values of the emulated bits.
    space: ConfigSpace,
    /// Which bits are emulated.
    emulated: Box<[u8; LEN]>,
    msi: Option<MsiLayout>,
    msix: Option<MsixLayout>,
    express: Option<Express>,
    /// Offset of the register with the power state, which is the host's.
    power: Option<u16>,
    /// Bits emulated for the PCI Express capability alone: offsets, and bits of the byte there.
    express_bits: Vec<(u16, u8)>,
    len_bytes: u16,
}

impl ShadowConfig {
    /// Builds it from the host's configuration space. MSI and MSI-X are hidden from the guest unless their
    /// layout is given; `has_pin` says whether the interrupt pin is connected.
    ///
    /// # Errors
    /// The function is not an endpoint, or has an invalid BAR.
    pub fn new(
        config: &[u8],
        bars: &[BarDescription],
        msi: Option<MsiLayout>,
        msix: Option<MsixLayout>,
        has_pin: bool,
    ) -> Result<Self, VfioError> {
        let header = config.get(usize::from(HEADER_TYPE)).copied().unwrap_or(0xff);
        if header & !HEADER_MULTI_FUNCTION != 0 {
            return Err(VfioError::Header { found: header });
        }
        let none = Identity {
            vendor_id: 0,
            device_id: 0,
            revision: 0,
            class: 0,
            subsystem_vendor_id: 0,
            subsystem_id: 0,
        };
        let len_bytes = u16::try_from(config.len()).unwrap_or(u16::MAX).min(CONFIG_SPACE_LEN_BYTES);
        let mut shadow = Self {
            space: ConfigSpace::endpoint(&none),
            emulated: Box::new([0; LEN]),
            msi,
            msix,
            express: Express::find(config),
            power: capabilities::find(config, capabilities::POWER_MANAGEMENT)
                .and_then(|at| at.checked_add(4))
                .filter(|at| *at < CONVENTIONAL_END),
            express_bits: Vec::new(),
            len_bytes,
        };
        shadow.emulate(register::COMMAND, &[COMMAND_IO | COMMAND_MEMORY]);
        shadow.emulate(HEADER_TYPE, &[HEADER_MULTI_FUNCTION]);
        // All BARs and the ROM, so that unsupported ones read as zero.
        shadow.emulate(register::BAR0, &[0xff; 24]);
        shadow.emulate(register::ROM, &[0xff; 4]);
        shadow.emulate(register::INTERRUPT_LINE, &[0xff; 2]);
        shadow.space.put(INTERRUPT_PIN, &[if has_pin { PIN_A } else { 0 }]);
        for bar in bars {
            let (index, len_bytes) = (bar.index, bar.len_bytes);
            shadow.space.add_bar(*bar).map_err(|source| VfioError::Bar {
                index,
                len_bytes,
                source,
            })?;
        }
        shadow.lay_out_interrupts(config);
        shadow.lay_out_express();
        for (offset, id) in capabilities::extended(config) {
            if HIDDEN_EXTENDED.contains(&id) {
                // Id and version zero: a null capability, whose next pointer still works.
                shadow.emulate(offset, &[0xff, 0xff, 0x0f]);
            }
        }
        Ok(shadow)
    }

    fn lay_out_interrupts(&mut self, config: &[u8]) {
        if let Some(msix) = self.msix {
            let control = word(config, msix.offset + 2).unwrap_or(0) & !MSIX_CONTROL_WRITABLE;
            self.emulate(msix.offset + 2, &[0xff; 2]);
            self.space.put(msix.offset + 2, &control.to_le_bytes());
            self.space.allow(msix.offset + 2, &MSIX_CONTROL_WRITABLE.to_le_bytes());
        } else if let Some(offset) = capabilities::find(config, capabilities::MSIX) {
            self.emulate(offset, &[0xff]);
        }
        if let Some(msi) = self.msi {
            for offset in msi.offset + 2..msi.end {
                self.emulate(offset, &[0xff]);
            }
            let control = msi.control & !MSI_CONTROL_WRITABLE;
            self.space.put(msi.offset + 2, &control.to_le_bytes());
            self.space.allow(msi.offset + 2, &MSI_CONTROL_WRITABLE.to_le_bytes());
            for offset in msi.offset + 4..msi.mask.map_or(msi.end, |mask| mask + 4) {
                self.space.allow(offset, &[0xff]);
            }
        } else if let Some(offset) = capabilities::find(config, capabilities::MSI) {
            self.emulate(offset, &[0xff]);
        }
    }

    /// All functions are on the guest's root bus, where they have no link.
    fn lay_out_express(&mut self) {
        let Some(express) = self.express else { return };
        for (offset, masks, values) in express.made_up() {
            for (at, mask) in (offset..).zip(masks) {
                let before = self.emulated.get(usize::from(at)).copied().unwrap_or(0xff);
                self.express_bits.push((at, mask & !before));
            }
            self.emulate(offset, masks);
            self.space.put(offset, values);
        }
    }

    /// Has the function name the GPUDirect clique that it is in. `config` is the host's configuration space.
    ///
    /// # Errors
    /// It is no GPU of NVIDIA's, or there is no room.
    pub fn show_clique(&mut self, config: &[u8], clique: u8) -> Result<(), VfioError> {
        let CliqueCapability { offset, link, registers } = CliqueCapability::place(config, clique)?;
        let [pointer, _] = offset.to_le_bytes();
        self.emulate(link, &[0xff]);
        self.space.put(link, &[pointer]);
        self.emulate(offset, &[0xff; 8]);
        self.space.put(offset, &registers);
        Ok(())
    }

    fn emulate(&mut self, offset: u16, masks: &[u8]) {
        for (mask, current) in masks.iter().zip(self.emulated.iter_mut().skip(offset.into())) {
            *current |= mask;
        }
    }

    /// Length of the function's configuration space; beyond it all bits read as ones.
    pub fn len_bytes(&self) -> u16 {
        self.len_bytes
    }

    /// Overlays the emulated bits on data read from the host at `offset`.
    pub fn overlay(&self, offset: u16, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(usize::from(offset)..) {
            let at16 = u16::try_from(at).unwrap_or(u16::MAX);
            if at16 >= self.len_bytes {
                *byte = 0xff;
                continue;
            }
            let emulated = self.emulated.get(at).copied().unwrap_or(0);
            let mut own = [0];
            self.space.read(at16, &mut own);
            *byte = *byte & !emulated | own[0] & emulated;
        }
    }

    /// Handles a guest write; returns what is to be written to the host, by offset.
    pub fn write(&mut self, offset: u16, data: &[u8]) -> Vec<(u16, Vec<u8>)> {
        self.space.write(offset, data);
        let mut forwards: Vec<(u16, Vec<u8>)> = Vec::new();
        for (byte, at) in data.iter().zip(usize::from(offset)..) {
            let Some(at) = u16::try_from(at).ok().filter(|at| *at < self.len_bytes) else { break };
            if self.emulated.get(usize::from(at)).is_none_or(|emulated| *emulated == 0xff) {
                continue;
            }
            let byte = match at {
                register::COMMAND => {
                    let io = u8::from(self.space.io_decode()) * COMMAND_IO;
                    *byte & !COMMAND_IO | COMMAND_MEMORY | io
                }
                _ => *byte,
            };
            match forwards.last_mut() {
                Some((start, bytes)) if usize::from(*start) + bytes.len() == usize::from(at) => {
                    bytes.push(byte);
                }
                _ => forwards.push((at, vec![byte])),
            }
        }
        forwards
    }

    /// Whether a write sets one of these bits of the command register.
    fn commands(offset: u16, data: &[u8], bits: u8) -> bool {
        let at = register::COMMAND.checked_sub(offset);
        let byte = at.and_then(|at| data.get(usize::from(at)));
        byte.is_some_and(|byte| byte & bits != 0)
    }

    /// Whether a write sets Bus Master Enable.
    pub fn asks_for_bus_master(offset: u16, data: &[u8]) -> bool {
        Self::commands(offset, data, COMMAND_BUS_MASTER)
    }

    /// Whether a write has the function respond, or use memory: the guest begins to use it.
    pub fn begins_use(offset: u16, data: &[u8]) -> bool {
        Self::commands(offset, data, COMMAND_IO | COMMAND_MEMORY | COMMAND_BUS_MASTER)
    }

    /// Whether a write of so many bytes sets the power state (PCI Bus Power Management 1.2, 3.2.4).
    pub fn sets_power(&self, offset: u16, len_bytes: usize) -> bool {
        let at = self.power.and_then(|power| power.checked_sub(offset));
        at.is_some_and(|at| usize::from(at) < len_bytes)
    }

    /// Where the power state is.
    pub fn power(&self) -> Option<u16> {
        self.power
    }

    /// Whether the function is in D3hot, by what the host says of it; one that does not respond is, too.
    pub fn is_asleep(&self, read: impl FnOnce(u16, &mut [u8])) -> bool {
        let Some(power) = self.power else { return false };
        let mut state = [0xff];
        read(power, &mut state);
        state[0] & POWER_STATE == POWER_STATE_D3_HOT
    }

    /// Initial value of the host's command register: memory decoding only.
    pub fn first_command() -> [u8; 2] {
        [COMMAND_MEMORY, 0]
    }

    /// Saves the emulated registers.
    pub fn save(&self) -> ConfigSpaceState {
        self.space.save()
    }

    /// Validates a saved state for this function; applied by [`Self::take`].
    ///
    /// # Errors
    /// Names the register.
    pub fn restored(&self, state: &ConfigSpaceState) -> Result<ConfigSpace, ConfigStateError> {
        match self.express {
            // The guest was shown the host's registers, and must continue to see them.
            Some(express) if express.is_of_host(state) => {
                let mut earlier = self.space.clone();
                express.show_port_of_host(&mut earlier);
                earlier.restored(state)
            }
            _ => self.space.restored(state),
        }
    }

    /// Applies a validated state.
    pub fn take(&mut self, restored: ConfigSpace) {
        self.space = restored;
        let Some(express) = self.express else { return };
        let is_ours = express.port(&self.space) == Port::RootComplex;
        for (at, mask) in &self.express_bits {
            let Some(current) = self.emulated.get_mut(usize::from(*at)) else { continue };
            *current = if is_ours { *current | mask } else { *current & !mask };
        }
    }

    /// The BARs.
    pub fn bars(&self) -> Vec<BarDescription> {
        self.space.bars().collect()
    }

    /// Whether an endpoint of the host is shown as an integrated endpoint.
    pub fn is_integrated_endpoint(&self) -> bool {
        self.express.is_some_and(|express| express.is_shown_integrated(&self.space))
    }

    /// The guest's BAR registers and decode bits.
    pub fn bar_decode(&self) -> BarDecode {
        self.space.bar_decode()
    }

    /// Sets a BAR register.
    pub fn set_bar_gpa(&mut self, index: u8, gpa: u64) {
        self.space.set_bar_gpa(index, gpa);
    }

    /// The guest's MSI-X message control register.
    pub fn msix_control(&self) -> Option<u16> {
        self.msix.map(|msix| self.space.read_u16(msix.offset + 2))
    }

    /// The MSI registers as the guest has set them.
    pub fn msi(&self) -> Option<MsiRegisters> {
        let msi = self.msi?;
        let control = self.space.read_u16(msi.offset + 2);
        let high =
            if msi.control & MSI_64_BIT == 0 { 0 } else { self.space.read_u32(msi.offset + 8) };
        let address = u64::from(high) << 32 | u64::from(self.space.read_u32(msi.offset + 4));
        Some(MsiRegisters {
            enabled: control & MSI_ENABLE != 0,
            count: 1 << (control >> MSI_COUNT_SHIFT & 0b111).min(msi.count_log2),
            message: MsiMessage { address, data: u32::from(self.space.read_u16(msi.data)) },
            masks: msi.mask.map_or(0, |mask| self.space.read_u32(mask)),
        })
    }
}
