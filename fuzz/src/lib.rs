// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What all fuzz targets share: one way to run an entry point, and checks after each run.
//!
//! A panic, a hang, a memory error and leaked memory are found by libFuzzer and the address
//! sanitizer. This adds leaked file descriptors, and runs that could set nothing up: those would
//! count as executions although nothing was tested. What is fed to what stays in the targets.

use std::fs::File;
use std::os::fd::AsRawFd;

#[doc(hidden)]
pub use libfuzzer_sys;

#[cfg(test)]
#[path = "../seeds/main.rs"]
#[expect(dead_code, reason = "the program around the seeds is not tested")]
mod seeds;
#[cfg(test)]
mod seeds_are_valid;

/// Lowest free descriptor number after any run. A run that leaves nothing behind stays at the
/// handful that libFuzzer holds; one that leaks a descriptor gets here within a hundred runs.
const DESCRIPTOR_MAX: i32 = 100;

/// The module whose warnings mean that a run could not be set up.
const ENTRY_POINTS: &str = "devices::virtio::fuzz";

struct SetupMustWork;

impl log::Log for SetupMustWork {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target() == ENTRY_POINTS
    }

    fn log(&self, record: &log::Record<'_>) {
        assert!(!self.enabled(record.metadata()), "{}", record.args());
    }

    fn flush(&self) {}
}

/// Prepares the process; once, before the first run.
pub fn prepare() {
    if log::set_logger(&SetupMustWork).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    // SAFETY: no handler is installed. The programs have it ignored: a peer that closes its end is an error of the write.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Checks after a run that it left no descriptor open.
///
/// # Panics
/// When too many are open; libFuzzer reports that as a finding.
pub fn check_descriptors() {
    let lowest_free = File::open("/dev/null").map(|file| file.as_raw_fd());
    match lowest_free {
        Ok(number) => {
            assert!(number < DESCRIPTOR_MAX, "descriptors leak: {number} is the first free");
        }
        Err(error) => panic!("descriptors leak: {error}"),
    }
}

/// Defines a target that feeds its input to a function.
#[macro_export]
macro_rules! target {
    ($entry:path) => {
        $crate::libfuzzer_sys::fuzz_target!(
            init: $crate::prepare(),
            |data: &[u8]| {
                $entry(data);
                $crate::check_descriptors();
            }
        );
    };
}
