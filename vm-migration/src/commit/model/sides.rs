// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The two sides and the first connection between them, up to the start of the guest.

use std::time::Duration;

use super::world::{
    Answer, Caller, Destination, Kind, Next, PROMISE, Reply, Setup, Source, ToDestination,
    ToSource, World,
};
use crate::commit::destination::{NotHere, Promised};
use crate::commit::usable;

impl World {
    pub(super) fn at_source(&self, setup: &Setup, all: &mut Vec<Next>) {
        let broken = self.wire.is_broken();
        let mut ends = |change: &dyn Fn(&mut Self)| {
            if broken {
                self.step(all, "the source finds the connection lost", change);
            } else {
                self.fault(setup, all, "the source waits for too long", change);
            }
        };
        match self.source {
            Source::Offered(offered) => {
                ends(&|next| next.withhold(offered.fails(), setup));
                let cancelled = self.change(|next| next.withhold(offered.fails(), setup));
                all.push((Kind::Request, "a cancel at the source", cancelled));
            }
            Source::Acknowledged(acknowledged) => {
                let age =
                    if setup.broken.age_is_not_asked { Duration::MAX } else { usable(PROMISE) };
                match acknowledged.commit(self.now(), age) {
                    Ok(committed) => self.step(all, "the source commits", |next| {
                        next.source = Source::Confirming(committed);
                        next.send_destination(ToDestination::Confirm);
                    }),
                    Err(_) => self.step(all, "the acknowledgement has become too old", |next| {
                        next.withhold(acknowledged.fails(), setup);
                    }),
                }
                self.fault(setup, all, "a disk stays locked at the source", |next| {
                    next.withhold(acknowledged.fails(), setup);
                });
                let cancelled = self.change(|next| next.withhold(acknowledged.fails(), setup));
                all.push((Kind::Request, "a cancel at the source", cancelled));
            }
            Source::Confirming(committed) => ends(&|next| {
                next.wire.source_closed = true;
                next.wire.to_source.clear();
                next.source = match (setup.postcopy, setup.verdicts) {
                    (false, false) => Source::Left,
                    _ => Source::Unconfirmed(committed.lost()),
                };
            }),
            _ => {}
        }
    }

    pub(super) fn at_destination(&self, setup: &Setup, all: &mut Vec<Next>) {
        match self.destination {
            Destination::Preparing => {
                self.fault(setup, all, "the destination cannot take the state", |next| {
                    next.send_source(ToSource::Refused);
                    next.close_destination(Destination::Gone);
                });
                if self.wire.is_broken() {
                    self.step(all, "the destination finds the connection lost", |next| {
                        next.close_destination(Destination::Gone);
                    });
                }
            }
            Destination::Promised(promised) => {
                let doubt =
                    |next: &mut Self| next.close_destination(Destination::InDoubt(promised.lost()));
                // Data that has arrived is read before the end of the connection is seen.
                let unread = !self.wire.to_destination.is_empty();
                if self.wire.is_broken() && !unread {
                    self.step(all, "the destination finds the connection lost", doubt);
                } else {
                    self.fault(setup, all, "the destination waits for too long", doubt);
                }
            }
            Destination::Owned(owned, reply) => {
                self.step(all, "the guest starts", |next| {
                    next.destination = Destination::Running;
                    next.reply(setup, reply, true);
                });
                self.fault(setup, all, "the guest does not start", |next| {
                    if setup.broken.unstartable_is_dropped && setup.postcopy {
                        return next.close_destination(Destination::Gone);
                    }
                    next.destination = Destination::NotStarted(owned.does_not_start());
                    next.reply(setup, reply, false);
                });
            }
            _ => {}
        }
    }

    pub(super) fn close_destination(&mut self, destination: Destination) {
        self.wire.destination_closed = true;
        self.wire.to_destination.clear();
        self.destination = destination;
    }

    /// Reports the outcome of the start to the waiting peer. In postcopy the source serves pages
    /// either way.
    pub(super) fn reply(&mut self, setup: &Setup, reply: Reply, runs: bool) {
        let well = runs || setup.postcopy;
        match reply {
            Reply::Control => {
                self.send_source(if well { ToSource::Runs } else { ToSource::NotStarted });
                if setup.postcopy {
                    (self.link, self.link_broken) = (Some(Caller::Source), self.wire.is_broken());
                }
            }
            Reply::Call => {
                if let Some(call) = &mut self.call {
                    call.answer = Some(if well { Answer::Heard } else { Answer::NotStarted });
                }
            }
            Reply::Nothing => {}
        }
    }

    pub(super) fn on_wire(&self, setup: &Setup, all: &mut Vec<Next>) {
        let (to_destination, to_source) = self.wire.cut;
        if !to_destination && !self.wire.source_closed || !self.wire.to_destination.is_empty() {
            self.fault(setup, all, "nothing gets to the destination any more", |next| {
                next.wire.cut.0 = true;
                next.wire.to_destination.clear();
                next.lose_first_link();
            });
        }
        if !to_source && !self.wire.destination_closed || !self.wire.to_source.is_empty() {
            self.fault(setup, all, "nothing gets to the source any more", |next| {
                next.wire.cut.1 = true;
                next.wire.to_source.clear();
                next.lose_first_link();
            });
        }
        if let Some(message) = self.wire.to_destination.first().copied() {
            let change = self.hear_at_destination(message);
            if let Some((name, destination, answers)) = change {
                self.step(all, name, |next| {
                    next.wire.to_destination.remove(0);
                    if answers {
                        next.send_source(ToSource::Acknowledged);
                    }
                    match destination {
                        Destination::Gone => next.close_destination(Destination::Gone),
                        other => next.destination = other,
                    }
                });
            }
        }
        if let Some(message) = self.wire.to_source.first().copied() {
            self.hear_at_source(message, setup, all);
        }
    }

    pub(super) fn hear_at_destination(
        &self,
        message: ToDestination,
    ) -> Option<(&'static str, Destination, bool)> {
        use ToDestination::{Abandon, Complete, Confirm, Renew};
        Some(match (self.destination, message) {
            (Destination::Preparing, Complete) => {
                let promised = Promised::new(self.now(), PROMISE);
                ("the destination acknowledges", Destination::Promised(promised), true)
            }
            (Destination::Preparing, Abandon) => {
                ("the destination hears of the end", Destination::Gone, false)
            }
            (Destination::Promised(promised), Renew) => {
                let promised = promised.renewed(self.now(), PROMISE);
                ("the destination acknowledges anew", Destination::Promised(promised), true)
            }
            (Destination::Promised(promised), Confirm) => (
                "the destination hears the confirmation",
                Destination::Owned(promised.confirmed(), Reply::Control),
                false,
            ),
            (Destination::Promised(promised), Abandon) => {
                let NotHere = promised.abandoned();
                ("the destination hears that it is not to", Destination::Gone, false)
            }
            _ => return None,
        })
    }

    pub(super) fn hear_at_source(&self, message: ToSource, setup: &Setup, all: &mut Vec<Next>) {
        let heard = |all: &mut Vec<Next>, name, change: &dyn Fn(&mut Self)| {
            self.step(all, name, |next| {
                next.wire.to_source.remove(0);
                change(next);
            });
        };
        match (self.source, message) {
            (Source::Offered(offered), ToSource::Acknowledged) => {
                let acknowledged = offered.acknowledged();
                let looked = if setup.broken.age_is_not_asked {
                    Ok(acknowledged)
                } else {
                    acknowledged.still_usable(self.now(), usable(PROMISE))
                };
                match looked {
                    Ok(acknowledged) => heard(all, "the source is acknowledged", &|next| {
                        next.source = Source::Acknowledged(acknowledged);
                    }),
                    Err(outdated) if setup.verdicts => {
                        heard(all, "the source asks again", &|next| {
                            next.source = Source::Offered(outdated.asked_again(self.now()));
                            next.send_destination(ToDestination::Renew);
                        });
                    }
                    Err(_) => heard(all, "the acknowledgement comes too late", &|next| {
                        next.withhold(acknowledged.fails(), setup);
                    }),
                }
            }
            (Source::Offered(_), ToSource::Refused) => {
                heard(all, "the source is refused", &|next| {
                    next.source = Source::Running(None);
                    next.wire.source_closed = true;
                });
            }
            (Source::Confirming(_), ToSource::Runs) => {
                heard(all, "the source hears that it runs", &|next| {
                    next.source = if setup.postcopy { Source::Serving } else { Source::Done };
                });
            }
            (Source::Confirming(_), ToSource::NotStarted) => {
                heard(all, "the source hears that it did not start", &|next| {
                    next.source = Source::Left;
                });
            }
            _ => {}
        }
    }
}
