// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is said when SIGINT (Ctrl-C) comes while this program waits for what another one does.
//!
//! Owns SIGINT from the first call on. It must never keep the signal from ending the process.

/// Prints `words` on stderr when SIGINT comes, which then ends the process as it always does.
pub fn explain(words: String) {
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
