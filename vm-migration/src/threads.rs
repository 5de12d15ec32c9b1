// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads of a postcopy are started before the guest is stopped: fewer connections where a process may not start
//! one for each.
//!
//! Owns how many are started, and how many are left for all else. They wait in a [`Session`] until there is something to
//! do for them. Must never be asked for while the guest is stopped.

use std::iter::repeat_n;
use std::time::Duration;

use crate::descriptors::fewer;
use crate::error::{Cause, Failure, Step};
use crate::options::MemoryMode;
use crate::session::{Session, Urgency};

/// Threads that are left for all else that a migration and a machine start.
const SPARE: usize = 128;

/// How often the fewest threads are tried.
const ATTEMPTS_MAX: u32 = 10;

/// Time before threads are tried once more: those that have been waited for are counted for a moment longer.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(10);

/// The urgency of threads that are only tried: the guest may run beside them.
pub(crate) const TRIED: Urgency = Urgency::Later { vcpus: 0, threads: 1 };

/// The threads that a set of connections needs, one for each.
pub(crate) struct Needs {
    /// Connections that are wanted, for memory and for requests.
    pub wanted: (u16, u16),
    pub mode: MemoryMode,
    /// Names of the threads of the background, and of those for requests.
    pub bulk: &'static str,
    pub urgent: &'static str,
    /// vCPUs of the guest that run on this host when those of the background work.
    pub vcpus: u32,
    /// Further threads that the process will start besides, and those for each connection for memory.
    pub besides: usize,
    pub beside_bulk: usize,
}

/// For how many connections there are threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Connections for memory and for requests.
    pub counts: (u16, u16),
    /// The most connections, if that is less than there might be.
    pub most: Option<u16>,
    /// The connections before the threads were counted.
    before: (u16, u16),
}

impl Room {
    /// Says so where there are fewer for lack of threads.
    pub(crate) fn say_fewer(&self) {
        let [all, there] =
            [self.before, self.counts].map(|(bulk, urgent)| u32::from(bulk) + u32::from(urgent));
        if there < all {
            log::warn!(
                "{there} of {all} further connections are used: this process may start no more threads (RLIMIT_NPROC, \
                 or pids.max of its cgroup)"
            );
        }
    }
}

impl Needs {
    /// Starts a thread for each connection, of which there may be `most`, and fewer of both where the process may not
    /// start so many.
    ///
    /// # Errors
    /// When not even the fewest can be started, by the name of the limit.
    pub(crate) fn park(&self, most: Option<u16>) -> Result<(Session, Room), Failure> {
        self.fit(most, None)
    }

    /// The same with threads that end at once.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn try_out(&self, most: Option<u16>) -> Result<Room, Failure> {
        self.fit(most, Some(TRIED)).map(|(_, room)| room)
    }

    /// Starts a thread for each of these connections.
    ///
    /// # Errors
    /// When one was refused.
    pub(crate) fn park_all(&self, counts: (u16, u16)) -> Result<Session, Failure> {
        self.start(counts, None)
    }

    fn fit(&self, most: Option<u16>, urgency: Option<Urgency>) -> Result<(Session, Room), Failure> {
        let before = self.counts(most);
        let mut parked_most = most;
        loop {
            let counts = self.counts(parked_most);
            let room = Room { counts, most: parked_most, before };
            if counts == self.counts(Some(0)) {
                return Ok((patiently(|| self.start(counts, urgency))?, room));
            }
            let started = match self.start_leaving_others(counts, urgency)? {
                Ok(session) => return Ok((session, room)),
                Err(started) => started,
            };
            parked_most = Some(self.most_of(started, total(counts)));
            std::thread::sleep(ATTEMPT_PAUSE);
        }
    }

    fn counts(&self, most: Option<u16>) -> (u16, u16) {
        fewer(self.wanted, most.unwrap_or(u16::MAX), self.mode)
    }

    /// Threads for which there has to be room beside those of so many connections.
    fn others(&self, (bulk, _): (u16, u16)) -> usize {
        SPARE + self.besides + self.beside_bulk * usize::from(bulk)
    }

    /// The most connections that so many threads are enough for: fewer than `refused` in any case.
    fn most_of(&self, threads: usize, refused: u16) -> u16 {
        let fits = |most: &u16| {
            let counts = self.counts(Some(*most));
            usize::from(total(counts)) + self.others(counts) <= threads
        };
        (0..refused).rev().find(fits).unwrap_or(0)
    }

    /// Starts threads for so many connections, all of which have this urgency if it is given.
    fn start(&self, counts: (u16, u16), urgency: Option<Urgency>) -> Result<Session, Failure> {
        const STEP: &str = "starting the threads of the connections";
        let mut session = Session::new()?;
        for (name, urgency) in self.kinds(counts, urgency) {
            session.park(name, urgency).map_err(Cause::Threads).step(STEP)?;
        }
        Ok(session)
    }

    /// The same, and tries whether there is room for others. If there is not, returns how many threads were started
    /// before one was refused.
    fn start_leaving_others(
        &self,
        counts: (u16, u16),
        urgency: Option<Urgency>,
    ) -> Result<Result<Session, usize>, Failure> {
        let (mut session, mut spare) = (Session::new()?, Session::new()?);
        for (started, (name, urgency)) in self.kinds(counts, urgency).enumerate() {
            if session.park(name, urgency).is_err() {
                return Ok(Err(started));
            }
        }
        for others in 0..self.others(counts) {
            if spare.park(self.urgent, TRIED).is_err() {
                return Ok(Err(usize::from(total(counts)) + others));
            }
        }
        Ok(Ok(session))
    }

    /// Name and urgency of the thread of each connection.
    fn kinds(
        &self,
        (bulk, urgent): (u16, u16),
        urgency: Option<Urgency>,
    ) -> impl Iterator<Item = (&'static str, Urgency)> {
        let later = Urgency::Later { vcpus: self.vcpus, threads: bulk.into() };
        let of_bulk = repeat_n((self.bulk, urgency.unwrap_or(later)), bulk.into());
        of_bulk.chain(repeat_n((self.urgent, urgency.unwrap_or(Urgency::Now)), urgent.into()))
    }
}

/// Starts threads, and tries that once more, a few times, if the host gives no thread: those that have just ended are
/// counted for a moment longer.
///
/// # Errors
/// The last failure, or one for another reason.
pub(crate) fn patiently<T>(start: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
    for _ in 1..ATTEMPTS_MAX {
        match start() {
            Err(Failure { cause: Cause::Threads(_), .. }) => std::thread::sleep(ATTEMPT_PAUSE),
            result => return result,
        }
    }
    start()
}

fn total((bulk, urgent): (u16, u16)) -> u16 {
    bulk.saturating_add(urgent)
}

#[cfg(test)]
use std::sync::atomic::Ordering::SeqCst;

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
    most: usize,
    there: std::sync::atomic::AtomicUsize,
    /// Threads that have ended are counted until so many were refused.
    refusals: std::sync::atomic::AtomicUsize,
    /// Those that are.
    ended: std::sync::atomic::AtomicUsize,
    starts: crate::testing::Calls,
}

#[cfg(test)]
impl ThreadLimit {
    /// Bounds the sets that the calling thread makes from now on to `most` threads together; the name of each is noted in
    /// `starts`.
    pub(crate) fn set(most: usize, starts: &crate::testing::Calls) -> Self {
        Self::set_slow(most, 0, starts)
    }

    /// The same, where threads that have ended are counted until so many were refused.
    pub(crate) fn set_slow(most: usize, refusals: usize, starts: &crate::testing::Calls) -> Self {
        let starts = std::sync::Arc::clone(starts);
        let (there, refusals, ended) = (0.into(), refusals.into(), 0.into());
        let limit = Self(std::sync::Arc::new(Limited { most, there, refusals, ended, starts }));
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
        self.0.there.load(SeqCst)
    }

    /// A thread starts.
    pub(crate) fn begin(&self, name: &'static str) -> std::io::Result<()> {
        let Limited { most, there, refusals, ended, starts } = &*self.0;
        let more = |there| (there < *most).then_some(there + 1);
        if there.fetch_update(SeqCst, SeqCst, more).is_err() {
            let one_less = |left: usize| left.checked_sub(1);
            if refusals.fetch_update(SeqCst, SeqCst, one_less) == Ok(1) {
                there.fetch_sub(ended.swap(0, SeqCst), SeqCst);
            }
            return Err(std::io::Error::from_raw_os_error(libc::EAGAIN));
        }
        starts.lock().push(name);
        Ok(())
    }

    /// So many have ended.
    pub(crate) fn end(&self, count: usize) {
        let Limited { there, refusals, ended, .. } = &*self.0;
        if refusals.load(SeqCst) > 0 {
            ended.fetch_add(count, SeqCst);
        } else {
            there.fetch_sub(count, SeqCst);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use super::*;
    use crate::testing::Calls;

    /// Connections for memory and requests, how many there may be, and how many threads wait.
    type There = ((u16, u16), Option<u16>, usize);

    const NEEDS: Needs = Needs {
        wanted: (6, 5),
        mode: MemoryMode::Postcopy,
        bulk: "mig-bulk",
        urgent: "mig-urgent",
        vcpus: 9,
        besides: 7,
        beside_bulk: 0,
    };

    fn park(limit: usize, most: Option<u16>) -> Result<There, Failure> {
        park_slowly(limit, 0, most, &NEEDS)
    }

    fn park_slowly(
        limit: usize,
        refusals: usize,
        most: Option<u16>,
        needs: &Needs,
    ) -> Result<There, Failure> {
        let limit = ThreadLimit::set_slow(limit, refusals, &Calls::default());
        let tried = needs.try_out(most);
        assert!(refusals > 0 || limit.there() == 0, "those that are only tried end");
        let parked = needs.park(most);
        ThreadLimit::lift();
        parked.map(|(session, room)| {
            assert_eq!(Some(room), tried.ok(), "both find the same");
            let there = limit.there();
            drop(session);
            (room.counts, room.most, there)
        })
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

    #[test]
    fn each_connection_for_memory_leaves_room_for_what_runs_beside_its_thread() {
        const OTHERS: usize = SPARE + 7;
        let park = |limit| park_slowly(limit, 0, None, &Needs { beside_bulk: 1, ..NEEDS }).unwrap();
        assert_eq!(park(OTHERS + 11 + 6), ((6, 5), None, 11));
        assert_eq!(park(OTHERS + 11 + 5), ((5, 5), Some(10), 10));
        assert_eq!(park(OTHERS + 9 + 4), ((4, 4), Some(8), 8));
        assert_eq!(park(OTHERS + 2), ((1, 0), Some(1), 1));
    }

    #[test]
    fn threads_that_have_ended_and_still_count_are_waited_for() {
        // The first attempt starts all of these, and is refused the next.
        let slowly = |refusals| {
            let limit = ThreadLimit::set_slow(20, refusals, &Calls::default());
            let parked = NEEDS.park(None);
            ThreadLimit::lift();
            (parked.map(|(_, room)| room.counts), limit)
        };
        let attempts = usize::try_from(ATTEMPTS_MAX).unwrap();
        for refusals in [1, 2, attempts] {
            assert_eq!(slowly(refusals).0.unwrap(), (1, 0), "{refusals}");
        }
        let (parked, limit) = slowly(attempts + 1);
        assert!(matches!(parked.unwrap_err().cause, Cause::Threads(_)));
        assert_eq!(limit.there(), 0, "none is left");
    }

    #[test]
    fn the_background_is_as_urgent_as_the_number_of_its_threads_that_are_started_allows() {
        for bulk in [1, 4] {
            let kinds: Vec<_> = NEEDS.kinds((bulk, 1), None).collect();
            let later = Urgency::Later { vcpus: 9, threads: bulk.into() };
            assert_eq!(kinds.first(), Some(&("mig-bulk", later)));
            assert_eq!(kinds.last(), Some(&("mig-urgent", Urgency::Now)));
        }
        let tried: Vec<_> = NEEDS.kinds((6, 5), Some(TRIED)).collect();
        assert_eq!(tried.len(), 11);
        assert!(tried.iter().all(|(_, urgency)| *urgency == TRIED), "{tried:?}");
    }
}
