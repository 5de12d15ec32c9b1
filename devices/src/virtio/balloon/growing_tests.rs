// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A balloon alongside memory that comes while the guest runs.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};

use super::*;
use crate::virtio::VirtioDevice as _;

/// A guest whose balloon is larger than what it boots with, because more memory is to come, is not
/// emptied at its boot: the balloon grows with the memory, and what is in it travels.
#[test]
fn a_balloon_larger_than_boot_memory_follows_the_memory_that_comes() {
    const MIB: u64 = 1 << 20;
    let pages = |mib: u64| u32::try_from(mib * MIB / PAGE_BYTES).unwrap();
    let ram = || {
        let zones = vec![
            ZoneSpec::new("boot", 8 * MIB),
            ZoneSpec {
                block_bytes: Some(2 * MIB),
                shared: true,
                ..ZoneSpec::new("more", 32 * MIB)
            },
        ];
        Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap())
    };
    let plug = |ram: &GuestRam, mib: u64| {
        ram.regions()[1].set_usable(std::slice::from_ref(&(0..mib * MIB))).unwrap();
    };
    let config = || BalloonConfig {
        size_bytes: 16 * MIB,
        coming_bytes: 24 * MIB,
        ..BalloonConfig::default()
    };
    let source = ram();
    let balloon = Balloon::new(config(), Arc::clone(&source)).unwrap();
    let handle = balloon.handle();
    assert_eq!(handle.target_bytes(), 0, "8 of 32 MiB are here, and 16 are to stay");
    for (more, expected) in [(4, 0), (8, 0), (16, 8)] {
        plug(&source, more);
        handle.memory_has_grown();
        assert_eq!(handle.target_bytes(), expected * MIB, "with {more} MiB more");
    }
    // It moves in the middle of that; memory devices come back first.
    let destination = ram();
    let mut arrived = Balloon::new(config(), Arc::clone(&destination)).unwrap();
    plug(&destination, 16);
    arrived.restore(&balloon.save()).unwrap();
    assert_eq!(arrived.handle().target_bytes(), 8 * MIB);
    plug(&destination, 24);
    arrived.handle().memory_has_grown();
    assert_eq!(arrived.handle().target_bytes(), 16 * MIB);
    // What is asked for by name counts at once, and ends the wait.
    handle.resize(2 * MIB).unwrap();
    plug(&source, 24);
    handle.memory_has_grown();
    assert_eq!(handle.target_bytes(), 2 * MIB);
    // A target is bounded by what the guest may ever have.
    let mut bad = balloon.save();
    bad.data["target_pages"] = pages(41).into();
    assert!(arrived.restore(&bad).is_err());
    let too_large = BalloonConfig { size_bytes: 41 * MIB, ..BalloonConfig::default() };
    assert!(matches!(Balloon::new(too_large, ram()), Err(BalloonError::TooLarge { .. })));
}
