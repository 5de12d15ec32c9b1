// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults of the host that a test cannot make happen otherwise: system calls that fail, threads and
//! processes that stand still.
//!
//! Owns the tracer of a process, which releases it when it is dropped. Must never know what a call is for.

use std::io::{BufRead as _, BufReader, Error};
use std::marker::PhantomData;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{Vmm, skip, wait_for};

/// System calls of a VMM fail, until it is dropped.
pub struct Faults(Child);

impl Faults {
    /// Calls of `vmm` that name the file at `path`, by a descriptor for example, meet `fault`, as
    /// strace(1) takes it for its `inject`. The test is SKIPPED where processes cannot be traced.
    #[track_caller]
    pub fn inject(vmm: &Vmm, path: &Path, fault: &str) -> Self {
        Self::start(vmm, fault, |strace| strace.arg("--trace-path").arg(path))
    }

    /// All calls of this kind of `vmm` meet `fault`.
    #[track_caller]
    pub fn inject_all(vmm: &Vmm, fault: &str) -> Self {
        Self::start(vmm, fault, |strace| strace)
    }

    #[track_caller]
    fn start(vmm: &Vmm, fault: &str, limit: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["--follow-forks", "--attach", &vmm.pid().to_string()]);
        let spawned = limit(&mut strace)
            .args(["-e", &format!("inject={fault}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut strace = match spawned {
            Ok(strace) => strace,
            Err(error) => skip(format!("strace: {error}")),
        };
        let said = strace.stderr.take().expect("a pipe");
        // It says so when all threads are attached.
        let mut lines = BufReader::new(said).lines().map_while(Result::ok);
        let mut before = String::new();
        let attached = lines.by_ref().find(|line| {
            before.push_str(line);
            line.contains(" attached")
        });
        if attached.is_none() {
            let _ = strace.wait();
            skip(format!("processes cannot be traced: {before}"));
        }
        // What it has to say is read, or it waits.
        std::thread::spawn(move || lines.for_each(drop));
        Self(strace)
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        let pid = libc::pid_t::try_from(self.0.id()).expect("a pid");
        // SAFETY: only numbers are passed; the child has not been waited for, so the number is its own.
        let _ = unsafe { libc::kill(pid, libc::SIGTERM) };
        let _ = self.0.wait();
    }
}

/// A process that stands still, until it is dropped.
pub struct Stopped(libc::pid_t);

impl Stopped {
    /// A process that is not a child of this one.
    #[track_caller]
    pub fn process(pid: u32) -> Self {
        let process = libc::pid_t::try_from(pid).expect("a pid");
        // SAFETY: only numbers are passed.
        let answer = unsafe { libc::kill(process, libc::SIGSTOP) };
        assert_eq!(answer, 0, "process {pid} has ended: {}", Error::last_os_error());
        wait_for("the process to stand still", || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its state");
            let (_, state) = stat.rsplit_once(") ").expect("a state");
            state.starts_with('T').then_some(())
        });
        Self(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: only numbers are passed.
        let _ = unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

/// A thread that stands still, until it is dropped. Only the thread that made this may do so.
pub struct Frozen {
    thread: libc::pid_t,
    tracer: PhantomData<*const ()>,
}

fn trace(what: libc::c_uint, thread: libc::pid_t) -> Result<(), Error> {
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: requests that stop a thread or let it go neither read nor write memory.
    match unsafe { libc::ptrace(what, thread, nothing, nothing) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

impl Frozen {
    /// The first thread of `vmm`, which takes requests, events of the guest and ends of threads one after the
    /// other. The test is SKIPPED where processes cannot be traced.
    #[track_caller]
    pub fn first_thread(vmm: &Vmm) -> Self {
        let thread = libc::pid_t::try_from(vmm.pid()).expect("a pid");
        if let Err(error) = trace(libc::PTRACE_SEIZE, thread) {
            skip(format!("processes cannot be traced: {error}"));
        }
        let frozen = Self { thread, tracer: PhantomData };
        trace(libc::PTRACE_INTERRUPT, thread).expect("it can be stopped");
        let mut status = 0;
        // SAFETY: writes one int.
        let stopped = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        assert_eq!((stopped, libc::WIFSTOPPED(status)), (thread, true), "status {status:#x}");
        frozen
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = trace(libc::PTRACE_DETACH, self.thread);
    }
}
