// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Clients that follow a migration: for how long they count as such.

use std::sync::Arc;

use parking_lot::Mutex;
use vm_migration::{Phase, Progress, Side};
use vmm_sys_util::eventfd::EventFd;

use super::super::watchers::Watchers;
use super::*;

const PROGRESS: &str = "vm.migration-progress";

/// A server whose VMM is in a phase of a migration.
struct Following {
    dir: tempfile::TempDir,
    phase: Arc<Mutex<Phase>>,
    watchers: Watchers,
    _server: ApiServer,
}

impl Following {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = ApiListener::bind(ApiSocket::Path(dir.path().join("api"))).unwrap();
        let (handle, queue) = channel().unwrap();
        let watchers = queue.watchers().clone();
        let phase = Arc::new(Mutex::new(Phase::Precopy));
        let current = Arc::clone(&phase);
        std::thread::spawn(move || {
            while let Some(call) = queue.wait() {
                let (_, responder) = call.into_parts();
                let mut document = Progress::new(Side::Source).snapshot();
                document.phase = *current.lock();
                responder.answer(Ok(ApiReply::Progress(Box::new(document))));
            }
        });
        let server = ApiServer::start(listener, handle).unwrap();
        Self { dir, phase, watchers, _server: server }
    }

    fn client(&self) -> client::Client {
        client::Client::new(self.dir.path().join("api"))
    }

    fn wait_for(&self, count: usize) {
        let begun = Instant::now();
        while self.watchers.count() != count {
            assert!(begun.elapsed() < Duration::from_secs(20), "there are {:?}", self.watchers);
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_client_that_keeps_its_connection_counts_until_it_reads_the_end_or_leaves() {
    let vmm = Following::new();
    let [mut one, mut other, mut third] = [(); 3].map(|()| vmm.client().keep().unwrap());
    for client in [&mut one, &mut other, &mut third] {
        assert!(client.get(PROGRESS).unwrap().unwrap().contains("precopy"));
        client.get(PROGRESS).unwrap();
    }
    vmm.wait_for(3);
    drop(third);
    vmm.wait_for(2);
    *vmm.phase.lock() = Phase::Done;
    assert!(one.get(PROGRESS).unwrap().unwrap().contains("done"));
    vmm.wait_for(1);
    // It asks late.
    other.get(PROGRESS).unwrap();
    vmm.wait_for(0);
    drop((one, other));
    vmm.wait_for(0);
}

#[test]
fn a_client_that_connects_for_each_request_does_not_count_afterwards() {
    let vmm = Following::new();
    vmm.client().ask(endpoints::Method::Get, PROGRESS, None).unwrap();
    vmm.wait_for(0);
    let mut kept = vmm.client().keep().unwrap();
    kept.get("vmm.ping").unwrap();
    assert_eq!(vmm.watchers.count(), 0, "it has not asked for that");
}

#[test]
fn a_kept_connection_that_has_ended_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let start = || {
        let listener = ApiListener::bind(ApiSocket::Path(dir.path().join("api"))).unwrap();
        let (handle, queue) = channel().unwrap();
        let (hold, _) = std::sync::mpsc::channel();
        std::thread::spawn(move || vmm(&queue, &hold));
        ApiServer::start(listener, handle).unwrap()
    };
    let server = start();
    let mut kept = client::Client::new(dir.path().join("api")).keep().unwrap();
    kept.get("vmm.ping").unwrap();
    server.stop();
    assert!(matches!(kept.get("vmm.ping"), Err(client::ClientError::Connect { .. })));
    let _server = start();
    kept.get("vmm.ping").unwrap();
    kept.get("vmm.ping").unwrap();
}

#[test]
fn who_waits_for_the_last_client_is_woken() {
    let event = Arc::new(EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap());
    let watchers = Watchers::new(&event);
    let (one, other) = (watchers.begin(), watchers.begin());
    assert!(event.read().is_err());
    drop(one);
    assert_eq!((event.read().unwrap(), watchers.count()), (1, 1));
    drop(other);
    assert_eq!((event.read().unwrap(), watchers.count()), (1, 0));
}
