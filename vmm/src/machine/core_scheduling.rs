// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Core scheduling: what may run on the other hyperthread of a core while a vCPU is in the guest.
//!
//! The kernel keeps a cookie with each thread, and runs threads on one core at the same time only if their cookies are
//! the same (Documentation/admin-guide/hw-vuln/core-scheduling.rst). Owns no state: the cookies of the vCPU threads end
//! with them. Must never be left to vCPU threads themselves, which a guest may control: a thread of its own, which ends
//! at once, gives them their cookies.

use std::io;

use hypervisor::VcpuThreads;
use rustix::io::Errno;
use rustix::thread::{
    CoreSchedulingScope, Pid, create_core_scheduling_cookie, gettid, pull_core_scheduling_cookie,
    push_core_scheduling_cookie,
};
use thiserror::Error;

use crate::config::CoreSchedulingMode;

/// Name of the thread.
const THREAD: &str = "core-cookies";
const ONE: CoreSchedulingScope = CoreSchedulingScope::Thread;

/// Why vCPUs cannot be isolated on their cores.
#[derive(Debug, Error)]
pub enum CoreSchedulingError {
    /// The kernel refuses it.
    #[error(
        "vCPUs cannot be kept apart from other threads on a core; core_scheduling=off does without"
    )]
    Refused(#[source] io::Error),
    /// The thread cannot be started.
    #[error("the thread that keeps vCPUs apart on a core cannot be started")]
    Thread(#[source] io::Error),
}

/// Gives the threads of the `added` vCPUs that were added last, none of which has run, the cookies that `mode` asks for.
/// Where the kernel has no core scheduling, or the host no hyperthreads, nothing is done.
///
/// # Errors
/// See [`CoreSchedulingError`].
pub fn isolate(
    vcpus: &VcpuThreads,
    mode: CoreSchedulingMode,
    added: u32,
) -> Result<(), CoreSchedulingError> {
    let ids = vcpus.thread_ids().into_iter();
    let threads: Vec<_> = ids.filter_map(|(_, id)| Pid::from_raw(id)).collect();
    give_cookies(mode, &threads, usize::try_from(added).unwrap_or(usize::MAX))
}

fn give_cookies(
    mode: CoreSchedulingMode,
    threads: &[Pid],
    added: usize,
) -> Result<(), CoreSchedulingError> {
    let (old, new) = threads.split_at(threads.len().saturating_sub(added));
    if mode == CoreSchedulingMode::Off || new.is_empty() {
        return Ok(());
    }
    let give = || match mode {
        CoreSchedulingMode::Off => Ok(()),
        CoreSchedulingMode::Vm => {
            match old.first() {
                Some(first) => pull_core_scheduling_cookie(*first, ONE)?,
                None => create_core_scheduling_cookie(gettid(), ONE)?,
            }
            new.iter().try_for_each(|thread| push_core_scheduling_cookie(*thread, ONE))
        }
        CoreSchedulingMode::Vcpu => {
            new.iter().try_for_each(|thread| create_core_scheduling_cookie(*thread, ONE))
        }
    };
    match stoppable_thread::start_group(THREAD, give).map_err(CoreSchedulingError::Thread)? {
        Ok(()) => Ok(()),
        Err(Errno::NODEV) => {
            log::debug!("this host has no hyperthreads to keep vCPUs apart on");
            Ok(())
        }
        Err(Errno::INVAL) => {
            log::info!(
                "this kernel has no core scheduling (Linux 5.14 with CONFIG_SCHED_CORE): where the host has \
                 hyperthreads, others may run beside a vCPU"
            );
            Ok(())
        }
        // Not by the kernel, within one process: by a filter around the program.
        Err(Errno::PERM | Errno::NOSYS) if mode == CoreSchedulingMode::Vm => {
            log::warn!(
                "core scheduling is forbidden here: where the host has hyperthreads, others may run beside a vCPU"
            );
            Ok(())
        }
        Err(error) => Err(CoreSchedulingError::Refused(error.into())),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::sync::mpsc::{Sender, channel};

    use rustix::thread::core_scheduling_cookie;

    use super::*;

    /// A thread that lives as long as the sender.
    fn thread() -> (Pid, Sender<()>) {
        let (tell, told) = channel();
        let (live, lives) = channel::<()>();
        stoppable_thread::spawn("vcpu0", move || {
            tell.send(gettid()).unwrap();
            let _ = lives.recv();
        })
        .unwrap();
        (told.recv().unwrap(), live)
    }

    fn cookies(mode: CoreSchedulingMode) -> Result<[u64; 4], Errno> {
        let threads: Vec<_> = (0..3).map(|_| thread()).collect();
        let ids: Vec<_> = threads.iter().map(|(id, _)| *id).collect();
        give_cookies(mode, &ids[..2], 2).unwrap();
        give_cookies(mode, &ids, 1).unwrap();
        let of = |id| core_scheduling_cookie(id, ONE);
        Ok([of(ids[0])?, of(ids[1])?, of(ids[2])?, of(gettid())?])
    }

    #[test]
    fn vcpus_have_the_cookies_of_their_mode() {
        let [one, two, later, own] = match cookies(CoreSchedulingMode::Vm) {
            Ok(cookies) => cookies,
            Err(error) => return test_skip::skip!("no core scheduling here: {error}"),
        };
        assert!(one != 0 && one == two && one == later, "{one:#x} {two:#x} {later:#x}");
        assert_eq!(own, 0, "no other thread of the VMM has it");
        let [one, two, later, own] = cookies(CoreSchedulingMode::Vcpu).unwrap();
        assert!(one != two && two != later && one != later, "{one:#x} {two:#x} {later:#x}");
        assert!(one != 0 && two != 0 && later != 0 && own == 0);
        assert_eq!(cookies(CoreSchedulingMode::Off).unwrap(), [0; 4]);
    }

    #[test]
    fn a_host_without_it_and_no_vcpu_are_no_error() {
        give_cookies(CoreSchedulingMode::Vm, &[], 0).unwrap();
        let (id, _live) = thread();
        give_cookies(CoreSchedulingMode::Vm, &[id], 1).unwrap();
        give_cookies(CoreSchedulingMode::Off, &[id], 7).unwrap();
    }
}
