// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The clock that measures the age of an acknowledgement.
//!
//! `Instant` stands still while a host sleeps, but the other host's promise expires meanwhile.
//! This clock continues during sleep, and cannot be set.

use std::time::Duration;

/// Time since the host booted, including time asleep.
pub fn now() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_goes_on() {
        let before = super::now();
        assert!(!before.is_zero());
        while super::now() == before {}
        assert!(super::now() > before);
    }
}
