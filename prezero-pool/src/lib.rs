// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A daemon that leases populated, zeroed memory to virtual machines, and reclaims it when they end.
//!
//! Owns the slots: which are ready or leased, and what happens to returned ones. Knows
//! nothing of virtual machines but where their memory begins and ends: a slot is a memfd, perhaps mapped
//! for a device, and its user is the holder of the connection over which it was taken. Must never hand
//! out a byte that was written.
//!
//! ```text
//!                build (kernel zeroes, every byte is looked at)
//!   absent ------------------------------------------------> ready ---- take ----> lent
//!     ^                                                        ^                    |
//!     | cannot be proved free, or fails,       scrub, verify   |                    | connection
//!     | or is not to be used again            (same-user only) |                    | closes
//!     +------------------------------ lingering ---------------+                    |
//!                                         ^-----------------------------------------+
//! ```
//!
//! # What is used again
//!
//! By default nothing: when no process has the memfd any more, its pages go back to the kernel, and a new one takes
//! its place. A page that its user has kept hold of without a file (in a pipe, by a pin) stays with that
//! user alone, and is in no other slot.
//!
//! With `reuse = "same-user"` a memfd that comes back is cleared in place, for the same user. Either waits until
//! no other process can reach it: no descriptor, no mapping, none on its way through a socket. The kernel tells
//! that of an *open file*: it grants a write lease on one only if no other open file of that inode exists. So the pool keeps an open
//! file of its own, hands out another one, made for this user, and asks for the lease when the user
//! is gone; while it is refused, a process still has the memory (another process of a VM that
//! moved, say) and it stays `lent`. The memfd's mode keeps users from opening it a third time.
//!
//! # Slots with a device
//!
//! ```text
//!   memory is clear --> waiting ---- opens and binds the device, maps, fills a page table ----> ready
//!                         ^                                                                      |
//!                         +--- the device is in use, or its user was refused the slot ------------+
//! ```
//!
//! Such a slot has all memory of a VM: a memfd for each of its zones, mapped in one iommufd where the VM has it. The way
//! back closes the device at once, and what is mapped after it, which takes long for terabytes: the thread that serves all
//! clients waits for neither.
//!
//! The memory is mapped by its file, so the iommufd has an open file of it until it is gone itself, and
//! it cannot go before the device was released. The lease is refused for as long as any process has one of
//! the three, whichever it is: what the first user passed on is found in the same way.
//!
//! Pages can be held without a file, in a pipe for instance, by a process that means to. So what is cleared
//! in place is only ever given to the same user again; for another one it goes back to the kernel, and new
//! memory is made.

mod broker;
mod config;
mod connections;
mod pace;
mod parallel;
mod prepinned;
mod server;
mod slot;
mod stats;
mod sys;
mod worker;

pub use config::{Class, Config, ConfigError, Reuse, UserLimits};
pub use server::{ServeError, read_stats, serve};
