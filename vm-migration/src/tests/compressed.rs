// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migrations with compressed memory.

use std::sync::Arc;
use std::time::Duration;

use super::{
    Builder, FakeMemory, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, options, send,
};
use crate::Compression;
use crate::layout::{Backing, PAGE_BYTES};
use crate::progress::ProgressDocument;

/// Migrates a writing guest with compression; returns the source's report.
fn compressed(from: &Arc<FakeMemory>, to: &Arc<FakeMemory>, connections: u16) -> ProgressDocument {
    let guest = Guest::new(from, 81);
    guest.fill(from, 90);
    let target = Target::start(&loopback(), Builder::new(to, &guest), LIMITS);
    let mut options = options(&target.address);
    (options.compression, options.connections) = (Compression::Zstd, connections);
    options.downtime = Duration::from_secs(1);
    let received = Arc::clone(&target.progress);
    let finished = send(FakeVm::new(from, &guest).running(), &options).unwrap();
    target.join().unwrap().vm.stop();
    assert_whole(&guest, to);
    let arrived = received.snapshot().memory_bytes_received;
    assert_eq!(arrived, finished.report.memory_bytes_sent);
    finished.report
}

#[test]
pub(super) fn frames_arrive_page_by_page_as_they_were() {
    let new = || FakeMemory::new(&[(0, 12288)], Backing::Shared, PAGE_BYTES).unwrap();
    for connections in [1, 3] {
        let report = compressed(&new(), &new(), connections);
        let compression = report.compression;
        assert!(compression.raw_bytes >= 4 << 20, "{compression:?}");
        assert!(compression.frame_bytes < compression.raw_bytes / 2, "{compression:?}");
    }
}

#[test]
fn what_pays_is_found_out_by_trying_and_told() {
    let new = || FakeMemory::new(&[(0, 8192)], Backing::Shared, PAGE_BYTES).unwrap();
    let report = compressed(&new(), &new(), 1);
    assert_eq!(report.compression.decisions, 1, "{report:?}");
    assert!(report.compression.connections_on <= 1);
}

#[test]
fn content_that_does_not_compress_goes_as_it_is() {
    let new = || FakeMemory::new(&[(0, 4096)], Backing::Shared, PAGE_BYTES).unwrap();
    let (from, to) = (new(), new());
    let mut random = 1_u64;
    for page in 0..4096 {
        for word in 0..512 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            from.word(0, page, word).store(random, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let guest = Guest::new(&from, 82);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let mut options = options(&target.address);
    options.compression = Compression::Zstd;
    let finished = send(FakeVm::new(&from, &guest), &options).unwrap();
    target.join().unwrap();
    assert_eq!(finished.report.memory_bytes_sent, Some(4096 * PAGE_BYTES));
    assert_eq!(finished.report.compression.raw_bytes, 0, "{:?}", finished.report.compression);
    for page in 0..4096 {
        let word = |memory: &FakeMemory| {
            memory.word(0, page, 511).load(std::sync::atomic::Ordering::Relaxed)
        };
        assert_eq!(word(&from), word(&to), "page {page}");
    }
}

#[test]
fn compression_is_refused_where_it_has_no_meaning() {
    let mut options = options(&loopback());
    options.compression = Compression::Zstd;
    options.memory_mode = crate::MemoryMode::Postcopy;
    let text = error_text::chain(&options.check().unwrap_err());
    assert!(text.contains("compression=zstd"), "{text}");
}
