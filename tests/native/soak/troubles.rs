// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happens to a migration under way, each at its moment: cuts, cancels, kills, stops, resets.
//!
//! Owns the doing, and what was done. Must never judge what comes of it: `moving` does.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::life::Running;
use super::link::Stop;
use super::moving::{Moving, phase};
use super::plan::Trouble;

impl Moving<'_> {
    /// Does what is due.
    pub(super) fn disturb(&mut self) {
        if let Some((at_source, until)) = self.stopped {
            if Instant::now() < until {
                return;
            }
            self.signal(at_source, libc::SIGCONT);
            self.stopped = None;
        }
        let elapsed = self.begun.elapsed();
        let due = |after_ms: u64| elapsed >= Duration::from_millis(after_ms);
        for trouble in std::mem::take(&mut self.left) {
            let is_done = match trouble {
                Trouble::Cut { is_one, down_ms, .. } => self.cut(is_one, down_ms),
                Trouble::Cancel { at_source, after_ms } if due(after_ms) => {
                    self.cancel(at_source);
                    true
                }
                _ if self.stopped.is_some() => false,
                Trouble::Kill { .. } => self.kill(),
                Trouble::KillSource { after_ms } if due(after_ms) => {
                    self.is_source_killed |= self.signal(true, libc::SIGKILL);
                    true
                }
                Trouble::KillPageServer { after_ms } => self.kill_page_server(after_ms),
                Trouble::Stop { at_source, after_ms, for_ms } if due(after_ms) => {
                    if self.signal(at_source, libc::SIGSTOP) {
                        let until = Instant::now() + Duration::from_millis(for_ms);
                        self.stopped = Some((at_source, until));
                    }
                    true
                }
                Trouble::Reset { after_ms } if due(after_ms) => {
                    self.is_crashed = true;
                    Running::crash(self.running.vmm());
                    true
                }
                Trouble::SameFile => true,
                Trouble::Cancel { .. }
                | Trouble::Reset { .. }
                | Trouble::KillSource { .. }
                | Trouble::Stop { .. } => false,
            };
            if !is_done {
                self.left.push(trouble);
            }
        }
        if self.mends_at.is_some_and(|at| at <= Instant::now()) {
            self.mends_at = None;
            if let Some(link) = &self.link {
                link.mend();
            }
        }
        for asked in std::mem::take(&mut self.cancels) {
            if asked.is_finished() {
                let status = asked.join().expect("a thread that asks");
                self.is_cancelled |= status.is_some_and(|status| status < 300);
            } else {
                self.cancels.push(asked);
            }
        }
    }

    /// Whether the cut has been, and is being mended.
    fn cut(&mut self, is_one: bool, down_ms: u64) -> bool {
        let stop = if is_one { Stop::CutOne } else { Stop::Cut };
        let reached = self.link.as_ref().is_some_and(|link| link.take_reached(stop));
        if reached && !is_one {
            self.mends_at = Some(Instant::now() + Duration::from_millis(down_ms));
        }
        reached
    }

    /// Asked on a thread: it is answered when the migration is over.
    fn cancel(&mut self, at_source: bool) {
        let vmm = if at_source { self.running.vmm() } else { self.there() };
        let api = vmm.api();
        let ask = move || Some(api.request("PUT", "vm.migration-cancel", None).ok()?.status);
        self.cancels.push(std::thread::spawn(ask));
    }

    /// Kills the destination while nothing gets on, if the guest cannot have been handed over.
    fn kill(&mut self) -> bool {
        let Some(link) = &self.link else { return true };
        if !link.take_reached(Stop::Hold) {
            return false;
        }
        // Before Stop nothing was asked that the destination could have acknowledged, and from now
        // on no answer gets through.
        let early = ["connect", "negotiate", "precopy"];
        let phase = phase(self.running.vmm());
        if phase.is_some_and(|phase| early.contains(&phase.as_str())) {
            self.is_killed = true;
            let there = self.running.there.as_mut().expect("a destination");
            if there.exited().is_none() {
                there.signal(libc::SIGKILL);
                there.wait_for_exit();
            }
            link.cut();
        }
        link.release();
        true
    }

    /// Whether there is a process to be told.
    fn signal(&mut self, at_source: bool, signal: i32) -> bool {
        let side = if at_source { &mut self.running.here } else { &mut self.running.there };
        side.as_mut().is_some_and(|vmm| vmm.signal_if_there(signal))
    }

    /// Kills the process that the source has handed its pages on to. Whether there is no more to do.
    fn kill_page_server(&mut self, after_ms: u64) -> bool {
        let events = self.running.vmm().events();
        let handed_on = |event: &&Value| event["event"] == "migration-handed-on";
        let Some(event) = events.iter().skip(self.before).find(handed_on) else { return false };
        let since = *self.handed_on.get_or_insert_with(Instant::now);
        if since.elapsed() < Duration::from_millis(after_ms) {
            return false;
        }
        let pid = event["properties"]["pid"].as_str().and_then(|pid| pid.parse().ok());
        let pid: libc::pid_t = pid.unwrap_or_else(|| panic!("no process in {event}"));
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if name.trim() == "page-server" {
            // SAFETY: its name has just been looked at.
            self.is_source_killed |= unsafe { libc::kill(pid, libc::SIGKILL) } == 0;
        }
        true
    }
}
