// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests, signals, operators that have checked both sides, and hosts that fail.

use super::world::{
    Caller, Destination, Kind, Next, Reply, Server, Setup, Source, ToSource, World,
};
use crate::commit::destination::{Decision, DoubtOutcome, InDoubt, OperatorRequest};

impl World {
    pub(super) fn operator(&self, setup: &Setup, all: &mut Vec<Next>) {
        let operator = |all: &mut Vec<Next>, name, change: &dyn Fn(&mut Self)| {
            all.push((Kind::Operator, name, self.change(change)));
        };
        match self.destination {
            Destination::Preparing => {
                let ended = self.change(|next| {
                    next.send_source(ToSource::Refused);
                    next.close_destination(Destination::Gone);
                });
                all.push((Kind::Request, "a cancel at the destination", ended));
            }
            Destination::Promised(promised) => {
                for asked in [
                    OperatorRequest::Cancel,
                    OperatorRequest::Delete { force: true },
                    OperatorRequest::End { force: true },
                ] {
                    let (stays, _) = promised.asked(asked);
                    let asked = self.change(|next| next.destination = Destination::Promised(stays));
                    all.push((Kind::Request, "a request to a destination that promised", asked));
                }
            }
            Destination::InDoubt(doubt) => self.ask_in_doubt(doubt, setup, all),
            Destination::NotStarted(standing) => {
                operator(all, "vm.resume of a machine that did not start", &|next| {
                    next.destination = Destination::Owned(standing.again(), Reply::Nothing);
                });
                operator(all, "vm.delete of a machine that did not start", &|next| {
                    (next.destination, next.insisted) = (Destination::Gone, true);
                });
            }
            _ => {}
        }
        let serves = matches!(self.source, Source::Serving | Source::Lost | Source::Unconfirmed(_));
        if serves && setup.postcopy {
            let discarded = self.change(|next| (next.source, next.insisted) = (Source::Left, true));
            all.push((Kind::Request, "the source is told to release pages, by force", discarded));
        }
    }

    pub(super) fn ask_in_doubt(&self, doubt: InDoubt, setup: &Setup, all: &mut Vec<Next>) {
        let asks = [
            OperatorRequest::Cancel,
            OperatorRequest::End { force: false },
            OperatorRequest::End { force: true },
            OperatorRequest::Delete { force: false },
            OperatorRequest::Delete { force: true },
            OperatorRequest::Resume,
        ];
        for asked in asks {
            // Using `force` loses nothing where the guest is seen to run at the source.
            let seen = matches!(self.source, Source::Running(_));
            let forces = matches!(
                asked,
                OperatorRequest::End { force: true } | OperatorRequest::Delete { force: true }
            );
            let insists = forces && !seen;
            let (kind, name) = match asked {
                OperatorRequest::Delete { force: true } if seen => (
                    Kind::Operator,
                    "vm.delete in doubt, by force, of a guest that the source runs",
                ),
                OperatorRequest::Cancel => (Kind::Request, "a cancel in doubt"),
                OperatorRequest::End { .. } => (Kind::Request, "SIGTERM in doubt"),
                OperatorRequest::Delete { force: true } => {
                    (Kind::Request, "vm.delete in doubt, by force")
                }
                OperatorRequest::Delete { force: false } => (Kind::Operator, "vm.delete in doubt"),
                OperatorRequest::Resume => (Kind::Operator, "vm.resume in doubt"),
            };
            if kind == Kind::Request && !insists && setup.broken.cancel_ends_doubt {
                let next = self.change(|next| next.destination = Destination::Gone);
                all.push((kind, name, next));
                continue;
            }
            // docs/migration.md tells the operator to check the source first.
            let looked = match asked {
                OperatorRequest::Resume => !self.source_has(),
                OperatorRequest::Delete { force: false } => self.source_has(),
                _ => true,
            };
            let Ok(decision) = doubt.asked(asked, self.now()) else { continue };
            if !looked {
                continue;
            }
            let next = self.change(|next| {
                next.insisted |= insists;
                next.destination = match doubt.decided(decision) {
                    DoubtOutcome::Owned(owned) => {
                        debug_assert_eq!(decision, Decision::RunsHere);
                        Destination::Owned(owned, Reply::Nothing)
                    }
                    DoubtOutcome::NotHere(_) | DoubtOutcome::Discarded => Destination::Gone,
                };
            });
            all.push((kind, name, next));
        }
    }

    pub(super) fn deaths(&self, all: &mut Vec<Next>) {
        if self.died {
            return;
        }
        let mut dies = |name, change: &dyn Fn(&mut Self)| {
            let next = self.change(|next| {
                next.died = true;
                change(next);
            });
            all.push((Kind::Death, name, next));
        };
        if !matches!(self.source, Source::Done | Source::Left) {
            dies("the source's host dies", &|next| {
                next.source = Source::Dead;
                next.wire.source_closed = true;
                next.wire.to_source.clear();
                next.call = next.call.filter(|call| call.who != Caller::Source);
                // The page server runs on the same host.
                if next.server != Server::None {
                    next.server = Server::Dead;
                    next.call = None;
                }
            });
        }
        dies("the destination's host dies", &|next| {
            next.close_destination(Destination::Dead);
            (next.link, next.last, next.call) = (None, (false, false), None);
        });
        if matches!(
            self.server,
            Server::Ready | Server::Serving | Server::Lost | Server::TakingOver
        ) {
            dies("the page server dies", &|next| {
                next.server = Server::Dead;
                next.call = next.call.filter(|call| call.who != Caller::Server);
            });
        }
    }
}
