// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU exits and their handler.
//!
//! Owns one pass through KVM_RUN and the translation of its exit into calls of an
//! [`ExitHandler`]. Must never decide what happens to the VM: it reports, the handler decides.

use std::fmt::Write as _;

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON,
};
use kvm_ioctls::VcpuExit;

use crate::fault_trace::FaultedAt;
use crate::stage2::MapStage2;
use crate::userfault::FaultedAccess;
use crate::vcpu::Vcpu;

/// Granularity of missing memory in bytes.
const PAGE_BYTES: u64 = 4096;

/// What a vCPU does after its handler has handled an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterExit {
    /// Re-enter the guest.
    Resume,
    /// Complete the access and park the vCPU, as after a reset request: no further guest instruction runs
    /// until it is resumed.
    Leave,
}

/// What a vCPU does after a memory fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// Re-enter the guest: the memory may be resident now.
    Retry,
    /// Map the resident memory and re-enter the guest, which saves another exit. Only with
    /// [`crate::Capabilities::pre_fault_memory`].
    Map,
    /// Stop with [`StopReason::MemoryFault`].
    Stop,
}

/// Why a vCPU has stopped for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Triple fault.
    Shutdown,
    /// The guest halted without an in-kernel interrupt controller.
    Halted,
    /// The guest requested a reset, shutdown or similar (KVM_SYSTEM_EVENT_*).
    SystemEvent {
        /// Kind of the event.
        kind: u32,
    },
    /// A KVM internal error.
    InternalError {
        /// Kind of the error (KVM_INTERNAL_ERROR_*).
        suberror: u32,
        /// Explanation, with the instruction pointer.
        text: String,
    },
    /// The processor refused to enter the guest.
    FailEntry {
        /// Reason code of the processor.
        hardware_reason: u64,
        /// Host CPU.
        cpu: u32,
    },
    /// Guest memory is not available.
    MemoryFault(FaultedAccess),
    /// KVM_RUN failed.
    RunFailed {
        /// The errno.
        errno: i32,
    },
    /// An unexpected exit.
    UnexpectedExit {
        /// Name of the exit in kvm-ioctls.
        name: String,
    },
}

/// Handles the exits of a VM's vCPUs. Called on the vCPU threads, concurrently, but for [`kicked`](Self::kicked).
///
/// Methods must not call [`crate::VcpuThreads::pause_all`] and the like, as a vCPU cannot wait for itself.
/// Such calls are refused.
pub trait ExitHandler: Send + Sync {
    /// Port read by the guest; `data` is 1, 2 or 4 bytes long.
    fn pio_read(&self, port: u16, data: &mut [u8]);
    /// Port write by the guest; `data` is 1, 2 or 4 bytes long.
    fn pio_write(&self, port: u16, data: &[u8]) -> AfterExit;
    /// MMIO read by the guest; `data` is 1 to 8 bytes long.
    fn mmio_read(&self, gpa: u64, data: &mut [u8]);
    /// MMIO write by the guest; `data` is 1 to 8 bytes long.
    fn mmio_write(&self, gpa: u64, data: &[u8]) -> AfterExit;
    /// Where the calling vCPU faulted when KVM_RUN failed without an address, if known otherwise: see
    /// [`crate::FaultTracer`].
    fn faulted_at(&self, vcpu_index: u32) -> Option<FaultedAt> {
        let _ = vcpu_index;
        None
    }
    /// Guest access to memory that the host cannot provide.
    fn memory_fault(&self, vcpu_index: u32, access: FaultedAccess) -> FaultAction {
        let _ = (vcpu_index, access);
        FaultAction::Stop
    }
    /// A vCPU is to leave the guest and the handler: its thread, if [`memory_fault`](Self::memory_fault) waits on it,
    /// is to return. Called on other threads, after the reason was set, also if it is not there.
    fn kicked(&self, vcpu_index: u32) {
        let _ = vcpu_index;
    }
    /// A vCPU has stopped for good; its state can still be read. The others keep running.
    fn stopped(&self, vcpu_index: u32, reason: StopReason);
}

/// Result of one KVM_RUN.
#[derive(Debug)]
pub(crate) enum RunOutcome {
    /// The exit was handled; the next KVM_RUN completes it.
    Handled,
    /// As `Handled`, and the vCPU is to park.
    Leave,
    /// A signal or `immediate_exit`; nothing is pending.
    Interrupted,
    /// The vCPU cannot continue.
    Stopped(StopReason),
}

impl From<AfterExit> for RunOutcome {
    fn from(after: AfterExit) -> Self {
        match after {
            AfterExit::Resume => Self::Handled,
            AfterExit::Leave => Self::Leave,
        }
    }
}

/// Enters the guest once, and handles the exit.
pub(crate) fn run_once(vcpu: &mut Vcpu, handler: &dyn ExitHandler) -> RunOutcome {
    let pass = enter_once(vcpu, handler);
    match &pass {
        RunOutcome::Stopped(StopReason::InternalError { suberror, text })
            if *suberror == KVM_INTERNAL_ERROR_DELIVERY_EV && vcpu.lost_deliveries.again() =>
        {
            log::debug!("vcpu{}: {text}; trying again", vcpu.index());
            RunOutcome::Handled
        }
        _ => {
            vcpu.lost_deliveries.none();
            pass
        }
    }
}

fn enter_once(vcpu: &mut Vcpu, handler: &dyn ExitHandler) -> RunOutcome {
    let index = vcpu.index();
    match vcpu.fd.run() {
        Ok(VcpuExit::IoIn(port, data)) => {
            // A string instruction gives one exit with all its elements.
            let element_len_bytes = vcpu.run_page.pio_element_len_bytes();
            data.chunks_mut(element_len_bytes).for_each(|data| handler.pio_read(port, data));
            RunOutcome::Handled
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            let element_len_bytes = vcpu.run_page.pio_element_len_bytes();
            let mut after = AfterExit::Resume;
            for data in data.chunks(element_len_bytes) {
                if handler.pio_write(port, data) == AfterExit::Leave {
                    after = AfterExit::Leave;
                }
            }
            after.into()
        }
        Ok(VcpuExit::MmioRead(gpa, data)) => {
            handler.mmio_read(gpa, data);
            RunOutcome::Handled
        }
        Ok(VcpuExit::MmioWrite(gpa, data)) => handler.mmio_write(gpa, data).into(),
        Ok(VcpuExit::MemoryFault { flags, gpa, size }) => {
            let access = FaultedAccess { gpa: Some(gpa), len_bytes: size, flags };
            fault(handler, vcpu, index, access)
        }
        Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => RunOutcome::Handled,
        Ok(VcpuExit::Hyperv) => {
            vcpu.answer_hyperv();
            RunOutcome::Handled
        }
        Ok(VcpuExit::Shutdown) => RunOutcome::Stopped(StopReason::Shutdown),
        Ok(VcpuExit::Hlt) => RunOutcome::Stopped(StopReason::Halted),
        Ok(VcpuExit::SystemEvent(kind, _)) => RunOutcome::Stopped(StopReason::SystemEvent { kind }),
        Ok(VcpuExit::FailEntry(hardware_reason, cpu)) => {
            RunOutcome::Stopped(StopReason::FailEntry { hardware_reason, cpu })
        }
        Ok(VcpuExit::InternalError) => RunOutcome::Stopped(internal_error(vcpu)),
        Ok(other) => RunOutcome::Stopped(StopReason::UnexpectedExit { name: format!("{other:?}") }),
        Err(error) => match error.errno() {
            libc::EINTR => RunOutcome::Interrupted,
            // A vCPU that waited for INIT and SIPI was woken.
            libc::EAGAIN => RunOutcome::Handled,
            libc::EFAULT => {
                let gpa = handler.faulted_at(index).and_then(|at| vcpu.gpa_of(at));
                let access = FaultedAccess { gpa, len_bytes: 0, flags: 0 };
                fault(handler, vcpu, index, access)
            }
            errno => RunOutcome::Stopped(StopReason::RunFailed { errno }),
        },
    }
}

fn fault(
    handler: &dyn ExitHandler,
    vcpu: &dyn MapStage2,
    index: u32,
    access: FaultedAccess,
) -> RunOutcome {
    match handler.memory_fault(index, access) {
        FaultAction::Retry => RunOutcome::Handled,
        FaultAction::Map => {
            let page = access.gpa.map(|gpa| gpa & !(PAGE_BYTES - 1));
            // If KVM cannot map it in advance, the guest's access maps it, or is refused again.
            if let Some(Err(error)) = page.map(|page| vcpu.fill(page, PAGE_BYTES)) {
                log::trace!("vcpu{index}: {error}: {}", error.source);
            }
            RunOutcome::Handled
        }
        FaultAction::Stop => RunOutcome::Stopped(StopReason::MemoryFault(access)),
    }
}

fn internal_error(vcpu: &Vcpu) -> StopReason {
    let (suberror, data) = vcpu.run_page.internal_error();
    let rip = vcpu.regs().map(|regs| regs.rip).ok();
    StopReason::InternalError { suberror, text: describe(suberror, &data, rip) }
}

/// Describes an internal error for the log.
fn describe(suberror: u32, data: &[u64], rip: Option<u64>) -> String {
    let mut text = match suberror {
        KVM_INTERNAL_ERROR_EMULATION => "KVM cannot emulate the guest's instruction",
        KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions at once",
        KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while an event was delivered",
        KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "an exit of the processor that KVM ignores",
        _ => "an internal error of KVM",
    }
    .to_owned();
    if let Some(rip) = rip {
        let _ = write!(text, " at instruction pointer {rip:#x}");
    }
    if !data.is_empty() {
        text.push_str(", details");
        for word in data {
            let _ = write!(text, " {word:#x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use parking_lot::Mutex;

    use super::*;
    use crate::error::KvmError;
    use crate::vcpu::LostDeliveries;

    /// A handler for memory faults only.
    struct Faults(FaultAction);

    impl ExitHandler for Faults {
        fn pio_read(&self, _port: u16, _data: &mut [u8]) {}
        fn pio_write(&self, _port: u16, _data: &[u8]) -> AfterExit {
            AfterExit::Resume
        }
        fn mmio_read(&self, _gpa: u64, _data: &mut [u8]) {}
        fn mmio_write(&self, _gpa: u64, _data: &[u8]) -> AfterExit {
            AfterExit::Resume
        }
        fn memory_fault(&self, vcpu_index: u32, access: FaultedAccess) -> FaultAction {
            assert_eq!((vcpu_index, access.gpa), (3, Some(0x5008)));
            self.0
        }
        fn stopped(&self, _vcpu_index: u32, _reason: StopReason) {}
    }

    /// Records what it should map, and fails.
    #[derive(Default)]
    struct Tables(Mutex<Vec<(u64, u64)>>);

    impl MapStage2 for Tables {
        fn fill(&self, gpa: u64, len_bytes: u64) -> Result<u64, KvmError> {
            self.0.lock().push((gpa, len_bytes));
            Err(KvmError { what: "fill", source: io::Error::from_raw_os_error(libc::EAGAIN) })
        }
    }

    #[test]
    fn the_handler_decides_whether_a_memory_fault_is_retried() {
        let access = FaultedAccess { gpa: Some(0x5008), len_bytes: 4096, flags: 0 };
        let tables = Tables::default();
        let after = |action| fault(&Faults(action), &tables, 3, access);
        assert!(matches!(after(FaultAction::Retry), RunOutcome::Handled));
        let RunOutcome::Stopped(reason) = after(FaultAction::Stop) else {
            panic!("the vCPU continues without its memory");
        };
        assert_eq!(reason, StopReason::MemoryFault(access));
        assert!(tables.0.lock().is_empty());
    }

    #[test]
    fn a_page_is_mapped_ahead_when_the_handler_says_so_and_the_guest_continues_without() {
        let access = FaultedAccess { gpa: Some(0x5008), len_bytes: 0, flags: 0 };
        let tables = Tables::default();
        let after = fault(&Faults(FaultAction::Map), &tables, 3, access);
        assert!(matches!(after, RunOutcome::Handled));
        assert_eq!(*tables.0.lock(), [(0x5000, 4096)]);
    }

    #[test]
    fn an_internal_error_names_the_place_and_the_details() {
        let text = describe(KVM_INTERNAL_ERROR_EMULATION, &[0x10, 0x2], Some(0x1000));
        let expected = "KVM cannot emulate the guest's instruction at instruction pointer 0x1000, \
                        details 0x10 0x2";
        assert_eq!(text, expected);
        assert_eq!(describe(99, &[], None), "an internal error of KVM");
    }

    #[test]
    fn a_delivery_that_fails_is_tried_again_and_not_for_ever() {
        let mut lost = LostDeliveries::default();
        let again = std::iter::from_fn(|| lost.again().then_some(())).take(1000).count();
        assert!((20..1000).contains(&again), "{again}");
        assert!(!lost.again());
        lost.none();
        assert!(lost.again());
    }
}
