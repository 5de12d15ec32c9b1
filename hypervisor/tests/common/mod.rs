// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A tiny real-mode guest for tests on real KVM.
//!
//! Owns the guest's memory and a handler that records what the guest does. Must never wait by
//! sleeping: tests wait for what the guest says.

#![allow(dead_code, reason = "each test file uses a part")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use hypervisor::{
    AfterExit, BootRegisters, ExitHandler, FaultAction, FaultedAccess, Hypervisor, MemslotConfig,
    StopReason, ThreadsConfig, Vcpu, VcpuInit, VcpuThreads, Vm, VmConfig,
};
use parking_lot::Mutex;

/// Longer than any step of these guests takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(1);
/// Guest memory: 64 pages from address 0.
pub const MEMORY_LEN_BYTES: usize = 64 * 4096;
/// Where guest code begins.
pub const CODE: u16 = 0x1000;
/// A write to this port parks the vCPU.
pub const LEAVE_PORT: u16 = 0x10;

/// Opens KVM, or says that the test is skipped.
pub fn kvm() -> Option<Hypervisor> {
    test_skip::kvm().then(|| Hypervisor::open(Path::new("/dev/kvm")).unwrap())
}

/// Anonymous memory that the guest and the test share.
pub struct Memory(*mut u8);

// SAFETY: the mapping is valid on every thread until drop; tests access it by volatile copies.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new() -> Arc<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MEMORY_LEN_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        Arc::new(Self(address.cast()))
    }

    pub fn write(&self, gpa: u16, bytes: &[u8]) {
        for (at, byte) in (usize::from(gpa)..).zip(bytes) {
            // SAFETY: 64 KiB are addressable, and the mapping is longer.
            unsafe { self.0.add(at).write_volatile(*byte) };
        }
    }

    pub fn read_u32(&self, gpa: u16) -> u32 {
        assert!(gpa.is_multiple_of(4));
        // SAFETY: within the mapping.
        let address = unsafe { self.0.add(usize::from(gpa)) };
        #[expect(clippy::cast_ptr_alignment, reason = "checked above; the mapping is page-aligned")]
        // SAFETY: aligned and within the mapping.
        unsafe {
            address.cast::<u32>().read_volatile()
        }
    }

    pub fn copy_from(&self, other: &Self) {
        // SAFETY: both mappings have this length and do not overlap; no guest runs on them.
        unsafe { std::ptr::copy_nonoverlapping(other.0, self.0, MEMORY_LEN_BYTES) };
    }

    pub fn protect(&self, page: usize, protection: i32) {
        // SAFETY: one page within the mapping; the test expects the faults.
        let answer = unsafe { libc::mprotect(self.0.add(page * 4096).cast(), 4096, protection) };
        assert_eq!(answer, 0);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and nothing borrows from it.
        unsafe { libc::munmap(self.0.cast(), MEMORY_LEN_BYTES) };
    }
}

/// What the guest did.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Out(u16, Vec<u8>),
    MmioWrite(u64, Vec<u8>),
    Fault(FaultedAccess),
    Stopped(u32, StopReason),
}

type OnFault = Box<dyn Fn(FaultedAccess) -> FaultAction + Send + Sync>;

/// Reports what the guest does, in order.
pub struct Recorder {
    events: Mutex<Sender<Event>>,
    pub on_fault: Option<OnFault>,
    pub on_out: Option<Box<dyn Fn() + Send + Sync>>,
    pub on_kick: Option<Box<dyn Fn(u32) + Send + Sync>>,
}

impl Recorder {
    pub fn new() -> (Self, Receiver<Event>) {
        let (sender, receiver) = channel();
        let (on_fault, on_out, on_kick) = (None, None, None);
        (Self { events: Mutex::new(sender), on_fault, on_out, on_kick }, receiver)
    }

    fn report(&self, event: Event) {
        // The test may be over.
        let _ = self.events.lock().send(event);
    }
}

impl ExitHandler for Recorder {
    fn pio_read(&self, port: u16, data: &mut [u8]) {
        data.fill(u8::try_from(port & 0xff).unwrap());
    }

    fn pio_write(&self, port: u16, data: &[u8]) -> AfterExit {
        if let Some(on_out) = &self.on_out {
            on_out();
        }
        self.report(Event::Out(port, data.to_vec()));
        if port == LEAVE_PORT { AfterExit::Leave } else { AfterExit::Resume }
    }

    fn mmio_read(&self, _gpa: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, gpa: u64, data: &[u8]) -> AfterExit {
        self.report(Event::MmioWrite(gpa, data.to_vec()));
        AfterExit::Resume
    }

    fn memory_fault(&self, _vcpu: u32, access: FaultedAccess) -> FaultAction {
        self.report(Event::Fault(access));
        self.on_fault.as_ref().map_or(FaultAction::Stop, |on_fault| on_fault(access))
    }

    fn kicked(&self, vcpu_index: u32) {
        if let Some(on_kick) = &self.on_kick {
            on_kick(vcpu_index);
        }
    }

    fn stopped(&self, vcpu_index: u32, reason: StopReason) {
        self.report(Event::Stopped(vcpu_index, reason));
    }
}

/// A VM with 64 pages of memory.
pub fn vm(kvm: &Hypervisor, log_dirty: bool) -> (Vm, Arc<Memory>) {
    let vm = Vm::create(kvm, &VmConfig::default()).unwrap();
    let memory = Memory::new();
    let config = MemslotConfig {
        slot: 0,
        gpa: 0,
        hva: memory.0.expose_provenance() as u64,
        len_bytes: MEMORY_LEN_BYTES as u64,
        log_dirty,
        readonly: false,
    };
    // SAFETY: the mapping lives until its last Arc is dropped, and is accessed as volatile only.
    unsafe { vm.set_memory_slot(config, memory.clone()) }.unwrap();
    (vm, memory)
}

/// Gives a vCPU real-mode registers that begin at `entry`, with data at `data_base`.
pub fn boot(kvm: &Hypervisor, vcpu: &Vcpu, entry: u16, data_base: u64) {
    let mut registers = BootRegisters {
        regs: vcpu.regs().unwrap(),
        sregs: vcpu.sregs().unwrap(),
        fpu: kvm_bindings::kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() },
    };
    registers.sregs.cs.base = 0;
    registers.sregs.cs.selector = 0;
    registers.sregs.ds.base = data_base;
    registers.regs.rip = entry.into();
    registers.regs.rflags = 2;
    registers.regs.rsp = 0x8000;
    let cpuid = kvm.supported_cpuid().unwrap();
    let registers = Some(registers);
    vcpu.init(&VcpuInit { cpuid, registers, msrs: Vec::new(), msr_bits: Vec::new() }).unwrap();
}

/// What a vCPU begins with that waits for INIT and SIPI.
pub fn waiting(kvm: &Hypervisor) -> VcpuInit {
    let cpuid = kvm.supported_cpuid().unwrap();
    VcpuInit { cpuid, registers: None, msrs: Vec::new(), msr_bits: Vec::new() }
}

/// Starts threads with `recorder`.
pub fn start(vcpus: Vec<Vcpu>, recorder: Recorder) -> VcpuThreads {
    let config = ThreadsConfig { handler: Arc::new(recorder), on_start: None };
    VcpuThreads::start(vcpus, config).unwrap()
}

/// A VM with one vCPU that runs `code`, its threads parked.
pub struct Guest {
    pub threads: VcpuThreads,
    pub events: Receiver<Event>,
    pub vm: Vm,
    pub memory: Arc<Memory>,
}

impl Guest {
    pub fn new(kvm: &Hypervisor, code: &[u8]) -> Self {
        let (recorder, events) = Recorder::new();
        let (vm, memory) = vm(kvm, false);
        memory.write(CODE, code);
        let vcpu = vm.create_vcpu(0).unwrap();
        boot(kvm, &vcpu, CODE, 0);
        Self { threads: start(vec![vcpu], recorder), events, vm, memory }
    }

    pub fn next(&self) -> Event {
        self.events.recv_timeout(PATIENCE).unwrap()
    }

    /// Waits for the guest's write to the leave port, and for its vCPU to be parked.
    pub fn wait_for_leave(&self) {
        while !matches!(self.next(), Event::Out(LEAVE_PORT, _)) {}
        self.threads.pause_all().unwrap();
    }

    pub fn rip(&self) -> u64 {
        self.threads.on_one(0, |vcpu| vcpu.regs().unwrap().rip).unwrap()
    }
}
