// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Free page hints for a migration (virtio 1.3, 5.5.6.5).
//!
//! Owns the command that the driver sees, and the pages that it names under the current command.
//! A hint says that the contents that a page had when the command was issued are no longer needed. The driver
//! may use the page again at any time without notice, so a hint is useful only to a reader that
//! has logged writes since before the command.
//!
//! ```text
//!   Idle -- ask --> Requested -- id from the driver --> Receiving -- stop from the driver --> Complete
//!    ^                  |                                   |                                    |
//!    +---- done, reset--+-----------------------------------+------------------------------------+
//! ```

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use memory::{GuestRam, PageBitmap};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::PAGE_BYTES;
use super::shared::Shared;

/// The driver shall stop; pages that it named stay with it.
const STOP: u32 = 0;
/// The driver shall stop and may use the pages that it named.
const DONE: u32 = 1;
/// The first number that is a command.
const FIRST: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Requested,
    Receiving,
    Complete,
}

struct State {
    stage: Stage,
    /// What the driver reads.
    command: u32,
    /// The last number that was a command; none is used twice in a row.
    last: u32,
    /// By region, while hints are wanted.
    maps: Option<Arc<Vec<PageBitmap>>>,
}

/// The device's side of hinting.
pub(super) struct Hinting {
    /// Held only to look and to set.
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Hinting {
    fn default() -> Self {
        let state = State { stage: Stage::Idle, command: STOP, last: FIRST - 1, maps: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Hinting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// What the driver reads.
    pub(super) fn command(&self) -> u32 {
        self.lock().command
    }

    /// The last number that was a command, to be saved.
    pub(super) fn last_command(&self) -> u32 {
        self.lock().last
    }

    /// Goes on from a saved state, in which nothing was asked.
    pub(super) fn restore(&self, last: u32) {
        let mut state = self.lock();
        state.last = last.max(FIRST - 1);
        state.command = DONE;
    }

    /// Asks for hints; `None` while another migration does. The driver has to be told of the change.
    pub(super) fn ask(&self, maps: Vec<PageBitmap>) -> Option<Arc<Vec<PageBitmap>>> {
        let mut state = self.lock();
        if state.stage != Stage::Idle {
            return None;
        }
        let maps = Arc::new(maps);
        state.last = state.last.checked_add(1).unwrap_or(FIRST);
        state.command = state.last;
        state.stage = Stage::Requested;
        state.maps = Some(Arc::clone(&maps));
        Some(maps)
    }

    /// The driver has sent a command number.
    pub(super) fn driver_said(&self, command: u32) {
        let mut state = self.lock();
        let current = command == state.command;
        state.stage = match state.stage {
            Stage::Requested if current => Stage::Receiving,
            Stage::Receiving if command == STOP => Stage::Complete,
            // A late answer to an earlier command; or one that says nothing new.
            stage => stage,
        };
        drop(state);
        self.changed.notify_all();
    }

    /// The maps that take hints now.
    pub(super) fn taking(&self) -> Option<Arc<Vec<PageBitmap>>> {
        let state = self.lock();
        state.maps.clone().filter(|_| state.stage == Stage::Receiving)
    }

    /// Hints are not wanted any more.
    pub(super) fn end(&self, command_is: HintingEnd) {
        let mut state = self.lock();
        state.stage = Stage::Idle;
        state.maps = None;
        state.command = match command_is {
            HintingEnd::Done => DONE,
            HintingEnd::Reset => STOP,
        };
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the driver has told all that it has to tell; false if that takes longer.
    fn wait_told(&self, limit: Duration) -> bool {
        let going_on =
            |state: &mut State| matches!(state.stage, Stage::Requested | Stage::Receiving);
        let mut state = self.lock();
        self.changed.wait_while_for(&mut state, going_on, limit);
        state.stage == Stage::Complete
    }
}

/// What a driver finds when hints are not wanted any more.
#[derive(Clone, Copy)]
pub(super) enum HintingEnd {
    /// It may use what it named.
    Done,
    /// It has forgotten everything itself.
    Reset,
}

/// An empty map for each region.
pub(super) fn maps(ram: &GuestRam) -> io::Result<Vec<PageBitmap>> {
    ram.regions().iter().map(|region| PageBitmap::sparse(region.len_pages())).collect()
}

/// Notes the whole pages of a hint; returns the bytes that are RAM.
pub(super) fn note(ram: &GuestRam, maps: &[PageBitmap], hint: &Range<u64>) -> u64 {
    let mut noted = 0;
    for (region, map) in ram.regions().iter().zip(maps) {
        let start = hint.start.max(region.gpa());
        let end = hint.end.min(region.gpa().saturating_add(region.len_bytes()));
        if start >= end {
            continue;
        }
        let first = (start - region.gpa()).div_ceil(PAGE_BYTES);
        let behind = (end - region.gpa()) / PAGE_BYTES;
        if first < behind {
            map.set_range(first..behind);
            noted += (behind - first) * PAGE_BYTES;
        }
    }
    noted
}

/// Hints that a migration has asked for. Dropping it lets the guest use its free pages again.
pub struct FreePageHints {
    shared: Arc<Shared>,
    maps: Arc<Vec<PageBitmap>>,
}

impl FreePageHints {
    /// Asks the driver; `None` if it gives no hints now.
    pub(super) fn ask(shared: &Arc<Shared>) -> Option<Self> {
        let interrupt = shared.hints_interrupt()?;
        // A guest that fills free pages with a pattern relies on them.
        if shared.config().poison != 0 {
            return None;
        }
        let maps = shared.hinting.ask(maps(&shared.ram).ok()?)?;
        interrupt.config_changed();
        Some(Self { shared: Arc::clone(shared), maps })
    }

    /// Waits until the guest has told all that it has to tell, at most for `limit`; true if it has.
    pub fn wait(&self, limit: Duration) -> bool {
        self.shared.hinting.wait_told(limit)
    }

    /// Bytes that the guest has named since it was made; some of them more than once.
    pub fn named_bytes(&self) -> u64 {
        self.shared.counters.hinted_bytes.get()
    }

    /// The free pages of each region of guest RAM, as far as they are known.
    pub fn maps(&self) -> &[PageBitmap] {
        &self.maps
    }
}

impl Drop for FreePageHints {
    fn drop(&mut self) {
        self.shared.hinting.end(HintingEnd::Done);
        if let Some(interrupt) = self.shared.hints_interrupt() {
            interrupt.config_changed();
        }
    }
}
