// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is said when SIGINT (Ctrl-C) comes while this program waits for what another one does.
//!
//! Owns SIGINT from the first call on. It must never keep the signal from ending the process.

/// Whether this process was started with SIGINT ignored, as a shell starts what a script ends with `&`.
fn is_ignored() -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: changes nothing and writes one sigaction, which lives during the call.
    let done = unsafe { libc::sigaction(libc::SIGINT, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: the call that succeeded has filled it.
    done == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

/// Prints `words` on stderr when SIGINT comes, which then ends the process as it always does. One that is
/// ignored stays so.
pub fn explain(words: String) {
    // A signal that is blocked comes to `sigwait` also if it is ignored.
    if is_ignored() {
        return;
    }
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both calls write to the set alone, which lives during them; it is whole afterwards.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        set.assume_init()
    };
    // SAFETY: reads the set and changes nothing but this thread's mask, which its threads will inherit.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    let wait = move || {
        let mut signal = 0;
        // SAFETY: reads the set and writes one number, which both live during the call.
        while unsafe { libc::sigwait(&raw const set, &raw mut signal) } != 0 {}
        eprintln!("\n{words}");
        // SAFETY: restores what a process begins with and lets the signal end it, as the mask of
        // this thread no longer holds it.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
            libc::raise(libc::SIGINT);
        }
    };
    if std::thread::Builder::new().name("interrupt".to_owned()).spawn(wait).is_err() {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::process::Command;

    use super::*;

    const DISPOSITION: &str = "GODWIT_TEST_SIGINT";
    const IGNORED: &str = "ignored";

    /// What the process does that gets the signal.
    fn interrupted(disposition: &str) {
        let action = if disposition == IGNORED { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: sets one of the two dispositions that call nothing.
        unsafe { libc::signal(libc::SIGINT, action) };
        explain("it goes on".to_owned());
        let mut pending = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the signal goes to this thread alone, where it does nothing or stays; the set is written
        // to and then looked at.
        let is_pending = unsafe {
            libc::raise(libc::SIGINT);
            libc::sigpending(pending.as_mut_ptr());
            libc::sigismember(pending.as_ptr(), libc::SIGINT) == 1
        };
        assert_eq!(is_pending, disposition != IGNORED);
    }

    #[test]
    fn a_signal_is_waited_for_unless_it_is_ignored() {
        if let Some(disposition) = std::env::var_os(DISPOSITION) {
            return interrupted(disposition.to_str().unwrap());
        }
        for disposition in ["default", IGNORED] {
            let ended = Command::new(std::env::current_exe().unwrap())
                .arg("--exact")
                .arg("cli::interrupt::tests::a_signal_is_waited_for_unless_it_is_ignored")
                .env(DISPOSITION, disposition)
                .output()
                .unwrap();
            assert!(ended.status.success(), "{disposition}: {ended:?}");
        }
    }
}
