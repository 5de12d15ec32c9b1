// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a block device.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::virtio::Counters;
use crate::virtio::counters::Counter;

/// Counters of one transfer direction.
#[derive(Debug)]
pub(super) struct Direction {
    bytes: Counter,
    ops: Counter,
    latency_total_us: Counter,
    latency_max_us: AtomicU64,
    latency_min_us: AtomicU64,
}

impl Default for Direction {
    fn default() -> Self {
        Self {
            bytes: Counter::default(),
            ops: Counter::default(),
            latency_total_us: Counter::default(),
            latency_max_us: AtomicU64::new(0),
            latency_min_us: AtomicU64::new(u64::MAX),
        }
    }
}

impl Direction {
    pub(super) fn done(&self, len_bytes: u64, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.bytes.add(len_bytes);
        self.ops.add(1);
        self.latency_total_us.add(took_us);
        self.latency_max_us.fetch_max(took_us, Ordering::Relaxed);
        self.latency_min_us.fetch_min(took_us, Ordering::Relaxed);
    }

    /// Minimum, maximum, mean and sum of latencies in microseconds; zeros before the first transfer.
    fn latencies_us(&self) -> [u64; 4] {
        let ops = self.ops.get();
        if ops == 0 {
            return [0; 4];
        }
        let min = self.latency_min_us.load(Ordering::Relaxed);
        let max = self.latency_max_us.load(Ordering::Relaxed);
        let total = self.latency_total_us.get();
        [min, max, total / ops, total]
    }
}

/// Counters of all queues of a block device.
#[derive(Debug, Default)]
pub struct BlockCounters {
    pub(super) read: Direction,
    pub(super) write: Direction,
    pub(super) errors: Counter,
}

impl Counters for BlockCounters {
    fn counters(&self) -> BTreeMap<&'static str, u64> {
        let [read_min, read_max, read_avg, read_total] = self.read.latencies_us();
        let [write_min, write_max, write_avg, write_total] = self.write.latencies_us();
        BTreeMap::from([
            ("read_bytes", self.read.bytes.get()),
            ("read_ops", self.read.ops.get()),
            ("read_latency_min", read_min),
            ("read_latency_max", read_max),
            ("read_latency_avg", read_avg),
            ("read_latency_total", read_total),
            ("write_bytes", self.write.bytes.get()),
            ("write_ops", self.write.ops.get()),
            ("write_latency_min", write_min),
            ("write_latency_max", write_max),
            ("write_latency_avg", write_avg),
            ("write_latency_total", write_total),
            ("errors", self.errors.get()),
        ])
    }
}
