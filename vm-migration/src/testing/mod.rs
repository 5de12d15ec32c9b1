// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests without KVM: memory, dirty log, machines, and threads that write like vCPUs.
//!
//! For tests and benches. A fake guest checks itself: every page holds its number and a counter
//! that only its one writer raises, and a shadow table outside guest memory knows each counter, so
//! a stale, torn or misplaced page shows at the next visit.

mod certificates;
mod guest;
mod leaving;
mod machine;
mod memory;
mod page_server;

pub use certificates::TestCa;
pub use guest::{Guest, Pace, Writers};
pub use machine::{
    BlobFault, Builder, Calls, FakeBlobs, FakeDestination, FakeMapped, FakePaused, FakeVm, Gated,
    Inject, Throttled,
};
pub use memory::{FakeLog, FakeMemory, FakeMemoryError};
pub use page_server::{Behaviour, FakePageServer, Served};
