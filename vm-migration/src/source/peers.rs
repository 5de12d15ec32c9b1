// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The connections over which a peer is told that a migration has failed.
//!
//! Owns which of them are told. One of this program is told on the first; the others have ended by then.

use super::negotiate::Links;
use super::other;
use crate::channel::Channel;
use crate::error::Failure;
use crate::session::Session;

/// Connections to a peer.
pub(crate) struct Peers {
    /// The first one.
    pub control: Channel,
    /// Further ones for memory, to another program.
    further: Vec<Channel>,
    is_other: bool,
    /// Threads that were to serve pages, which are waited for after the guest runs again.
    serving: Option<Session>,
}

impl Peers {
    /// A peer that has one connection so far.
    pub(crate) fn first(control: Channel) -> Self {
        Self { control, further: Vec::new(), is_other: false, serving: None }
    }

    /// A peer whose further connections are no longer used.
    pub(crate) fn new(control: Channel, links: Links) -> Self {
        let is_other = links.terms.is_other();
        let further = if is_other { links.memory } else { Vec::new() };
        Self { control, further, is_other, serving: links.serving }
    }

    /// Tells the peer, if the connection still takes it, and ends all connections.
    pub(crate) fn tell(self, failure: &Failure) {
        let Self { control, further, is_other, serving: _serving } = self;
        if is_other {
            other::leave(&control, further, failure);
        } else if failure.peer_listens() {
            control.abandon(&failure.for_peer());
        }
    }
}
