// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records what the threads of a migration do while vCPUs wait for pages.
//!
//! Owns the choice of events and threads, and the time for which they are recorded. Must never record the calls of
//! threads that have no part in a wait: those of the background would only be slowed down.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::chain::Roles;
use super::events;
use crate::trace::Instance;

/// How long at most, from when the threads are there.
const RECORD: Duration = Duration::from_millis(1500);
/// Distance between two looks for them.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Room for events, KiB for each processor.
const BUFFER_KIB: &str = "24576";

/// What is recorded: of system calls and wake-ups those of threads that take part, and all switches, by which it is
/// known who has a processor.
const EVENTS: [&str; 4] =
    ["raw_syscalls/sys_enter", "raw_syscalls/sys_exit", "sched/sched_waking", "sched/sched_switch"];

/// Ready to record, or why this machine does not let that be done.
pub fn prepare() -> io::Result<Instance> {
    let instance = Instance::create()?;
    instance.set("tracing_on", "0")?;
    instance.set("buffer_size_kb", BUFFER_KIB)?;
    // The beginning is kept: it is then known of each thread what it does.
    instance.set("options/overwrite", "0")?;
    for event in EVENTS {
        instance.set(&format!("events/{event}/enable"), "1")?;
    }
    Ok(instance)
}

/// Records from when the destination has its threads until `over`, or long enough. Returns the text and who is who.
pub fn record(
    instance: &Instance,
    [source, destination]: [u32; 2],
    vcpus: usize,
    over: &AtomicBool,
) -> Result<(String, Roles), String> {
    let mut seen = Roles::default();
    let mut roles = loop {
        if over.load(Ordering::Acquire) {
            return Err("the migration was over before its threads were found".to_owned());
        }
        let roles = roles(source, destination);
        // They are started one by one, so what two looks find is all.
        let is_all = roles.parts().eq(seen.parts()) && roles.vcpus.len() >= vcpus;
        if is_all && !roles.receivers.is_empty() && !roles.servers.is_empty() {
            break roles;
        }
        seen = roles;
        std::thread::sleep(LOOK_EVERY);
    };
    let text =
        run(instance, &roles, over, RECORD).map_err(|error| format!("recording: {error}"))?;
    // Those that have come since had processors as well.
    let late = [source, destination].into_iter().flat_map(threads);
    roles.own.extend(late.map(|(thread, _)| thread));
    Ok((text, roles))
}

/// Records what the parts do.
fn run(
    instance: &Instance,
    roles: &Roles,
    over: &AtomicBool,
    at_most: Duration,
) -> io::Result<String> {
    let one_of = |field: &str| {
        let threads = roles.parts().map(|thread| format!("{field} == {thread}"));
        threads.collect::<Vec<_>>().join(" || ")
    };
    let calls = format!("({}) && ({})", events::filter(), one_of("common_pid"));
    for event in ["sys_enter", "sys_exit"] {
        instance.set(&format!("events/raw_syscalls/{event}/filter"), &calls)?;
    }
    instance.set("events/sched/sched_waking/filter", &one_of("pid"))?;
    instance.set("tracing_on", "1")?;
    let began = Instant::now();
    while !over.load(Ordering::Acquire) && began.elapsed() < at_most {
        std::thread::sleep(LOOK_EVERY);
    }
    instance.set("tracing_on", "0")?;
    let text = instance.get("trace")?;
    if lost(instance) > 0 {
        return Err(io::Error::other("there was no room for all events"));
    }
    Ok(text)
}

/// Events of all processors for which there was no room.
fn lost(instance: &Instance) -> u64 {
    let mut lost = 0;
    for number in 0.. {
        let Ok(stats) = instance.get(&format!("per_cpu/cpu{number}/stats")) else { break };
        lost += parse_lost(&stats);
    }
    lost
}

fn parse_lost(stats: &str) -> u64 {
    let of = |line: &str| {
        let (name, count) = line.split_once(": ")?;
        let is_loss = ["overrun", "commit overrun", "dropped events"].contains(&name);
        is_loss.then(|| count.trim().parse::<u64>().ok())?
    };
    stats.lines().filter_map(of).sum()
}

/// The threads by their names.
fn roles(source: u32, destination: u32) -> Roles {
    let mut roles = Roles::default();
    for (thread, name) in threads(destination) {
        roles.own.insert(thread);
        match name.as_str() {
            "mig-faults" => roles.readers.insert(thread),
            "mig-urgent" => roles.receivers.insert(thread),
            _ if name.strip_prefix("vcpu").is_some_and(|rest| rest.parse::<u32>().is_ok()) => {
                roles.vcpus.insert(thread)
            }
            _ => false,
        };
    }
    for (thread, name) in threads(source) {
        roles.own.insert(thread);
        if name == "mig-urgent" {
            roles.servers.insert(thread);
        }
    }
    roles
}

fn threads(pid: u32) -> Vec<(u32, String)> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        Some((task.file_name().to_str()?.parse().ok()?, name.trim_end().to_owned()))
    };
    tasks.filter_map(Result::ok).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::thread;

    use super::super::calls;
    use super::super::threads::Threads;
    use super::*;

    fn this_thread() -> u32 {
        // SAFETY: touches no memory.
        unsafe { libc::gettid() }.cast_unsigned()
    }

    /// Asks again and again on one thread, and answers on another one.
    fn ask_and_answer(asking: TcpStream, answering: TcpStream, tell: &mpsc::Sender<u32>) {
        let told = tell.clone();
        let server = thread::spawn(move || {
            let (mut stream, mut request) = (answering, [0; 16]);
            let _ = told.send(this_thread());
            while stream.read_exact(&mut request).is_ok() && stream.write_all(&[1; 64]).is_ok() {}
        });
        let (mut stream, mut answer) = (asking, [0; 64]);
        let _ = tell.send(this_thread());
        while stream.write_all(&[1; 16]).is_ok() && stream.read_exact(&mut answer).is_ok() {}
        let _ = server.join();
    }

    #[test]
    fn who_wakes_whom_by_which_call_is_recorded() {
        let instance = match prepare() {
            Ok(instance) => instance,
            Err(error) => {
                return test_skip::skip!("the kernel's tracing cannot be used: {error}");
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
        let asking = TcpStream::connect(listener.local_addr().expect("its address"));
        let asking = asking.expect("a connection");
        let (answering, _) = listener.accept().expect("its other end");
        asking.set_nodelay(true).expect("no delay");
        answering.set_nodelay(true).expect("no delay");
        let end = asking.try_clone().expect("a descriptor");
        let (tell, told) = mpsc::channel();
        let work = thread::spawn(move || ask_and_answer(asking, answering, &tell));
        let parts = BTreeSet::from([told.recv().expect("one"), told.recv().expect("the other")]);
        let roles = Roles { vcpus: parts.clone(), ..Roles::default() };
        let over = AtomicBool::new(false);
        let text = run(&instance, &roles, &over, Duration::from_millis(100));
        end.shutdown(std::net::Shutdown::Both).expect("an end");
        work.join().expect("no panic");
        let events = events::parse(&text.expect("a record"));
        let threads = Threads::of(&events, &parts);
        let calls = calls::all(&events);
        let wakes = |call: &&calls::Call| {
            let mut others = parts.iter().filter(|part| **part != call.thread);
            others.any(|part| threads.wake_up(*part, call.enter.at, call.exit.at).is_some())
        };
        for bytes in [16, 64] {
            let of = |kinds: [i64; 2]| {
                calls.iter().filter(move |call| kinds.contains(&call.kind) && call.bytes() == bytes)
            };
            assert!(of(events::SENDS).filter(wakes).count() > 0, "{} events", events.len());
            assert!(of(events::RECEIVES).count() > 0, "{} events", events.len());
        }
    }

    #[test]
    fn lost_events_are_found() {
        let stats = "entries: 17\noverrun: 0\ncommit overrun: 2\nbytes: 1156\n\
                     oldest event ts: 30416.688012\nnow ts: 30416.789318\ndropped events: 3\nread events: 9\n";
        assert_eq!(parse_lost(stats), 5);
    }

    #[test]
    fn threads_are_known_by_their_names() {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = std::sync::Arc::new(std::sync::Mutex::new(ends));
        let names = ["vcpu0", "vcpu12", "vcpux", "mig-faults", "mig-urgent", "mig-pages"];
        let threads: Vec<_> = names
            .into_iter()
            .map(|name| {
                let (ready, ends) = (ready.clone(), std::sync::Arc::clone(&ends));
                let named = std::thread::Builder::new().name(name.to_owned());
                let work = move || {
                    ready.send(()).is_ok() && ends.lock().is_ok_and(|ends| ends.recv().is_err())
                };
                named.spawn(work).expect("a thread")
            })
            .collect();
        for _ in names {
            is_ready.recv().expect("it has begun");
        }
        let roles = roles(std::process::id(), std::process::id());
        drop(end);
        assert!(threads.into_iter().all(|thread| thread.join().is_ok_and(|ended| ended)));
        let counts = [roles.vcpus.len(), roles.readers.len(), roles.receivers.len()];
        assert_eq!((counts, roles.servers), ([2, 1, 1], roles.receivers));
    }
}
