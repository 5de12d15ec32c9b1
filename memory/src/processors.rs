// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that populate guest memory: how many there are, on which CPUs they run and with which priority.
//!
//! Owns the rule: memory of a NUMA node, or that comes to lie there ([`crate::homes`]), is populated by CPUs of that node, as many as the process may use, because
//! the kernel clears pages on the CPU that asks for them. A CPU that the process was not given (by `taskset`, a
//! cpuset or a service manager) is never taken.

use std::num::NonZeroUsize;

use process_facts::{CpuSet, usable_processors};

use crate::host::Host;

/// Upper limit of threads, requested or not; hosts with more CPUs are rare, and memory limits them first.
pub const THREADS_MAX: usize = 512;

/// The work for one NUMA node, or for memory of any node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Units of work.
    pub chunks: usize,
    /// CPUs that populate it.
    pub cpus: usize,
}

impl Load {
    /// The work for a node on this host, by the CPUs that the calling thread may use.
    pub fn of(node: Option<u32>, chunks: usize) -> Self {
        let allowed = allowed_cpus();
        let of_node = node.map(|node| Host::real().node_cpus(node)).unwrap_or_default();
        let cpus = cpus_of(&of_node, &allowed).len().max(1);
        Self { chunks, cpus }
    }
}

/// The CPUs of a node that may be used; if it has none, or they are unknown, all that may be.
fn cpus_of(of_node: &[usize], allowed: &[usize]) -> Vec<usize> {
    let both: Vec<_> = of_node.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
    if both.is_empty() { allowed.to_vec() } else { both }
}

/// The CPUs that the calling thread may use; none if the kernel does not say.
pub fn allowed_cpus() -> Vec<usize> {
    CpuSet::of_thread(0).map(|set| set.cpus()).unwrap_or_default()
}

/// Threads that join small pages into huge ones beside a running guest; beyond it they wait for each other in the
/// kernel, and for memory.
pub const THREADS_BESIDE_GUEST_MAX: usize = 4;

/// Number of threads that work on memory beside a guest with so many vCPUs, on this many processors: as many as it leaves,
/// and two even if it leaves none, as a vCPU sleeps that meets the memory that is being worked on.
pub fn threads_beside_guest(vcpus: u32, processors: usize) -> usize {
    let guest = usize::try_from(vcpus).unwrap_or(usize::MAX);
    processors.saturating_sub(guest).clamp(processors.clamp(1, 2), THREADS_BESIDE_GUEST_MAX)
}

/// Number of threads for each load. Requested threads are shared in proportion to the chunks. By default there
/// is one for each CPU of the node, or, where a cgroup gives the process less time than its CPUs have, as many as
/// that is worth, shared likewise. At least one each, and at most one per chunk.
pub fn share_threads(loads: &[Load], requested: Option<NonZeroUsize>) -> Vec<usize> {
    let available = usable_processors();
    let quota = (available < allowed_cpus().len()).then_some(available);
    share(loads, requested.map(NonZeroUsize::get).or(quota))
}

/// As [`share_threads`], of so many threads if that is given.
fn share(loads: &[Load], threads: Option<usize>) -> Vec<usize> {
    let all: usize = loads.iter().map(|load| load.chunks).sum();
    let of_load = |load: &Load| {
        let share = match threads {
            Some(threads) => (threads.min(THREADS_MAX) * load.chunks).checked_div(all).unwrap_or(0),
            None => load.cpus.min(THREADS_MAX),
        };
        share.clamp(1, load.chunks.max(1))
    };
    loads.iter().map(of_load).collect()
}

/// Lowers the priority of the calling thread for its lifetime: others that want its CPU leave it about a
/// tenth. The niceness is raised relative to the process, because a process that was started niced could not
/// set a lower value without a privilege.
pub fn yield_processor() {
    const NICER_BY: libc::c_int = 10;
    const NICEST: libc::c_int = 19;
    // SAFETY: both calls read or change how the calling thread is scheduled, and touch no memory; 0 is
    // that thread. It may be read always: there is no error to tell from a niceness of -1.
    let result = unsafe {
        let own = libc::getpriority(libc::PRIO_PROCESS, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, own.saturating_add(NICER_BY).min(NICEST))
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        log::debug!("the priority of a prefault thread cannot be lowered: {error}");
    }
}

/// Moves the calling thread to those CPUs of a node that it may use. Where there are none the memory still comes
/// from the right node, only more slowly.
pub fn run_on_node(node: u32) {
    move_to(&cpus_of(&Host::real().node_cpus(node), &allowed_cpus()));
}

fn move_to(cpus: &[usize]) {
    if cpus.is_empty() {
        return;
    }
    if let Err(error) = CpuSet::of(cpus).and_then(|set| set.bind(0)) {
        log::debug!("could not run on CPUs of the memory's NUMA node: {error}");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn loads(chunks_and_cpus: &[(usize, usize)]) -> Vec<Load> {
        chunks_and_cpus.iter().map(|(chunks, cpus)| Load { chunks: *chunks, cpus: *cpus }).collect()
    }

    #[test]
    fn by_default_each_node_has_a_thread_for_each_of_its_cpus() {
        assert_eq!(share(&loads(&[(8192, 96), (100, 32)]), None), [96, 32]);
        assert_eq!(share(&loads(&[(8192, 192)]), None), [192], "more than 16");
        assert_eq!(share(&loads(&[(8192, 1000)]), None), [THREADS_MAX]);
        assert_eq!(share(&loads(&[(3, 96), (0, 96)]), None), [3, 1], "one per chunk");
        assert_eq!(share(&[], None), Vec::<usize>::new());
    }

    #[test]
    fn threads_of_a_given_number_are_shared_in_proportion() {
        let shared = |chunks: &[(usize, usize)], threads| share(&loads(chunks), Some(threads));
        assert_eq!(shared(&[(30, 1), (10, 64)], 8), [6, 2]);
        assert_eq!(shared(&[(1000, 2), (1, 2)], 4), [3, 1]);
        assert_eq!(shared(&[(2, 16)], 8), [2]);
        assert_eq!(shared(&[(10_000, 2)], 100_000), [THREADS_MAX]);
        assert_eq!(shared(&[], 8), Vec::<usize>::new());
    }

    #[test]
    fn there_are_two_threads_beside_a_guest_and_more_where_it_leaves_processors() {
        assert_eq!(threads_beside_guest(1, 1), 1);
        assert_eq!(threads_beside_guest(2, 2), 2);
        assert_eq!(threads_beside_guest(160, 160), 2);
        assert_eq!(threads_beside_guest(5, 8), 3);
        assert_eq!(threads_beside_guest(8, 192), THREADS_BESIDE_GUEST_MAX);
        assert_eq!(threads_beside_guest(u32::MAX, 0), 1);
    }

    #[test]
    fn only_cpus_that_may_be_used_count() {
        assert_eq!(cpus_of(&[0, 1, 2, 3], &[2, 3, 8]), [2, 3]);
        assert_eq!(cpus_of(&[0, 1], &[8, 9]), [8, 9], "another node's are better than none");
        assert_eq!(cpus_of(&[], &[8, 9]), [8, 9], "a node that is not known");
    }

    /// A thread with one CPU of those that this process has.
    fn with_one_cpu<T: Send>(check: impl FnOnce(usize) -> T + Send) -> T {
        std::thread::scope(|scope| {
            let checked = scope.spawn(|| {
                let last = allowed_cpus().into_iter().next_back().unwrap_or(0);
                move_to(&[last]);
                check(last)
            });
            checked.join().expect("no panic")
        })
    }

    #[test]
    fn a_thread_keeps_to_the_cpus_that_it_was_given() {
        let (given, used) = with_one_cpu(|given| {
            run_on_node(0);
            (given, allowed_cpus())
        });
        assert_eq!(used, [given]);
    }

    #[test]
    fn a_process_with_one_cpu_has_one_thread() {
        let load = with_one_cpu(|_| Load::of(Some(0), 100));
        assert_eq!(load, Load { chunks: 100, cpus: 1 });
        assert_eq!(with_one_cpu(|_| Load::of(None, 100)).cpus, 1);
        assert!(Load::of(None, 100).cpus >= 1);
    }
}
