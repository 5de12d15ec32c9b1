// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a process that makes a system call which its sandbox does not allow: a line that names the call and the
//! thread, and an exit code of its own.
//!
//! Owns the handler of SIGSYS. It runs wherever the call was made: it must never allocate, lock or wait.

use std::cell::Cell;
use std::io;

use super::names::name_of;

/// Exit code of a process that made a system call which its sandbox does not allow.
pub const STOPPED: u8 = 102;

thread_local! {
    /// The kind of this thread. It needs no destructor, so that reading it in a handler is one load.
    static KIND: Cell<&'static str> = const { Cell::new("main") };
}

/// Notes the kind of the calling thread, for the line.
pub(super) fn set_kind(kind: &'static str) {
    KIND.set(kind);
}

/// A line of limited length, without an allocation.
struct Line {
    bytes: [u8; 320],
    len: usize,
}

impl Line {
    fn text(&mut self, text: &str) {
        for byte in text.bytes() {
            if let Some(slot) = self.bytes.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, value: u64, base: u64) {
        let mut digits = [0_u8; 20];
        let (mut at, mut rest) = (digits.len(), value);
        loop {
            at = at.saturating_sub(1);
            // A digit of a base up to 16.
            let digit = b"0123456789abcdef".get(usize::try_from(rest % base).unwrap_or(0)).copied();
            if let Some(slot) = digits.get_mut(at) {
                *slot = digit.unwrap_or(b'?');
            }
            rest /= base;
            if rest == 0 || at == 0 {
                break;
            }
        }
        let text = digits.get(at..).and_then(|digits| std::str::from_utf8(digits).ok());
        self.text(text.unwrap_or("?"));
    }
}

/// The argument that the table may check, and so the one that tells such calls apart. None of them is an address.
fn telling_argument(call: i64, arguments: [u64; 3]) -> Option<u64> {
    let [first, second, third] = arguments;
    match call {
        // The first of a priority is nearly always PRIO_PROCESS.
        libc::SYS_ioctl | libc::SYS_fcntl | libc::SYS_setpriority => Some(second),
        libc::SYS_kill
        | libc::SYS_tgkill
        | libc::SYS_sched_setaffinity
        | libc::SYS_sched_setscheduler
        | libc::SYS_bpf
        | libc::SYS_clone
        | libc::SYS_prlimit64
        | libc::SYS_socket
        | libc::SYS_socketpair
        | libc::SYS_prctl
        | libc::SYS_arch_prctl
        | libc::SYS_seccomp => Some(first),
        libc::SYS_mmap | libc::SYS_mprotect => Some(third),
        _ => None,
    }
}

fn line(call: i64, argument: Option<u64>, kind: &str) -> Line {
    let mut line = Line { bytes: [0; 320], len: 0 };
    line.text("Error: the sandbox has stopped system call ");
    line.number(call.unsigned_abs(), 10);
    line.text(" (");
    line.text(name_of(call).unwrap_or("unknown"));
    if let Some(argument) = argument {
        line.text(" 0x");
        line.number(argument, 16);
    }
    line.text(") of a thread of kind ");
    line.text(kind);
    line.text(", and the process ends\nHint: this is a defect: --seccomp log lets such calls through and has the ");
    line.text("kernel log them; please report this line\n");
    line
}

/// The kind of thread on which other calls fail with ENOSYS rather than end the process: the C library loads what the
/// host is configured to look up names with, and which calls that makes is not known here.
const LIBRARIES_OF_THE_HOST: &str = "mig-resolve";

/// Handles SIGSYS.
extern "C" fn on_sigsys(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    /// `siginfo_t` of SIGSYS: `si_call_addr`, `si_syscall`, `si_arch`.
    #[repr(C)]
    struct Info {
        head: [libc::c_int; 4],
        address: u64,
        call: libc::c_int,
        arch: libc::c_uint,
    }
    // SAFETY: the kernel passes a siginfo_t of SIGSYS, whose layout Info is, and a ucontext_t.
    let (call, registers) = unsafe {
        let context = context.cast::<libc::ucontext_t>();
        ((*info.cast::<Info>()).call, (*context).uc_mcontext.gregs)
    };
    let register = |index: libc::c_int| {
        let index = usize::try_from(index).unwrap_or(0);
        registers.get(index).copied().unwrap_or(0).cast_unsigned()
    };
    if KIND.get() == LIBRARIES_OF_THE_HOST {
        // SAFETY: as above. The thread goes on behind the call, with this as its result.
        unsafe {
            let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            if let Some(result) = registers.get_mut(usize::try_from(libc::REG_RAX).unwrap_or(0)) {
                *result = -i64::from(libc::ENOSYS);
            }
        }
        return;
    }
    let arguments = [register(libc::REG_RDI), register(libc::REG_RSI), register(libc::REG_RDX)];
    let call = i64::from(call);
    let line = line(call, telling_argument(call, arguments), KIND.get());
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: these calls are safe in a handler; pollfd and the line live during them. A pipe that is ready takes so
    // much without waiting. `_exit` runs nothing else of the process.
    unsafe {
        if libc::poll(&raw mut poll, 1, 0) == 1 {
            libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len);
        }
        libc::_exit(STOPPED.into());
    }
}

/// From now on a call that a filter stops ends the process with [`STOPPED`].
///
/// # Errors
/// The kernel takes no handler.
pub(super) fn end_with_line() -> io::Result<()> {
    // SAFETY: sigaction is a plain C structure for which all zeros is a valid value; the handler has the signature
    // that SA_SIGINFO asks for and does only what a handler may. It runs on the thread's signal stack, if it has one.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigsys as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigfillset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_the_call_the_argument_and_the_thread() {
        let line = line(libc::SYS_ioctl, telling_argument(libc::SYS_ioctl, [3, 0xae80, 0]), "vcpu");
        let text = std::str::from_utf8(&line.bytes[..line.len]).expect("text");
        assert!(text.contains("system call 16 (ioctl 0xae80) of a thread of kind vcpu"), "{text}");
        assert!(text.ends_with("report this line\n"), "{text}");
        assert_eq!(telling_argument(libc::SYS_read, [1, 2, 3]), None);
    }
}
