// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What an engine that populates memory has done, by NUMA node and by kind of page.
//!
//! A page of 4 KiB costs another time per byte than one of 1 GiB, and a node that is busy another than one that is idle:
//! what is left of a VM's memory takes as long as each lane says of its own.
//!
//! Owns the counters. It must never make a thread that populates wait: the path of a chunk adds to them without a lock, and a
//! reader may see the bytes of a chunk before its time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What a part of guest memory consists of, as far as the time is concerned that a chunk takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageKind {
    /// Size of a page in bytes: of 4 KiB, a transparent huge page, or a hugetlb page.
    pub page_bytes: u64,
    /// From the host's hugetlb pool.
    pub is_hugetlb: bool,
    /// Of a file, so that it is entered there as well.
    pub is_shared: bool,
    /// Populated already, by a pool or by an engine before: it is only to be found, and put to use.
    pub is_there: bool,
}

/// Memory of one node and one kind.
#[derive(Debug)]
pub struct Lane {
    kind: PageKind,
    total_bytes: u64,
    done_bytes: AtomicU64,
    done_chunks: AtomicU64,
    busy_ns: AtomicU64,
}

impl Lane {
    pub fn new(kind: PageKind, total_bytes: u64) -> Self {
        let [done_bytes, done_chunks, busy_ns] = [const { AtomicU64::new(0) }; 3];
        Self { kind, total_bytes, done_bytes, done_chunks, busy_ns }
    }

    /// Adds a chunk that has taken a thread so long.
    fn add(&self, bytes: u64, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.busy_ns.fetch_add(ns, Ordering::Relaxed);
        self.done_chunks.fetch_add(1, Ordering::Relaxed);
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The memory of one node.
#[derive(Debug)]
pub struct NodeMeter {
    node: Option<u32>,
    threads: AtomicUsize,
    lanes: Vec<Lane>,
}

impl NodeMeter {
    pub fn new(node: Option<u32>, lanes: Vec<Lane>) -> Self {
        Self { node, threads: AtomicUsize::new(0), lanes }
    }

    /// Another thread works on it from now on.
    pub fn add_thread(&self) {
        self.threads.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a chunk of a lane.
    pub fn add(&self, lane: usize, bytes: u64, took: Duration) {
        if let Some(lane) = self.lanes.get(lane) {
            lane.add(bytes, took);
        }
    }
}

/// How far memory of one node and one kind is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneProgress {
    /// The node whose threads populate it; `None` for memory that any thread does.
    pub node: Option<u32>,
    /// Its pages.
    pub kind: PageKind,
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What is done.
    pub done_bytes: u64,
    /// Chunks that this was.
    pub done_chunks: u64,
    /// What these chunks have taken the threads that did them, in sum.
    pub busy: Duration,
    /// Threads that work on the memory of the node, of all kinds.
    pub threads: usize,
}

impl LaneProgress {
    /// What is still to be done.
    pub fn left_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.done_bytes)
    }
}

/// Reads how far an engine is, also after its end.
#[derive(Clone, Debug)]
pub struct PrefaultMeter(pub(crate) Vec<Arc<NodeMeter>>);

impl PrefaultMeter {
    /// All lanes, in an order that stays.
    pub fn lanes(&self) -> Vec<LaneProgress> {
        let of_node = |meter: &Arc<NodeMeter>| {
            let (node, threads) = (meter.node, meter.threads.load(Ordering::Relaxed));
            let of_lane = move |lane: &Lane| LaneProgress {
                node,
                kind: lane.kind,
                total_bytes: lane.total_bytes,
                done_bytes: lane.done_bytes.load(Ordering::Relaxed),
                done_chunks: lane.done_chunks.load(Ordering::Relaxed),
                busy: Duration::from_nanos(lane.busy_ns.load(Ordering::Relaxed)),
                threads,
            };
            meter.lanes.iter().map(of_lane).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of_node).collect()
    }
}
