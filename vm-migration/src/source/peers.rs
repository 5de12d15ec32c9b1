// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The connections over which a peer is told that a migration has failed.
//!
//! Owns how it is told. Further connections have ended by then.

use super::negotiate::Links;
use super::other;
use crate::channel::Channel;
use crate::error::Failure;

/// Connections to a peer.
pub(crate) struct Peers {
    /// The first one.
    pub control: Channel,
    is_other: bool,
}

impl Peers {
    /// A peer that has one connection so far.
    pub(crate) fn first(control: Channel) -> Self {
        Self { control, is_other: false }
    }

    /// A peer whose further connections are no longer used.
    pub(crate) fn new(control: Channel, links: &Links) -> Self {
        Self { control, is_other: links.terms.is_other() }
    }

    /// Tells the peer, if the connection still takes it, and ends all connections.
    pub(crate) fn tell(self, failure: &Failure) {
        let Self { control, is_other } = self;
        if is_other {
            other::leave(&control, failure);
        } else if failure.peer_listens() {
            control.abandon(&failure.for_peer());
        }
    }
}
