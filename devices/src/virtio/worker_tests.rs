// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pauses of a device whose storage does not answer.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::log_limit::kept;

const STORAGE: u64 = 1;
const SOON: Duration = Duration::from_millis(30);
const PATIENCE: Duration = Duration::from_secs(30);

/// What the test knows of the work.
struct Seen {
    /// The storage has answered.
    answered: AtomicBool,
    /// Readable when it has.
    storage: EventFd,
    starts: AtomicU32,
}

/// One request that is in flight until the storage answers.
struct Slow(Arc<Seen>);

impl Work for Slow {
    fn kind(&self) -> &'static str {
        "slow"
    }

    fn start(&mut self, _watch: &mut Watch) -> Result<(), Broken> {
        self.0.starts.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn ready(&mut self, _token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Broken> {
        while !self.0.answered.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn try_drain(&mut self, watch: &mut Watch) -> Result<bool, Broken> {
        watch.on(STORAGE, self.0.storage.as_raw_fd())?;
        let is_answered = self.0.answered.load(Ordering::Acquire);
        if is_answered {
            watch.off(STORAGE);
        }
        Ok(is_answered)
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        Vec::new()
    }

    fn report_broken(&self) {}
}

fn slow() -> (Workers, Arc<Seen>) {
    let storage = EventFd::new(EFD_NONBLOCK).unwrap();
    let seen = Seen { answered: AtomicBool::new(false), storage, starts: AtomicU32::new(0) };
    let (mut workers, seen) = (Workers::default(), Arc::new(seen));
    workers.spawn("slow", &[], Slow(Arc::clone(&seen))).unwrap();
    started(&seen, 1);
    (workers, seen)
}

fn answer(seen: &Seen) {
    seen.answered.store(true, Ordering::Release);
    seen.storage.write(1).unwrap();
}

#[track_caller]
fn started(seen: &Seen, times: u32) {
    let until = Instant::now() + PATIENCE;
    while seen.starts.load(Ordering::Acquire) < times {
        assert!(Instant::now() < until, "it does not work");
        std::thread::yield_now();
    }
}

/// CPUs on which the calling thread may run.
fn own_cpus() -> Vec<usize> {
    memory::CpuSet::of_thread(0).unwrap().cpus()
}

/// Work that tells what it finds when it starts, and breaks then if it is to.
struct Probe {
    /// Gets the CPUs on which its thread may run.
    tell: mpsc::Sender<Vec<usize>>,
    breaks: bool,
}

impl Work for Probe {
    fn kind(&self) -> &'static str {
        "probe"
    }

    fn start(&mut self, _watch: &mut Watch) -> Result<(), Broken> {
        if self.breaks {
            return Err(Broken::Device("always"));
        }
        self.tell.send(own_cpus()).unwrap();
        Ok(())
    }

    fn ready(&mut self, _token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        Vec::new()
    }

    /// After the line in the log.
    fn report_broken(&self) {
        self.tell.send(own_cpus()).unwrap();
    }
}

#[test]
fn a_thread_that_a_bound_vcpu_starts_runs_where_it_was_told_or_anywhere() {
    let all = own_cpus();
    let last = *all.last().unwrap();
    // What a vCPU's thread does, from its affinity to DRIVER_OK.
    let vcpu = std::thread::spawn(move || {
        syscalls::bind_thread(&[last]).unwrap();
        let (sender, receiver) = mpsc::channel();
        let mut workers = Workers::default();
        workers.spawn("free", &[], Probe { tell: sender.clone(), breaks: false }).unwrap();
        let free = receiver.recv().unwrap();
        workers.spawn("told", &[last], Probe { tell: sender, breaks: false }).unwrap();
        (free, receiver.recv().unwrap(), own_cpus())
    });
    let (free, told, own) = vcpu.join().unwrap();
    assert_eq!((free, told, own), (all, vec![last], vec![last]));
}

#[test]
fn a_driver_that_resets_and_breaks_its_device_again_and_again_does_not_fill_the_log() {
    kept::start();
    let (sender, receiver) = mpsc::channel();
    let mut workers = Workers::default();
    for _ in 0..200 {
        workers.spawn("flood_q0", &[], Probe { tell: sender.clone(), breaks: true }).unwrap();
        receiver.recv().unwrap();
        workers.stop();
    }
    let lines = kept::count("flood_q0");
    assert!((1..100).contains(&lines), "{lines} lines for 200 resets");
}

#[test]
fn a_pause_that_has_begun_is_over_when_the_storage_has_answered() {
    let (mut workers, seen) = slow();
    let begun = workers.begin_pause();
    assert!(!begun.wait_until(Instant::now() + SOON), "a request is in flight");
    answer(&seen);
    assert!(begun.wait_until(Instant::now() + PATIENCE));
    workers.pause();
    assert_eq!(seen.starts.load(Ordering::Acquire), 1, "it holds still");
    workers.resume();
    started(&seen, 2);
}

#[test]
fn a_pause_that_is_taken_back_has_it_work_at_once_whatever_is_in_flight() {
    let (mut workers, seen) = slow();
    for times in 2..20 {
        let begun = workers.begin_pause();
        assert!(!begun.wait_until(Instant::now()), "a request is in flight");
        // Whether the thread has come to it or not, it works on.
        if times % 2 == 0 {
            assert!(!begun.wait_until(Instant::now() + SOON));
        }
        begun.withdraw();
        if times % 2 == 0 {
            started(&seen, times / 2 + 1);
        }
    }
    answer(&seen);
    workers.pause();
}

#[test]
fn taking_a_pause_back_neither_revives_what_ends_nor_resumes_what_was_paused_before() {
    let (mut workers, seen) = slow();
    answer(&seen);
    let begun = workers.begin_pause();
    workers.stop();
    begun.withdraw();
    assert!(begun.wait_until(Instant::now()), "it has ended");
    // Those that are activated after the begin work.
    workers.spawn("next", &[], Slow(Arc::clone(&seen))).unwrap();
    started(&seen, 2);
    workers.stop();
}

/// Work that tells which descriptors it has handled whenever it settles, and whether a wait has ended at its limit.
struct Settling {
    tell: mpsc::Sender<(Vec<u64>, bool)>,
    handled: Vec<u64>,
    signals: [EventFd; 2],
}

impl Work for Settling {
    fn kind(&self) -> &'static str {
        "settling"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        for (token, signal) in (1..).zip(&self.signals) {
            signal.write(1).unwrap();
            watch.on_signal(token, signal.as_raw_fd())?;
        }
        Ok(())
    }

    fn ready(&mut self, token: u64, watch: &mut Watch) -> Result<(), Broken> {
        assert_eq!(watch.ready_for(), EventSet::IN);
        self.handled.push(token);
        Ok(())
    }

    fn settle(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        let mut handled = std::mem::take(&mut self.handled);
        handled.sort_unstable();
        if !handled.is_empty() {
            watch.limit_wait(Duration::from_millis(1));
        }
        // The test has ended if it does not listen.
        let _ = self.tell.send((handled, watch.has_timed_out()));
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        Vec::new()
    }

    fn report_broken(&self) {}
}

#[test]
fn work_settles_once_for_all_that_is_ready_and_when_its_wait_is_over() {
    let (tell, receiver) = mpsc::channel();
    let signals = [EventFd::new(EFD_NONBLOCK).unwrap(), EventFd::new(EFD_NONBLOCK).unwrap()];
    let signal = signals[1].try_clone().unwrap();
    let mut workers = Workers::default();
    let work = Settling { tell, handled: Vec::new(), signals };
    workers.spawn_with("settling", work, Watch::new().unwrap()).unwrap();
    let next = || receiver.recv_timeout(PATIENCE).unwrap();
    assert_eq!(next(), (vec![1, 2], false));
    assert_eq!(next(), (vec![], true));
    // Without a limit it waits until something is ready.
    signal.write(1).unwrap();
    assert_eq!(next(), (vec![2], false));
    assert_eq!(next(), (vec![], true));
    workers.stop();
}

/// Work that is told when to go on with what is ready.
struct Held {
    tell: mpsc::Sender<&'static str>,
    go_on: mpsc::Receiver<()>,
    signal: EventFd,
}

impl Work for Held {
    fn kind(&self) -> &'static str {
        "held"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on_signal(1, self.signal.as_raw_fd())
    }

    fn ready(&mut self, _token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        self.tell.send("ready").unwrap();
        self.go_on.recv_timeout(PATIENCE).unwrap();
        Ok(())
    }

    fn settle(&mut self, _watch: &mut Watch) -> Result<(), Broken> {
        self.tell.send("settle").unwrap();
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.tell.send("drain").unwrap();
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        Vec::new()
    }

    fn report_broken(&self) {}
}

#[test]
fn nothing_new_is_begun_once_a_pause_is_wanted() {
    let (tell, told) = mpsc::channel();
    let (going_on, go_on) = mpsc::channel();
    let signal = EventFd::new(EFD_NONBLOCK).unwrap();
    let signalled = signal.try_clone().unwrap();
    let mut workers = Workers::default();
    workers.spawn("held", &[], Held { tell, go_on, signal }).unwrap();
    let next = || told.recv_timeout(PATIENCE).unwrap();
    for is_paused in [false, true] {
        signalled.write(1).unwrap();
        // Its thread wakes up for the pause as well, and settles before the next signal.
        let mut first = next();
        while first != "ready" {
            first = next();
        }
        let begun = is_paused.then(|| workers.begin_pause());
        going_on.send(()).unwrap();
        assert_eq!(next(), if is_paused { "drain" } else { "settle" });
        assert!(begun.is_none_or(|begun| begun.wait_until(Instant::now() + PATIENCE)));
    }
    workers.stop();
}
