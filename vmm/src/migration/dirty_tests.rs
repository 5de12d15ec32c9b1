// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The merged log on real KVM, with a guest that writes, device writes of this process, discards, a fake
//! passed-through function and the log of a vhost-user back end. Skipped without /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use hypervisor::{
    AfterExit, BootRegisters, ExitHandler, Hypervisor, StopReason, ThreadsConfig, VcpuInit,
    VcpuThreads, VmConfig,
};
use memory::{RamConfig, RamLayout, ZoneSpec};
use pci::fakes::FakeMsiSource;
use vfio::fakes::{FakeFunction, FakeSlots};
use vfio::{DmaGate, VfioPciDevice, VfioWiring};
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::*;

const MIB: u64 = 1 << 20;
/// More pages than device bits are moved at a time.
const FIRST_LEN_BYTES: u64 = 32 * MIB;
/// A region with a memory slot at either end and nothing in between.
const SECOND_LEN_BYTES: u64 = 4 * MIB;
const SLOTS_OF_SECOND: [(u32, Range<u64>); 2] = [(1, 0..MIB), (2, 2 * MIB..4 * MIB)];

/// Writes one set of pages, leaves, writes the other, and leaves again, without end. DS is at 0, GS at 16 MiB, ES and FS where the
/// slots of the second region begin.
#[rustfmt::skip]
const CODE: [u8; 30] = [
    0xa2, 0x00, 0x30,           // mov [0x3000], al
    0x65, 0xa2, 0x00, 0x00,     // mov gs:[0], al
    0x26, 0xa2, 0x00, 0x50,     // mov es:[0x5000], al
    0x64, 0xa2, 0xff, 0x7f,     // mov fs:[0x7fff], al
    0xe6, 0x10,                 // out 0x10, al
    0xa2, 0x00, 0x40,           // mov [0x4000], al
    0x26, 0xa2, 0x00, 0x60,     // mov es:[0x6000], al
    0xe6, 0x10,                 // out 0x10, al
    0xeb, 0xe4,                 // jmp to the begin
    0x90, 0x90,
];
const CODE_GPA: u64 = 0x1000;

/// A page, by region and number in it.
type Page = (usize, u64);

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A vCPU: KVM's log.
    Guest,
    /// A device of this process.
    Device,
    /// The balloon, or a guest that discards.
    Discard,
    /// A passed-through function.
    Dma,
    /// The back end of a vhost-user device.
    BackEnd,
}

const SOURCES: [Source; 5] =
    [Source::Guest, Source::Device, Source::Discard, Source::Dma, Source::BackEnd];

impl Source {
    /// What it writes at once, first and after that; no other source writes these.
    fn pages(self) -> [&'static [Page]; 2] {
        match self {
            Self::Guest => [&[(0, 3), (0, 4096), (1, 5), (1, 519)], &[(0, 4), (1, 6)]],
            Self::Device => [&[(0, 64), (0, 5000), (0, 8191), (1, 300)], &[(0, 65), (1, 1023)]],
            Self::Discard => [&[(0, 127), (0, 128), (1, 0)], &[(0, 4095)]],
            Self::Dma => [&[(0, 200), (1, 255), (1, 256)], &[(0, 4097), (1, 520)]],
            Self::BackEnd => [&[(0, 8190), (1, 511), (1, 512)], &[(0, 0), (1, 700)]],
        }
    }
}

fn of(sources: &[Source], turns: &[usize]) -> BTreeSet<Page> {
    let all = sources.iter().map(|source| source.pages());
    all.flat_map(|pages| turns.iter().flat_map(move |turn| pages[*turn])).copied().collect()
}

struct Leaves(Mutex<Sender<()>>);

impl ExitHandler for Leaves {
    fn pio_read(&self, _: u16, _: &mut [u8]) {}

    fn pio_write(&self, _: u16, _: &[u8]) -> AfterExit {
        self.0.lock().send(()).unwrap();
        AfterExit::Leave
    }

    fn mmio_read(&self, _: u64, _: &mut [u8]) {}

    fn mmio_write(&self, gpa: u64, _: &[u8]) -> AfterExit {
        panic!("the guest writes beside its memory, at {gpa:#x}");
    }

    fn stopped(&self, _: u32, reason: StopReason) {
        panic!("{reason:?}");
    }
}

/// A machine with all sources of dirty pages.
struct Rig {
    log: Option<MachineDirtyLog>,
    threads: VcpuThreads,
    left: Receiver<()>,
    vm: Vm,
    ram: Arc<GuestRam>,
    function: Arc<FakeFunction>,
    device: Arc<VfioPciDevice>,
    /// Where the back end marks pages, by address.
    marks: File,
}

fn hosts() -> Vec<Hypervisor> {
    if !test_skip::kvm() {
        return Vec::new();
    }
    let kvm = || Hypervisor::open(Path::new("/dev/kvm")).unwrap();
    vec![kvm(), Hypervisor::without_manual_dirty_log(kvm())]
}

fn ram() -> Arc<GuestRam> {
    let zone = |name: &str, len| ZoneSpec { shared: true, ..ZoneSpec::new(name, len) };
    let zones = vec![zone("first", FIRST_LEN_BYTES), zone("second", SECOND_LEN_BYTES)];
    Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap())
}

fn attach(vm: &Vm, ram: &Arc<GuestRam>) {
    let first = [(0, 0, 0..FIRST_LEN_BYTES)];
    let second = SLOTS_OF_SECOND.map(|(slot, bytes)| (slot, 1, bytes));
    for (slot, region, bytes) in first.into_iter().chain(second) {
        let region = &ram.regions()[region];
        let config = MemslotConfig {
            slot,
            gpa: region.gpa() + bytes.start,
            hva: region.slot_addr() + bytes.start,
            len_bytes: bytes.end - bytes.start,
            log_dirty: false,
            readonly: false,
        };
        // SAFETY: the bytes are within the region, which the slot keeps mapped with all of guest memory; tests
        // reach them by volatile accesses only.
        unsafe { vm.set_memory_slot(config, Arc::<GuestRam>::clone(ram)) }.unwrap();
    }
}

fn function() -> (Arc<FakeFunction>, Arc<VfioPciDevice>) {
    let gate = Arc::new(DmaGate::default());
    let host = FakeFunction::new(FakeFunction::config(), Arc::clone(&gate)).unwrap();
    host.migration.allow(true, b"state");
    host.migration.hardware_mut().logs = true;
    let wiring = VfioWiring {
        msi_source: &FakeMsiSource::new(64),
        slots: Arc::new(FakeSlots::default()),
        gate,
        intx: None,
        trapped_bars: Vec::new(),
        has_ports: true,
        gpudirect_clique: None,
        peers: None,
    };
    let device = VfioPciDevice::new("function".to_owned(), host.clone(), wiring).unwrap();
    (host, Arc::new(device))
}

impl Rig {
    /// The log has been started, and `prepare` has changed the function before.
    fn prepared(kvm: &Hypervisor, prepare: impl FnOnce(&FakeFunction)) -> Self {
        let (vm, ram) = (Vm::create(kvm, &VmConfig::default()).unwrap(), ram());
        attach(&vm, &ram);
        ram.regions()[0].write_range(CODE_GPA, &CODE).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut registers = BootRegisters {
            regs: vcpu.regs().unwrap(),
            sregs: vcpu.sregs().unwrap(),
            fpu: kvm_bindings::kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() },
        };
        let second = ram.regions()[1].gpa();
        let sregs = &mut registers.sregs;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        (sregs.ds.base, sregs.gs.base) = (0, 4096 * PAGE_BYTES);
        (sregs.es.base, sregs.fs.base) = (second, second + 2 * MIB);
        (registers.regs.rip, registers.regs.rflags) = (CODE_GPA, 2);
        let cpuid = kvm.supported_cpuid().unwrap();
        let registers = Some(registers);
        let init = VcpuInit { cpuid, registers, msrs: Vec::new(), msr_bits: Vec::new() };
        vcpu.init(&init).unwrap();
        let (sender, left) = channel();
        let handler = Arc::new(Leaves(Mutex::new(sender)));
        let threads =
            VcpuThreads::start(vec![vcpu], ThreadsConfig { handler, on_start: None }).unwrap();
        let (function, device) = function();
        prepare(&function);
        let (served, marks) = WriteLog::for_tests("back end", &ram).unwrap();
        let watch = || DeviceLogs { dma: vec![device.watch_dma(&ram)], served: vec![served] };
        let log = Some(MachineDirtyLog::start(vm.clone(), Arc::clone(&ram), watch).unwrap());
        Self { log, threads, left, vm, ram, function, device, marks }
    }

    /// One of which nothing is dirty.
    fn clean(kvm: &Hypervisor) -> Self {
        let rig = Self::prepared(kvm, |_| ());
        rig.round();
        rig.take(FIRST_LEN_BYTES / PAGE_BYTES);
        assert_eq!(rig.round(), 0);
        rig
    }

    fn log(&self) -> &MachineDirtyLog {
        self.log.as_ref().unwrap()
    }

    fn round(&self) -> u64 {
        self.log().begin_round().unwrap()
    }

    /// Takes what is dirty, in slices of so many pages.
    fn take(&self, slice_pages: u64) -> BTreeSet<Page> {
        let mut all = BTreeSet::new();
        for (index, region) in self.ram.regions().iter().enumerate() {
            let mut first = 0;
            while first < region.len_pages() {
                let end = region.len_pages().min(first + slice_pages);
                // What is in the buffer from before counts for nothing.
                let mut words =
                    vec![u64::MAX; usize::try_from((end - first).div_ceil(64)).unwrap()];
                self.log().collect_and_clear(index, first..end, &mut words).unwrap();
                let dirty = (first..end).filter(|page| {
                    let at = page - first;
                    words[usize::try_from(at / 64).unwrap()] & 1 << (at % 64) != 0
                });
                all.extend(dirty.map(|page| (index, page)));
                first = end;
            }
        }
        all
    }

    fn gpa(&self, (region, page): Page) -> u64 {
        self.ram.regions()[region].gpa() + page * PAGE_BYTES
    }

    /// Has a source write its pages of this turn. The guest has its turns one after the other.
    fn write(&self, source: Source, turn: usize) {
        let pages = source.pages()[turn];
        match source {
            Source::Guest => {
                self.threads.resume_all();
                self.left.recv_timeout(Duration::from_mins(1)).unwrap();
                self.threads.pause_all().unwrap();
            }
            Source::Device => {
                let memory = self.ram.guest_memory();
                for page in pages {
                    let at = GuestAddress(self.gpa(*page) + 17);
                    memory.memory().write_slice(&[1, 2, 3], at).unwrap();
                }
            }
            Source::Discard => {
                for page in pages {
                    let gpa = self.gpa(*page);
                    assert_eq!(self.ram.discard(gpa..gpa + PAGE_BYTES).len_bytes(), PAGE_BYTES);
                }
            }
            Source::Dma => {
                for page in pages {
                    self.function.migration.write_memory(self.gpa(*page));
                }
            }
            Source::BackEnd => {
                for page in pages {
                    let number = self.gpa(*page) / PAGE_BYTES;
                    let mut byte = [0];
                    self.marks.read_exact_at(&mut byte, number / 8).unwrap();
                    byte[0] |= 1 << (number % 8);
                    self.marks.write_all_at(&byte, number / 8).unwrap();
                }
            }
        }
    }
}

#[test]
fn what_each_source_writes_is_in_one_round_and_in_no_other() {
    for kvm in hosts() {
        let rig = Rig::clean(&kvm);
        for turn in [0, 1] {
            for source in SOURCES {
                rig.write(source, turn);
                let expected = of(&[source], &[turn]);
                assert_eq!(rig.round(), expected.len() as u64, "{source:?}");
                assert_eq!(rig.take(8192), expected, "{source:?}");
                assert_eq!(rig.round(), 0, "{source:?} is told of again");
                assert_eq!(rig.take(8192), BTreeSet::new(), "{source:?} is told of again");
            }
        }
    }
}

#[test]
fn all_sources_together_are_the_union_whatever_the_slices() {
    for kvm in hosts() {
        for slice_pages in [64, 192, 4096 + 64] {
            let rig = Rig::clean(&kvm);
            for source in SOURCES {
                rig.write(source, 0);
            }
            assert_eq!(rig.round(), of(&SOURCES, &[0]).len() as u64);
            assert_eq!(rig.take(slice_pages), of(&SOURCES, &[0]));
            assert_eq!((rig.round(), rig.take(slice_pages)), (0, BTreeSet::new()));
        }
    }
}

/// The guest and its devices write between the reading of the log and the copying of a slice.
#[test]
fn what_is_written_while_a_round_is_copied_is_in_it_or_in_the_next() {
    for kvm in hosts() {
        for source in SOURCES {
            let rig = Rig::clean(&kvm);
            rig.write(source, 0);
            rig.round();
            rig.write(source, 1);
            let here = rig.take(192);
            assert!(here.is_superset(&of(&[source], &[0])), "{source:?}: {here:?}");
            rig.round();
            let next = rig.take(192);
            let late = of(&[source], &[1]);
            let both: BTreeSet<_> = here.union(&next).copied().collect();
            assert_eq!(both, of(&[source], &[0, 1]), "{source:?}");
            assert!(late.iter().all(|page| here.contains(page) != next.contains(page)));
            assert_eq!((rig.round(), rig.take(192)), (0, BTreeSet::new()), "{source:?}");
        }
    }
}

/// The log is read at the end of a round and again at the stop, with nothing taken in between.
#[test]
fn what_an_earlier_reading_found_is_still_there_when_it_is_read_again() {
    for kvm in hosts() {
        for source in SOURCES {
            let rig = Rig::clean(&kvm);
            rig.write(source, 0);
            rig.round();
            rig.write(source, 1);
            let both = of(&[source], &[0, 1]);
            assert_eq!(rig.round(), both.len() as u64, "{source:?}");
            assert_eq!(rig.take(192), both, "{source:?}");
        }
    }
}

/// Of a slice that is copied only what is in it is taken.
#[test]
fn a_slice_takes_nothing_of_others() {
    for kvm in hosts() {
        let rig = Rig::clean(&kvm);
        for source in SOURCES {
            rig.write(source, 0);
        }
        rig.round();
        let mut words = [0; 64];
        rig.log().collect_and_clear(0, 0..4096, &mut words).unwrap();
        let is_elsewhere = |page: &Page| page.0 != 0 || page.1 >= 4096;
        let rest: BTreeSet<_> = of(&SOURCES, &[0]).into_iter().filter(is_elsewhere).collect();
        assert_eq!(rig.round(), rest.len() as u64);
        assert_eq!(rig.take(64), rest);
    }
}

#[test]
fn tracking_ends_with_the_log_and_a_new_one_has_nothing_of_devices() {
    for kvm in hosts() {
        let mut rig = Rig::clean(&kvm);
        let dirty = |rig: &Rig| -> u64 {
            rig.ram.regions().iter().map(|region| region.device_dirty().count()).sum()
        };
        assert!(rig.function.migration.is_logging());
        drop(rig.log.take());
        assert!(!rig.function.migration.is_logging());
        assert!(rig.ram.regions().iter().all(|region| !region.device_dirty().is_tracking()));
        for slot in [0, 1, 2] {
            let read = rig.vm.dirty_log(slot, &mut Vec::new());
            assert!(matches!(read, Err(MemslotError::NotLogged { .. })), "{slot}: {read:?}");
        }
        rig.write(Source::Device, 0);
        assert_eq!(dirty(&rig), 0);
        let nothing = || DeviceLogs { dma: Vec::new(), served: Vec::new() };
        let (vm, ram) = (rig.vm.clone(), Arc::clone(&rig.ram));
        rig.log = Some(MachineDirtyLog::start(vm, ram, nothing).unwrap());
        rig.round();
        rig.take(8192);
        rig.write(Source::Device, 1);
        assert_eq!((rig.round(), rig.take(64)), (2, of(&[Source::Device], &[1])));
    }
}

/// It may have written every page, until it stops: all are told of then, once.
#[test]
fn a_device_without_a_log_is_named_and_all_memory_is_dirty_once_it_has_stopped() {
    let pages = (FIRST_LEN_BYTES + SECOND_LEN_BYTES) / PAGE_BYTES;
    for kvm in hosts() {
        let rig = Rig::prepared(&kvm, |host| host.migration.hardware_mut().logs = false);
        rig.round();
        rig.take(8192);
        assert_eq!(rig.log().devices_without_log(), ["function"]);
        assert_eq!(rig.round(), 0);
        rig.device.quiesce().unwrap();
        rig.device.stop().unwrap();
        assert_eq!(rig.round(), pages);
        assert_eq!(rig.log().devices_without_log(), [""; 0]);
        assert_eq!(rig.take(4096).len() as u64, pages);
        assert_eq!((rig.round(), rig.take(4096)), (0, BTreeSet::new()));
    }
}
