// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a device needs of a vhost-user back end.

use vhost::vhost_user::message::VhostUserProtocolFeatures;

/// How a back end is asked for the number of queues that it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskedQueues {
    /// Not at all: each serves as many.
    No,
    /// It says how many queues.
    Queues,
    /// It says how many queues, or how many pairs of them, as some back ends of networks do.
    QueuesOrPairs,
}

/// What a device needs of a back end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Queues of the device that the back end serves.
    pub(super) count: usize,
    /// Those of a back end that is not asked, or does not say (MQ).
    pub(super) without_mq: usize,
    /// How it is asked.
    pub(super) asked: AskedQueues,
    /// What is used of the protocol beside what each device uses.
    pub(super) protocol: VhostUserProtocolFeatures,
}
