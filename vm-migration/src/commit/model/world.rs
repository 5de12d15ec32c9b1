// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Both sides, the link, a page server and operators, as one value that takes one step at a time.
//!
//! Owns none of the rules: the program's own types say which phase follows an event. This module has
//! what surrounds them: messages in flight, which direction of the link works, which side has noticed.

use std::time::Duration;

use crate::commit::Verdict;
use crate::commit::destination::{InDoubt, NotStarted, Owned, Promised};
use crate::commit::source::{Acknowledged, Committed, Offered, Unconfirmed, Withheld};

/// Time that passes in one step of the clock: a third of the promise.
const TICK: Duration = Duration::from_secs(20);

/// How long the destination promises to keep the machine.
pub(super) const PROMISE: Duration = Duration::from_mins(1);

/// Most steps of the clock: enough to pass the promise of the latest acknowledgement that matters.
const TICKS_MAX: u32 = 5;

/// A configuration to explore.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub postcopy: bool,
    pub page_server: bool,
    /// Both sides know `Renew` and `Verdict`.
    pub verdicts: bool,
    /// Most faults in one run: cuts, lost calls, timeouts on a working link, failed starts and
    /// unlocks.
    pub faults_max: u8,
    pub broken: Rules,
}

/// Rules of the product that the model can switch back to an earlier state, one at a time. The product
/// has no such switch.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an experiment of its own")]
pub struct Rules {
    /// A cancel at the destination ends the machine in doubt.
    pub cancel_ends_doubt: bool,
    /// The doubt ends by itself with the promise, and the machine with it.
    pub doubt_times_out: bool,
    /// The source uses an acknowledgement of any age.
    pub age_is_not_asked: bool,
    /// In postcopy a machine that does not start is dropped.
    pub unstartable_is_dropped: bool,
    /// The last message is repeated only once.
    pub last_message_once: bool,
}

/// What kind of step it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// One that happens by itself sooner or later.
    Step,
    /// A failure.
    Fault,
    /// The death of a host or a process.
    Death,
    /// A request or signal whose sender does not know the state.
    Request,
    /// A request of an operator who has checked both sides and follows the documentation.
    Operator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Offered(Offered),
    Acknowledged(Acknowledged),
    Confirming(Committed),
    Unconfirmed(Unconfirmed),
    /// The guest runs here; the destination is being told so, or (`None`) not any more.
    Running(Option<Withheld>),
    Serving,
    /// Postcopy, connections lost.
    Lost,
    /// It has handed the guest over and no longer reports that.
    Left,
    Done,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    Preparing,
    Promised(Promised),
    InDoubt(InDoubt),
    Owned(Owned, Reply),
    Running,
    NotStarted(NotStarted),
    /// No machine is here.
    Gone,
    Dead,
}

/// Where the outcome of the start is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reply {
    Control,
    Call,
    Nothing,
}

/// How far the end of a postcopy has come at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    NotYet,
    /// The last message or its answer is in flight.
    Saying,
    /// Whether it was received is not known; it is repeated to a server that reconnects.
    LateReconnects,
    /// It was received, or nothing listens any more.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Server {
    None,
    Ready,
    TakingOver,
    Serving,
    Lost,
    Done,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    Source,
    Server,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToDestination {
    Complete,
    Renew,
    Confirm,
    Abandon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToSource {
    Acknowledged,
    Refused,
    Runs,
    NotStarted,
}

/// The first connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Wire {
    pub(super) to_destination: Vec<ToDestination>,
    pub(super) to_source: Vec<ToSource>,
    /// Cut in the direction of the destination, and of the source.
    pub(super) cut: (bool, bool),
    pub(super) source_closed: bool,
    pub(super) destination_closed: bool,
}

impl Wire {
    pub(super) fn is_broken(&self) -> bool {
        self.cut.0 || self.cut.1 || self.source_closed || self.destination_closed
    }
}

/// A connection that is being made anew, and how far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    pub(super) who: Caller,
    pub(super) word: Word,
    pub(super) answer: Option<Answer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    Verdict(Verdict),
    Recover,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The verdict was received, and the guest runs if it was to run.
    Heard,
    NotStarted,
    /// Pages are missing: continue.
    Missing,
    Complete,
    Refused,
}

/// A state of the whole model: both sides, the page server and the connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub(super) ticks: u32,
    pub(super) faults: u8,
    pub source: Source,
    pub destination: Destination,
    pub server: Server,
    pub(super) wire: Wire,
    pub(super) call: Option<Call>,
    /// Postcopy: pages are missing at the destination.
    pub missing: bool,
    pub end: End,
    /// The process that sends pages to the destination, and whether that connection still works.
    pub(super) link: Option<Caller>,
    pub(super) link_broken: bool,
    /// The last message and its answer are in flight.
    pub(super) last: (bool, bool),
    /// A host has died.
    pub died: bool,
    /// The operator has forced something that loses a guest.
    pub insisted: bool,
    /// The source no longer reports, or the destination no longer answers, because the time was over.
    pub time_over: bool,
}

/// A step: its kind, its description, and the state after it.
pub type Next = (Kind, &'static str, World);

impl World {
    /// The state just after everything that the destination needs was sent.
    pub fn new(setup: &Setup) -> Self {
        let wire = Wire { to_destination: vec![ToDestination::Complete], ..Wire::default() };
        Self {
            ticks: 0,
            faults: 0,
            source: Source::Offered(Offered::new(Duration::ZERO)),
            destination: Destination::Preparing,
            server: if setup.page_server { Server::Ready } else { Server::None },
            wire,
            call: None,
            missing: setup.postcopy,
            end: End::NotYet,
            link: None,
            link_broken: false,
            last: (false, false),
            died: false,
            insisted: false,
            time_over: false,
        }
    }

    pub(super) fn now(&self) -> Duration {
        TICK * self.ticks
    }

    /// True when the source can run the guest, now or later.
    pub fn source_has(&self) -> bool {
        matches!(self.source, Source::Offered(_) | Source::Acknowledged(_) | Source::Running(_))
    }

    /// True when the destination has a machine that it keeps.
    pub fn destination_has(&self) -> bool {
        !matches!(self.destination, Destination::Preparing | Destination::Gone | Destination::Dead)
    }

    /// True when the destination runs the guest, or may start it at any moment.
    pub fn destination_owns(&self) -> bool {
        use Destination::{NotStarted, Owned, Running};
        matches!(self.destination, Owned(..) | Running | NotStarted(_))
    }

    /// True when a process has the missing pages.
    pub fn has_pages(&self) -> bool {
        use Source::{Confirming, Lost, Serving, Unconfirmed};
        self.source_has()
            || matches!(self.source, Confirming(_) | Unconfirmed(_) | Serving | Lost)
            || matches!(self.server, Server::Serving | Server::Lost | Server::TakingOver)
    }

    /// True when both sides have nothing left to do or to learn.
    pub fn is_settled(&self) -> bool {
        let over = matches!(self.source, Source::Done | Source::Left | Source::Dead);
        let served = !matches!(self.server, Server::Serving | Server::Lost | Server::TakingOver);
        match self.destination {
            Destination::Gone | Destination::Dead => self.source == Source::Running(None),
            Destination::Running => over && served && !self.missing,
            _ => false,
        }
    }

    /// All steps that are possible next.
    pub fn next(&self, setup: &Setup) -> Vec<Next> {
        let mut all = Vec::new();
        self.time(setup, &mut all);
        self.at_source(setup, &mut all);
        self.at_destination(setup, &mut all);
        self.on_wire(setup, &mut all);
        self.on_call(setup, &mut all);
        self.pages(setup, &mut all);
        self.operator(setup, &mut all);
        self.deaths(&mut all);
        all
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut next = self.clone();
        change(&mut next);
        next
    }

    pub(super) fn fault(
        &self,
        setup: &Setup,
        all: &mut Vec<Next>,
        name: &'static str,
        change: impl FnOnce(&mut Self),
    ) {
        if self.faults < setup.faults_max {
            let next = self.change(|next| {
                next.faults += 1;
                change(next);
            });
            all.push((Kind::Fault, name, next));
        }
    }

    pub(super) fn step(
        &self,
        all: &mut Vec<Next>,
        name: &'static str,
        change: impl FnOnce(&mut Self),
    ) {
        all.push((Kind::Step, name, self.change(change)));
    }

    pub(super) fn time(&self, setup: &Setup, all: &mut Vec<Next>) {
        if self.ticks < TICKS_MAX {
            self.step(all, "time passes", |next| next.ticks += 1);
        }
        if setup.broken.doubt_times_out
            && let Destination::InDoubt(doubt) = self.destination
            && doubt.promise_is_over(self.now())
        {
            self.step(all, "the doubt times out", |next| next.destination = Destination::Gone);
        }
        if self.end == End::LateReconnects && self.ticks == TICKS_MAX {
            self.step(all, "the destination stops answering", |next| {
                next.end = End::Over;
                next.time_over = true;
            });
        }
        // A source may stop reporting at any moment: the time for that is the operator's choice.
        let stops = match self.source {
            Source::Unconfirmed(_) if !setup.postcopy => Some(Source::Left),
            Source::Running(Some(_)) => Some(Source::Running(None)),
            _ => None,
        };
        if let Some(stops) = stops {
            self.fault(setup, all, "the source stops telling", |next| {
                next.source = stops;
                next.time_over = true;
            });
        }
    }

    /// Ends the pages' connection of the first set, which is lost together with the first connection.
    pub(super) fn lose_first_link(&mut self) {
        if self.link == Some(Caller::Source) {
            (self.link_broken, self.last) = (true, (false, false));
        }
    }

    pub(super) fn send_destination(&mut self, message: ToDestination) {
        let wire = &mut self.wire;
        if !wire.source_closed && !wire.destination_closed && !wire.cut.0 {
            wire.to_destination.push(message);
        }
    }

    pub(super) fn send_source(&mut self, message: ToSource) {
        let wire = &mut self.wire;
        if !wire.source_closed && !wire.destination_closed && !wire.cut.1 {
            wire.to_source.push(message);
        }
    }

    /// The source decides to continue to run the guest.
    pub(super) fn withhold(&mut self, withheld: Withheld, setup: &Setup) {
        self.send_destination(ToDestination::Abandon);
        self.wire.source_closed = true;
        self.wire.to_source.clear();
        self.source = Source::Running(Some(withheld).filter(|_| setup.verdicts));
    }
}
