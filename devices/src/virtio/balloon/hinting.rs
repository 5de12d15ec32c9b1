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

/// Command: the driver stops; hinted pages stay reserved.
const STOP: u32 = 0;
/// Command: the driver stops and may reuse the hinted pages.
const DONE: u32 = 1;
/// Lowest command number of a request.
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
    /// Command for the driver to read.
    command: u32,
    /// Command number of the last request; no number is used twice in a row.
    last: u32,
    /// Free pages by region, while hints are wanted.
    maps: Option<Arc<Vec<PageBitmap>>>,
}

/// State of free page hinting.
pub(super) struct Hinting {
    /// Only locked briefly.
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

    /// The command for the driver to read.
    pub(super) fn command(&self) -> u32 {
        self.lock().command
    }

    /// Command number of the last request, to be saved.
    pub(super) fn last_command(&self) -> u32 {
        self.lock().last
    }

    /// Restores the state, in which no request is pending.
    pub(super) fn restore(&self, last: u32) {
        let mut state = self.lock();
        state.last = last.max(FIRST - 1);
        state.command = DONE;
    }

    /// Requests hints; `None` while another migration does. The driver must be notified of the change.
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

    /// Handles a command number sent by the driver.
    pub(super) fn driver_said(&self, command: u32) {
        let mut state = self.lock();
        let current = command == state.command;
        state.stage = match state.stage {
            Stage::Requested if current => Stage::Receiving,
            Stage::Receiving if command == STOP => Stage::Complete,
            // A late answer to an earlier command, or a repeated one.
            stage => stage,
        };
        drop(state);
        self.changed.notify_all();
    }

    /// The maps to which hints are added now.
    pub(super) fn taking(&self) -> Option<Arc<Vec<PageBitmap>>> {
        let state = self.lock();
        state.maps.clone().filter(|_| state.stage == Stage::Receiving)
    }

    /// Ends the request.
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

    /// Waits until the driver has sent all hints; false if that exceeds the limit.
    fn wait_told(&self, limit: Duration) -> bool {
        let going_on =
            |state: &mut State| matches!(state.stage, Stage::Requested | Stage::Receiving);
        let mut state = self.lock();
        self.changed.wait_while_for(&mut state, going_on, limit);
        state.stage == Stage::Complete
    }
}

/// What the driver reads after the end of a request.
#[derive(Clone, Copy)]
pub(super) enum HintingEnd {
    /// It may reuse the hinted pages.
    Done,
    /// The driver was reset.
    Reset,
}

/// An empty map for each region.
pub(super) fn maps(ram: &GuestRam) -> io::Result<Vec<PageBitmap>> {
    ram.regions().iter().map(|region| PageBitmap::sparse(region.len_pages())).collect()
}

/// Records the whole pages of a hint; returns the number of bytes in RAM.
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

/// Free page hints requested by a migration. Dropping this lets the guest reuse its free pages.
pub struct FreePageHints {
    shared: Arc<Shared>,
    maps: Arc<Vec<PageBitmap>>,
}

impl FreePageHints {
    /// Requests hints; `None` if the driver gives none now.
    pub(super) fn ask(shared: &Arc<Shared>) -> Option<Self> {
        let interrupt = shared.hints_interrupt()?;
        // A guest that fills free pages with a pattern relies on their contents.
        if shared.config().poison != 0 {
            return None;
        }
        let maps = shared.hinting.ask(maps(&shared.ram).ok()?)?;
        interrupt.config_changed();
        Some(Self { shared: Arc::clone(shared), maps })
    }

    /// Waits until the guest has sent all hints, up to `limit`; true if it has.
    pub fn wait(&self, limit: Duration) -> bool {
        self.shared.hinting.wait_told(limit)
    }

    /// Bytes hinted since the request, some possibly more than once.
    pub fn named_bytes(&self) -> u64 {
        self.shared.counters.hinted_bytes.get()
    }

    /// The known free pages of each region.
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
