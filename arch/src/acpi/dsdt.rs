// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The DSDT: devices that a guest cannot enumerate by itself.
//!
//! Owns all AML. What PCI can enumerate is not here. Must never describe a device that the inputs
//! do not name: a guest would drive it.
//!
//! Format: ACPI 6.5, chapters 6, 19 and 20; `_OSC` of a host bridge: PCI Firmware 3.3, 4.5.1.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, EISAName, Else, Equal,
    Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local,
    Memory32Fixed, Method, Name, NotEqual, Notify, Or, Package, PackageBuilder, Path,
    ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
};
use acpi_tables::sdt::Sdt;

use super::ged::{EVENT_CPU, EVENT_GENERATION, EVENT_MEMORY, EVENT_PCI, EVENT_POWER_BUTTON};
use super::hotplug::{self, Slots};
use super::inputs::{AcpiInputs, GedInputs, PciSegment};
use super::memory_hotplug::{self, MemoryHotplug};
use super::numa::proximity;
use super::registers::{HotplugProtocol, HotplugRegisters};
use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, to_bytes};
use super::{cpu_hotplug, cpu_selector, memory_selector};
use crate::layout;

/// Integers of 64 bits.
const DSDT_REVISION: u8 = 6;
const SDT_HEADER_BYTES: u32 = 36;
/// `_STA`: present, enabled, shown, functioning.
pub(super) const STATUS_PRESENT: u8 = 0xf;
/// Notification "the button was pressed" (section 5.6.6).
const NOTIFY_BUTTON: u8 = 0x80;
/// Notification "the ID is another one", the same number in the specification of the device.
const NOTIFY_GENERATION: u8 = 0x80;
/// What we let the guest's PCI layer control by itself: the PCI Express capability. Native hotplug
/// (ours is ACPI's), power events and error reporting are not there to be controlled.
const OSC_GRANTED: u8 = 0x10;
const OSC_PCI_HOST_UUID: &str = "33DB4D5B-1FF7-401C-9657-7441C03DD766";

/// AML that was already serialised.
pub(super) struct Raw(pub(super) Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

/// Borrows each element as what acpi_tables takes.
fn refs<T: Aml>(items: &[T]) -> Vec<&dyn Aml> {
    items.iter().map(|item| -> &dyn Aml { item }).collect()
}

pub(super) fn hid(name: &str) -> Name {
    Name::new("_HID".into(), &EISAName::new(name))
}

pub(super) fn uid(number: u32) -> Name {
    Name::new("_UID".into(), &number)
}

/// The whole table.
pub fn dsdt(inputs: &AcpiInputs) -> Vec<u8> {
    let mut devices = vec![Raw(motherboard(inputs)), Raw(processors(inputs))];
    let has_segments = inputs.segments.len() > 1;
    let slots_of = |segment: &PciSegment| match inputs.pci_hotplug {
        None => Slots::None,
        Some(_) if has_segments => Slots::Of(segment.id),
        Some(_) => Slots::Only,
    };
    let node =
        |segment: &PciSegment| inputs.numa.as_ref().map(|numa| numa.domain_of_segment(segment.id));
    let bridge = |segment| Raw(host_bridge(segment, slots_of(segment), node(segment)));
    let controller = |place| Raw(hotplug::controller(place, has_segments));
    devices.extend(inputs.pci_hotplug.map(controller));
    let memory = |hotplug| Raw(memory(hotplug, inputs.numa.is_some()));
    devices.extend(inputs.cpu_hotplug.and_then(selector));
    devices.extend(inputs.memory_hotplug.map(memory));
    devices.extend(inputs.segments.iter().map(bridge));
    devices.extend(inputs.cmos.then(|| Raw(clock())));
    devices.extend(inputs.serial_gsi.map(|gsi| Raw(serial(gsi))));
    devices.extend(inputs.generation_id_gpa.map(|gpa| Raw(generation_id(gpa))));
    devices.extend(inputs.tpm_gpa.map(|gpa| Raw(tpm(gpa))));
    let has_slots = inputs.pci_hotplug.is_some();
    let tell_of_slots = || hotplug::tell(inputs.segments.iter().map(|segment| segment.id));
    let has_generation = inputs.generation_id_gpa.is_some();
    let handlers = [
        (EVENT_PCI, has_slots.then(tell_of_slots)),
        (EVENT_CPU, inputs.cpu_hotplug.map(tell_of_cpus)),
        (EVENT_MEMORY, inputs.memory_hotplug.map(tell_of_memory)),
        (EVENT_GENERATION, has_generation.then(tell_of_generation)),
    ];
    devices.extend(inputs.ged.map(|ged| Raw(events(ged, inputs.rules.event_device, handlers))));
    let system_bus = Scope::new("\\_SB_".into(), refs(&devices));

    let s5 = layout::ACPI_S5_SLEEP_TYPE;
    let soft_off = Name::new("\\_S5_".into(), &Package::new(vec![&s5, &s5, &ZERO, &ZERO]));

    let mut table =
        Sdt::new(*b"DSDT", SDT_HEADER_BYTES, DSDT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let body = [to_bytes(&system_bus), to_bytes(&soft_off), inputs.extra_aml.clone()].concat();
    table.append_slice(&body);
    table.as_slice().to_vec()
}

/// The TPM, whose interface is in the table `TPM2`.
fn tpm(gpa: u64) -> Vec<u8> {
    let low = |value: u64| u32::try_from(value).unwrap_or(0);
    let registers = Memory32Fixed::new(true, low(gpa), low(layout::TPM_BYTES));
    let resources = Name::new("_CRS".into(), &ResourceTemplate::new(vec![&registers]));
    let id = Name::new("_HID".into(), &"MSFT0101");
    let status = Name::new("_STA".into(), &STATUS_PRESENT);
    to_bytes(&Device::new("TPM0".into(), vec![&id, &uid(0), &status, &resources]))
}

/// Addresses that belong to no device: without this Linux does not trust the configuration space.
fn motherboard(inputs: &AcpiInputs) -> Vec<u8> {
    let low = |value: u64| u32::try_from(value).unwrap_or(0);
    let ecams: Vec<_> = inputs
        .segments
        .iter()
        .map(|segment| Memory32Fixed::new(true, low(segment.ecam_gpa), low(segment.ecam_bytes())))
        .collect();
    let ports = IO::new(layout::ACPI_POWER_PORT, layout::ACPI_POWER_PORT, 1, 16);
    let len = u8::try_from(hotplug::REGISTERS_LEN_BYTES).unwrap_or(u8::MAX);
    let slots = inputs.pci_hotplug.map(|place| Raw(place.resource(len)));
    let cpus = inputs.cpu_hotplug.map(|it| Raw(it.place.resource(cpu_registers_len(it))));
    let memory = inputs.memory_hotplug.map(|it| it.registers);
    let memory = memory.map(|it| Raw(it.place.resource(memory_registers_len(it))));
    let mut resources = refs(&ecams);
    resources.push(&ports);
    resources.extend(slots.iter().chain(&cpus).chain(&memory).map(|range| -> &dyn Aml { range }));
    let resources = Name::new("_CRS".into(), &ResourceTemplate::new(resources));
    to_bytes(&Device::new("MBRD".into(), vec![&hid("PNP0C02"), &uid(0), &resources]))
}

/// A container with one device for each vCPU; its UID leads to the MADT entry.
fn processors(inputs: &AcpiInputs) -> Vec<u8> {
    let (cpus, numa, rules) = (&inputs.cpus, inputs.numa.as_ref(), &inputs.rules);
    match inputs.cpu_hotplug {
        Some(HotplugRegisters { place, protocol: HotplugProtocol::Events }) => {
            cpu_hotplug::container(place, cpus, numa, rules)
        }
        Some(_) => cpu_selector::container(cpus, numa, rules),
        None => fixed_processors(inputs),
    }
}

/// The device with the registers of vCPU hotplug, where they are not the container's.
fn selector(registers: HotplugRegisters) -> Option<Raw> {
    let HotplugRegisters { place, protocol } = registers;
    (protocol == HotplugProtocol::Selector).then(|| Raw(cpu_selector::controller(place)))
}

fn cpu_registers_len(registers: HotplugRegisters) -> u8 {
    match registers.protocol {
        HotplugProtocol::Events => cpu_hotplug::REGISTERS_LEN_BYTES,
        HotplugProtocol::Selector => cpu_selector::REGISTERS_LEN_BYTES,
    }
}

fn memory_registers_len(registers: HotplugRegisters) -> u8 {
    match registers.protocol {
        HotplugProtocol::Events => memory_hotplug::REGISTERS_LEN_BYTES,
        HotplugProtocol::Selector => memory_selector::REGISTERS_LEN_BYTES,
    }
}

fn memory(hotplug: MemoryHotplug, has_nodes: bool) -> Vec<u8> {
    match hotplug.registers.protocol {
        HotplugProtocol::Events => memory_hotplug::container(hotplug, has_nodes),
        HotplugProtocol::Selector => memory_selector::container(hotplug, has_nodes),
    }
}

fn tell_of_cpus(registers: HotplugRegisters) -> Vec<u8> {
    match registers.protocol {
        HotplugProtocol::Events => cpu_hotplug::tell(),
        HotplugProtocol::Selector => cpu_selector::tell(),
    }
}

fn tell_of_memory(hotplug: MemoryHotplug) -> Vec<u8> {
    match hotplug.registers.protocol {
        HotplugProtocol::Events => memory_hotplug::tell(),
        HotplugProtocol::Selector => memory_selector::tell(),
    }
}

fn fixed_processors(inputs: &AcpiInputs) -> Vec<u8> {
    let mut children = Vec::new();
    Name::new("_HID".into(), &"ACPI0010").to_aml_bytes(&mut children);
    Name::new("_CID".into(), &EISAName::new("PNP0A05")).to_aml_bytes(&mut children);
    for (index, cpu) in (0_u32..).zip(&inputs.cpus) {
        let path = Path::new(&format!("C{index:03X}"));
        let processor = Name::new("_HID".into(), &"ACPI0007");
        let number = uid(index);
        let status = if cpu.enabled { STATUS_PRESENT } else { 0 };
        let status = Name::new("_STA".into(), &status);
        let node = inputs.numa.as_ref().map(|_| proximity(cpu.domain));
        let mut fields: Vec<&dyn Aml> = vec![&processor, &number, &status];
        fields.extend(node.iter().map(|node| -> &dyn Aml { node }));
        Device::new(path, fields).to_aml_bytes(&mut children);
    }
    to_bytes(&Device::new("CPUS".into(), vec![&Raw(children)]))
}

fn serial(gsi: u32) -> Vec<u8> {
    let port = layout::SERIAL_PORT;
    let resources = ResourceTemplate::new(vec![
        &Interrupt::new(true, true, false, false, gsi),
        // Sixteen-bit decoding, eight registers.
        &IO::new(port, port, 1, 8),
    ])
    .named("_CRS");
    let label = Name::new("_DDN".into(), &"COM1");
    to_bytes(&Device::new("COM1".into(), vec![&hid("PNP0501"), &uid(0), &label, &resources]))
}

/// The CMOS clock, without the interrupt of a PC's: it has no alarm. A guest that is not told of the
/// device looks for one with interrupt 8 by itself, in vain.
fn clock() -> Vec<u8> {
    let port = layout::CMOS_PORT;
    let resources = ResourceTemplate::new(vec![&IO::new(port, port, 1, 2)]).named("_CRS");
    to_bytes(&Device::new("RTC0".into(), vec![&hid("PNP0B00"), &uid(0), &resources]))
}

/// The generation ID of the virtual machine, by the names that Microsoft's specification and Linux know;
/// `ADDR` is its address in two halves.
fn generation_id(gpa: u64) -> Vec<u8> {
    let id = Name::new("_HID".into(), &"GDWT0001");
    // The first is the specification's; Linux has both in its list and compares with capitals.
    let names = Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"]);
    let compatible = Name::new("_CID".into(), &names);
    let label = Name::new("_DDN".into(), &"VM_Gen_Counter");
    let (low, high) = (gpa & u64::from(u32::MAX), gpa >> 32);
    let address = Name::new("ADDR".into(), &Package::new(vec![&low, &high]));
    to_bytes(&Device::new("VGEN".into(), vec![&id, &uid(0), &compatible, &label, &address]))
}

/// Gives a template its name.
trait Named {
    fn named(&self, name: &str) -> Name;
}

impl<T: Aml> Named for T {
    fn named(&self, name: &str) -> Name {
        Name::new(name.into(), self)
    }
}

/// The generic event device and the power button it speaks for.
/// `handlers` are further events, with the AML that tells the guest of each, if anything does.
fn events(ged: GedInputs, name: &str, handlers: [(u8, Option<Vec<u8>>); 4]) -> Vec<u8> {
    let number = uid(0);
    let button_id = hid("PNP0C0C");
    let button = Device::new("PWRB".into(), vec![&button_id, &number]);
    let id = Name::new("_HID".into(), &"ACPI0013");
    let resources = ResourceTemplate::new(vec![&Interrupt::new(true, true, false, false, ged.gsi)])
        .named("_CRS");
    let region = Raw(ged.place.region("GEDR", 1));
    let register = Field::new(
        "GEDR".into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"GEST", 8)],
    );
    let status = Path::new("GEST");
    // One read, which clears; then look at the copy.
    let read = Store::new(&Local(0), &status);
    let pressed = And::new(&ZERO, &Local(0), &EVENT_POWER_BUTTON);
    let button_path = Path::new("\\_SB_.PWRB");
    let notify = Notify::new(&button_path, &NOTIFY_BUTTON);
    let was_pressed = If::new(&pressed, vec![&notify]);
    let mut body = Vec::new();
    for part in [&read as &dyn Aml, &was_pressed] {
        part.to_aml_bytes(&mut body);
    }
    for (event, tell) in handlers {
        let Some(tell) = tell.map(Raw) else { continue };
        let has_happened = And::new(&ZERO, &Local(0), &event);
        If::new(&has_happened, vec![&tell]).to_aml_bytes(&mut body);
    }
    let body = Raw(body);
    let handler = Method::new("_EVT".into(), 1, true, vec![&body]);
    let device =
        Device::new(name.into(), vec![&id, &number, &resources, &region, &register, &handler]);
    [to_bytes(&button), to_bytes(&device)].concat()
}

/// Tells the guest that its generation ID is another one.
fn tell_of_generation() -> Vec<u8> {
    to_bytes(&Notify::new(&Path::new("\\_SB_.VGEN"), &NOTIFY_GENERATION))
}

/// A PCI Express root with its windows, and the NUMA node that all devices below are in.
fn host_bridge(segment: &PciSegment, slots: Slots, node: Option<u32>) -> Vec<u8> {
    let path = Path::new(&format!("PC{:02X}", segment.id));
    let legacy = Name::new("_CID".into(), &EISAName::new("PNP0A03"));
    let number = Name::new("_SEG".into(), &u16::from(segment.id));
    let first_bus = Name::new("_BBN".into(), &segment.first_bus);
    let coherent = Name::new("_CCA".into(), &acpi_tables::aml::ONE);
    let resources = windows(segment);
    let control = osc();
    let id = hid("PNP0A08");
    let unique = uid(u32::from(segment.id));
    let routes = interrupt_routes(segment);
    let mut children: Vec<&dyn Aml> =
        vec![&id, &legacy, &unique, &number, &first_bus, &coherent, &resources, &control];
    if !segment.intx.is_empty() {
        children.push(&routes);
    }
    let node = node.map(proximity);
    children.extend(node.iter().map(|node| -> &dyn Aml { node }));
    let slots = hotplug::slots(slots);
    children.push(&slots);
    to_bytes(&Device::new(path, children))
}

fn windows(segment: &PciSegment) -> Name {
    let mut bytes = Vec::new();
    AddressSpace::<u16>::new_bus_number(u16::from(segment.first_bus), u16::from(segment.last_bus))
        .to_aml_bytes(&mut bytes);
    if let Some((first, last)) = segment.io_ports {
        if segment.id == 0 {
            // The bridge's own configuration ports.
            IO::new(
                layout::PCI_CONFIG_PORT,
                layout::PCI_CONFIG_PORT,
                1,
                u8::try_from(layout::PCI_CONFIG_PORT_COUNT).unwrap_or(8),
            )
            .to_aml_bytes(&mut bytes);
        }
        AddressSpace::<u16>::new_io(first, last, None).to_aml_bytes(&mut bytes);
    }
    let cacheable = AddressSpaceCacheable::NotCacheable;
    if let Some(window) = segment.mmio32 {
        let low = |gpa: u64| u32::try_from(gpa).unwrap_or(u32::MAX);
        let (first, last) = (low(window.gpa), low(window.end_gpa() - 1));
        AddressSpace::<u32>::new_memory(cacheable, true, first, last, None)
            .to_aml_bytes(&mut bytes);
    }
    if let Some(window) = segment.mmio64 {
        let (first, last) = (window.gpa, window.end_gpa() - 1);
        AddressSpace::<u64>::new_memory(cacheable, true, first, last, None)
            .to_aml_bytes(&mut bytes);
    }
    ResourceTemplate::new(vec![&Raw(bytes)]).named("_CRS")
}

/// `_PRT`: device and pin, the source (zero: an interrupt number), the number.
fn interrupt_routes(segment: &PciSegment) -> Name {
    let mut routes = PackageBuilder::new();
    for route in &segment.intx {
        let address = u32::from(route.device) << 16 | 0xffff;
        routes.add_element(&Package::new(vec![&address, &route.pin, &ZERO, &route.gsi]));
    }
    routes.named("_PRT")
}

/// `_OSC`: the guest asks for control of PCI Express features and is told what it gets.
fn osc() -> Raw {
    let (buffer, uuid) = (Arg(3), Uuid::new(OSC_PCI_HOST_UUID));
    let (status, control) = (Path::new("CDW1"), Path::new("CDW3"));
    let (granted, revision) = (Local(0), Arg(1));
    let status_field = CreateDWordField::new(&status, &buffer, &ZERO);
    let control_field = CreateDWordField::new(&control, &buffer, &8_u8);
    let mask = And::new(&granted, &control, &OSC_GRANTED);
    let wrong_revision = NotEqual::new(&revision, &acpi_tables::aml::ONE);
    let say_revision = Or::new(&status, &status, &0x08_u8);
    let if_revision = If::new(&wrong_revision, vec![&say_revision]);
    let less = NotEqual::new(&granted, &control);
    let say_less = Or::new(&status, &status, &0x10_u8);
    let if_less = If::new(&less, vec![&say_less]);
    let answer = Store::new(&control, &granted);
    let is_pci = Equal::new(&Arg(0), &uuid);
    let known = If::new(&is_pci, vec![&control_field, &mask, &if_revision, &if_less, &answer]);
    let say_unknown = Or::new(&status, &status, &0x04_u8);
    let unknown = Else::new(vec![&say_unknown]);
    let result = Return::new(&buffer);
    let method =
        Method::new("_OSC".into(), 4, true, vec![&status_field, &known, &unknown, &result]);
    Raw(to_bytes(&method))
}
