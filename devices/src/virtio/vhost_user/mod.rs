// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio devices whose queues another process serves: the front end of vhost-user.
//!
//! | module | what it is |
//! | --- | --- |
//! | `device` | the device as the transport drives it |
//! | `kind` | what differs between kinds of devices |
//! | `session` | the requests to the back end, and what was negotiated |
//! | `get_config` | reads of a configuration that the back end may not have |
//! | `accept`, `deadline` | a back end that connects itself, and the time limit of answers |
//! | `worker` | the thread that starts and stops queues, and forwards interrupts |
//!
//! The back end has all guest memory mapped, and the driver's notifications reach it without the VMM. It is
//! trusted with the guest, and not with the VMM: what it answers is checked, each answer has a time limit, and a
//! back end that is lost costs the guest this device alone.

mod accept;
mod counters;
mod deadline;
mod device;
mod error;
mod get_config;
mod kind;
mod session;
mod worker;

#[cfg(any(test, feature = "testing"))]
pub(super) mod fuzz;
#[cfg(test)]
mod generic_tests;
#[cfg(test)]
mod net_tests;
#[cfg(test)]
mod order_tests;
#[cfg(any(test, feature = "testing"))]
mod scripted;
#[cfg(test)]
mod tests;

pub use counters::VhostUserCounters;
pub use device::{VhostUser, VhostUserConfig};
pub use error::VhostUserError;
pub use kind::{FS_TAG_LEN_BYTES, NET_QUEUES, NetOffloads, VhostUserKind};
pub use worker::OnLost;
