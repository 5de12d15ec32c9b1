// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections that are made again, the messages on them, and pages with their last message.

use super::world::{
    Answer, Call, Caller, Destination, End, Next, Reply, Server, Setup, Source, Word, World,
};
use crate::commit::Verdict;
use crate::commit::destination::DoubtOutcome;

impl World {
    /// Which process would connect anew now, and with which message.
    pub(super) fn calls(&self, setup: &Setup) -> Option<(Caller, Word)> {
        match (self.source, self.server) {
            (_, Server::TakingOver | Server::Lost) => Some((Caller::Server, Word::Recover)),
            (Source::Lost, _) => Some((Caller::Source, Word::Recover)),
            (Source::Unconfirmed(_), _) if setup.postcopy => Some((Caller::Source, Word::Recover)),
            (Source::Unconfirmed(unconfirmed), _) => {
                Some((Caller::Source, Word::Verdict(unconfirmed.says())))
            }
            (Source::Running(Some(withheld)), _) => {
                Some((Caller::Source, Word::Verdict(withheld.says())))
            }
            _ => None,
        }
    }

    /// True when the destination listens for new connections.
    pub(super) fn listens(&self, setup: &Setup) -> bool {
        match self.destination {
            Destination::Preparing
            | Destination::Promised(_)
            | Destination::InDoubt(_)
            | Destination::Owned(..) => true,
            Destination::Running | Destination::NotStarted(_) => {
                setup.postcopy && self.end != End::Over
            }
            Destination::Gone | Destination::Dead => false,
        }
    }

    pub(super) fn on_call(&self, setup: &Setup, all: &mut Vec<Next>) {
        let Some(call) = self.call else {
            if let Some((who, word)) = self.calls(setup) {
                if self.listens(setup) {
                    self.step(all, "a connection is made", |next| {
                        next.call = Some(Call { who, word, answer: None });
                    });
                } else if self.destination != Destination::Dead {
                    self.step(all, "nothing listens", |next| next.call_ends(setup, None));
                }
                self.fault(setup, all, "a connection cannot be made", |next| {
                    next.call_fails();
                });
            }
            return;
        };
        self.fault(setup, all, "the new connection is cut", |next| {
            next.call = None;
            next.call_fails();
        });
        match call.answer {
            Some(answer) => self.step(all, "the answer is heard", |next| {
                next.call = None;
                next.call_ends(setup, Some(answer));
            }),
            None => self.answer_call(call, setup, all),
        }
        if call.answer.is_none() && !self.listens(setup) {
            self.step(all, "the new connection ends", |next| {
                next.call = None;
                next.call_fails();
            });
        }
    }

    /// A page server whose first attempt fails leaves the pages to the source.
    pub(super) fn call_fails(&mut self) {
        if self.server == Server::TakingOver {
            self.server = Server::None;
        }
    }

    pub(super) fn answer_call(&self, call: Call, setup: &Setup, all: &mut Vec<Next>) {
        let answered = |next: &mut Self, answer| {
            next.call = Some(Call { answer: Some(answer), ..call });
        };
        let linked = |next: &mut Self| {
            (next.link, next.link_broken) = (Some(call.who), false);
            answered(next, Answer::Missing);
        };
        match (self.destination, call.word) {
            (Destination::InDoubt(doubt), Word::Verdict(verdict)) => {
                self.step(all, "the destination hears the verdict", |next| {
                    match doubt.hears(verdict) {
                        DoubtOutcome::Owned(owned) => {
                            next.destination = Destination::Owned(owned, Reply::Call);
                        }
                        DoubtOutcome::NotHere(_) | DoubtOutcome::Discarded => {
                            next.destination = Destination::Gone;
                            answered(next, Answer::Heard);
                        }
                    }
                });
            }
            (Destination::InDoubt(doubt), Word::Recover) => {
                self.step(all, "the source is back at the destination", |next| {
                    if let DoubtOutcome::Owned(owned) = doubt.hears(Verdict::Committed) {
                        next.destination = Destination::Owned(owned, Reply::Nothing);
                        linked(next);
                    }
                });
            }
            (Destination::Running | Destination::NotStarted(_), Word::Recover)
                if setup.postcopy && self.end == End::NotYet =>
            {
                self.step(all, "the destination takes new connections", linked);
            }
            (Destination::Running | Destination::NotStarted(_), Word::Recover)
                if self.end == End::LateReconnects =>
            {
                self.step(all, "the destination says that all is there", |next| {
                    answered(next, Answer::Complete);
                    if setup.broken.last_message_once {
                        next.end = End::Over;
                    }
                });
            }
            (Destination::Running | Destination::NotStarted(_), Word::Verdict(_)) => {
                self.step(all, "the destination is in no doubt", |next| {
                    answered(next, Answer::Refused);
                });
            }
            // In all other states the destination does not look at it.
            _ => {}
        }
    }

    /// The calling process takes the answer; `None` when nothing listens.
    pub(super) fn call_ends(&mut self, setup: &Setup, answer: Option<Answer>) {
        let is_server = matches!(self.server, Server::TakingOver | Server::Lost);
        match answer {
            None if is_server => self.call_fails(),
            Some(Answer::Missing) if is_server => {
                self.server = Server::Serving;
                self.source = Source::Done;
            }
            Some(Answer::Complete) if is_server => {
                self.server = Server::Done;
                self.source = Source::Done;
            }
            Some(Answer::Missing) => self.source = Source::Serving,
            Some(Answer::Complete) => self.source = Source::Done,
            Some(Answer::Heard) if !self.source_has() => self.source = Source::Done,
            _ if self.source_has() => self.source = Source::Running(None),
            _ if !setup.postcopy => self.source = Source::Left,
            _ => {}
        }
    }

    /// True when the process at the other end of the link serves it.
    pub(super) fn is_served(&self) -> bool {
        match self.link {
            Some(Caller::Source) => self.source == Source::Serving,
            Some(Caller::Server) => self.server == Server::Serving,
            None => false,
        }
    }

    pub(super) fn pages(&self, setup: &Setup, all: &mut Vec<Next>) {
        if !setup.postcopy {
            return;
        }
        let here = matches!(self.destination, Destination::Running | Destination::NotStarted(_));
        let carries = self.is_served() && !self.link_broken;
        if here && carries && self.missing {
            self.step(all, "the last page arrives", |next| {
                (next.missing, next.end, next.last) = (false, End::Saying, (true, false));
            });
        }
        if carries && self.last.0 {
            self.step(all, "the last message is heard", |next| {
                next.last = (false, true);
                match next.link {
                    Some(Caller::Source) => next.source = Source::Done,
                    Some(Caller::Server) => next.server = Server::Done,
                    None => {}
                }
            });
        }
        if self.last.1 && !self.link_broken {
            self.step(all, "its answer is heard", |next| {
                (next.last, next.end, next.link) = ((false, false), End::Over, None);
            });
        }
        if self.link.is_some() && !self.link_broken {
            self.fault(setup, all, "the connections for pages are cut", |next| {
                (next.link_broken, next.last) = (true, (false, false));
            });
        }
        let noticeable = !carries && !self.last.1;
        if here && self.link.is_some() && noticeable {
            self.step(all, "the destination finds its pages' connections lost", |next| {
                (next.link, next.link_broken, next.last) = (None, false, (false, false));
                if next.end == End::Saying {
                    next.end = End::LateReconnects;
                }
            });
        }
        let lost = |who| self.link != Some(who) || self.link_broken;
        if self.source == Source::Serving
            && lost(Caller::Source)
            && self.server != Server::TakingOver
        {
            self.step(all, "the source finds its connections lost", |next| {
                next.source = Source::Lost;
            });
        }
        if self.server == Server::Serving && lost(Caller::Server) {
            self.step(all, "the page server finds its connections lost", |next| {
                next.server = Server::Lost;
            });
        }
        if self.source == Source::Serving && self.server == Server::Ready {
            self.step(all, "the page server takes over", |next| {
                next.server = Server::TakingOver;
            });
        }
    }
}
