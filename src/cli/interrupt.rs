// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The message on SIGINT (Ctrl-C) while waiting for a migration.
//!
//! Owns SIGINT from the first call on. It must never keep the signal from ending the process.

use vmm::panicking;
use vmm::signals::is_ignored;

/// Prints `words` on stderr on SIGINT, which then ends the process as usual. If SIGINT is ignored, that
/// stays so.
pub fn explain(words: String) {
    // `sigwait` returns a blocked signal also if it is ignored.
    if is_ignored(libc::SIGINT) {
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
        // SAFETY: restores what a process begins with: another signal ends it from here on, whatever this
        // thread does, as its mask no longer holds it.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        }
        panicking::say_at_once(&format!("\n{words}\n"));
        // SAFETY: sends a signal to this thread, which ends the process.
        unsafe { libc::raise(libc::SIGINT) };
    };
    if stoppable_thread::spawn("interrupt", wait).is_err() {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::io::{Read as _, Write as _};
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    const DISPOSITION: &str = "GODWIT_TEST_SIGINT";
    const IGNORED: &str = "ignored";

    /// Body of the process that gets the signal.
    fn interrupted(disposition: &str) {
        let action = if disposition == IGNORED { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: sets one of the two dispositions that call nothing.
        unsafe { libc::signal(libc::SIGINT, action) };
        explain("it continues".to_owned());
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

    const FULL_PIPE: &str = "GODWIT_TEST_SIGINT_FULL_PIPE";

    #[test]
    fn a_full_pipe_keeps_no_signal_from_ending_the_process() {
        if std::env::var_os(FULL_PIPE).is_some() {
            explain("it continues".to_owned());
            // From here on the signal may be sent.
            println!("ready");
            loop {
                std::thread::park();
            }
        }
        let (_unread, mut pipe) = std::io::pipe().unwrap();
        // SAFETY: only numbers are passed, and the descriptor is open.
        let room_bytes =
            unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&pipe), libc::F_GETPIPE_SZ) };
        pipe.write_all(&vec![b'.'; usize::try_from(room_bytes).unwrap()]).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--nocapture", "--exact"])
            .arg("cli::interrupt::tests::a_full_pipe_keeps_no_signal_from_ending_the_process")
            .env(FULL_PIPE, "1")
            .stdout(Stdio::piped())
            .stderr(pipe);
        // SAFETY: between fork and exec only the mask and the disposition are changed, which takes no memory. The signal is
        // blocked in all threads, as in a program that calls `explain` first: that of the tests has others. What starts
        // the tests may ignore it, as shells have it for what runs in the background.
        unsafe {
            command.pre_exec(|| {
                let mut set = std::mem::zeroed();
                libc::sigaddset(&raw mut set, libc::SIGINT);
                libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let (mut stdout, mut said) = (child.stdout.take().unwrap(), Vec::new());
        while !said.ends_with(b"ready\n") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            said.push(byte[0]);
        }
        let pid = libc::pid_t::try_from(child.id()).unwrap();
        // SAFETY: only numbers are passed; the child has not been waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
        let began = Instant::now();
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if began.elapsed() > Duration::from_secs(30) {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("the signal does not end it");
            }
            std::thread::yield_now();
        };
        assert_eq!(ended.signal(), Some(libc::SIGINT));
    }
}
