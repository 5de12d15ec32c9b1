// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The real-time clock device: the guest reads the host's time, and goes on to over reboots, moves and a restore.

use std::time::{SystemTime, UNIX_EPOCH};

use guest_reader::abi::{BALLOON_REQUEST_GPA, PAGE_BYTES};
use tempfile::TempDir;

use crate::disks::write_more;
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};

pub fn add(suite: &mut Suite) {
    suite.add("rtc::the_guest_reads_the_time_of_the_host", reads);
    suite.add("rtc::it_is_read_after_moves_and_a_restore", moves);
}

const GUEST: &str = "workload=rtc-read mem=16M";
/// Where the guest has the answer to its last request.
const READING_GPA: u64 = BALLOON_REQUEST_GPA + PAGE_BYTES + 8;

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
    u64::try_from(since.as_nanos()).expect("a time before 2554")
}

fn started(option: &str) -> Vmm {
    VmmBuilder::guest(1, "size=128M,shared=on", GUEST).with(&["--rtc", option]).start()
}

/// Waits until the guest has read the clock again, and compares what it shows.
#[track_caller]
fn shows_the_time(vmm: &Vmm) {
    let before = now_ns();
    // Two, of which the second has begun after that.
    write_more(vmm, 2);
    vmm.remote_ok(&["pause"]);
    let shown = vmm.guest().memory().word(READING_GPA).expect("the guest's memory");
    let after = now_ns();
    vmm.remote_ok(&["resume"]);
    assert!((before..=after).contains(&shown), "{shown} is not between {before} and {after}");
}

fn reads() {
    let vmm = started("id=clock,pci_device_id=9");
    shows_the_time(&vmm);
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!(info["config"]["rtc"]["id"], "clock", "{info}");
    vmm.remote_ok(&["reboot"]);
    shows_the_time(&vmm);
    vmm.shut_down();
}

fn moves() {
    let mut vmm = started("id=clock");
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let destination = VmmBuilder::new::<&str>(&[]).start();
        migrate(vmm, &destination, Transport::Unix, mode);
        shows_the_time(&destination);
        vmm = destination;
    }
    let folder = TempDir::new().expect("a folder");
    let url = format!("file://{}", folder.path().display());
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["snapshot", &url]);
    vmm.shut_down();
    let restored = VmmBuilder::new::<&str>(&[]).start();
    restored.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    shows_the_time(&restored);
    restored.shut_down();
}
