// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPUs that bring their own pages while everything happens to them: signals, pauses that are refused
//! and one that is not, a source that stands still, migrations that are cancelled, snapshots that are
//! refused and some that are not. No vCPU is lost, and no page is.
//!
//! `GODWIT_STRESS_ROUNDS=N` makes N moves; otherwise 6. `GODWIT_STRESS_SEED=N` repeats a run.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::harness::migrate::Reception;
use crate::harness::{Mode, Suite, Transport, Vmm, is_root, skip, wait_for};
use crate::snapshot::{place, save};

const LIMIT_EACH_ROUND: Duration = Duration::from_secs(20);
const VCPUS: u32 = 3;

pub fn add(suite: &mut Suite) {
    let rounds = number_of("GODWIT_STRESS_ROUNDS").unwrap_or(6);
    let each = u32::try_from(rounds).unwrap_or(u32::MAX);
    let limit = Duration::from_mins(1) + LIMIT_EACH_ROUND.saturating_mul(each);
    suite.add_long("fault_stress::no_vcpu_is_lost", limit, move || stress(rounds));
}

fn number_of(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Numbers that can be had again.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }

    fn nap(&mut self, below_ms: u64) {
        std::thread::sleep(Duration::from_micros(self.below(below_ms * 1000)));
    }
}

fn phase(vmm: &Vmm) -> String {
    let progress = vmm.api().get("vm.migration-progress").ok().json();
    progress["phase"].as_str().unwrap_or_default().to_owned()
}

/// Threads of its vCPUs.
fn vcpu_threads(vmm: &Vmm) -> Vec<libc::pid_t> {
    let tasks = format!("/proc/{}/task", vmm.pid());
    let tasks = fs::read_dir(tasks).into_iter().flatten().flatten();
    tasks
        .filter(|task| {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            name.trim_end().strip_prefix("vcpu").is_some_and(|rest| rest.parse::<u32>().is_ok())
        })
        .filter_map(|task| task.file_name().to_string_lossy().parse().ok())
        .collect()
}

/// The signal of a kick, to a vCPU's thread, without what a kick says alongside.
fn kick(vmm: &Vmm, dice: &mut Dice) {
    let threads = vcpu_threads(vmm);
    let pid = libc::pid_t::try_from(vmm.pid()).expect("a process id");
    let Ok(count) = u64::try_from(threads.len()) else { return };
    if count == 0 {
        return;
    }
    for _ in 0..=dice.below(20) {
        let thread = threads[usize::try_from(dice.below(count)).unwrap_or(0)];
        // SAFETY: takes numbers only. The process is a child that has not been waited for; a thread
        // that has gone makes it fail.
        unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, libc::SIGRTMIN()) };
    }
}

/// A pause, that is answered and undone.
fn pause(vmm: &Vmm) {
    match vmm.api().put("vm.pause", "").status {
        // It came after the last page.
        204 => assert_eq!(vmm.api().put("vm.resume", "").status, 204),
        status => assert_eq!(status, 409),
    }
}

/// A snapshot of a guest some of whose pages may be missing; it is refused unless all are here and the
/// guest is paused.
fn snapshot_meanwhile(vmm: &Vmm, resumed: bool) {
    let (_folder, url) = place();
    let body = format!(r#"{{"destination_url":"{url}"}}"#);
    let status = vmm.api().put("vm.snapshot", &body).status;
    assert!(status != 204 || !resumed, "a guest that runs was saved");
}

/// Saves what has arrived, kills it, and continues with what is restored.
fn through_snapshot(mut vmm: Vmm, dice: &mut Dice) -> Vmm {
    let (_folder, url) = place();
    save(&vmm, &url);
    vmm.signal(libc::SIGKILL);
    vmm.wait_for_exit();
    let restored = Vmm::empty();
    let mode = if dice.below(2) == 0 { "copy" } else { "ondemand" };
    let option = format!("source_url={url},memory_restore_mode={mode},resume=on");
    restored.remote_ok(&["restore", &option]);
    if mode == "ondemand" {
        // The file is read until then.
        restored.wait_for_event("restore-memory-completed");
    }
    restored
}

fn stress(rounds: u64) {
    if !is_root() {
        skip("fault_source=sigbus needs CAP_BPF and CAP_PERFMON");
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs());
    let seed = number_of("GODWIT_STRESS_SEED").unwrap_or(now);
    println!("     GODWIT_STRESS_SEED={seed}");
    let mut dice = Dice(seed);
    let mut vmm = Vmm::boot(VCPUS, "size=192M,shared=on", "workload=random-write mem=128M");
    let (mut moved, mut stayed, mut saved) = (0, 0, 0);
    while moved < rounds {
        vmm.wait_for_work(2_000);
        match round(vmm, &mut dice) {
            Round::Moved(there) => {
                moved += 1;
                vmm = there;
                if dice.below(3) == 0 {
                    saved += 1;
                    vmm = through_snapshot(vmm, &mut dice);
                }
            }
            Round::Stayed(here) => {
                stayed += 1;
                vmm = here;
            }
        }
        vmm.wait_for_heartbeat();
        vmm.verify();
        assert_eq!(vcpu_threads(&vmm).len(), usize::try_from(VCPUS).unwrap_or(0));
    }
    println!("     {moved} moves, {stayed} that were cancelled, {saved} snapshots");
    vmm.shut_down();
}

enum Round {
    Moved(Vmm),
    Stayed(Vmm),
}

fn round(mut source: Vmm, dice: &mut Dice) -> Round {
    let destination = Vmm::empty();
    let more = ",fault_source=sigbus";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Postcopy, more);
    let paused = dice.below(4) == 0;
    if paused {
        source.api().put("vm.pause", "").ok();
    }
    let (preempt, bandwidth) = (dice.below(4), 16 + dice.below(64));
    let option = format!(
        "destination_url={},memory_mode=postcopy,preempt={preempt},bandwidth={bandwidth}M",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    if dice.below(3) == 0 {
        dice.nap(40);
        let cancel = source.remote(&["migration-cancel"]);
        if cancel.status.success() {
            assert!(!reception.finish().status.success(), "{}", destination.output());
            destination.shut_down();
            if paused {
                source.api().put("vm.resume", "").ok();
            }
            return Round::Stayed(source);
        }
    }
    let received = reception.finish();
    assert!(received.status.success(), "{received:?}\n{}", destination.output());
    let mut resumed = !paused;
    while phase(&destination) != "done" {
        match dice.below(7) {
            0 | 1 => kick(&destination, dice),
            2 => pause_or_resume(&destination, &mut resumed),
            // It ends at any moment from the last page on.
            3 if source.signal_if_there(libc::SIGSTOP) => {
                dice.nap(30);
                source.signal_if_there(libc::SIGCONT);
            }
            4 => drop(destination.remote(&["migration-cancel"])),
            5 => snapshot_meanwhile(&destination, resumed),
            _ => dice.nap(20),
        }
    }
    if !resumed {
        assert_eq!(destination.api().put("vm.resume", "").status, 204);
    }
    wait_for("the source to end", || source.exited());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    kick(&destination, dice);
    Round::Moved(destination)
}

/// A guest that was paused at the source is let go at any moment; one that runs is not stopped while
/// pages arrive.
fn pause_or_resume(vmm: &Vmm, resumed: &mut bool) {
    if *resumed {
        pause(vmm);
    } else {
        assert_eq!(vmm.api().put("vm.resume", "").status, 204);
        *resumed = true;
    }
}
