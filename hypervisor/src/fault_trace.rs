// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The address of a vCPU's failed page access, traced with BPF on a KVM that does not report it.
//!
//! When the host refuses an access, `KVM_RUN` of a kernel without the bundled patches fails with
//! EFAULT and no address. KVM's tracepoints have the address before that: a program on one of them
//! records, for threads of this process only, the last address of each. Owns that program and its table.
//! Must never be taken for the cause of a fault: it has the last address, whatever refused the access.
//!
//! With two-dimensional paging the tracepoint of page faults has guest physical addresses. With
//! shadow paging every fault walks the guest's page tables first, and the tracepoint of those walks
//! has the guest virtual address.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use thiserror::Error;

use crate::bpf::{self, Helper, Insn, Reg};
use crate::caps::Capabilities;
use crate::fault_slots::{FaultSlots, SLOT_BITS, SLOTS, Taken};

/// Maximum number of threads with a pending fault: more than a VM has vCPUs.
const THREADS_MAX: u32 = 4096;

/// Longest log of the verifier that is read. What is refused comes at its end, and the program is short.
const VERIFIER_LOG_BYTES: usize = 64 << 10;
/// Lines of it that an error has.
const VERIFIER_LINES: usize = 2;

/// Why faults cannot be traced.
#[derive(Debug, Error)]
pub enum FaultTraceError {
    /// The permission to load BPF programs is missing.
    #[error(
        "this process may not load BPF programs, which tell where a vCPU faulted on a KVM without \
         the bundled patches: give them to the program with \
         'setcap cap_bpf,cap_perfmon+ep {}', or load the patched KVM with scripts/kvm-modules",
        program.display()
    )]
    NotPermitted {
        /// Path of this program.
        program: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Threads without the permission may not read what a program has recorded, and vCPUs have none.
    #[error(
        "this kernel lets only threads with CAP_BPF read the trace of faults, and vCPUs have no capabilities: use \
         Linux 5.19 or later, 'sysctl kernel.unprivileged_bpf_disabled=0' where that is possible, or the patched KVM"
    )]
    NotReadable(#[source] io::Error),
    /// The kernel lacks the tracepoint.
    #[error(
        "KVM of this kernel has no tracepoint {tracepoint} of the form that is known here (Linux \
         6.1 and later have)"
    )]
    NoTracepoint {
        /// Name of the tracepoint.
        tracepoint: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The kernel's verifier refuses the program.
    #[error("the kernel does not take the program that traces KVM's page faults: {why}")]
    Refused {
        /// The end of what the verifier says.
        why: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Any other error.
    #[error("the program that traces KVM's page faults cannot be loaded")]
    Load(#[source] io::Error),
}

/// Address of a fault in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultedAt {
    /// Guest physical address.
    Gpa(u64),
    /// Guest virtual address, in the vCPU's current address space.
    Gva(u64),
}

/// How KVM translates guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Paging {
    TwoDimensional,
    Shadow,
}

impl Paging {
    fn tracepoint(self) -> &'static CStr {
        match self {
            Self::TwoDimensional => c"kvm_page_fault",
            Self::Shadow => c"kvm_mmu_pagetable_walk",
        }
    }

    /// Offsets of the tracepoint's arguments: the address, and the last one that must exist.
    fn arguments(self) -> (i16, i16) {
        match self {
            // Before Linux 6.1 the tracepoint lacked its first argument, the vCPU, and so had two.
            Self::TwoDimensional => (8, 16),
            Self::Shadow => (0, 8),
        }
    }
}

/// Records where threads of this process fault, until dropped.
#[derive(Debug)]
pub struct FaultTracer {
    paging: Paging,
    noted: Noted,
    _attached: OwnedFd,
}

/// Where the program notes addresses: in the slot of a thread, which this process reads without a system call, or in the
/// table if another thread has that slot, or there are none.
#[derive(Debug)]
struct Noted {
    slots: Option<FaultSlots>,
    table: OwnedFd,
}

impl Noted {
    fn new() -> Result<Self, FaultTraceError> {
        let table = bpf::create_table(THREADS_MAX).map_err(refusal)?;
        let slots = FaultSlots::create()
            .inspect_err(|error| {
                log::info!("each page fault of a vCPU takes a system call more: {error}");
            })
            .ok();
        Ok(Self { slots, table })
    }

    /// Takes the address that was noted last for the calling thread.
    fn take(&self) -> Option<u64> {
        let thread = thread_id()?;
        match self.slots.as_ref().map(|slots| slots.take(thread)) {
            Some(Taken::Address(address)) => Some(address),
            Some(Taken::Nothing) => None,
            Some(Taken::OfAnother) | None => bpf::take_value(&self.table, thread).ok(),
        }
    }
}

/// Thread ID of the calling thread. The kernel is asked once.
fn thread_id() -> Option<u32> {
    thread_local! {
        static THREAD_ID: Option<u32> = {
            // SAFETY: takes nothing and touches no memory.
            u32::try_from(unsafe { libc::gettid() }).ok()
        };
    }
    THREAD_ID.with(|id| *id)
}

/// A program that the kernel has taken.
struct Prepared {
    paging: Paging,
    noted: Noted,
    program: OwnedFd,
}

impl Prepared {
    fn new(capabilities: &Capabilities) -> Result<Self, FaultTraceError> {
        let paging =
            if capabilities.uses_shadow_paging() { Paging::Shadow } else { Paging::TwoDimensional };
        let noted = Noted::new()?;
        probe(&noted.table)?;
        let this = Process::of_caller().map_err(FaultTraceError::Load)?;
        let program = load(&program(paging, &this, &noted))?;
        Ok(Self { paging, noted, program })
    }
}

impl FaultTracer {
    /// Starts tracing.
    ///
    /// # Errors
    /// Names what is missing and how to provide it.
    pub fn start(capabilities: &Capabilities) -> Result<Self, FaultTraceError> {
        let Prepared { paging, noted, program } = Prepared::new(capabilities)?;
        let tracepoint = paging.tracepoint();
        let attached =
            bpf::attach(&program, tracepoint).map_err(|source| match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => refusal(source),
                _ => FaultTraceError::NoTracepoint {
                    tracepoint: tracepoint.to_str().unwrap_or_default(),
                    source,
                },
            })?;
        Ok(Self { paging, noted, _attached: attached })
    }

    /// Whether the kernel takes the program, which is not attached to the tracepoint: nothing of the host changes.
    ///
    /// # Errors
    /// As [`Self::start`], but for a tracepoint that is missing.
    pub fn check(capabilities: &Capabilities) -> Result<(), FaultTraceError> {
        Prepared::new(capabilities).map(drop)
    }

    /// Where the calling thread last faulted, unless that was returned before.
    pub fn take(&self) -> Option<FaultedAt> {
        let address = self.noted.take()?;
        Some(match self.paging {
            Paging::TwoDimensional => FaultedAt::Gpa(address),
            Paging::Shadow => FaultedAt::Gva(address),
        })
    }
}

/// Looks whether a thread like a vCPU's, which has dropped its capabilities, may read `table`.
fn probe(table: &OwnedFd) -> Result<(), FaultTraceError> {
    const THREAD: &str = "trace-probe";
    let look = || stoppable_thread::start_group(THREAD, || bpf::take_value(table, 0));
    readable(look().map_err(FaultTraceError::Load)?)
}

/// What the answer about a thread that never faulted means.
fn readable(answer: io::Result<u64>) -> Result<(), FaultTraceError> {
    match answer {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            Err(FaultTraceError::NotReadable(error))
        }
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
            Err(FaultTraceError::Load(error))
        }
        _ => Ok(()),
    }
}

/// Loads a program. One that is refused is loaded again for the verifier's words, which cost memory and time.
fn load(program: &[Insn]) -> Result<OwnedFd, FaultTraceError> {
    bpf::load(program, &mut []).or_else(|source| match source.raw_os_error() {
        Some(libc::EACCES | libc::EINVAL) => {
            let mut log = vec![0; VERIFIER_LOG_BYTES];
            let again = bpf::load(program, &mut log);
            again.map_err(|source| match last_words(&log) {
                Some(why) => FaultTraceError::Refused { why, source },
                None => refusal(source),
            })
        }
        _ => Err(refusal(source)),
    })
}

/// The last lines of a verifier's log that say something, and not its statistics.
fn last_words(log: &[u8]) -> Option<String> {
    let text = log.split(|byte| *byte == 0).next()?;
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("processed "))
        .collect();
    let last = lines.get(lines.len().saturating_sub(VERIFIER_LINES)..)?.join("; ");
    Some(last.chars().filter(|char| !char.is_control()).collect())
        .filter(|why: &String| !why.is_empty())
}

fn refusal(source: io::Error) -> FaultTraceError {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            let program = std::env::current_exe().unwrap_or_else(|_| "cloud-hypervisor".into());
            FaultTraceError::NotPermitted { program, source }
        }
        _ => FaultTraceError::Load(source),
    }
}

/// Identity of a process in the kernel.
struct Process {
    id: i32,
    /// Device number, in the kernel's encoding, and inode of its PID namespace.
    namespace: (u64, u64),
}

impl Process {
    fn of_caller() -> io::Result<Self> {
        let namespace = std::fs::metadata("/proc/self/ns/pid")?;
        let (major, minor) = (libc::major(namespace.dev()), libc::minor(namespace.dev()));
        let device = u64::from(major) << 20 | u64::from(minor);
        let id = i32::try_from(std::process::id()).map_err(io::Error::other)?;
        Ok(Self { id, namespace: (device, namespace.ino()) })
    }
}

/// The program that records the address by thread, for threads of `process`.
fn program(paging: Paging, process: &Process, noted: &Noted) -> Vec<Insn> {
    const FRAME: Reg = Reg(10);
    const ADDRESS: i16 = -8;
    /// Stack offsets of thread and process id, 32 bits each.
    const THREAD: i16 = -16;
    const PROCESS: i16 = -12;
    const IDS_BYTES: i32 = 8;
    let (address, last) = paging.arguments();
    let mut to_table = Vec::from(Insn::set_map(Reg(1), &noted.table));
    to_table.extend([
        Insn::copy(Reg(2), FRAME),
        Insn::add(Reg(2), THREAD.into()),
        Insn::copy(Reg(3), FRAME),
        Insn::add(Reg(3), ADDRESS.into()),
        Insn::set(Reg(4), 0),
        Insn::call(Helper::MapUpdate),
    ]);
    let mut note = Vec::new();
    if let Some(slots) = &noted.slots {
        // The slot of the thread: it has it, or takes it if no other has.
        note.extend([
            Insn::load32(Reg(1), FRAME, THREAD),
            Insn::copy(Reg(2), Reg(1)),
            Insn::and(Reg(2), SLOTS - 1),
            Insn::shift_left(Reg(2), SLOT_BITS),
        ]);
        note.extend(Insn::set_value(Reg(3), slots.array()));
        note.extend([
            Insn::add_register(Reg(3), Reg(2)),
            Insn::load(Reg(4), Reg(3), FaultSlots::OWNER),
            Insn::skip_if_same(Reg(4), Reg(1), 1),
            Insn::skip_unless(Reg(4), 0, 3),
            Insn::store(Reg(3), FaultSlots::ADDRESS, Reg(7)),
            Insn::store(Reg(3), FaultSlots::OWNER, Reg(1)),
            Insn::skip(count(&to_table)),
        ]);
    }
    note.extend(to_table);
    let rest = count(&note);
    let mut program = vec![
        // Not used; makes attaching fail if the tracepoint lacks the argument.
        Insn::load(Reg(6), Reg(1), last),
        Insn::load(Reg(7), Reg(1), address),
        Insn::store(FRAME, ADDRESS, Reg(7)),
        Insn::store_value(FRAME, THREAD, 0),
    ];
    program.extend(Insn::set_wide(Reg(1), process.namespace.0));
    program.extend(Insn::set_wide(Reg(2), process.namespace.1));
    program.extend([
        Insn::copy(Reg(3), FRAME),
        Insn::add(Reg(3), THREAD.into()),
        Insn::set(Reg(4), IDS_BYTES),
        Insn::call(Helper::PidsInNamespace),
        Insn::skip_unless(Reg(0), 0, rest + 2),
        Insn::load32(Reg(1), FRAME, PROCESS),
        Insn::skip_unless(Reg(1), process.id, rest),
    ]);
    program.extend(note);
    program.extend([Insn::set(Reg(0), 0), Insn::exit()]);
    program
}

/// How many instructions a jump over these skips.
fn count(instructions: &[Insn]) -> i16 {
    // There are some twenty.
    i16::try_from(instructions.len()).unwrap_or(i16::MAX)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;
    use crate::Hypervisor;

    #[test]
    fn the_lack_of_rights_names_the_command_that_grants_them() {
        let text = refusal(io::Error::from_raw_os_error(libc::EPERM)).to_string();
        assert!(text.contains("setcap cap_bpf,cap_perfmon+ep /"), "{text}");
        let other = refusal(io::Error::from_raw_os_error(libc::ENOMEM));
        assert!(matches!(other, FaultTraceError::Load(_)), "{other:?}");
    }

    #[test]
    fn the_kernel_takes_the_program_and_nothing_is_noted_without_a_fault() {
        let hypervisor = match Hypervisor::open(std::path::Path::new("/dev/kvm")) {
            Ok(hypervisor) => hypervisor,
            Err(error) => return test_skip::skip!("{error}"),
        };
        match FaultTracer::start(hypervisor.capabilities()) {
            Ok(tracer) => assert_eq!(tracer.take(), None),
            Err(error @ FaultTraceError::NotPermitted { .. }) => test_skip::skip!("{error}"),
            Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
        }
    }

    #[test]
    fn a_trace_that_vcpus_may_not_read_is_refused_by_name() {
        let answer = |errno| readable(Err(io::Error::from_raw_os_error(errno)));
        let text = answer(libc::EPERM).unwrap_err().to_string();
        assert!(text.contains("Linux 5.19"), "{text}");
        assert!(matches!(answer(libc::EINVAL), Err(FaultTraceError::Load(_))));
        answer(libc::ENOENT).unwrap();
    }

    #[test]
    fn what_the_verifier_refuses_comes_with_its_words() {
        // It reads through a register that has no value.
        let program = [Insn::load(Reg(0), Reg(3), 0), Insn::exit()];
        match load(&program) {
            Err(FaultTraceError::Refused { why, .. }) => assert!(why.contains("R3"), "{why}"),
            Err(error @ FaultTraceError::NotPermitted { .. }) => test_skip::skip!("{error}"),
            other => panic!("{other:?}"),
        }
        let log =
            b"0: (79) r0 = *(u64 *)(r3 +0)\nR3 !read_ok\nprocessed 1 insns (limit 1000000)\n\0";
        assert_eq!(last_words(log).unwrap(), "0: (79) r0 = *(u64 *)(r3 +0); R3 !read_ok");
        assert_eq!(last_words(&[0; 8]), None);
    }

    /// What the program notes for two threads that fault one after the other, and a third fault of the first.
    fn noted_by_program(slots: bool) -> Result<[Option<u64>; 5], FaultTraceError> {
        let mut noted = Noted::new()?;
        noted.slots = noted.slots.filter(|_| slots);
        assert_eq!(noted.slots.is_some(), slots, "this kernel maps arrays");
        let this = Process::of_caller().unwrap();
        let program = load(&program(Paging::TwoDimensional, &this, &noted))?;
        let fault = |gpa| bpf::run(&program, &[1, gpa, 2, 3, 4]).unwrap();
        fault(0x1000);
        fault(0x2000);
        let last = [noted.take(), noted.take()];
        let other = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                fault(0x3000);
                noted.take()
            });
            other.join().unwrap()
        });
        let after = noted.take();
        fault(0x4000);
        Ok([last[0], last[1], other, after, noted.take()])
    }

    #[test]
    fn the_program_notes_the_last_address_of_each_thread_which_is_taken_once() {
        for slots in [true, false] {
            let expected = [Some(0x2000), None, Some(0x3000), None, Some(0x4000)];
            match noted_by_program(slots) {
                Ok(noted) => assert_eq!(noted, expected, "with slots: {slots}"),
                Err(error @ FaultTraceError::NotPermitted { .. }) => {
                    return test_skip::skip!("{error}");
                }
                Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
            }
        }
    }

    #[test]
    fn a_thread_whose_slot_another_one_has_is_noted_in_the_table() {
        let Ok(noted) = Noted::new() else { return test_skip::skip!("no BPF") };
        let this = Process::of_caller().unwrap();
        let program = load(&program(Paging::TwoDimensional, &this, &noted)).unwrap();
        let slots = noted.slots.as_ref().unwrap();
        let thread = thread_id().unwrap();
        slots.give_to(thread, thread ^ 1 << 30, 0x7000);
        bpf::run(&program, &[1, 0x5000, 2, 3, 4]).unwrap();
        assert_eq!(bpf::take_value(&noted.table, thread).unwrap(), 0x5000);
        bpf::run(&program, &[1, 0x6000, 2, 3, 4]).unwrap();
        assert_eq!([noted.take(), noted.take()], [Some(0x6000), None]);
        assert_eq!(slots.take(thread ^ 1 << 30), Taken::Address(0x7000), "which is left as it was");
    }

    #[test]
    fn a_table_says_that_it_has_no_value() {
        let Ok(table) = bpf::create_table(4) else { return test_skip::skip!("no BPF") };
        assert_eq!(bpf::take_value(&table, 7).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
}
