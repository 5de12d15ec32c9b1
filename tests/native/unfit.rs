// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A destination that cannot take the guest: without a back end, without memory, with another
//! processor or another memory layout. It is refused before the guest stops, it continues,
//! and both sides say what is missing and where.

use std::fs;
use std::net::TcpStream;

use serde_json::{Value, json};
use vm_migration::layout::{Backing, RegionInfo};
use vm_migration::protocol::capabilities::{Offer, features};
use vm_migration::protocol::message::{Answer, Message, VERSION};

use crate::harness::migrate::{Reception, failure_of};
use crate::harness::relay::Tee;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, is_root, skip};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        suite.add(&format!("unfit::{name}_disk_missing"), move || disk_missing(mode));
        suite.add(&format!("unfit::{name}_address_space_too_small"), move || no_memory(mode));
        suite.add(&format!("unfit::{name}_huge_pages_used_up"), move || no_huge_pages(mode));
        suite.add(&format!("unfit::{name}_tap_not_permitted"), move || no_tap(mode));
    }
    suite.add("unfit::processor_lacks_a_feature", processor);
    suite.add("unfit::memory_layout_differs", layout);
}

/// The guest continues at the source, and both sides name the reason before it has stopped.
#[track_caller]
fn refused(source: Vmm, destination: Vmm, mode: Mode, words: &[&str]) {
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    let option = format!("destination_url={},memory_mode={}", reception.url, mode.name());
    let sent = source.remote(&["send-migration", "--wait", &option]);
    assert_eq!(sent.status.code(), Some(1), "{sent:?}");
    let received = reception.finish();
    assert_eq!(received.status.code(), Some(1), "{received:?}");
    let told = [
        failure_of(&source),
        String::from_utf8_lossy(&sent.stderr).into_owned(),
        String::from_utf8_lossy(&received.stderr).into_owned(),
    ];
    for text in &told {
        for word in words {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
    }
    assert!(told[1].contains("the guest continues at the source"), "{}", told[1]);
    let progress = source.api().get("vm.migration-progress").ok().json();
    // The machine is built while the first memory travels; the guest has not stopped yet.
    let phase = progress["error"]["phase"].as_str().unwrap_or_default();
    assert!(["negotiate", "precopy"].contains(&phase), "{progress}");
    assert!(progress["downtime_us"].is_null(), "{progress}");
    assert_eq!(destination.api().get("vm.info").status, 404, "something was left behind");
    source.wait_for_work(2_000);
    source.verify();
    // The source can still migrate, and the destination still receive.
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    destination.remote_ok(&["migration-cancel"]);
    reception.finish();
    source.shut_down();
    destination.shut_down();
}

const CMDLINE: &str = "workload=random-write mem=32M";

fn disk_missing(mode: Mode) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk");
    fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let path = path.to_str().expect("UTF-8");
    let source = VmmBuilder::guest(1, "size=96M,shared=on", CMDLINE)
        .with(&["--disk", &format!("path={path},id=root")])
        .start();
    source.guest();
    fs::remove_file(path).expect("it can be removed");
    refused(source, Vmm::empty(), mode, &["root", path]);
}

fn no_memory(mode: Mode) {
    let source = Vmm::boot(1, "size=1536M,shared=on", CMDLINE);
    let little = VmmBuilder::new::<&str>(&[]).wrapped(&["prlimit", "--as=1073741824"]).start();
    refused(source, little, mode, &["memory", "mem0"]);
}

fn no_huge_pages(mode: Mode) {
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    if !is_root() {
        skip("only root can reserve huge pages");
    }
    let count = |name: &str| -> u64 {
        let text = fs::read_to_string(format!("{POOL}/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or_default()
    };
    let before = count("nr_hugepages");
    let set = |pages: u64| {
        let _ = fs::write(format!("{POOL}/nr_hugepages"), pages.to_string());
    };
    // 48 pages are the guest's, and a few more are too few for another one.
    set(before - count("free_hugepages") + 56);
    let restore = Restore(Box::new(move || set(before)));
    if count("free_hugepages") != 56 {
        skip("this host has no free huge pages to reserve");
    }
    let source = Vmm::boot(1, "size=96M,shared=on,hugepages=on", CMDLINE);
    refused(source, Vmm::empty(), mode, &["mem0", "huge"]);
    drop(restore);
}

/// Runs at the end, whatever happens.
struct Restore(Box<dyn Fn()>);

impl Drop for Restore {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn no_tap(mode: Mode) {
    if !is_root() {
        skip("only root can make a tap");
    }
    let name = format!("gw{}", std::process::id());
    let source = VmmBuilder::guest(1, "size=96M,shared=on", CMDLINE)
        .with(&["--net", &format!("tap={name},id=lan")])
        .start();
    if source.api().state() != "Running" {
        skip(format!("no tap can be made here: {}", source.output()));
    }
    source.guest();
    let powerless = VmmBuilder::new::<&str>(&[])
        .wrapped(&["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"])
        .start();
    refused(source, powerless, mode, &["lan", &name]);
}

/// A source made by hand.
struct Source {
    stream: TcpStream,
}

impl Source {
    fn connect(url: &str) -> Self {
        let stream = TcpStream::connect(url.trim_start_matches("tcp:")).expect("it listens");
        Self { stream }
    }

    fn ask(&mut self, message: &Message) -> Answer {
        use std::io::Write as _;
        self.stream.write_all(&message.encode()).expect("it reads");
        Answer::read(&mut Tee::new(&self.stream)).expect("an answer")
    }
}

#[track_caller]
fn reason(answer: Answer) -> String {
    match answer {
        Answer::Error { reason } => reason,
        Answer::Ok { .. } => panic!("it was accepted"),
    }
}

/// The configuration of a guest as a source sends it.
fn configuration() -> Value {
    let source = Vmm::boot(1, "size=96M,shared=on", CMDLINE);
    let config = source.api().get("vm.info").ok().json()["config"].clone();
    source.shut_down();
    config
}

fn processor() {
    let destination = Vmm::empty();
    // Every feature that leaf 7 can name: no processor has them all.
    let entry = json!({"function": 7, "index": 0, "flags": 1,
        "answer": [0, u32::MAX, u32::MAX, u32::MAX]});
    let document = json!({"vm_config": configuration(), "common_cpuid": [entry]});
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let mut source = Source::connect(&reception.url);
    assert!(matches!(
        source.ask(&Message::Start { version: VERSION, offer: false }),
        Answer::Ok { .. }
    ));
    let told = reason(source.ask(&Message::Config(document.to_string().into_bytes())));
    let output = reception.finish();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(told, "", "a source of plain version 0 reads none");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("lacks processor features") && text.contains("CPUID 0x7"), "{text}");
    assert_eq!(destination.api().get("vm.info").status, 404);
    destination.shut_down();
}

fn layout() {
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let mut source = Source::connect(&reception.url);
    assert!(matches!(
        source.ask(&Message::Start { version: VERSION, offer: true }),
        Answer::Ok { .. }
    ));
    let region = RegionInfo {
        name: "mem0".to_owned(),
        gpa: 0,
        len_bytes: 64 << 20,
        host_page_bytes: 4096,
        backing: Backing::Shared,
    };
    let offer = Offer {
        formats: vm_migration::protocol::formats::Formats::default(),
        local: false,
        software: "a test".to_owned(),
        features: features(),
        memory_mode: vm_migration::MemoryMode::Precopy,
        bulk_connections: 0,
        urgent_connections: 0,
        many_urgent_connections: None,
        vcpus: None,
        regions: vec![region],
        recover_timeout_ms: None,
    };
    assert!(matches!(source.ask(&Message::Capabilities(offer.to_json())), Answer::Ok { .. }));
    let document = json!({"vm_config": configuration()});
    let told = reason(source.ask(&Message::Config(document.to_string().into_bytes())));
    let output = reception.finish();
    for text in [&told, &String::from_utf8_lossy(&output.stderr).into_owned()] {
        assert!(text.contains("comparing memory layouts"), "{text}");
    }
    assert_eq!(destination.api().get("vm.info").status, 404);
    destination.shut_down();
}
