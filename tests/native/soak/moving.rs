// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One migration of the campaign: begun, disturbed, and followed until both sides have settled.
//!
//! Owns where the guest has to be afterwards, by what docs/migration.md says of what happened. Must
//! never draw anything but the moments of the link's own delays.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::dice::Dice;
use super::life::{Holdings, Running, assert_holds_no_more, assert_no_files, assert_no_processes};
use super::link::{Link, Stop};
use super::plan::{Plan, Trouble};
use crate::harness::Vmm;
use crate::harness::migrate::{ANYTHING, Reception, text};

/// For both sides to settle: a lost connection is noticed within 11 s, and made again within 5 s
/// more, several times over.
const SETTLE_TIME: Duration = Duration::from_secs(75);
/// For a connection that is under way to arrive.
const CONNECT_TIME: Duration = Duration::from_secs(1);
/// For a destination to learn by itself that the guest stays at the source.
const LEARN_TIME: Duration = Duration::from_secs(20);

/// Where the guest is afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where it was.
    Stayed,
    /// At the destination.
    Moved,
}

/// How a side has come out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// An operation is still in progress.
    Busy,
    /// The process has ended, or was killed.
    Ended(i32),
    /// It has the guest.
    Has,
    /// It has not.
    HasNot,
    /// It cannot know whether the guest is elsewhere.
    InDoubt,
}

/// A migration under way.
struct Moving<'a> {
    running: &'a mut Running,
    plan: &'a Plan,
    link: Option<Link>,
    begun: Instant,
    /// Events of the source that are of earlier ones.
    before: usize,
    left: Vec<Trouble>,
    /// When connections can be made again.
    mends_at: Option<Instant>,
    cancels: Vec<JoinHandle<Option<u16>>>,
    is_cancelled: bool,
    is_killed: bool,
    is_crashed: bool,
    /// A person had to say something.
    is_helped: bool,
    source_code: Option<i32>,
}

/// Makes it, and checks all there is to check but the guest's memory. Where the guest is, and how
/// many milliseconds it took until that was clear.
pub fn migrate(running: &mut Running, plan: &Plan, dice: Dice) -> (Place, u128) {
    prepare(running, plan);
    let pool = if plan.has_pool { running.pool() } else { String::new() };
    let before_source = Holdings::of(running.vmm());
    // A file that is handed over stays where it is.
    running.start_destination(plan.is_local || plan.troubles.contains(&Trouble::SameFile));
    let destination = running.there.as_ref().expect("a destination");
    let before_destination = Holdings::of(destination);
    // Files of memory hold what earlier tries have left in them.
    let receiving = format!("{}{pool}{ANYTHING}", plan.receiving);
    let reception = Reception::start_with(destination, plan.transport, plan.mode, &receiving);
    let folder = TempDir::with_prefix("godwit-link-").expect("a folder");
    let is_relayed = !plan.is_local && (plan.delay_ms.is_some() || !plan.troubles.is_empty());
    let link = is_relayed.then(|| {
        let delay_ms = plan.delay_ms.unwrap_or_default();
        Link::start(&reception.url, folder.path().join("link"), delay_ms, dice)
    });
    for trouble in &plan.troubles {
        let (Some(link), Some((bytes, stop))) = (&link, stop_of(*trouble)) else { continue };
        link.stop_at(bytes, stop);
    }
    let url = link.as_ref().map_or(&reception.url, |link| &link.url);
    let option = format!("destination_url={url},memory_mode={}{}", plan.mode.name(), plan.sending);
    let option =
        option.replace(&format!(",memory_mode={},local=on", plan.mode.name()), ",local=on");
    let before = running.vmm().events().len();
    running.vmm().remote_ok(&["send-migration", &option]);
    let mut moving = Moving {
        plan,
        link,
        begun: Instant::now(),
        before,
        left: plan.troubles.clone(),
        mends_at: None,
        cancels: Vec::new(),
        is_cancelled: false,
        is_killed: false,
        is_crashed: false,
        is_helped: false,
        source_code: None,
        running,
    };
    let place = moving.follow();
    let settled_ms = moving.begun.elapsed().as_millis();
    moving.judge(place);
    let (is_killed, is_helped, is_crashed) =
        (moving.is_killed, moving.is_helped, moving.is_crashed);
    let code = moving.source_code;
    drop(moving.link.take());
    let received = reception.finish();
    match place {
        Place::Moved => {
            let old = running.arrived();
            if let Some(old) = old {
                left_by_source(old, code, is_helped);
            }
            assert!(is_helped || received.status.success(), "receive-migration: {received:?}");
        }
        Place::Stayed => {
            assert!(
                !received.status.success(),
                "the guest stayed, and receive-migration succeeded"
            );
            if let Some(there) = running.there.take() {
                left_by_destination(there, is_killed, &before_destination);
            }
            if !is_crashed {
                assert_holds_no_more(running.vmm(), &before_source, "the source");
            }
        }
    }
    assert_no_files(running.vmm(), "VMM that has the guest");
    if is_crashed {
        // What was written over its code may be anywhere.
        running.reboot();
    }
    (place, settled_ms)
}

fn prepare(running: &mut Running, plan: &Plan) {
    if let Some(mode) = plan.snapshot {
        running.through_snapshot(mode);
    }
    running.use_balloon();
    if plan.has_hotplug {
        running.plug();
    }
    if plan.is_reset {
        running.reset();
    }
    if plan.is_paused {
        running.vmm().api().put("vm.pause", "").ok();
    }
}

fn stop_of(trouble: Trouble) -> Option<(u64, Stop)> {
    match trouble {
        Trouble::Cut { after_bytes, is_one: false, .. } => Some((after_bytes, Stop::Cut)),
        Trouble::Cut { after_bytes, is_one: true, .. } => Some((after_bytes, Stop::CutOne)),
        Trouble::Kill { after_bytes } => Some((after_bytes, Stop::Hold)),
        Trouble::Cancel { .. } | Trouble::Reset { .. } | Trouble::SameFile => None,
    }
}

/// The VMM that the guest has left.
fn left_by_source(mut old: Vmm, code: Option<i32>, is_helped: bool) {
    let code = code.unwrap_or_else(|| {
        assert!(is_helped, "the source continues after its migration");
        if old.api().get("vm.info").status == 409 {
            old.api().put("vm.delete", r#"{"force":true}"#).ok();
        }
        old.api().put("vmm.shutdown", "").ok();
        old.wait_for_exit()
    });
    assert_eq!(code, 0, "the source after its migration:\n{}", old.output());
    assert_no_processes(&old, "source");
    assert_no_files(&old, "source");
}

/// The VMM that the guest did not get to.
fn left_by_destination(mut there: Vmm, is_killed: bool, before: &Holdings) {
    if is_killed {
        return;
    }
    assert!(there.exited().is_none(), "the destination has ended:\n{}", there.output());
    assert_eq!(there.api().get("vm.info").status, 404, "the destination has a VM as well");
    assert_holds_no_more(&there, before, "the destination");
    assert_no_processes(&there, "destination");
    assert_no_files(&there, "destination");
    there.shut_down();
}

impl Moving<'_> {
    /// Until both sides have settled.
    fn follow(&mut self) -> Place {
        let mut stayed_since = None;
        loop {
            self.disturb();
            let (source, destination) = (self.source(), self.destination());
            if let Some(place) = self.settled(source, destination, &mut stayed_since) {
                return place;
            }
            assert!(
                self.begun.elapsed() < SETTLE_TIME,
                "not settled within {} s: source {source:?}, destination {destination:?}",
                SETTLE_TIME.as_secs()
            );
            std::thread::sleep(super::POLL);
        }
    }

    fn settled(
        &mut self,
        source: Side,
        destination: Side,
        stayed_since: &mut Option<Instant>,
    ) -> Option<Place> {
        match (source, destination) {
            (Side::Ended(code), Side::Has) => {
                self.source_code = Some(code);
                return Some(Place::Moved);
            }
            (Side::Has, Side::HasNot | Side::Ended(_)) => return Some(Place::Stayed),
            (Side::Has, Side::Has) => panic!("the guest is at both sides"),
            (Side::Ended(code), Side::HasNot | Side::Ended(_)) => {
                panic!(
                    "the guest is lost: the source ended with {code}, the destination has nothing"
                )
            }
            (Side::HasNot, Side::HasNot | Side::Ended(_)) => {
                panic!("the guest is lost: neither side has it")
            }
            // Neither can know what the other knows: a person does.
            (Side::HasNot, Side::InDoubt) => {
                self.is_helped = true;
                self.there().api().put("vm.resume", "").ok();
                return Some(Place::Moved);
            }
            (Side::Has, Side::InDoubt | Side::Busy) => {
                let since = *stayed_since.get_or_insert_with(Instant::now);
                // A destination without a connection listens forever.
                let listens = since.elapsed() > CONNECT_TIME
                    && phase(self.there()).as_deref() == Some("listen");
                if destination == Side::InDoubt || listens || since.elapsed() > LEARN_TIME {
                    self.is_helped = true;
                    let api = self.there().api();
                    if api.put("vm.migration-cancel", "").status >= 300 {
                        let _ = api.put("vm.delete", "");
                    }
                    *stayed_since = Some(Instant::now());
                }
            }
            _ => {}
        }
        None
    }

    fn there(&self) -> &Vmm {
        self.running.there.as_ref().expect("a destination")
    }

    fn source(&mut self) -> Side {
        let source = self.running.here.as_mut().expect("a source");
        if let Some(code) = source.exited() {
            return Side::Ended(code);
        }
        let events = source.events();
        let over = events.iter().skip(self.before).rev().find(|event| {
            ["migration-failed", "migration-finished"].iter().any(|name| event["event"] == *name)
        });
        let Some(over) = over else { return Side::Busy };
        if over["event"] == "migration-finished" {
            // It stays for those that have asked it before, until they have seen the end.
            let _ = source.api().request("GET", "vm.migration-progress", None);
            return Side::Busy;
        }
        match source.api().request("GET", "vm.info", None) {
            Ok(answer) if answer.status == 200 => Side::Has,
            Ok(_) => Side::HasNot,
            Err(_) => Side::Busy,
        }
    }

    fn destination(&mut self) -> Side {
        let there = self.running.there.as_mut().expect("a destination");
        if let Some(code) = there.exited() {
            return Side::Ended(code);
        }
        // By its events: a VMM that was asked for its progress stays for a while when its guest leaves.
        let is_phase = |event: &&Value| event["event"] == "migration-phase";
        let events = there.events();
        let last = events.iter().rfind(is_phase).map(|event| event["properties"]["phase"].clone());
        match last.as_ref().and_then(Value::as_str) {
            Some("done") => return Side::Has,
            Some("failed" | "in-doubt") => {}
            _ => return Side::Busy,
        }
        let Ok(answer) = there.api().request("GET", "vm.migration-progress", None) else {
            return Side::Busy;
        };
        let document = answer.json();
        let is_in_doubt =
            document["error"]["guest"] == "in-doubt" || document["phase"] == "in-doubt";
        if is_in_doubt { Side::InDoubt } else { Side::HasNot }
    }

    /// Does what is due.
    fn disturb(&mut self) {
        let elapsed = self.begun.elapsed();
        let due = |after_ms: u64| elapsed >= Duration::from_millis(after_ms);
        for trouble in std::mem::take(&mut self.left) {
            let is_done = match trouble {
                Trouble::Cut { is_one, down_ms, .. } => self.cut(is_one, down_ms),
                Trouble::Cancel { at_source, after_ms } if due(after_ms) => {
                    self.cancel(at_source);
                    true
                }
                Trouble::Kill { .. } => self.kill(),
                Trouble::Reset { after_ms } if due(after_ms) => {
                    self.is_crashed = true;
                    Running::crash(self.running.vmm());
                    true
                }
                Trouble::SameFile => true,
                Trouble::Cancel { .. } | Trouble::Reset { .. } => false,
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

    /// Whether that is where the documents say.
    fn judge(&mut self, place: Place) {
        for asked in self.cancels.drain(..) {
            let start = Instant::now();
            while !asked.is_finished() {
                assert!(start.elapsed() < LEARN_TIME, "a cancel is not answered");
                std::thread::sleep(super::POLL);
            }
            let status = asked.join().expect("a thread that asks");
            self.is_cancelled |= status.is_some_and(|status| status < 300);
        }
        let stays =
            self.is_killed || self.is_cancelled || self.plan.troubles.contains(&Trouble::SameFile);
        let is_calm = self.plan.troubles.is_empty();
        let why = || {
            let events = self.running.vmm().events();
            let last =
                events.iter().skip(self.before).rfind(|event| event["event"] == "migration-failed");
            last.map(text).unwrap_or_default()
        };
        match place {
            Place::Moved => assert!(
                !stays,
                "the guest has moved although it had to stay (cancelled {}, killed {})",
                self.is_cancelled, self.is_killed
            ),
            Place::Stayed => assert!(!is_calm, "nothing happened, and it failed: {}", why()),
        }
        if is_calm {
            let events = self.there().events();
            let is_loss = |event: &&Value| event["properties"]["phase"] == "postcopy-paused";
            let losses = events.iter().filter(is_loss).count();
            let planned = usize::from(self.plan.has_page_server);
            assert!(losses <= planned, "connections were lost although nothing happened to them");
        }
    }
}

fn phase(vmm: &Vmm) -> Option<String> {
    let document: Value = vmm.api().request("GET", "vm.migration-progress", None).ok()?.json();
    document["phase"].as_str().map(str::to_owned)
}
