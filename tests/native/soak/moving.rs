// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One migration of the campaign: begun, disturbed, and followed until both sides have settled.
//!
//! Owns where the guest has to be afterwards, by what docs/migration.md says of what happened. Must
//! never draw anything but the moments of the link's own delays.

use std::process::Output;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::counts::{Holdings, assert_holds_no_more, assert_no_files, assert_no_processes};
use super::dice::Dice;
use super::life::Running;
use super::link::{Link, Stop};
use super::plan::{Plan, Trouble};
use crate::harness::Vmm;
use crate::harness::migrate::{ANYTHING, Reception, text};

/// For both sides to settle: a lost connection is noticed within 11 s, and made again within 5 s
/// more, several times over.
const SETTLE_TIME: Duration = Duration::from_secs(75);
/// For a connection that is under way to arrive.
const CONNECT_TIME: Duration = Duration::from_secs(1);
/// How long a destination waits for pages until those are given up that were in a process that was killed; and
/// where there is a page server, which connects again within 5 s if it lives.
const LOST_TIME: Duration = Duration::from_secs(2);
const LOST_TIME_OF_PAGE_SERVER: Duration = Duration::from_secs(12);
/// For a destination to learn by itself that the guest stays at the source.
const LEARN_TIME: Duration = Duration::from_secs(20);

/// Where the guest is afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where it was.
    Stayed,
    /// At the destination.
    Moved,
    /// Nowhere: what had its pages was killed.
    Lost,
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
pub(super) struct Moving<'a> {
    pub(super) running: &'a mut Running,
    pub(super) plan: &'a Plan,
    pub(super) link: Option<Link>,
    pub(super) begun: Instant,
    /// Events of the source that are of earlier ones.
    pub(super) before: usize,
    pub(super) left: Vec<Trouble>,
    /// When connections can be made again.
    pub(super) mends_at: Option<Instant>,
    pub(super) cancels: Vec<JoinHandle<Option<u16>>>,
    pub(super) is_cancelled: bool,
    pub(super) is_killed: bool,
    /// The source, or its page server.
    pub(super) is_source_killed: bool,
    /// A side that is stopped, and until when.
    pub(super) stopped: Option<(bool, Instant)>,
    /// Since when the destination has waited for pages that no process has.
    pub(super) waits_since: Option<Instant>,
    /// The destination was told to end without its pages.
    pub(super) is_discarded: bool,
    /// When the page server was seen to have taken over.
    pub(super) handed_on: Option<Instant>,
    pub(super) is_crashed: bool,
    /// A person had to say something.
    pub(super) is_helped: bool,
    pub(super) source_code: Option<i32>,
}

/// Makes it, and checks all there is to check but the guest's memory. Where the guest is, and how
/// many milliseconds it took until that was clear.
pub fn migrate(running: &mut Running, plan: &Plan, dice: Dice) -> (Place, u128) {
    prepare(running, plan);
    let pool = if plan.has_pool { running.pool() } else { String::new() };
    let tls = if plan.has_tls { running.tls() } else { String::new() };
    let mut before_source = Holdings::of(running.vmm());
    if !running.life.memory.is_shared() {
        before_source = before_source.of_any_memory();
    }
    // A file that is handed over stays where it is.
    running.start_destination(plan.is_local || plan.troubles.contains(&Trouble::SameFile));
    let destination = running.there.as_ref().expect("a destination");
    let before_destination = Holdings::of(destination);
    // Files of memory hold what earlier tries have left in them.
    let receiving = format!("{}{pool}{tls}{ANYTHING}", plan.receiving);
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
    let (mode, more) = (plan.mode.name(), &plan.sending);
    let option = format!("destination_url={url},memory_mode={mode}{more}{tls}");
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
        is_source_killed: false,
        stopped: None,
        waits_since: None,
        is_discarded: false,
        handed_on: None,
        is_crashed: false,
        is_helped: false,
        source_code: None,
        running,
    };
    let place = moving.follow();
    let settled_ms = moving.begun.elapsed().as_millis();
    moving.judge(place);
    let settled = Settled {
        is_killed: moving.is_killed,
        is_source_killed: moving.is_source_killed,
        is_helped: moving.is_helped,
        is_discarded: moving.is_discarded,
        source_code: moving.source_code,
    };
    let is_crashed = moving.is_crashed;
    drop(moving.link.take());
    let received = reception.finish();
    match place {
        Place::Moved => moved(running, &settled, &received),
        Place::Stayed => {
            stayed(running, &settled, &received, &before_destination);
            if !is_crashed {
                assert_holds_no_more(running.vmm(), &before_source, "the source");
            }
        }
        Place::Lost => {
            lost(running, &settled, &received, &before_destination);
            return (place, settled_ms);
        }
    }
    assert_no_files(running.vmm());
    running.assert_holds_its_own();
    if is_crashed {
        // What was written over its code may be anywhere.
        running.reboot();
    }
    (place, settled_ms)
}

/// What was done to it, once both sides have settled.
struct Settled {
    is_killed: bool,
    is_source_killed: bool,
    is_helped: bool,
    is_discarded: bool,
    source_code: Option<i32>,
}

fn moved(running: &mut Running, settled: &Settled, received: &Output) {
    if let Some(old) = running.arrived() {
        left_by_source(old, settled);
    }
    assert!(settled.is_helped || received.status.success(), "receive-migration: {received:?}");
}

fn stayed(running: &mut Running, settled: &Settled, received: &Output, before: &Holdings) {
    assert!(!received.status.success(), "the guest stayed, and receive-migration succeeded");
    if let Some(there) = running.there.take() {
        left_by_destination(there, settled, before);
    }
}

/// Neither process has a guest, nor anything else.
fn lost(running: &mut Running, settled: &Settled, received: &Output, before: &Holdings) {
    let old = running.here.take().expect("a source");
    assert_no_processes(&old, "source");
    assert!(settled.is_discarded || !received.status.success(), "the loss is not told");
    let mut there = running.there.take().expect("a destination");
    if settled.is_discarded {
        assert_eq!(there.wait_for_exit(), 0, "the destination:\n{}", there.output());
        assert_no_processes(&there, "destination");
        assert_no_files(&there);
    } else {
        left_by_destination(there, settled, before);
    }
    running.was_killed = true;
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
        Trouble::Cancel { .. }
        | Trouble::KillSource { .. }
        | Trouble::KillPageServer { .. }
        | Trouble::Stop { .. }
        | Trouble::Reset { .. }
        | Trouble::SameFile => None,
    }
}

/// The VMM that the guest has left.
fn left_by_source(mut old: Vmm, settled: &Settled) {
    if settled.is_source_killed && settled.source_code == Some(-libc::SIGKILL) {
        // Its page server has gone on by itself.
        assert_no_processes(&old, "source");
        return;
    }
    let code = settled.source_code.unwrap_or_else(|| {
        assert!(settled.is_helped, "the source continues after its migration");
        if old.api().get("vm.info").status == 409 {
            old.api().put("vm.delete", r#"{"force":true}"#).ok();
        }
        old.api().put("vmm.shutdown", "").ok();
        old.wait_for_exit()
    });
    assert_eq!(code, 0, "the source after its migration:\n{}", old.output());
    assert_no_processes(&old, "source");
    if !settled.is_source_killed {
        // A page server that is killed cannot remove its socket.
        assert_no_files(&old);
    }
}

/// The VMM that the guest did not get to.
fn left_by_destination(mut there: Vmm, settled: &Settled, before: &Holdings) {
    if settled.is_killed {
        return;
    }
    assert!(there.exited().is_none(), "the destination has ended:\n{}", there.output());
    assert_eq!(there.api().get("vm.info").status, 404, "the destination has a VM as well");
    assert_holds_no_more(&there, before, "the destination");
    assert_no_processes(&there, "destination");
    assert_no_files(&there);
    there.shut_down();
}

impl Moving<'_> {
    /// Until both sides have settled.
    fn follow(&mut self) -> Place {
        let mut stayed_since = None;
        loop {
            self.disturb();
            if self.stopped.is_some() {
                // It would not answer.
                std::thread::sleep(super::POLL);
                continue;
            }
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
        if self.is_source_killed
            && let Side::Ended(_) = source
        {
            return self.settled_without(source, destination);
        }
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
                    self.end_wait();
                    *stayed_since = Some(Instant::now());
                }
            }
            _ => {}
        }
        None
    }

    /// The source was killed, or the page server behind it: what has arrived by then decides.
    fn settled_without(&mut self, source: Side, destination: Side) -> Option<Place> {
        if let Side::Ended(code) = source {
            self.source_code = Some(code);
        }
        match destination {
            Side::Has => return Some(Place::Moved),
            Side::HasNot | Side::Ended(_) => return Some(Place::Lost),
            // That process has ended in the middle: the guest may be resumed.
            Side::InDoubt if !self.is_helped => {
                self.is_helped = true;
                self.there().api().put("vm.resume", "").ok();
            }
            Side::InDoubt => {}
            Side::Busy => {
                let phase = phase(self.there());
                match phase.as_deref() {
                    // No source will ever connect.
                    Some("listen") if self.waits(CONNECT_TIME) => {
                        self.waits_since = None;
                        self.end_wait();
                    }
                    Some("postcopy-paused") if self.waits(self.lost_time()) => {
                        let info = self.there().api().get("vm.info").ok().json();
                        assert!(info["postcopy_paused"].is_string(), "no loss is told: {info}");
                        // What is left of the guest is of no use.
                        self.there().api().put("vmm.shutdown", r#"{"force":true}"#).ok();
                        self.is_discarded = true;
                        return Some(Place::Lost);
                    }
                    Some("listen" | "postcopy-paused") => {}
                    _ => self.waits_since = None,
                }
            }
        }
        None
    }

    /// The destination is told that nothing comes.
    fn end_wait(&self) {
        let api = self.there().api();
        if api.put("vm.migration-cancel", "").status >= 300 {
            let _ = api.put("vm.delete", "");
        }
    }

    const fn lost_time(&self) -> Duration {
        if self.plan.has_page_server { LOST_TIME_OF_PAGE_SERVER } else { LOST_TIME }
    }

    /// Whether it has been so for this long.
    fn waits(&mut self, time: Duration) -> bool {
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        since.elapsed() > time
    }

    pub(super) fn there(&self) -> &Vmm {
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
        // A side that is silent for less than the limits is waited for.
        let is_stop = |trouble: &Trouble| matches!(trouble, Trouble::Stop { .. });
        let moves = self.plan.troubles.iter().all(is_stop);
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
            Place::Stayed => assert!(!moves, "nothing had to stop it, and it failed: {}", why()),
            Place::Lost => assert!(self.is_source_killed, "the guest is lost: {}", why()),
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

/// Of its migration, if it answers.
pub(super) fn phase(vmm: &Vmm) -> Option<String> {
    let document: Value = vmm.api().request("GET", "vm.migration-progress", None).ok()?.json();
    document["phase"].as_str().map(str::to_owned)
}
