// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Named threads: the one way in which a process starts them, and an owner that stops and joins one.
//!
//! Owns the start hook, which each thread runs before its body. A thread that [`spawn`] starts may be left to
//! itself by dropping its handle, where nothing may wait for it: one that storage may keep, for
//! example. One that has to end with what it belongs to is a [`StoppableThread`]. Must never know what a thread
//! does; what depends on its kind goes by its name.

mod start;
mod stoppable;

pub use start::{
    Builder, HookIsSet, Kinds, StartHook, set_start_hook, spawn, spawn_scoped, start_group,
};
pub use stoppable::StoppableThread;
