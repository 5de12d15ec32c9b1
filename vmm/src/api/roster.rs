// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Who is connected, and who has to go when there is no room for a new client.
//!
//! Owns the seats. A client whose request is being carried out keeps its seat; of the others
//! (idle, slow to ask, slow to read) the one that has been so for longest gives its seat up. So a
//! client that only holds connections open cannot keep anybody out.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tokio::sync::{Notify, oneshot};

/// The seats of the server; shared by the tasks of one thread.
#[derive(Debug)]
pub struct Roster {
    size: usize,
    seats: RefCell<Seats>,
    empty: Notify,
}

#[derive(Debug, Default)]
struct Seats {
    /// Counts whatever happens, so that two things never happen at the same time: a clock may say that they
    /// did, or the wrong way round.
    turn: u64,
    taken: BTreeMap<u64, SeatState>,
}

impl Seats {
    fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }
}

#[derive(Debug)]
struct SeatState {
    /// Requests being carried out; more than one only if a client leaves and its request stays.
    busy: u32,
    /// The turn since which it has not been busy.
    since: u64,
    /// Dropped to send the client away.
    keep: Option<oneshot::Sender<()>>,
}

/// A seat; given back when dropped.
#[derive(Debug)]
pub struct Seat {
    roster: Rc<Roster>,
    number: u64,
}

/// A request that is being carried out; while it lives, its client keeps the seat.
#[derive(Debug)]
pub struct Busy<'a>(&'a Seat);

impl Roster {
    /// A roster with so many seats.
    pub fn new(size: usize) -> Rc<Self> {
        Rc::new(Self { size, seats: RefCell::default(), empty: Notify::new() })
    }

    /// Takes a seat, sending somebody away if that is the only way; nothing if all are busy. The
    /// receiver ends when this client has to go.
    pub fn sit(self: &Rc<Self>) -> Option<(Seat, oneshot::Receiver<()>)> {
        let mut seats = self.seats.borrow_mut();
        let present = seats.taken.values().filter(|seat| seat.keep.is_some()).count();
        if present >= self.size {
            let idle = seats
                .taken
                .values_mut()
                .filter(|seat| seat.busy == 0 && seat.keep.is_some())
                .min_by_key(|seat| seat.since)?;
            idle.keep = None;
        }
        let number = seats.next_turn();
        let (keep, leave) = oneshot::channel();
        seats.taken.insert(number, SeatState { busy: 0, since: number, keep: Some(keep) });
        Some((Seat { roster: Rc::clone(self), number }, leave))
    }

    /// Waits until all seats are free.
    pub async fn empty(&self) {
        while !self.seats.borrow().taken.is_empty() {
            self.empty.notified().await;
        }
    }
}

impl Seat {
    /// Begins to carry a request out.
    pub fn work(&self) -> Busy<'_> {
        self.change(|state, _| state.busy += 1);
        Busy(self)
    }

    fn change(&self, change: impl FnOnce(&mut SeatState, u64)) {
        let mut seats = self.roster.seats.borrow_mut();
        let turn = seats.next_turn();
        if let Some(state) = seats.taken.get_mut(&self.number) {
            change(state, turn);
        }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.change(|state, turn| {
            state.busy = state.busy.saturating_sub(1);
            state.since = turn;
        });
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.roster.seats.borrow_mut().taken.remove(&self.number);
        self.roster.empty.notify_one();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use oneshot::error::TryRecvError;

    use super::*;

    #[test]
    fn the_longest_idle_client_goes_first_and_a_busy_one_never() {
        let roster = Roster::new(3);
        let (first, mut first_leave) = roster.sit().unwrap();
        let (_second, mut second_leave) = roster.sit().unwrap();
        let (third, mut third_leave) = roster.sit().unwrap();
        let busy = first.work();
        let _fourth = roster.sit().unwrap();
        assert_eq!(first_leave.try_recv(), Err(TryRecvError::Empty));
        assert_eq!(second_leave.try_recv(), Err(TryRecvError::Closed));
        let _busy = third.work();
        assert_eq!(third_leave.try_recv(), Err(TryRecvError::Empty));
        drop(busy);
        // The fourth has been idle for longer than the first, which has just been busy.
        let (_fifth, _fifth_leave) = roster.sit().unwrap();
        assert_eq!(first_leave.try_recv(), Err(TryRecvError::Empty));
    }

    #[test]
    fn with_only_busy_clients_there_is_no_room() {
        let roster = Roster::new(1);
        let (seat, _leave) = roster.sit().unwrap();
        let busy = seat.work();
        assert!(roster.sit().is_none());
        drop(busy);
        assert!(roster.sit().is_some());
    }
}
