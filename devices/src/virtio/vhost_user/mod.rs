// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio devices whose queues another process serves: the front end of vhost-user.
//!
//! | module | what it is |
//! | --- | --- |
//! | `device` | the device as the transport drives it |
//! | `kind` | what differs between kinds of devices |
//! | `session`, `needs`, `ring` | the requests to the back end, and what was negotiated |
//! | `plain` | requests whose answers the `vhost` crate does not read |
//! | `channel` | the requests of the back end: its configuration has changed |
//! | `config_space` | the configuration, as far as the VMM has it |
//! | `net_link`, `control` | what a network has beside its rings: pairs in use, announcements, the control queue |
//! | `accept`, `deadline` | a back end that connects itself, and the time limit of answers |
//! | `handle`, `state`, `write_log`, `moving` | migration and snapshots: what is saved, and the log of what the back end writes |
//! | `worker` | the thread that starts and stops queues, and forwards interrupts |
//!
//! The back end has all guest memory mapped, and the driver's notifications reach it without the VMM. It is
//! trusted with the guest, and not with the VMM: what it answers is checked, each answer has a time limit, and a
//! back end that is lost costs the guest this device alone.

mod accept;
mod channel;
mod config_space;
mod control;
mod counters;
mod deadline;
mod device;
mod error;
mod handle;
mod kind;
mod moving;
mod needs;
mod net_link;
mod plain;
mod ring;
mod running;
mod session;
mod state;
mod worker;
mod write_log;

#[cfg(test)]
mod channel_tests;
#[cfg(test)]
mod fs_state_tests;
#[cfg(any(test, feature = "testing"))]
pub(super) mod fuzz;
#[cfg(test)]
mod generic_tests;
#[cfg(test)]
mod moving_tests;
#[cfg(test)]
mod net_tests;
#[cfg(test)]
mod order_tests;
#[cfg(test)]
mod pairs_tests;
#[cfg(any(test, feature = "testing"))]
mod scripted;
#[cfg(test)]
mod tests;

pub use counters::VhostUserCounters;
pub use device::{VhostUser, VhostUserConfig};
pub use error::VhostUserError;
pub use handle::VhostUserHandle;
pub use kind::{FS_TAG_LEN_BYTES, NET_QUEUES, NetOffloads, VhostUserKind};
pub use worker::OnLost;
pub use write_log::WriteLog;
