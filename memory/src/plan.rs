// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The plan of an engine that populates memory: which chunks there are, and whose threads do which in what order.
//!
//! ```text
//!   regions --cut--> chunks of a node, by kind of page --in turn--> queue of the node --> its threads
//!   memory without a node --dealt out to the nodes on which it may lie (homes)--^
//! ```
//!
//! Owns the order. The kinds of a node's queue are all begun at once and end at about the same time, each chunk in
//! proportion: after a moment it is known of every kind how long it takes, and no zone comes last whose pages surprise. It
//! must never leave out a usable page or have one in two chunks, and populates nothing itself.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::homes::{Dealer, Homes};
use crate::host::Host;
use crate::lanes::{Lane, NodeMeter, PageKind};
use crate::populate::THP_BYTES;
use crate::processors::{Load, share_threads};
use crate::region::RamRegion;

/// What a thread populates at a time.
#[derive(Debug)]
pub struct Chunk {
    pub region: Arc<RamRegion>,
    pub bytes: Range<u64>,
    /// Number of its lane in the queue.
    pub lane: usize,
}

impl Chunk {
    pub fn len_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

/// The work for one NUMA node; `None` for memory that may lie on any.
#[derive(Debug)]
pub struct Queue {
    pub node: Option<u32>,
    pub chunks: Vec<Chunk>,
    pub next: AtomicUsize,
    pub meter: Arc<NodeMeter>,
}

/// Chunks of one kind, in the order of memory.
struct Share {
    kind: PageKind,
    chunks: Vec<Chunk>,
    total_bytes: u64,
}

/// The work on `regions` in chunks of this length, and the number of threads for each queue. `homes` are where memory
/// without a node lies, by default those of this thread; `threads` is how many there are together.
pub fn plan(
    regions: &[Arc<RamRegion>],
    chunk_bytes: u64,
    homes: Option<Homes>,
    threads: Option<NonZeroUsize>,
) -> (Vec<Queue>, Vec<usize>) {
    let homes = homes.unwrap_or_else(|| Homes::of_thread(&Host::real(), regions));
    let queues = cut(regions, chunk_bytes, homes);
    let load = |queue: &Queue| Load::of(queue.node, queue.chunks.len());
    let counts = share_threads(&queues.iter().map(load).collect::<Vec<_>>(), threads);
    (queues, counts)
}

/// Cuts `regions` into chunks that begin and end at huge pages wherever possible.
pub fn cut(regions: &[Arc<RamRegion>], chunk_bytes: u64, homes: Homes) -> Vec<Queue> {
    let mut nodes: Vec<(Option<u32>, Vec<Share>)> = Vec::new();
    let mut dealer = Dealer::new(homes);
    for region in regions {
        let align = region.page_bytes().max(THP_BYTES);
        let skew = region.host_addr() % align;
        for run in region.usable_runs() {
            let mut start = run.start;
            while start < run.end {
                let end = chunk_end(start, skew, chunk_bytes, align).min(run.end);
                let bytes = start..end;
                let kind = region.page_kind(&bytes);
                let own = region.spec().host_numa_node;
                let node = own.or_else(|| dealer.deal(kind, end - start));
                share_of(&mut nodes, node, kind).push(region, bytes);
                start = end;
            }
        }
    }
    nodes.into_iter().map(|(node, shares)| in_turn(node, shares)).collect()
}

impl Share {
    fn push(&mut self, region: &Arc<RamRegion>, bytes: Range<u64>) {
        self.total_bytes += bytes.end - bytes.start;
        self.chunks.push(Chunk { region: Arc::clone(region), bytes, lane: 0 });
    }
}

fn share_of(
    nodes: &mut Vec<(Option<u32>, Vec<Share>)>,
    node: Option<u32>,
    kind: PageKind,
) -> &mut Share {
    let at = nodes.iter().position(|(of, _)| *of == node).unwrap_or_else(|| {
        nodes.push((node, Vec::new()));
        nodes.len() - 1
    });
    let shares = &mut nodes[at].1;
    let at = shares.iter().position(|share| share.kind == kind).unwrap_or_else(|| {
        shares.push(Share { kind, chunks: Vec::new(), total_bytes: 0 });
        shares.len() - 1
    });
    &mut shares[at]
}

/// The queue of a node: of its kinds always that of which the smallest part has had its turn.
fn in_turn(node: Option<u32>, shares: Vec<Share>) -> Queue {
    let lanes = shares.iter().map(|share| Lane::new(share.kind, share.total_bytes)).collect();
    let count = shares.iter().map(|share| share.chunks.len()).sum();
    let totals: Vec<u64> = shares.iter().map(|share| share.total_bytes).collect();
    let mut left: Vec<_> =
        shares.into_iter().map(|share| share.chunks.into_iter().peekable()).collect();
    let (mut given, mut chunks) = (vec![0_u64; totals.len()], Vec::with_capacity(count));
    loop {
        let part = |at: usize, other: usize| u128::from(given[at]) * u128::from(totals[other]);
        let with_work = (0..left.len()).filter(|at| left[*at].len() > 0);
        let next = with_work.min_by(|one, two| part(*one, *two).cmp(&part(*two, *one)));
        let Some(lane) = next else { break };
        if let Some(chunk) = left[lane].next() {
            given[lane] += chunk.len_bytes();
            chunks.push(Chunk { lane, ..chunk });
        }
    }
    let meter = Arc::new(NodeMeter::new(node, lanes));
    Queue { node, chunks, next: AtomicUsize::new(0), meter }
}

/// End of the chunk that begins at `start`, for memory whose host address is `skew` modulo `align`: always at
/// a multiple of `align` by host addresses.
pub fn chunk_end(start: u64, skew: u64, chunk_bytes: u64, align: u64) -> u64 {
    let begin = skew + start;
    let wanted = begin.saturating_add(chunk_bytes.max(1));
    let aligned = wanted - wanted % align;
    let end = if aligned > begin { aligned } else { begin - begin % align + align };
    end - skew
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{Backing, GuestRam, RamConfig, RamLayout, ZoneSpec};

    const MIB: u64 = 1 << 20;

    /// Zones of so many MiB, with transparent huge pages or without, shared or not.
    fn ram(zones: &[(u64, bool, bool)]) -> GuestRam {
        let zone = |(at, (mib, thp, shared)): (usize, &(u64, bool, bool))| ZoneSpec {
            backing: if *shared { Backing::Memfd } else { Backing::Anonymous },
            thp: *thp,
            shared: *shared,
            ..ZoneSpec::new(format!("z{at}"), mib * MIB)
        };
        let zones = zones.iter().enumerate().map(zone).collect();
        GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap()
    }

    fn cut_of(ram: &GuestRam, nodes: &[u32]) -> Vec<Queue> {
        cut(ram.regions(), 4 * MIB, Homes::pretended(nodes))
    }

    #[test]
    fn each_kind_of_page_is_begun_at_once() {
        let ram = ram(&[(64, false, true), (64, true, true), (16, false, false)]);
        let queues = cut_of(&ram, &[]);
        let lanes: Vec<_> = queues[0].chunks[..9].iter().map(|chunk| chunk.lane).collect();
        assert_eq!(lanes, [0, 1, 2, 0, 1, 0, 1, 0, 1]);
        let zones: Vec<_> = queues[0].chunks[..3].iter().map(|it| it.region.zone_id()).collect();
        assert_eq!(zones, ["z0", "z1", "z2"]);
    }

    #[test]
    fn memory_without_a_node_is_dealt_out_to_the_nodes_on_which_it_may_lie() {
        let ram = ram(&[(64, false, true)]);
        let bytes = |queues: &[Queue]| -> Vec<_> {
            let all = |queue: &Queue| queue.chunks.iter().map(Chunk::len_bytes).sum::<u64>() / MIB;
            queues.iter().map(|queue| (queue.node, all(queue))).collect()
        };
        assert_eq!(bytes(&cut_of(&ram, &[])), [(None, 64)]);
        assert_eq!(bytes(&cut_of(&ram, &[1])), [(Some(1), 64)]);
        assert_eq!(bytes(&cut_of(&ram, &[0, 2])), [(Some(0), 32), (Some(2), 32)]);
    }

    #[test]
    fn what_was_populated_is_a_kind_of_its_own_until_it_is_discarded() {
        let ram = ram(&[(16, false, true)]);
        let region = &ram.regions()[0];
        region.note_ahead(&(4 * MIB..12 * MIB));
        let there = |ram: &GuestRam| -> Vec<_> {
            let queues = cut_of(ram, &[]);
            let meter = crate::PrefaultMeter(vec![Arc::clone(&queues[0].meter)]);
            let lanes = meter.lanes();
            lanes.iter().map(|lane| (lane.kind.is_there, lane.total_bytes / MIB)).collect()
        };
        assert_eq!(there(&ram), [(false, 8), (true, 8)]);
        assert_eq!(ram.discard(5 * MIB..5 * MIB + 4096).ranges.len(), 1);
        assert_eq!(there(&ram), [(false, 12), (true, 4)]);
    }

    proptest! {
        /// Every chunk has one turn, those of a kind in the order of memory, and no kind runs ahead of another by more
        /// than a chunk.
        #[test]
        fn kinds_take_turns_in_proportion(
            zones in prop::collection::vec((64..512_u64, any::<bool>(), any::<bool>()), 1..5),
            nodes in prop::collection::btree_set(0..4_u32, 0..3),
        ) {
            let ram = ram(&zones);
            let nodes: Vec<_> = nodes.into_iter().collect();
            let queues = cut_of(&ram, &nodes);
            let mut all = BTreeMap::new();
            for queue in &queues {
                prop_assert_eq!(queue.node.is_none(), nodes.is_empty());
                prop_assert!(queue.node.is_none_or(|node| nodes.contains(&node)));
                let lanes = crate::PrefaultMeter(vec![Arc::clone(&queue.meter)]).lanes();
                let mut given = vec![0_u64; lanes.len()];
                let mut last = vec![0_u64; lanes.len()];
                for chunk in &queue.chunks {
                    let gpa = chunk.region.gpa() + chunk.bytes.start;
                    prop_assert!(all.insert(gpa, chunk.len_bytes()).is_none());
                    prop_assert!(last[chunk.lane] <= gpa);
                    last[chunk.lane] = gpa;
                    given[chunk.lane] += chunk.len_bytes();
                    // In parts of a million; a chunk of each may be missing.
                    let part = |bytes: u64, at: usize| bytes * 1_000_000 / lanes[at].total_bytes;
                    for (one, two) in (0..lanes.len()).flat_map(|one| (0..one).map(move |two| (one, two))) {
                        let apart = part(given[one], one).abs_diff(part(given[two], two));
                        let apart_max = part(6 * MIB, one) + part(6 * MIB, two) + 2;
                        prop_assert!(apart_max < 500_000, "too little memory to tell");
                        prop_assert!(apart <= apart_max);
                    }
                }
                for (given, lane) in given.iter().zip(&lanes) {
                    prop_assert_eq!(*given, lane.total_bytes);
                }
            }
            prop_assert_eq!(all.values().sum::<u64>(), ram.total_bytes());
        }
    }
}
