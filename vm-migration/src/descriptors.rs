// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fewer connections where a process lacks descriptors for all of them.
//!
//! Owns how many it has room for, and which kind gives way. Both sides apply the same rule, so that each knows how many
//! connections there will be. Must never open any.

use std::io;
use std::os::fd::RawFd;

use rustix::process::{Resource, getrlimit};

use crate::options::{CONNECTIONS_MAX, MemoryMode, URGENT_CONNECTIONS_MAX};

/// Descriptors that are left for all else that a migration and a machine open.
const SPARE: usize = 128;

/// Most for which there is any use: further connections, and what the vCPUs of a destination need besides.
const USEFUL_MAX: u16 = CONNECTIONS_MAX + 3 * URGENT_CONNECTIONS_MAX;

/// Numbers that are looked at in one call, which has to be less than a process may open.
const AT_ONCE: RawFd = 64;

/// For how many of `wanted` further descriptors this process has room. The guest of a source runs meanwhile, and devices of it
/// may open files: none of the room is taken for it.
pub(crate) fn room(wanted: u16) -> u16 {
    #[cfg(test)]
    if let Some(room) = TEST_ROOM.get() {
        return wanted.min(room);
    }
    let wanted = wanted.min(USEFUL_MAX);
    room_in(&free_numbers(usize::from(wanted) + SPARE), limit(), wanted)
}

/// The same by numbers that are free, of which those below the limit are allowed.
fn room_in(free: &[RawFd], limit: u64, wanted: u16) -> u16 {
    let allowed = free.partition_point(|number| u64::try_from(*number).is_ok_and(|it| it < limit));
    u16::try_from(allowed.saturating_sub(SPARE)).unwrap_or(wanted).min(wanted)
}

/// The first number that no descriptor of this process may have.
fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The lowest numbers that no descriptor has, as many as there are up to `count`.
fn free_numbers(count: usize) -> Vec<RawFd> {
    let mut free = Vec::with_capacity(count);
    let mut first: RawFd = 0;
    while free.len() < count {
        let Some(end) = first.checked_add(AT_ONCE) else { break };
        let entry = |fd| libc::pollfd { fd, events: 0, revents: 0 };
        let mut polled: Vec<_> = (first..end).map(entry).collect();
        // SAFETY: the entries live during the call, which writes no more than as many as it is told.
        let done = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
        if done < 0 {
            match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => continue,
                _ => break,
            }
        }
        let are_free = polled.iter().filter(|entry| entry.revents & libc::POLLNVAL != 0);
        free.extend(are_free.map(|entry| entry.fd));
        first = end;
    }
    free.truncate(count);
    free
}

/// So many connections for memory and for requests that they are `most` together. Postcopy has one for memory in any case.
pub(crate) fn fewer((bulk, urgent): (u16, u16), most: u16, mode: MemoryMode) -> (u16, u16) {
    if bulk.saturating_add(urgent) <= most {
        return (bulk, urgent);
    }
    let least = u16::from(mode.may_postcopy());
    let bulk = bulk.min(least.max(most - urgent.min(most / 2)));
    (bulk, urgent.min(most.saturating_sub(bulk)))
}

/// Why there are fewer where this process lacks descriptors.
pub(crate) const FEW_HERE: &str = "this process may open no more files (RLIMIT_NOFILE)";

/// The same, and says so if these are fewer than wanted.
pub(crate) fn fewer_telling(
    wanted: (u16, u16),
    most: u16,
    mode: MemoryMode,
    why: &str,
) -> (u16, u16) {
    let counts = fewer(wanted, most, mode);
    if counts != wanted {
        let [all, there] =
            [wanted, counts].map(|(bulk, urgent)| u32::from(bulk) + u32::from(urgent));
        log::warn!("{there} of {all} further connections are used: {why}");
    }
    counts
}

#[cfg(test)]
thread_local! {
    /// For how many connections the calling thread finds room, in place of what is there.
    pub(crate) static TEST_ROOM: std::cell::Cell<Option<u16>> = const { std::cell::Cell::new(None) };
}

/// Fails as the host would if there were no more room than that for so many connections.
#[cfg(test)]
pub(crate) fn test_open(count: usize) -> io::Result<()> {
    let room = TEST_ROOM.get().map(|room| usize::from(room.max(1)));
    if room.is_some_and(|room| count > room) {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::fs::File;
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn there_is_room_for_what_can_be_opened_beside_the_rest() {
        let free: Vec<RawFd> = (10..1000).collect();
        let with = |allowed: usize, wanted| room_in(&free, 10 + allowed as u64, wanted);
        assert_eq!([0, 1, SPARE].map(|allowed| with(allowed, 5)), [0; 3]);
        assert_eq!([3, 5, 9].map(|more| with(SPARE + more, 5)), [3, 5, 5]);
        assert_eq!(room_in(&free[..SPARE + 2], u64::MAX, 5), 2, "no more numbers are free");
    }

    #[test]
    fn numbers_that_are_free_are_found_without_being_taken() {
        let file = File::open("/dev/null").unwrap();
        let taken = file.as_raw_fd();
        let free = free_numbers(300);
        assert!(free.len() == 300 && free.is_sorted() && !free.contains(&taken), "{free:?}");
        let limit = limit();
        assert!(u64::try_from(taken).unwrap() < limit, "one that exists is below it");
        assert_eq!(room(2), 2);
    }

    #[test]
    fn what_is_there_is_shared_and_postcopy_has_one_for_memory() {
        use MemoryMode::{Auto, Postcopy, Precopy};
        for (wanted, most, mode, expected) in [
            ((4, 128), 132, Postcopy, (4, 128)),
            ((4, 128), 131, Postcopy, (4, 127)),
            ((1, 128), 100, Postcopy, (1, 99)),
            ((4, 128), 3, Auto, (2, 1)),
            ((4, 1), 3, Auto, (2, 1)),
            ((4, 128), 1, Auto, (1, 0)),
            ((4, 128), 0, Postcopy, (1, 0)),
            ((4, 0), 2, Postcopy, (2, 0)),
            ((7, 0), 3, Precopy, (3, 0)),
            ((7, 0), 0, Precopy, (0, 0)),
        ] {
            assert_eq!(fewer(wanted, most, mode), expected, "{wanted:?} in {most}");
        }
        for most in 0..300 {
            let (bulk, urgent) = fewer((128, 128), most, Postcopy);
            assert!(bulk >= 1 && bulk + urgent <= most.max(1), "{most}");
            assert!(most > 256 || bulk + urgent == most.max(1), "{most}: all are used");
        }
    }
}
