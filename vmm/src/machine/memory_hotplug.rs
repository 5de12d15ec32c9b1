// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that comes as memory devices of ACPI while the guest runs.
//!
//! Owns the order of things: memory is plugged in, which pins it for passed-through devices, then vCPUs reach it, then
//! the guest is told. The region is plugged in from its start, without gaps; what is not plugged in has no memory slot,
//! so that vCPUs do not reach it. Must never take memory away: no guest is asked to give a device back.

use std::ops::Range;
use std::sync::Arc;

use arch::acpi::memory_hotplug as aml;
use arch::acpi::{HotplugProtocol, HotplugRegisters};
use devices::Snapshot as _;
use devices::bus::BusDevice;
use devices::legacy::{
    self, MEMORY_DEVICES_MAX, MEMORY_HOTPLUG_LEN_BYTES, MEMORY_SELECTOR_LEN_BYTES, MemoryDevice,
    MemorySelector,
};
use devices::virtio::DeviceSnapshot;
use memory::{GuestRam, RamRegion};

use super::mems::ResizeMemoryError;
use super::numa::Nodes;
use super::space::AddressSpace;
use super::{Machine, MachineError, ram};
use crate::config::VmConfig;
use crate::config::memory::HotplugMethod;

/// The hot-plug registers of memory, and the region that they are about.
pub struct MemoryHotplug {
    registers: Arc<legacy::MemoryHotplug>,
    region: Arc<RamRegion>,
}

/// The region that is plugged in as memory devices, if the configuration has one.
fn region<'a>(config: &VmConfig, ram: &'a GuestRam) -> Option<&'a Arc<RamRegion>> {
    let is_acpi = config.memory.hotplug_method == HotplugMethod::Acpi;
    ram::hotplug_regions(ram).next().filter(|_| is_acpi)
}

/// Whether a configuration has memory devices, or may get some.
pub fn is_configured(config: &VmConfig, ram: &GuestRam) -> bool {
    region(config, ram).is_some()
}

/// What the tables of a guest say of memory devices.
pub fn described(
    config: &VmConfig,
    ram: &GuestRam,
    registers: HotplugRegisters,
) -> Option<aml::MemoryHotplug> {
    let region = region(config, ram)?;
    let domain = Nodes::of(config).map_or(0, |nodes| nodes.of_zone(region.zone_id()));
    Some(aml::MemoryHotplug { registers, domain })
}

impl MemoryHotplug {
    /// Places the registers in `space`, if memory may come as memory devices. What is plugged in already is one device.
    ///
    /// # Errors
    /// The addresses are taken.
    pub fn wire(
        config: &VmConfig,
        space: &AddressSpace,
        ram: &GuestRam,
        at: HotplugRegisters,
    ) -> Result<Option<Self>, MachineError> {
        let Some(region) = region(config, ram) else { return Ok(None) };
        let registers = Arc::new(legacy::MemoryHotplug::new(None));
        let hotplug = Self { registers, region: Arc::clone(region) };
        hotplug.registers.rest(hotplug.as_one());
        let state = Arc::clone(&hotplug.registers);
        let (device, len_bytes): (Arc<dyn BusDevice>, _) = match at.protocol {
            HotplugProtocol::Events => (state, MEMORY_HOTPLUG_LEN_BYTES),
            HotplugProtocol::Selector => {
                (Arc::new(MemorySelector::over(state)), MEMORY_SELECTOR_LEN_BYTES)
            }
        };
        space.insert_registers(at.place, len_bytes, "memory hotplug", device)?;
        Ok(Some(hotplug))
    }

    /// All that is plugged in, as one device.
    fn as_one(&self) -> Option<MemoryDevice> {
        let len_bytes = self.region.usable_bytes();
        (len_bytes > 0).then(|| MemoryDevice { gpa: self.region.gpa(), len_bytes })
    }

    /// Saves the registers; `None` if all is one device that the guest knows of, or nothing is plugged in.
    pub fn save(&self) -> Option<DeviceSnapshot> {
        (!self.registers.is_at_rest(self.as_one())).then(|| self.registers.save())
    }

    /// Restores what [`Self::save`] returned.
    ///
    /// # Errors
    /// The state is malformed, or its devices are not the memory that is plugged in.
    pub fn restore(&self, state: Option<&DeviceSnapshot>) -> Result<(), MachineError> {
        self.registers.rest(self.as_one());
        let Some(state) = state else { return Ok(()) };
        self.registers.restore(state)?;
        let devices = self.registers.devices();
        let len_bytes = devices.iter().fold(0, |sum: u64, one| sum.saturating_add(one.len_bytes));
        let gpa = devices.first().map(|first| first.gpa);
        if gpa.is_some_and(|gpa| gpa != self.region.gpa())
            || len_bytes != self.region.usable_bytes()
        {
            let what = format!(
                "its memory devices have {len_bytes} bytes, this machine's {}",
                self.region.usable_bytes()
            );
            return Err(MachineError::StateMismatch(what));
        }
        Ok(())
    }

    /// The addresses to plug in, so that there are `wanted_bytes` with the `boot_bytes` of before; `None` if there are.
    fn missing(
        &self,
        boot_bytes: u64,
        wanted_bytes: u64,
    ) -> Result<Option<Range<u64>>, ResizeMemoryError> {
        let now_bytes = self.region.usable_bytes();
        let has_bytes = boot_bytes.saturating_add(now_bytes);
        let missing_bytes = wanted_bytes.saturating_sub(has_bytes);
        if missing_bytes == 0 {
            if wanted_bytes < has_bytes {
                log::warn!(
                    "the guest keeps its {has_bytes} bytes of memory, of which {wanted_bytes} were to stay: memory \
                     devices of ACPI cannot be removed (hotplug_method=virtio-mem can)"
                );
            }
            return Ok(None);
        }
        let more_bytes = now_bytes.saturating_add(missing_bytes);
        let room_bytes = self.region.len_bytes();
        let block_bytes = self.region.block_bytes().unwrap_or(1);
        if more_bytes > room_bytes || !missing_bytes.is_multiple_of(block_bytes) {
            let more_bytes = missing_bytes;
            let room_bytes = room_bytes.saturating_sub(now_bytes);
            return Err(ResizeMemoryError::Device { more_bytes, room_bytes, block_bytes });
        }
        if self.registers.devices().len() >= MEMORY_DEVICES_MAX {
            return Err(ResizeMemoryError::NoDevice);
        }
        let start = self.region.gpa().saturating_add(now_bytes);
        Ok(Some(start..start.saturating_add(missing_bytes)))
    }
}

impl Machine {
    /// Whether memory comes as memory devices, which takes its time, if `wanted_bytes` are not there yet.
    ///
    /// # Errors
    /// The size is not possible.
    pub fn check_memory_devices(&self, wanted_bytes: u64) -> Result<bool, ResizeMemoryError> {
        let Some(hotplug) = &self.parts.memory_hotplug else { return Ok(false) };
        let grows = hotplug.missing(self.config.memory.size, wanted_bytes)?.is_some();
        match self.parts.devices.first_vdpa().filter(|_| grows) {
            Some(vdpa) => Err(ResizeMemoryError::MappedForVdpa(vdpa.to_owned())),
            None => Ok(grows),
        }
    }

    /// Adds a memory device, so that the guest has `wanted_bytes`; false if it has as much or more. May take as long as the host needs to populate the
    /// memory, where that is needed.
    ///
    /// # Errors
    /// The size is not possible, or the host does not have the memory; nothing has changed then.
    pub fn add_memory_device(&mut self, wanted_bytes: u64) -> Result<bool, ResizeMemoryError> {
        let boot_bytes = self.config.memory.size;
        let Some(hotplug) = &self.parts.memory_hotplug else { return Ok(false) };
        let Some(gpa) = hotplug.missing(boot_bytes, wanted_bytes)? else { return Ok(false) };
        let ram = &self.parts.ram;
        ram.check_plug(&gpa).map_err(ResizeMemoryError::Insufficient)?;
        ram.plug(&gpa)?;
        if let Err(error) = ram::attach_more(&self.parts.vm, ram, &hotplug.region, &gpa) {
            if let Err(error) = ram.unplug(&gpa) {
                log::warn!("memory that is not used stays: {}", error_text::chain(&error));
            }
            return Err(ResizeMemoryError::Slot(error));
        }
        let len_bytes = gpa.end.saturating_sub(gpa.start);
        // There is one left: that was checked.
        hotplug.registers.add(MemoryDevice { gpa: gpa.start, len_bytes });
        self.config.memory.hotplugged_size = Some(hotplug.region.usable_bytes());
        self.parts.legacy.notify_memory_changed();
        if let Some(balloon) = self.balloon() {
            balloon.memory_has_grown();
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use devices::bus::BusDevice as _;
    use memory::{RamConfig, ZoneSpec};

    use arch::layout;

    use super::*;
    use crate::config::memory::DEFAULT_ZONE;

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 128 * MIB;

    fn hotplug(plugged_bytes: u64) -> MemoryHotplug {
        let spec = ZoneSpec::new(ram::later_id(DEFAULT_ZONE), 16 * BLOCK);
        let later = ZoneSpec { block_bytes: Some(BLOCK), ..spec };
        let config = RamConfig { zones: vec![ZoneSpec::new(DEFAULT_ZONE, 64 * MIB), later] };
        let layout = ram::layout_of(46, arch::layout::HighHole::None);
        let ram = GuestRam::new(&config, layout).unwrap();
        let region = Arc::clone(ram::hotplug_regions(&ram).next().unwrap());
        if plugged_bytes > 0 {
            region.set_usable(std::slice::from_ref(&(0..plugged_bytes))).unwrap();
        }
        let registers = Arc::new(legacy::MemoryHotplug::new(None));
        let hotplug = MemoryHotplug { registers, region };
        hotplug.registers.rest(hotplug.as_one());
        hotplug
    }

    fn read(hotplug: &MemoryHotplug, offset: u64) -> u32 {
        let mut word = [0; 4];
        hotplug.registers.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    /// The AML and the device are written in crates that do not know each other.
    #[test]
    fn the_device_speaks_as_the_aml_expects() {
        let hotplug = hotplug(3 * BLOCK);
        assert_eq!(MEMORY_HOTPLUG_LEN_BYTES, u64::from(aml::REGISTERS_LEN_BYTES));
        assert_eq!(legacy::MEMORY_HOTPLUG_PORT, layout::MEMORY_HOTPLUG_PORT);
        assert_eq!(MEMORY_DEVICES_MAX, usize::from(aml::DEVICES));
        assert_eq!(read(&hotplug, aml::NEXT_EVENT_OFFSET), u32::MAX);
        assert_eq!(read(&hotplug, aml::PRESENT_OFFSET), 1);
        let gpa = hotplug.region.gpa();
        let words = [0, 4, 8, 12].map(|at| read(&hotplug, aml::RANGES_OFFSET + at));
        assert_eq!(u64::from(words[0]) | u64::from(words[1]) << 32, gpa);
        assert_eq!(u64::from(words[2]) | u64::from(words[3]) << 32, 3 * BLOCK);
        hotplug.registers.write(aml::STATUS_OFFSET, &0x100_u32.to_le_bytes());
        assert!(hotplug.save().is_none());
    }

    #[test]
    fn only_what_fits_is_plugged_in() {
        let hotplug = hotplug(2 * BLOCK);
        let boot = 64 * MIB;
        let missing = |bytes: u64| hotplug.missing(boot, bytes);
        for bytes in [0, boot - 1, boot, boot + BLOCK, boot + 2 * BLOCK] {
            assert_eq!(missing(bytes).unwrap(), None, "nothing is removed");
        }
        let start = hotplug.region.gpa() + 2 * BLOCK;
        assert_eq!(missing(boot + 5 * BLOCK).unwrap(), Some(start..start + 3 * BLOCK));
        assert_eq!(missing(boot + 16 * BLOCK).unwrap(), Some(start..start + 14 * BLOCK));
        for (bytes, why) in [
            (boot + 2 * BLOCK + MIB, "multiple of 134217728"),
            (boot + 17 * BLOCK, "room for 1879048192"),
            (u64::MAX, "room for 1879048192"),
        ] {
            let error = missing(bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{bytes}: {error}");
        }
        let mut gpa = start;
        for _ in 1..MEMORY_DEVICES_MAX {
            assert!(hotplug.registers.add(MemoryDevice { gpa, len_bytes: BLOCK }));
            gpa += BLOCK;
        }
        assert!(matches!(missing(boot + 3 * BLOCK), Err(ResizeMemoryError::NoDevice)));
        assert_eq!(missing(boot + 2 * BLOCK).unwrap(), None, "nothing is missing");
    }

    #[test]
    fn a_state_with_other_memory_is_refused() {
        let source = hotplug(2 * BLOCK);
        let gpa = source.region.gpa() + 2 * BLOCK;
        source.registers.add(MemoryDevice { gpa, len_bytes: BLOCK });
        let state = source.save().unwrap();
        let destination = hotplug(3 * BLOCK);
        assert!(destination.save().is_none());
        destination.restore(Some(&state)).unwrap();
        assert_eq!((read(&destination, 8), read(&destination, 0)), (0b11, 1));
        for bytes in [0, 2 * BLOCK, 4 * BLOCK] {
            let refused = hotplug(bytes).restore(Some(&state)).unwrap_err().to_string();
            assert!(refused.contains("402653184 bytes"), "{refused}");
        }
        destination.restore(None).unwrap();
        assert_eq!(read(&destination, 8), 1);
    }
}
