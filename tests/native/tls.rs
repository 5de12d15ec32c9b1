// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Migrations over TLS between two processes: every page is compared; what is not known is refused, and a
//! directory that cannot be used is named by the request for it.

use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vm_migration::testing::TestCa;

use crate::harness::migrate::{Reception, failure_of, migrate_to, send_option};
use crate::harness::{Mode, Suite, Transport, Vmm};

/// How long a process stays for a client that watches a migration and has not seen its end. Neither a refusal nor
/// the end of a process after one takes that long.
const WATCHER_TIME: Duration = Duration::from_secs(10);

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy, Mode::Auto] {
        let name = format!("tls::{}", mode.name());
        suite.add(&name, move || moves(mode, ",connections=4"));
    }
    suite.add("tls::precopy_with_compression", || moves(Mode::Precopy, ",compression=zstd"));
    suite.add("tls::postcopy_with_a_page_server", || {
        moves(Mode::Postcopy, ",page_server=on,bandwidth=48M");
    });
    suite.add("tls::a_side_without_certificates_is_refused", one_side);
    suite.add("tls::an_unknown_source_is_refused", unknown);
    suite.add("tls::a_directory_that_cannot_be_used_is_named", unusable);
}

/// A directory with the files of both sides.
fn certificates() -> TempDir {
    let folder = TempDir::with_prefix("godwit-tls-").expect("a folder");
    TestCa::new().write_all(folder.path(), &["127.0.0.1"]);
    folder
}

fn tls(folder: &Path) -> String {
    format!(",tls_dir={}", folder.display())
}

/// A guest that writes.
fn writing() -> Vmm {
    let source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M pace_ns=20000");
    source.wait_for_work(5_000);
    source
}

fn moves(mode: Mode, more: &str) {
    let folder = certificates();
    let tls = tls(folder.path());
    let (source, destination) = (writing(), Vmm::empty());
    let reception = Reception::start_with(&destination, Transport::Tcp, mode, &tls);
    let ready = destination.wait_for_event("migration-receive-ready");
    assert_eq!(ready["properties"]["tls"], "on", "{ready}");
    migrate_to(reception, source, &destination, |url| {
        format!("{}{tls}{more}", send_option(url, mode))
    });
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// The source goes on, and the destination goes on waiting.
fn refused(source: &Vmm, url: &str, tls: &str, why: &str) {
    let began = Instant::now();
    let failed =
        source.remote(&["send-migration", "--wait", &format!("destination_url={url}{tls}")]);
    assert!(!failed.status.success());
    let told = failure_of(source);
    assert!(told.contains(why), "{told}");
    assert!(began.elapsed() < WATCHER_TIME / 2, "it took {:?}", began.elapsed());
    assert_eq!(source.api().state(), "Running");
}

fn one_side() {
    let folder = certificates();
    let tls = tls(folder.path());
    let source = writing();
    let destination = Vmm::empty();
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, &tls);
    refused(&source, &reception.url, "", "give tls_dir to send-migration as well");
    let began = Instant::now();
    migrate_to(reception, source, &destination, |url| {
        format!("{}{tls}", send_option(url, Mode::Precopy))
    });
    assert!(began.elapsed() < WATCHER_TIME, "it took {:?}", began.elapsed());
    destination.verify();

    let other = Vmm::empty();
    let reception = Reception::start(&other, Transport::Tcp, Mode::Precopy);
    let ready = other.wait_for_event("migration-receive-ready");
    assert_eq!(ready["properties"]["tls"], "off", "{ready}");
    assert!(other.output().contains("unauthenticated"), "{}", other.output());
    refused(&destination, &reception.url, &tls, "the peer does not use TLS");
    migrate_to(reception, destination, &other, |url| send_option(url, Mode::Precopy));
    other.verify();
    other.shut_down();
}

fn unknown() {
    let (ours, theirs) = (certificates(), certificates());
    let source = writing();
    let destination = Vmm::empty();
    let here = tls(theirs.path());
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, &here);
    refused(&source, &reception.url, &tls(ours.path()), "certificate is not accepted");
    source.verify();
    source.shut_down();
    drop(reception);
}

fn unusable() {
    let folder = certificates();
    let source = writing();
    let destination = Vmm::empty();
    let tls = tls(folder.path());
    for side in ["client", "server"] {
        std::fs::remove_file(folder.path().join(format!("{side}-key.pem"))).expect("it was there");
    }
    for (vmm, command, url, file) in [
        (&source, "send-migration", "destination_url=tcp:127.0.0.1:1", "client-key.pem"),
        (&destination, "receive-migration", "receiver_url=tcp:127.0.0.1:0", "server-key.pem"),
    ] {
        let output = vmm.remote(&[command, &format!("{url}{tls}")]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(file), "{told}");
        let unix = url.split_once("=tcp").expect("an address").0;
        let output = vmm.remote(&[command, &format!("{unix}=unix:/x{tls}")]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("tls_dir needs a tcp: address"), "{told}");
    }
    assert!(!destination.event_names().iter().any(|name| name == "migration-receive-ready"));
    source.verify();
    source.shut_down();
}
