// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One access that the host refuses, tried in a VM made for it.
//!
//! What a vCPU reports of such an access depends on the kernel: the arguments of a tracepoint are no stable interface, and a
//! table may be unreadable for a vCPU's thread. A wrong address found after a handover is a guest that waits for the
//! wrong page for good. Owns that VM, its few pages and its one instruction. Must never touch a guest's VM.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use kvm_bindings::{kvm_fpu, kvm_segment, kvm_sregs};
use parking_lot::Mutex;
use thiserror::Error;

use crate::amx;
use crate::caps::Hypervisor;
use crate::error::KvmError;
use crate::exits::{AfterExit, ExitHandler, FaultAction, RunOutcome, StopReason, run_once};
use crate::fault_trace::{FaultTracer, FaultedAt};
use crate::userfault::FaultedAccess;
use crate::vcpu::{BootRegisters, Vcpu, VcpuInit};
use crate::vcpu_state::VcpuStateError;
use crate::vm::{MemslotConfig, MemslotError, Vm, VmConfig};

/// Kind of the thread on which the vCPU runs: like a vCPU's it has no capabilities.
const THREAD: &str = "trace-probe";
/// Passes through `KVM_RUN` after which the access counts as not reported: a signal may end some.
const PASSES_MAX: usize = 64;

const PAGE_BYTES: usize = 4096;
/// A page for each level of the page tables, and one with the instruction.
const PAGES: usize = 5;
const CODE_PAGE: usize = 4;
/// Guest physical address of the page that the host refuses.
const REFUSED_GPA: u64 = 0x10_0000;
/// Its guest virtual address, which differs, so that one cannot be taken for the other.
const REFUSED_GVA: u32 = 0x9000;
/// The access is not to the first byte of the page.
const OFFSET: u32 = 0x238;
/// Present, writable, for user mode.
const ENTRY: u64 = 0b111;

/// Why refused accesses cannot be relied on.
#[derive(Debug, Error)]
pub enum FaultTrialError {
    /// The VM for the trial could not be made.
    #[error("the VM in which a refused access is tried cannot be made")]
    Make(#[source] KvmError),
    /// Nor its memory.
    #[error("the VM in which a refused access is tried gets no memory")]
    Memory(#[source] MemslotError),
    /// Nor its vCPU.
    #[error("the VM in which a refused access is tried gets no vCPU")]
    Vcpu(#[source] VcpuStateError),
    /// Host memory or a thread is missing.
    #[error("the VM in which a refused access is tried cannot run")]
    Host(#[source] io::Error),
    /// The access was reported for another page, or without an address.
    #[error(
        "this kernel does not report where a vCPU's access was refused: in a trial at {expected:#x} it reported {}",
        reported.map_or_else(|| "no address".to_owned(), |gpa| format!("{gpa:#x}"))
    )]
    WrongAddress {
        /// Where the access was.
        expected: u64,
        /// Where it was reported.
        reported: Option<u64>,
    },
    /// The access was not reported.
    #[error(
        "this kernel does not report that a vCPU's access was refused: in a trial the vCPU ended with {ended}"
    )]
    NotReported {
        /// What happened instead.
        ended: String,
    },
}

/// Has a vCPU of a VM of its own make an access that the host refuses, and looks whether it is reported with its address: by
/// KVM itself, or by `tracer`.
///
/// # Errors
/// What was reported instead, or why it could not be tried.
pub fn try_refused_access(
    hypervisor: &Hypervisor,
    tracer: Option<&FaultTracer>,
) -> Result<(), FaultTrialError> {
    let memory = Arc::new(TrialMemory::new().map_err(FaultTrialError::Host)?);
    let vm = Vm::create(hypervisor, &VmConfig::default()).map_err(FaultTrialError::Make)?;
    for config in memory.slots() {
        // SAFETY: the mapping is as long as the slot, lives as long as `memory`, which the VM keeps, and no reference to
        // its bytes is made once the VM has it.
        unsafe { vm.set_memory_slot(config, Arc::clone(&memory) as Arc<_>) }
            .map_err(FaultTrialError::Memory)?;
    }
    // The first vCPU of a process fixes what its guests are permitted, and this one comes before any guest.
    if let Err(error) = amx::request_permission() {
        log::debug!("guests of this process have no AMX: {error}");
    }
    let mut vcpu = vm.create_vcpu(0).map_err(FaultTrialError::Make)?;
    prepare(&vcpu, hypervisor)?;
    let handler = Trial { tracer, access: Mutex::new(None) };
    let outcome = stoppable_thread::start_group(THREAD, || run(&mut vcpu, &handler))
        .map_err(FaultTrialError::Host)?;
    let expected = REFUSED_GPA + u64::from(OFFSET);
    judge(expected, handler.access.into_inner(), &outcome)
}

/// The page is what counts: KVM may report its beginning.
fn judge(
    expected: u64,
    access: Option<FaultedAccess>,
    outcome: &RunOutcome,
) -> Result<(), FaultTrialError> {
    let page = |gpa: u64| gpa / PAGE_BYTES as u64;
    match access {
        Some(FaultedAccess { gpa: Some(gpa), .. }) if page(gpa) == page(expected) => Ok(()),
        Some(FaultedAccess { gpa: reported, .. }) => {
            Err(FaultTrialError::WrongAddress { expected, reported })
        }
        None => Err(FaultTrialError::NotReported { ended: format!("{outcome:?}") }),
    }
}

/// Until the vCPU stops, which a refused access makes it do.
fn run(vcpu: &mut Vcpu, handler: &Trial<'_>) -> RunOutcome {
    let mut outcome = RunOutcome::Interrupted;
    for _ in 0..PASSES_MAX {
        outcome = run_once(vcpu, handler);
        if matches!(outcome, RunOutcome::Stopped(_) | RunOutcome::Leave) {
            break;
        }
    }
    outcome
}

/// Puts the vCPU at the instruction: 64-bit mode with least privilege, in which any KVM runs guest code itself.
fn prepare(vcpu: &Vcpu, hypervisor: &Hypervisor) -> Result<(), FaultTrialError> {
    let mut regs = vcpu.regs().map_err(FaultTrialError::Make)?;
    (regs.rip, regs.rflags) = ((CODE_PAGE * PAGE_BYTES) as u64, 0b10);
    let sregs = in_user_mode(&vcpu.sregs().map_err(FaultTrialError::Make)?);
    let registers =
        BootRegisters { regs, sregs, fpu: kvm_fpu { fcw: 0x37f, ..kvm_fpu::default() } };
    let init = VcpuInit {
        cpuid: hypervisor.supported_cpuid().map_err(FaultTrialError::Make)?,
        registers: Some(registers),
        msrs: Vec::new(),
        msr_bits: Vec::new(),
    };
    vcpu.init(&init).map_err(FaultTrialError::Vcpu)
}

/// Paging, protection and long mode switched on, with flat segments at CPL 3 (AMD64 APM volume 2, chapters 3 to 5).
fn in_user_mode(sregs: &kvm_sregs) -> kvm_sregs {
    const CR0_PE_ET_NE_PG: u64 = 1 | 1 << 4 | 1 << 5 | 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let flat =
        kvm_segment { limit: u32::MAX, present: 1, dpl: 3, s: 1, g: 1, ..Default::default() };
    let code = kvm_segment { selector: 0x1b, type_: 0b1011, l: 1, ..flat };
    let data = kvm_segment { selector: 0x23, type_: 0b0011, db: 1, ..flat };
    kvm_sregs {
        cs: code,
        ss: data,
        ds: data,
        es: data,
        fs: data,
        gs: data,
        cr0: CR0_PE_ET_NE_PG,
        cr3: 0,
        cr4: CR4_PAE,
        efer: EFER_LME_LMA,
        ..*sregs
    }
}

/// Notes the access.
struct Trial<'a> {
    tracer: Option<&'a FaultTracer>,
    access: Mutex<Option<FaultedAccess>>,
}

impl ExitHandler for Trial<'_> {
    fn pio_read(&self, _port: u16, _data: &mut [u8]) {}
    fn pio_write(&self, _port: u16, _data: &[u8]) -> AfterExit {
        AfterExit::Leave
    }
    fn mmio_read(&self, _gpa: u64, _data: &mut [u8]) {}
    fn mmio_write(&self, _gpa: u64, _data: &[u8]) -> AfterExit {
        AfterExit::Leave
    }
    fn faulted_at(&self, _vcpu_index: u32) -> Option<FaultedAt> {
        self.tracer.and_then(FaultTracer::take)
    }
    fn memory_fault(&self, _vcpu_index: u32, access: FaultedAccess) -> FaultAction {
        *self.access.lock() = Some(access);
        FaultAction::Stop
    }
    fn stopped(&self, _vcpu_index: u32, _reason: StopReason) {}
}

/// The pages of the VM, and one behind them that has no access.
struct TrialMemory(NonNull<u8>);

// SAFETY: the mapping is valid until drop on whatever thread that happens, and is not accessed through a shared reference.
unsafe impl Send for TrialMemory {}
// SAFETY: as above.
unsafe impl Sync for TrialMemory {}

impl TrialMemory {
    const LEN_BYTES: usize = (PAGES + 1) * PAGE_BYTES;

    fn new() -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::LEN_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Self(start);
        let bytes = contents();
        // SAFETY: the mapping is longer than `bytes`, and nothing else refers to it yet.
        unsafe { start.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        // SAFETY: the last page of the mapping, to which nothing refers.
        let refused = unsafe {
            let last = start.as_ptr().add(PAGES * PAGE_BYTES);
            libc::mprotect(last.cast(), PAGE_BYTES, libc::PROT_NONE)
        };
        if refused == 0 { Ok(memory) } else { Err(io::Error::last_os_error()) }
    }

    fn slots(&self) -> [MemslotConfig; 2] {
        let hva = self.0.as_ptr().expose_provenance() as u64;
        let pages_bytes = (PAGES * PAGE_BYTES) as u64;
        let all = MemslotConfig {
            slot: 0,
            gpa: 0,
            hva,
            len_bytes: pages_bytes,
            log_dirty: false,
            readonly: false,
        };
        let len_bytes = PAGE_BYTES as u64;
        [all, MemslotConfig { slot: 1, gpa: REFUSED_GPA, hva: hva + pages_bytes, len_bytes, ..all }]
    }
}

impl Drop for TrialMemory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping that `new` made, which the VM no longer has: it owned this value.
        unsafe { libc::munmap(self.0.as_ptr().cast(), Self::LEN_BYTES) };
    }
}

/// Page tables of four levels at 0, and the instruction that reads a byte of the refused page.
fn contents() -> Vec<u8> {
    let mut bytes = vec![0; PAGES * PAGE_BYTES];
    let mut put = |page: usize, at: usize, value: &[u8]| {
        let from = page * PAGE_BYTES + at;
        if let Some(place) = bytes.get_mut(from..from + value.len()) {
            place.copy_from_slice(value);
        }
    };
    let entry = |gpa: u64| (gpa | ENTRY).to_le_bytes();
    let size = size_of::<u64>();
    for level in 0..3 {
        put(level, 0, &entry(((level + 1) * PAGE_BYTES) as u64));
    }
    put(3, CODE_PAGE * size, &entry((CODE_PAGE * PAGE_BYTES) as u64));
    put(3, REFUSED_GVA as usize / PAGE_BYTES * size, &entry(REFUSED_GPA));
    // mov al, [address]; then an instruction that is none.
    put(CODE_PAGE, 0, &[0x8a, 0x04, 0x25]);
    put(CODE_PAGE, 3, &(REFUSED_GVA + OFFSET).to_le_bytes());
    put(CODE_PAGE, 7, &[0x0f, 0x0b]);
    bytes
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;
    use crate::FaultTraceError;

    fn hypervisor() -> Option<Hypervisor> {
        match Hypervisor::open(std::path::Path::new("/dev/kvm")) {
            Ok(hypervisor) => Some(hypervisor),
            Err(error) => {
                test_skip::skip!("{error}");
                None
            }
        }
    }

    #[test]
    fn a_refused_access_is_reported_where_it_was() {
        let Some(hypervisor) = hypervisor() else { return };
        match FaultTracer::start(hypervisor.capabilities()) {
            Ok(tracer) => try_refused_access(&hypervisor, Some(&tracer)).unwrap(),
            Err(error @ FaultTraceError::NotPermitted { .. }) => test_skip::skip!("{error}"),
            Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
        }
    }

    #[test]
    fn without_an_address_the_trial_fails() {
        let Some(hypervisor) = hypervisor() else { return };
        let error = match try_refused_access(&hypervisor, None) {
            // A KVM with the bundled patches says where by itself.
            Ok(()) => return,
            Err(error) => error,
        };
        assert!(matches!(error, FaultTrialError::WrongAddress { reported: None, .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.ends_with("in a trial at 0x100238 it reported no address"), "{text}");
    }

    #[test]
    fn only_the_page_of_the_access_will_do() {
        let judged = |gpa| {
            let access = FaultedAccess { gpa: Some(gpa), len_bytes: 0, flags: 0 };
            judge(0x10_0238, Some(access), &RunOutcome::Interrupted)
        };
        judged(0x10_0238).unwrap();
        judged(0x10_0000).unwrap();
        for other in [0x9238, 0x10_1000, 0xf_ffff] {
            let reported = Some(other);
            assert!(
                matches!(judged(other), Err(FaultTrialError::WrongAddress { reported: r, .. }) if r == reported)
            );
        }
        let stopped = RunOutcome::Stopped(StopReason::Shutdown);
        let text = judge(0x10_0238, None, &stopped).unwrap_err().to_string();
        assert!(text.contains("Shutdown"), "{text}");
    }
}
