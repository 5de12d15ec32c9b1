// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The flags for which a vCPU leaves the guest, and the two orders in which they and `immediate_exit` are written and
//! read: see the documentation of `threads`.
//!
//! Owns both orders, which a model of every interleaving checks. Must never wait.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

use crate::run_page::RunPage;

/// The byte of the run page that has the next KVM_RUN return at once.
pub(super) trait ImmediateExit {
    fn set_immediate_exit(&self, on: bool);
}

impl ImmediateExit for RunPage {
    fn set_immediate_exit(&self, on: bool) {
        Self::set_immediate_exit(self, on);
    }
}

/// A reason to leave the guest.
pub(super) struct Flag(AtomicBool);

impl Flag {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Of a vCPU that is not in the guest, or sets it itself.
    pub(super) fn set(&self, on: bool) {
        self.0.store(on, Ordering::SeqCst);
    }
}

/// The accesses before and after this are in one order that all threads see: sequentially consistent ones are without it,
/// but the model takes them for weaker ones and knows fences only.
fn then() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// Gets a running vCPU out of the guest for this reason. Neither the flag nor the signal alone would do: the vCPU may
/// have looked at the flag and not entered the guest yet.
pub(super) fn get_out(flag: &Flag, page: &impl ImmediateExit, signal: impl FnOnce()) {
    flag.set(true);
    then();
    page.set_immediate_exit(true);
    signal();
}

/// Prepares the entry of the calling vCPU thread into the guest, which ends at once if there is a reason.
pub(super) fn before_entry(page: &impl ImmediateExit, flags: [&Flag; 3]) {
    page.set_immediate_exit(false);
    then();
    if flags.iter().any(|flag| flag.is_set()) {
        page.set_immediate_exit(true);
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    struct Byte(AtomicBool);

    impl ImmediateExit for Byte {
        fn set_immediate_exit(&self, on: bool) {
            self.0.store(on, Ordering::SeqCst);
        }
    }

    /// What the kernel knows of the vCPU thread.
    #[derive(Default)]
    struct Kernel {
        /// It is in KVM_RUN, where a signal interrupts it. Before that the handler of the signal has run, to no effect.
        in_run: bool,
        interrupted: bool,
    }

    struct Vcpu {
        page: Byte,
        flags: [Flag; 3],
        kernel: Mutex<Kernel>,
    }

    impl Vcpu {
        fn new() -> Self {
            let flags = [Flag::new(), Flag::new(), Flag::new()];
            Self {
                page: Byte(AtomicBool::new(false)),
                flags,
                kernel: Mutex::new(Kernel::default()),
            }
        }

        fn kick(&self, flag: usize) {
            get_out(&self.flags[flag], &self.page, || {
                let mut kernel = self.kernel.lock().unwrap();
                kernel.interrupted |= kernel.in_run;
            });
        }

        /// Enters the guest; true if it stays there until a signal comes.
        fn enter(&self) -> bool {
            let [leave, hold, tasks_pending] = &self.flags;
            before_entry(&self.page, [leave, hold, tasks_pending]);
            self.kernel.lock().unwrap().in_run = true;
            !self.page.0.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn no_kick_is_lost_wherever_the_vcpu_is() {
        for flag in 0..3 {
            loom::model(move || {
                let vcpu = Arc::new(Vcpu::new());
                let kicked = Arc::clone(&vcpu);
                let kicker = thread::spawn(move || kicked.kick(flag));
                let is_in_the_guest = vcpu.enter();
                kicker.join().unwrap();
                let interrupted = vcpu.kernel.lock().unwrap().interrupted;
                assert!(!is_in_the_guest || interrupted, "the guest runs on");
                assert!(vcpu.flags[flag].is_set());
            });
        }
    }

    /// After a late signal without a kick, with `immediate_exit` still set by an earlier kick.
    #[test]
    fn what_one_kick_has_left_behind_hides_no_other() {
        loom::model(|| {
            let vcpu = Arc::new(Vcpu::new());
            vcpu.page.set_immediate_exit(true);
            assert!(vcpu.enter(), "there is no reason to leave");
            vcpu.kernel.lock().unwrap().in_run = false;
            let kicked = Arc::clone(&vcpu);
            let kicker = thread::spawn(move || kicked.kick(2));
            let is_in_the_guest = vcpu.enter();
            kicker.join().unwrap();
            let interrupted = vcpu.kernel.lock().unwrap().interrupted;
            assert!(!is_in_the_guest || interrupted, "the guest runs on");
        });
    }
}
