// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connection slots: the connected clients, and which one is dropped for a new one.
//!
//! Owns the slots. A client whose request is being carried out keeps its slot; of the others
//! (idle, slow to ask, slow to read) the one that has been so for longest loses its slot. So a
//! client that only holds connections open cannot keep others out.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tokio::sync::{Notify, oneshot};

/// The slots of the server; shared by the tasks of one thread.
#[derive(Debug)]
pub struct ConnectionSlots {
    size: usize,
    slots: RefCell<Slots>,
    empty: Notify,
}

#[derive(Debug, Default)]
struct Slots {
    /// Incremented at each change, to order them: a clock may give two changes the same time, or the wrong
    /// order.
    sequence: u64,
    taken: BTreeMap<u64, SlotState>,
}

impl Slots {
    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }
}

#[derive(Debug)]
struct SlotState {
    /// Requests being carried out; more than one only if an abandoned request is still in progress.
    busy: u32,
    /// The sequence number at which the slot last became idle.
    since: u64,
    /// Dropped to disconnect the client.
    keep: Option<oneshot::Sender<()>>,
}

/// A slot of one connection; returned to the pool when dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    pool: Rc<ConnectionSlots>,
    number: u64,
}

/// A request that is being carried out; its slot counts as busy until this is dropped.
#[derive(Debug)]
pub struct RequestInProgress<'a>(&'a ConnectionSlot);

impl ConnectionSlots {
    /// A pool of `size` slots.
    pub fn new(size: usize) -> Rc<Self> {
        Rc::new(Self { size, slots: RefCell::default(), empty: Notify::new() })
    }

    /// Takes a slot; if none is free, disconnects the client that has been idle longest. `None` if all are
    /// busy. The receiver resolves when this client has to be disconnected.
    pub fn acquire(self: &Rc<Self>) -> Option<(ConnectionSlot, oneshot::Receiver<()>)> {
        let mut slots = self.slots.borrow_mut();
        let present = slots.taken.values().filter(|slot| slot.keep.is_some()).count();
        if present >= self.size {
            let idle = slots
                .taken
                .values_mut()
                .filter(|slot| slot.busy == 0 && slot.keep.is_some())
                .min_by_key(|slot| slot.since)?;
            idle.keep = None;
        }
        let number = slots.next_sequence();
        let (keep, leave) = oneshot::channel();
        slots.taken.insert(number, SlotState { busy: 0, since: number, keep: Some(keep) });
        Some((ConnectionSlot { pool: Rc::clone(self), number }, leave))
    }

    /// Waits until all slots are free.
    pub async fn empty(&self) {
        while !self.slots.borrow().taken.is_empty() {
            self.empty.notified().await;
        }
    }
}

impl ConnectionSlot {
    /// Marks the slot busy until the guard is dropped.
    pub fn begin_request(&self) -> RequestInProgress<'_> {
        self.change(|state, _| state.busy += 1);
        RequestInProgress(self)
    }

    fn change(&self, change: impl FnOnce(&mut SlotState, u64)) {
        let mut slots = self.pool.slots.borrow_mut();
        let sequence = slots.next_sequence();
        if let Some(state) = slots.taken.get_mut(&self.number) {
            change(state, sequence);
        }
    }
}

impl Drop for RequestInProgress<'_> {
    fn drop(&mut self) {
        self.0.change(|state, sequence| {
            state.busy = state.busy.saturating_sub(1);
            state.since = sequence;
        });
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.pool.slots.borrow_mut().taken.remove(&self.number);
        self.pool.empty.notify_one();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use oneshot::error::TryRecvError;

    use super::*;

    #[test]
    fn the_longest_idle_client_goes_first_and_a_busy_one_never() {
        let pool = ConnectionSlots::new(3);
        let (first, mut first_leave) = pool.acquire().unwrap();
        let (_second, mut second_leave) = pool.acquire().unwrap();
        let (third, mut third_leave) = pool.acquire().unwrap();
        let busy = first.begin_request();
        let _fourth = pool.acquire().unwrap();
        assert_eq!(first_leave.try_recv(), Err(TryRecvError::Empty));
        assert_eq!(second_leave.try_recv(), Err(TryRecvError::Closed));
        let _busy = third.begin_request();
        assert_eq!(third_leave.try_recv(), Err(TryRecvError::Empty));
        drop(busy);
        // The fourth has been idle for longer than the first, which has just been busy.
        let (_fifth, _fifth_leave) = pool.acquire().unwrap();
        assert_eq!(first_leave.try_recv(), Err(TryRecvError::Empty));
    }

    #[test]
    fn with_only_busy_clients_there_is_no_room() {
        let pool = ConnectionSlots::new(1);
        let (slot, _leave) = pool.acquire().unwrap();
        let busy = slot.begin_request();
        assert!(pool.acquire().is_none());
        drop(busy);
        assert!(pool.acquire().is_some());
    }
}
