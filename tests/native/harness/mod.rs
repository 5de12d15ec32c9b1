// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the native tests share: VMM processes, their API, `ch-remote`, migrations, a runner.
//!
//! Owns every process and file that a test makes, and takes them away when it is over, failed or
//! not. Must never contain an expectation about a particular feature.

pub mod api;
pub mod beside;
pub mod faults;
pub mod huge_pages;
pub mod loops;
pub mod migrate;
pub mod payload;
pub mod pool;
pub mod process;
pub mod programs;
pub mod qcow2;
pub mod relay;
pub mod runner;
pub mod runs;
pub mod taps;
pub mod terminal;
pub mod upstream;
pub mod upstream_cuts;
pub mod upstream_destination;
pub mod upstream_program;
pub mod vmm;

use std::time::{Duration, Instant};

pub use api::Api;
pub use huge_pages::HugePages;
pub use migrate::{Mode, Transport};
pub use runner::{Suite, skip};
pub use vmm::{Vmm, VmmBuilder, ch_remote};

/// How long a condition may take that normally takes milliseconds; a loaded machine is slow.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(2);

/// Waits until `attempt` gives something; panics with `what` when it does not.
#[track_caller]
pub fn wait_for<T>(what: &str, attempt: impl FnMut() -> Option<T>) -> T {
    wait_within(PATIENCE, what, attempt)
}

/// The same with a time of its own.
#[track_caller]
pub fn wait_within<T>(patience: Duration, what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(start.elapsed() < patience, "{what}: not within {} ms", patience.as_millis());
        std::thread::sleep(POLL);
    }
}

/// A TCP port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// The test guest's image, built once.
pub fn image() -> &'static str {
    static IMAGE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    IMAGE.get_or_init(|| {
        let path = guest_reader::image::image().expect("the test guest builds");
        path.to_str().expect("a path in UTF-8").to_owned()
    })
}
