// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMs that arrive, or are restored, in memory of the pool: every page is right, what was there before stays
//! populated, and the pool gets it back whatever becomes of the VM.

use std::os::unix::fs::MetadataExt as _;

use crate::harness::migrate::{Reception, migrate_to, send_option};
use crate::harness::pool::Pool;
use crate::harness::{HugePages, Mode, Suite, Transport, Vmm, is_root, skip, wait_for};
use crate::migration::huge_bytes;
use crate::postcopy;
use crate::prezero::memory_of_pool;
use crate::snapshot::{place, save, source};

const MIB: u64 = 1 << 20;
const WORK: &str = "workload=random-write mem=64M";

/// All that the guest writes is outdated again after half a second, and the rest never fits into a millisecond.
const SWITCHES: &str = ",bandwidth=128M,downtime_ms=1,timeout_s=600,postcopy_after_s=3";
const SWITCHES_OVER_FOUR: &str =
    ",bandwidth=128M,downtime_ms=1,timeout_s=600,postcopy_after_s=3,connections=4";

pub fn add(suite: &mut Suite) {
    let before = Way { mode: Mode::Precopy, send: "", receive: "" };
    let both = Way { mode: Mode::Auto, send: "", receive: "" };
    suite.add("pool_arrivals::small_pages", move || arrives("4K", "size=192M,thp=off", before));
    suite.add("pool_arrivals::private_memory_becomes_shared", move || {
        arrives("4K", "size=192M,thp=off,shared=off", before);
    });
    suite.add("pool_arrivals::transparent_pages_over_four_connections", move || {
        arrives("thp", "size=192M", Way { send: ",connections=4", ..before });
    });
    suite.add("pool_arrivals::compressed", move || {
        arrives("4K", "size=192M,thp=off", Way { send: ",compression=zstd", ..before });
    });
    suite.add("pool_arrivals::huge_pages", move || {
        // The source's and the pool's.
        let _pages = HugePages::borrow(2 * 96);
        arrives("2M", "size=192M,hugepages=on", before);
    });
    for (mode, faults) in [
        (Mode::Postcopy, "uffd"),
        (Mode::Postcopy, "sigbus"),
        (Mode::Auto, "uffd"),
        (Mode::Auto, "sigbus"),
    ] {
        let receive = if faults == "uffd" { ",fault_source=uffd" } else { ",fault_source=sigbus" };
        let behind = Way { mode, send: if mode == Mode::Auto { SWITCHES } else { "" }, receive };
        let over_four = match mode {
            Mode::Auto => Way { send: SWITCHES_OVER_FOUR, ..behind },
            _ => behind,
        };
        let name = |what: &str| format!("pool_arrivals::{}_{what}_by_{faults}", mode.name());
        suite.add(&name("in_small_pages"), move || {
            only_root_traces(behind);
            arrives("4K", "size=192M,thp=off,shared=on", behind);
        });
        suite.add(&name("in_huge_pages"), move || {
            only_root_traces(behind);
            let _pages = HugePages::borrow(2 * 96);
            arrives("2M", "size=192M,hugepages=on", over_four);
        });
        suite.add(&name("ends_in_transparent_pages"), move || {
            only_root_traces(behind);
            let vmm = in_transparent_pages(over_four);
            // All but what the guest's parts leave of a block at their edges.
            wait_for("huge pages", || (huge_bytes(&vmm) >= 160 * MIB).then_some(()));
            vmm.verify();
        });
        suite.add(&name("heals_after_cuts"), move || {
            only_root_traces(behind);
            cuts(behind);
        });
    }
    suite.add("pool_arrivals::auto_that_does_not_switch", move || {
        arrives("4K", "size=192M,thp=off,shared=on", both);
    });
    suite.add("pool_arrivals::auto_that_does_not_switch_in_transparent_pages", move || {
        let vmm = in_transparent_pages(Way { send: ",connections=4", ..both });
        // At least what the guest writes.
        wait_for("huge pages", || (huge_bytes(&vmm) >= 48 * MIB).then_some(()));
        vmm.verify();
    });
    suite.add("pool_arrivals::off_asks_no_pool", off);
    suite.add("pool_arrivals::rules_are_for_what_the_source_names", rules);
    for mode in [Mode::Precopy, Mode::Auto] {
        let name = format!("pool_arrivals::a_cancelled_{}_returns_its_memory", mode.name());
        suite.add(&name, move || cancelled(mode));
    }
    suite.add("pool_arrivals::restored", restored);
}

fn pool(pages: &str) -> Pool {
    Pool::start(&[&format!("size = '192M'\npages = '{pages}'\ncount = 1")])
}

/// The option of `receive-migration` and `restore` for this pool.
fn option(pool: &Pool) -> String {
    format!(",prezeroed={}", pool.socket().display())
}

/// Whether accesses to its memory are caught by userfaultfd: to missing pages, or to pages that are not mapped.
fn is_watched(vmm: &Vmm) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", vmm.pid())).expect("it runs");
    let mut flags = maps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    flags.any(|flags| flags.split_whitespace().any(|flag| flag == "um" || flag == "ui"))
}

/// Nothing was discarded on the way, and nothing of the way is left.
#[track_caller]
fn assert_in_its_pages(vmm: &Vmm) {
    let held = memory_of_pool(vmm.pid()).blocks() * 512;
    assert_eq!(held, 192 * MIB, "memory that the pool had populated is gone");
    assert!(!is_watched(vmm), "accesses are still caught");
}

/// Ends the VM, whose memory comes back to the pool with nothing of the guest left.
fn end(vmm: Vmm, pool: &Pool) {
    vmm.shut_down();
    pool.wait_until_ready();
    assert_eq!(pool.count("not_zero_total", "") + pool.count("unproved_total", ""), 0);
}

/// How a VM arrives.
#[derive(Clone, Copy)]
struct Way {
    mode: Mode,
    /// More of the source's options.
    send: &'static str,
    /// More of the destination's.
    receive: &'static str,
}

fn only_root_traces(way: Way) {
    if way.receive.contains("sigbus") && !is_root() {
        skip("fault_source=sigbus needs CAP_BPF and CAP_PERFMON");
    }
}

/// Moves a VM to a new VMM with memory of the pool.
fn into(pool: &Pool, source: Vmm, way: Way) -> Vmm {
    let Way { mode, send, receive } = way;
    let destination = Vmm::empty();
    let more = option(pool) + receive;
    let reception = Reception::start_with(&destination, Transport::Tcp, mode, &more);
    migrate_to(reception, source, &destination, |url| match send {
        SWITCHES | SWITCHES_OVER_FOUR => format!("destination_url={url},memory_mode=auto{send}"),
        _ => send_option(url, mode) + send,
    });
    destination.wait_for_event("prezeroed-taken");
    let progress = destination.api().get("vm.migration-progress").ok().json();
    match receive.strip_prefix(",fault_source=") {
        Some(faults) => assert_eq!(progress["faults"]["source"], faults, "{progress}"),
        None => assert!(progress["faults"]["source"].is_null(), "{progress}"),
    }
    destination
}

/// Without anything of the pool's memory on the way back to it.
fn in_transparent_pages(way: Way) -> Vmm {
    let pool = pool("thp");
    let source = Vmm::boot(2, "size=192M,shared=on", WORK);
    source.wait_for_work(5_000);
    let destination = into(&pool, source, way);
    destination.wait_for_work(20_000);
    destination.verify();
    assert_in_its_pages(&destination);
    destination
}

/// The source has memory of its own.
fn arrives(pages: &str, memory: &str, way: Way) {
    let pool = pool(pages);
    let source = Vmm::boot(2, memory, WORK);
    source.wait_for_work(5_000);
    let destination = into(&pool, source, way);
    assert_eq!(pool.slots("lent"), 1);
    destination.wait_for_work(20_000);
    destination.verify();
    assert_in_its_pages(&destination);
    // The guest after a reboot is in it as well.
    destination.api().put("vm.reboot", "").ok();
    destination.wait_for_work(2_000);
    destination.verify();
    assert_eq!((pool.slots("lent"), pool.count("grants_total", "")), (1, 1));
    end(destination, &pool);
}

/// Pages that were on the way come again, into memory in which a part of them is.
fn cuts(way: Way) {
    let pool = pool("thp");
    let receiving = option(&pool) + way.receive;
    postcopy::soak(3, way.mode, &receiving, |vmm| {
        // Another one may have come before the slot of the first was ready again.
        if vmm.events().iter().any(|event| event["event"] == "prezeroed-taken") {
            assert_in_its_pages(vmm);
        }
    });
    assert!(pool.count("grants_total", "") > 0, "it was in other memory");
    pool.wait_until_ready();
    assert_eq!(pool.count("not_zero_total", "") + pool.count("unproved_total", ""), 0);
}

/// The configuration names a pool, which the request says to do without.
fn off() {
    let pool = pool("4K");
    let memory = format!("size=192M,thp=off{}", pool.option());
    let source = Vmm::boot(1, &memory, WORK);
    source.wait_for_work(5_000);
    assert_eq!(pool.slots("lent"), 1);
    let destination = Vmm::empty();
    let more = ",prezeroed=off";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, more);
    migrate_to(reception, source, &destination, |url| send_option(url, Mode::Precopy));
    pool.wait_until_ready();
    destination.wait_for_work(5_000);
    destination.verify();
    let config = destination.api().get("vm.info").ok().json()["config"].clone();
    assert!(config["memory"]["prezeroed"].is_null(), "{config}");
    destination.shut_down();
    assert_eq!(pool.count("grants_total", ""), 1);
}

/// A pool that the source's configuration names needs a rule, and one that the request names does not.
fn rules() {
    let pool = pool("4K");
    let source = Vmm::boot(1, &format!("size=192M,thp=off{}", pool.option()), WORK);
    source.wait_for_work(2_000);
    let destination = Vmm::empty();
    let none = ",allow=[/nowhere:disk,tty:console,/:payload]";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, none);
    let sent =
        source.remote(&["send-migration", "--wait", &send_option(&reception.url, Mode::Precopy)]);
    assert_eq!(sent.status.code(), Some(1), "{sent:?}");
    assert!(!reception.finish().status.success());
    let told = destination.output();
    assert!(told.contains("pool of memory"), "{told}");
    let other = self::pool("4K");
    let more = format!("{none}{}", option(&other));
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, &more);
    migrate_to(reception, source, &destination, |url| send_option(url, Mode::Precopy));
    assert_eq!(other.slots("lent"), 1);
    destination.wait_for_work(2_000);
    destination.verify();
    end(destination, &other);
}

fn cancelled(mode: Mode) {
    let pool = pool("4K");
    let source = Vmm::boot(2, "size=192M,thp=off,shared=on", "workload=random-write mem=128M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let reception = Reception::start_with(&destination, Transport::Tcp, mode, &option(&pool));
    let slow = format!(
        "destination_url={},memory_mode={},bandwidth=8M,timeout_s=600",
        reception.url,
        mode.name()
    );
    source.remote_ok(&["send-migration", &slow]);
    wait_for("memory that has arrived", || {
        let progress = destination.api().get("vm.migration-progress").ok().json();
        let received = progress["memory_bytes_received"].as_u64();
        received.is_some_and(|bytes| bytes > 4 * MIB).then_some(())
    });
    assert_eq!(pool.slots("lent"), 1);
    source.remote_ok(&["migration-cancel"]);
    assert!(!reception.finish().status.success());
    // The VMM that wanted to receive goes on, without it.
    pool.wait_until_ready();
    assert_eq!(pool.count("not_zero_total", "") + pool.count("unproved_total", ""), 0);
    source.wait_for_work(2_000);
    source.verify();
    source.shut_down();
    destination.shut_down();
}

fn restored() {
    let (_folder, url) = place();
    let mut saved = source("size=192M,thp=off", "mem=64M");
    save(&saved, &url);
    saved.signal(libc::SIGKILL);
    saved.wait_for_exit();
    let pool = pool("4K");
    for mode in ["copy", "ondemand"] {
        let restored = Vmm::empty();
        let from = format!("source_url={url},memory_restore_mode={mode}{}", option(&pool));
        restored.remote_ok(&["restore", &from]);
        assert_eq!(pool.slots("lent"), 1, "{mode}");
        restored.remote_ok(&["resume"]);
        restored.wait_for_work(5_000);
        if mode == "ondemand" {
            restored.wait_for_event("restore-memory-completed");
        }
        restored.verify();
        assert_eq!(memory_of_pool(restored.pid()).blocks() * 512, 192 * MIB, "{mode}");
        end(restored, &pool);
    }
}
