// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads of a postcopy are started before the guest is stopped: fewer connections where a process may not start
//! one for each.
//!
//! Owns how many are started, and how many are left for all else. They wait in a [`Session`] until there is something to
//! do for them. Must never be asked for while the guest is stopped.

use std::io;
use std::iter::repeat_n;

use crate::descriptors::fewer;
use crate::error::{Cause, Failure, Step};
use crate::options::MemoryMode;
use crate::session::{Session, Urgency};

/// Threads that are left for all else that a migration and a machine start.
const SPARE: usize = 32;

/// Name and urgency of the threads of one kind.
pub(crate) type Kind = (&'static str, Urgency);

/// The threads that a set of connections needs, one for each.
pub(crate) struct Needs {
    /// Connections that are wanted, for memory and for requests.
    pub wanted: (u16, u16),
    pub mode: MemoryMode,
    pub bulk: Kind,
    pub urgent: Kind,
    /// Further threads that the process will start besides.
    pub besides: usize,
}

/// Threads that wait, and for how many connections they are.
pub(crate) struct Parked {
    pub session: Session,
    /// Connections for memory and for requests.
    pub counts: (u16, u16),
    /// The most connections, if that is less than there might be.
    pub most: Option<u16>,
}

impl Needs {
    /// Starts a thread for each connection, of which there may be `most`, and fewer of both where the process may not
    /// start so many. What it says about that goes to the log.
    ///
    /// # Errors
    /// When not even the fewest can be started, by the name of the limit.
    pub(crate) fn park(&self, most: Option<u16>) -> Result<Parked, Failure> {
        let mut parked_most = most;
        let most_there =
            |most: Option<u16>| fewer(self.wanted, most.unwrap_or(u16::MAX), self.mode);
        loop {
            let counts = most_there(parked_most);
            let is_least = counts == most_there(Some(0));
            let (mut session, mut spare) = (Session::new()?, Session::new()?);
            let Err((started, error)) = self.start((&mut session, &mut spare), counts, is_least)
            else {
                if parked_most != most {
                    say_fewer(most_there(most), counts);
                }
                return Ok(Parked { session, counts, most: parked_most });
            };
            if is_least {
                return Err(Cause::Threads(error)).step("starting the threads of the connections");
            }
            let all = total(counts);
            let room = started.saturating_sub(SPARE + self.besides);
            // One less than before in any case: those that are counted were refused once.
            parked_most = Some(u16::try_from(room).unwrap_or(u16::MAX).min(all.saturating_sub(1)));
        }
    }

    /// Starts threads for so many connections, and tries whether there is room for others, unless these are the
    /// fewest.
    ///
    /// # Errors
    /// How many were started before one was refused.
    fn start(
        &self,
        (session, spare): (&mut Session, &mut Session),
        (bulk, urgent): (u16, u16),
        is_least: bool,
    ) -> Result<(), (usize, io::Error)> {
        let others = if is_least { 0 } else { SPARE + self.besides };
        let of_bulk = repeat_n(self.bulk, bulk.into());
        let of_connections = of_bulk.chain(repeat_n(self.urgent, urgent.into()));
        let count = usize::from(bulk) + usize::from(urgent);
        let kinds = of_connections.chain(repeat_n(self.urgent, others));
        for (started, (name, urgency)) in kinds.enumerate() {
            let of = if started < count { &mut *session } else { &mut *spare };
            of.park(name, urgency).map_err(|error| (started, error))?;
        }
        Ok(())
    }
}

fn total((bulk, urgent): (u16, u16)) -> u16 {
    bulk.saturating_add(urgent)
}

fn say_fewer(wanted: (u16, u16), counts: (u16, u16)) {
    let [all, there] = [wanted, counts].map(|(bulk, urgent)| u32::from(bulk) + u32::from(urgent));
    log::warn!(
        "{there} of {all} further connections are used: this process may start no more threads (RLIMIT_NPROC, or \
         pids.max of its cgroup)"
    );
}

#[cfg(test)]
thread_local! {
    /// What bounds the threads of the sets that the calling thread makes.
    static TEST_LIMIT: std::cell::RefCell<Option<ThreadLimit>> =
        const { std::cell::RefCell::new(None) };
}

/// Refuses threads as the host does at a limit on processes, and notes each that starts.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(crate) struct ThreadLimit(std::sync::Arc<Limited>);

#[cfg(test)]
#[derive(Debug)]
struct Limited {
    most: std::sync::atomic::AtomicUsize,
    there: std::sync::atomic::AtomicUsize,
    starts: crate::testing::Calls,
}

#[cfg(test)]
impl ThreadLimit {
    /// Bounds the sets that the calling thread makes from now on to `most` threads together; each is noted in `starts`.
    pub(crate) fn set(most: usize, starts: &crate::testing::Calls) -> Self {
        let (most, there, starts) = (most.into(), 0.into(), std::sync::Arc::clone(starts));
        let limit = Self(std::sync::Arc::new(Limited { most, there, starts }));
        TEST_LIMIT.set(Some(limit.clone()));
        limit
    }

    pub(crate) fn of_caller() -> Option<Self> {
        TEST_LIMIT.with_borrow(Clone::clone)
    }

    /// The calling thread's sets are not bounded any more.
    pub(crate) fn lift() {
        TEST_LIMIT.set(None);
    }

    /// How many there are.
    pub(crate) fn there(&self) -> usize {
        self.0.there.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// A thread starts.
    pub(crate) fn begin(&self) -> io::Result<()> {
        use std::sync::atomic::Ordering::SeqCst;
        let most = self.0.most.load(SeqCst);
        let more = |there| (there < most).then_some(there + 1);
        if self.0.there.fetch_update(SeqCst, SeqCst, more).is_err() {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        self.0.starts.lock().push("thread");
        Ok(())
    }

    /// So many have ended.
    pub(crate) fn end(&self, count: usize) {
        self.0.there.fetch_sub(count, std::sync::atomic::Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use super::*;
    use crate::testing::Calls;

    /// Connections for memory and requests, how many there may be, and how many threads wait.
    type There = ((u16, u16), Option<u16>, usize);

    fn park(limit: usize, most: Option<u16>) -> Result<There, Failure> {
        let limit = ThreadLimit::set(limit, &Calls::default());
        let urgency = Urgency::Now;
        let needs = Needs {
            wanted: (6, 5),
            mode: MemoryMode::Postcopy,
            bulk: ("mig-bulk", urgency),
            urgent: ("mig-urgent", urgency),
            besides: 7,
        };
        let parked = needs.park(most);
        ThreadLimit::lift();
        parked.map(|parked| (parked.counts, parked.most, limit.there()))
    }

    #[test]
    fn threads_are_started_for_as_many_connections_as_leave_room_for_others() {
        const OTHERS: usize = SPARE + 7;
        assert_eq!(park(OTHERS + 11, None).unwrap(), ((6, 5), None, 11));
        assert_eq!(park(OTHERS + 10, None).unwrap(), ((5, 5), Some(10), 10));
        assert_eq!(park(OTHERS + 3, None).unwrap(), ((2, 1), Some(3), 3));
        assert_eq!(park(OTHERS + 3, Some(2)).unwrap(), ((1, 1), Some(2), 2));
        assert_eq!(park(OTHERS + 11, Some(40)).unwrap(), ((6, 5), Some(40), 11));
        for few in [1, OTHERS, OTHERS + 1] {
            assert_eq!(park(few, None).unwrap().0, (1, 0), "{few}: the fewest leave none");
        }
        for most in [None, Some(0)] {
            let failure = park(0, most).unwrap_err();
            assert!(matches!(failure.cause, Cause::Threads(_)), "{failure:?}");
        }
    }
}
