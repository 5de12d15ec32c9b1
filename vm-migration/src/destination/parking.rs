// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads of an arriving postcopy: tried before the number of connections is agreed, and started once memory is
//! mapped.
//!
//! Owns how many there are. Those that stay are started by the thread that has mapped the memory, after that: a builder may
//! confine it then, and what they read comes from a peer. Must never start one that stays before.

use std::collections::BTreeSet;

use super::fault::{FAULTS, LOOK, LOOK_URGENCY, PAGES, ParkedThreads, URGENT};
use super::negotiate::{fault_readers, leave};
use crate::error::{Cause, Failure, Step};
use crate::options::{CONNECTIONS_MAX, MemoryMode, ReceiveOptions, URGENT_CONNECTIONS_MAX};
use crate::protocol::capabilities::{FEATURE_FEWER_CONNECTIONS, Offer};
use crate::session::{Session, Urgency};
use crate::threads::{Needs, TRIED, patiently};

/// Most vCPUs for whose threads room is left: their number is the source's word.
const VCPUS_COUNTED_MAX: u32 = 1024;

/// Threads for which there is room, and that are to be started.
pub(super) struct Planned {
    needs: Needs,
    /// Connections for memory and for requests.
    counts: (u16, u16),
    /// How many read faults.
    readers: usize,
}

/// Tries the threads for a postcopy with so many connections, of which there may be `most`: when the guest has stopped
/// none has to be started, or could be refused. If the process may start fewer, there are fewer connections; returns how
/// many at the most. Where vCPUs turn out to read on connections of their own, some of the threads get nothing to do.
pub(super) fn plan(
    offer: &mut Offer,
    offered: (u16, u16),
    most: Option<u16>,
    common: &BTreeSet<String>,
    options: &ReceiveOptions,
) -> Result<(Option<u16>, Option<Planned>), Failure> {
    let (bulk, urgent) = offered;
    if !offer.memory_mode.may_postcopy() {
        return Ok((most, None));
    }
    if bulk > CONNECTIONS_MAX || urgent > URGENT_CONNECTIONS_MAX {
        // The source will not be let open so many.
        return Ok((most, None));
    }
    let vcpus = offer.vcpus.unwrap_or(urgent.into());
    let needs = Needs {
        wanted: offered,
        mode: offer.memory_mode,
        bulk: PAGES,
        urgent: URGENT,
        vcpus,
        besides: usize::try_from(vcpus.min(VCPUS_COUNTED_MAX)).unwrap_or(0).max(urgent.into()),
        // While rounds arrive a thread receives on each connection for memory, beside those that wait.
        beside_bulk: usize::from(offer.memory_mode == MemoryMode::Auto),
    };
    let readers = fault_readers(urgent, options);
    let of_faults = patiently(|| start_readers(readers, (TRIED, TRIED)))?;
    let room = needs.try_out(most)?;
    drop(of_faults);
    let planned = Planned { needs, counts: room.counts, readers };
    if room.most == most {
        return Ok((most, Some(planned)));
    }
    if common.contains(FEATURE_FEWER_CONNECTIONS) {
        room.say_fewer();
        leave(offer, room.counts);
        return Ok((room.most, Some(planned)));
    }
    log::warn!(
        "this process may not start a thread for each connection (RLIMIT_NPROC, or pids.max of its cgroup), and the \
         source, of an older version, opens them all: some threads start while the guest is stopped"
    );
    Ok((most, Some(planned)))
}

impl Planned {
    /// Starts them.
    ///
    /// # Errors
    /// The host gives no thread, though it did before.
    pub(super) fn park(&self) -> Result<ParkedThreads, Failure> {
        patiently(|| {
            let readers = start_readers(self.readers, (Urgency::Now, LOOK_URGENCY))?;
            Ok(ParkedThreads { set: self.needs.park_all(self.counts)?, readers })
        })
    }
}

/// Starts the threads that read faults, and the one that looks after the machine.
fn start_readers(count: usize, (now, look): (Urgency, Urgency)) -> Result<Session, Failure> {
    const STEP: &str = "starting the threads that read faults";
    let mut readers = Session::new()?;
    for _ in 0..count {
        readers.park(FAULTS, now).map_err(Cause::Threads).step(STEP)?;
    }
    readers.park(LOOK, look).map_err(Cause::Threads).step(STEP)?;
    Ok(readers)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use super::*;
    use crate::protocol::capabilities::features;
    use crate::testing::Calls;
    use crate::threads::ThreadLimit;

    /// Readers of faults for five connections for requests, and the thread that looks.
    const READERS: usize = 5 + 1;

    /// Left for all else.
    const OTHERS: usize = 128;

    /// What a process that may start so many threads says to an offer of 6 + 5 connections: the connections of the offer
    /// then, how many at the most, and how many threads start once memory is mapped.
    fn planned(
        limit: usize,
        (mode, vcpus): (&str, Option<u32>),
        common: &BTreeSet<String>,
    ) -> ((u16, u16), Option<u16>, usize) {
        let limit = ThreadLimit::set(limit, &Calls::default());
        let json = format!(
            r#"{{"software": "", "features": [], "memory_mode": "{mode}", "bulk_connections": 6,
            "urgent_connections": 5, "regions": []}}"#
        );
        let mut offer = Offer { vcpus, ..Offer::parse(json.as_bytes()).unwrap() };
        let options = ReceiveOptions::default();
        let planned = plan(&mut offer, (6, 5), None, common, &options);
        let (most, planned) = planned.unwrap();
        assert_eq!(limit.there(), 0, "none stays that has been tried");
        let parked = planned.unwrap().park().unwrap();
        let there = limit.there();
        drop(parked);
        ThreadLimit::lift();
        ((offer.bulk_connections, offer.urgent_connections), most, there)
    }

    #[test]
    fn threads_of_the_vcpus_and_of_the_rounds_have_room_beside_those_that_wait() {
        let ours = features();
        let all = ((6, 5), None, READERS + 11);
        let one_less = ((5, 5), Some(10), READERS + 10);
        for (mode, vcpus, besides) in [
            ("postcopy", None, 5),
            ("postcopy", Some(3), 5),
            ("postcopy", Some(40), 40),
            ("postcopy", Some(u32::MAX), 1024),
            ("auto", Some(40), 40 + 6),
        ] {
            let enough = READERS + OTHERS + besides + 11;
            assert_eq!(planned(enough, (mode, vcpus), &ours), all, "{mode} {vcpus:?}");
            assert_eq!(planned(enough - 1, (mode, vcpus), &ours), one_less, "{mode} {vcpus:?}");
        }
    }

    #[test]
    fn an_older_source_opens_all_its_connections_though_not_each_has_a_thread_before() {
        let mut older = features();
        older.remove(FEATURE_FEWER_CONNECTIONS);
        let limit = READERS + OTHERS + 5 + 4;
        assert_eq!(planned(limit, ("postcopy", None), &older), ((6, 5), None, READERS + 4));
        assert_eq!(planned(limit, ("postcopy", None), &features()).0, (2, 2));
    }
}
