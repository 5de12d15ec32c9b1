// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Named threads: the one way in which a process starts them.
//!
//! Owns the start hook, which each thread runs before its body. Must never know what a thread does; what
//! depends on its kind goes by its name.

mod start;

pub use start::{Builder, HookIsSet, StartHook, set_start_hook, spawn, spawn_scoped};
