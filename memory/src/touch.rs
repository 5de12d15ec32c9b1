// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Touching guest memory: a write to each page that changes nothing, so that page faults populate it.
//!
//! Owns the write, and the handler of `SIGBUS`: a page that cannot be had ends the touching instead of the process, and
//! the advice says why then. Other accesses that cause the signal are left to the handler that was there before. Must
//! never be used on memory whose content is still to arrive.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::OnceLock;

use crate::mapping::Mapping;
use crate::to_usize;

// The one instruction whose SIGBUS the handler expects. `or` with zero is a write for the kernel and for the page
// tables, and no change for all others; `lock` makes it one access, whatever vCPUs and devices write meanwhile.
core::arch::global_asm!(
    ".pushsection .text.godwit_touch, \"ax\", @progbits",
    ".hidden godwit_touch_pages",
    ".hidden godwit_touch_write",
    ".hidden godwit_touch_end",
    ".globl godwit_touch_pages",
    ".globl godwit_touch_write",
    ".globl godwit_touch_end",
    ".type godwit_touch_pages, @function",
    "godwit_touch_pages:",
    ".cfi_startproc",
    "cmp rdi, rsi",
    "jae godwit_touch_end",
    "godwit_touch_write:",
    "lock or byte ptr [rdi], 0",
    "add rdi, rdx",
    "jmp godwit_touch_pages",
    "godwit_touch_end:",
    "mov rax, rdi",
    "ret",
    ".cfi_endproc",
    ".size godwit_touch_pages, . - godwit_touch_pages",
    ".popsection",
);

unsafe extern "C" {
    /// Touches a byte at `start` and each `step_bytes` after it, below `end`. Returns the first address that was not
    /// touched.
    fn godwit_touch_pages(start: *mut u8, end: *mut u8, step_bytes: usize) -> *mut u8;
    /// The write.
    fn godwit_touch_write();
    /// Where it goes on after a write that failed.
    fn godwit_touch_end();
}

/// Touches a byte of each `step_bytes` of `range` (bytes of the mapping). Returns the offset of the first that was not
/// touched: the end, or more, if all were.
pub fn touch(mapping: &Mapping, range: &Range<u64>, step_bytes: u64) -> u64 {
    let is_inside = range.start <= range.end && range.end <= mapping.len_bytes();
    if !is_inside || step_bytes == 0 || !handles_bus_errors() {
        return range.start;
    }
    // SAFETY: both offsets lie in the mapping or at its end, as just checked.
    let (start, end) = unsafe {
        (mapping.start().add(to_usize(range.start)), mapping.start().add(to_usize(range.end)))
    };
    // SAFETY: every byte that is touched lies in the mapping, which is readable, writable, and borrowed for the call;
    // the access is atomic and changes nothing, so it may alias whatever others write. Should the page not be had, the
    // handler that was just installed leads behind the write.
    let reached = unsafe { godwit_touch_pages(start, end, to_usize(step_bytes)) };
    (reached.addr() - mapping.start().addr()) as u64
}

/// The action for `SIGBUS` before ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Whether our handler is installed, which is done on first use, and called for this thread: another may have taken its
/// place, the action before ours is restored by a signal that is none of ours, and the signal may be blocked since before
/// the program was executed.
fn handles_bus_errors() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| install().is_some())
        && current().is_some_and(|current| current.sa_sigaction == our_handler())
        && !is_blocked()
}

fn is_blocked() -> bool {
    let mut mask = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: changes nothing and writes one set of signals, which lives during the call.
    let asked =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr()) };
    // SAFETY: the call that succeeded has filled it.
    asked != 0 || unsafe { libc::sigismember(mask.as_ptr(), libc::SIGBUS) } != 0
}

fn our_handler() -> libc::sighandler_t {
    let handler: Handler = on_bus_error;
    handler as *const () as libc::sighandler_t
}

fn current() -> Option<libc::sigaction> {
    let mut current = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: changes nothing and writes one sigaction, which lives during the call.
    let asked = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), current.as_mut_ptr()) };
    // SAFETY: the call that succeeded has filled it.
    (asked == 0).then(|| unsafe { current.assume_init() })
}

fn install() -> Option<()> {
    // Before the handler is installed, which reads it.
    let before = current()?;
    BEFORE.get_or_init(|| before);
    // SAFETY: all zeros is a valid sigaction: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = our_handler();
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler makes no call that is not safe in a handler, and touches nothing but the context it is given.
    let done = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    (done == 0).then_some(())
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    const RIP: usize = libc::REG_RIP.cast_unsigned() as usize;
    // SAFETY: with SA_SIGINFO the third argument is the context of the interrupted thread, which is ours to change
    // until the handler returns.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let address = |label: unsafe extern "C" fn()| (label as *const ()).addr().cast_signed() as i64;
    match registers.get_mut(RIP) {
        Some(rip) if *rip == address(godwit_touch_write) => *rip = address(godwit_touch_end),
        _ => pass_on(signal, info, context),
    }
}

/// What would have happened without our handler. Ours is gone afterwards wherever that, or what ran before it, has set the
/// default action: nothing is touched then.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let before = BEFORE.get();
    let handler = before.map_or(libc::SIG_DFL, |before| before.sa_sigaction);
    // SAFETY: with SA_SIGINFO the second argument describes the signal, for as long as the handler runs.
    let code = unsafe { (*info).si_code };
    // By a process, or of a page that nothing has accessed: no access is repeated.
    let is_sent = code <= 0 || code == libc::BUS_MCEERR_AO;
    if handler == libc::SIG_IGN && is_sent {
        return;
    }
    if matches!(handler, libc::SIG_DFL | libc::SIG_IGN) {
        // An access is repeated when the handler returns, and ends the process. That is also what the kernel does where
        // a signal that a thread causes itself is ignored.
        // SAFETY: only the disposition of one signal is changed, to one that runs no code.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        if is_sent {
            // SAFETY: takes a number; the signal is blocked until the handler returns.
            unsafe { libc::raise(signal) };
        }
    } else if before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: a handler that was installed with SA_SIGINFO takes these three arguments, which are those of ours.
        let handler: Handler = unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: a handler that was installed without SA_SIGINFO takes the number alone.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "touch_tests.rs"]
mod tests;
