// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the table of capabilities gives to whom, and processes that have dropped theirs.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeSet;
use std::sync::mpsc::channel;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities,
};

use super::capabilities::{NEEDS, Span, kept, limit_process, unnecessary};
use super::table::{BUILDERS, KINDS, Kind};
use super::*;
use crate::testing::again;

const MODE_OF_TEST: &str = "GODWIT_TEST_CAPABILITIES";

fn kind(name: &str) -> &'static Kind {
    Kind::of_thread(name).unwrap().1
}

/// Kinds that may make a call, by their own groups.
fn with_own_group(name: &str) -> impl Iterator<Item = &'static Kind> {
    KINDS.iter().filter(move |kind| kind.groups.iter().any(|group| group.name == name))
}

#[test]
fn each_capability_is_there_once_with_threads_and_a_reason() {
    let kinds: BTreeSet<_> = KINDS.iter().map(|kind| kind.name).collect();
    let mut all = CapabilitySet::empty();
    for need in NEEDS {
        assert_eq!(need.capability.bits().count_ones(), 1, "{need:?}");
        assert!(!all.intersects(need.capability), "{need:?} is there twice");
        assert!(!need.why.is_empty() && need.threads.iter().copied().flatten().count() > 0);
        for thread in need.threads.iter().copied().flatten() {
            assert!(kinds.contains(thread), "{need:?}: {thread} is no kind");
        }
        all |= need.capability;
    }
    // Any of these is all of root's power.
    for never in [
        CapabilitySet::SYS_ADMIN,
        CapabilitySet::SYS_MODULE,
        CapabilitySet::SYS_RAWIO,
        CapabilitySet::SETUID,
        CapabilitySet::SETPCAP,
        CapabilitySet::MKNOD,
        CapabilitySet::CHOWN,
        CapabilitySet::NET_RAW,
    ] {
        assert!(!all.intersects(never), "{never:?}");
    }
    assert_eq!(kept(kind("main")), all, "the first thread starts all others");
}

/// A capability without a call that it is for would be there for an attacker alone.
#[test]
fn each_thread_has_a_group_that_its_capability_is_for() {
    let paths = ["open", "names", "local sockets", "paths of sockets"].as_slice();
    let uses = [
        (CapabilitySet::DAC_OVERRIDE, paths),
        (CapabilitySet::DAC_READ_SEARCH, paths),
        (CapabilitySet::FOWNER, &["names", "paths of sockets"]),
        (CapabilitySet::NET_ADMIN, &["taps"]),
        (CapabilitySet::NET_BIND_SERVICE, &["internet sockets"]),
        (CapabilitySet::IPC_LOCK, &["vfio", "memory", "ring"]),
        (CapabilitySet::BPF, &["fault trace"]),
        (CapabilitySet::PERFMON, &["fault trace"]),
        (CapabilitySet::SYS_NICE, &["scheduling"]),
        (CapabilitySet::SYS_PTRACE, &["memory"]),
    ];
    assert_eq!(uses.len(), NEEDS.len());
    for need in NEEDS {
        let (_, groups) =
            uses.iter().find(|(capability, _)| *capability == need.capability).unwrap();
        for name in need.threads.iter().copied().flatten() {
            let is_used = kind(name).groups.iter().any(|group| groups.contains(&group.name));
            assert!(is_used, "{name} has no call that {:?} is for", need.capability);
        }
    }
}

#[test]
fn threads_that_face_a_guest_or_a_peer_have_only_what_is_listed() {
    let lock = CapabilitySet::IPC_LOCK;
    let excepted = [
        ("vcpu", lock),
        ("device-balloon", lock),
        ("device-mem", lock),
        ("device-vsock", CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH),
    ];
    let faces = |kind: &&Kind| {
        let name = kind.name;
        name == "vcpu" || name.starts_with("device-") && name != "device-start"
    };
    let found: Vec<_> = KINDS
        .iter()
        .filter(faces)
        .map(|kind| (kind.name, kept(kind)))
        .filter(|(_, kept)| !kept.is_empty())
        .collect();
    assert_eq!(found.len(), excepted.len(), "{found:?}");
    for (name, set) in excepted {
        assert!(found.contains(&(name, set)), "{name}: {found:?}");
    }
    for name in [
        "mig-receive",
        "mig-pages",
        "mig-faults",
        "mig-urgent",
        "mig-send",
        "mig-state",
        "mig-bulk",
        "mig-look",
        "mig-prepare",
        "mig-resolve",
        "mig-alive",
        "restore-fault",
        "vfio-user",
        "vfio-events",
        "vhost-requests",
        "tpm",
        "serial",
        "console-out",
        "throttle",
        "stage2-fill",
        "log",
        "event-monitor",
    ] {
        assert_eq!(kept(kind(name)), CapabilitySet::empty(), "{name}");
    }
    let bpf = CapabilitySet::BPF | CapabilitySet::PERFMON;
    let with_bpf: Vec<_> =
        KINDS.iter().filter(|kind| kept(kind).intersects(bpf)).map(|kind| kind.name).collect();
    assert_eq!(with_bpf, ["main"]);
    let loading: Vec<_> = with_own_group("fault trace").map(|kind| kind.name).collect();
    assert_eq!(loading, ["main"]);
}

#[test]
fn a_thread_has_what_the_threads_need_that_it_starts() {
    for kind in KINDS {
        let own = kept(kind);
        for started in kind.family() {
            assert!(own.contains(kept(started)), "{} starts {}", kind.name, started.name);
            for need in NEEDS.iter().filter(|need| need.span == Span::Start) {
                let needs =
                    need.threads.iter().copied().flatten().any(|name| *name == started.name);
                assert!(
                    !needs || started.name == kind.name || own.contains(need.capability),
                    "{} starts {}",
                    kind.name,
                    started.name
                );
            }
        }
        let may_drop = kind.calls().any(|call| call.number == libc::SYS_capset);
        assert_eq!(may_drop, !kind.starts.is_empty(), "{}", kind.name);
    }
}

/// What a thread may call says what it may need a capability for; each exception with the reason why it needs none.
#[test]
fn who_may_open_configure_or_map_has_the_capability_for_it() {
    let lacks = |group: &str, capability: CapabilitySet| -> BTreeSet<&str> {
        with_own_group(group)
            .filter(|kind| !kept(kind).contains(capability))
            .map(|kind| kind.name)
            .collect()
    };
    let builders: BTreeSet<_> = with_own_group("taps")
        .filter(|kind| kind.groups.iter().any(|group| group.name == "open"))
        .map(|kind| kind.name)
        .collect();
    let others = ["main", "page-server", "prezero-pool"];
    let listed: BTreeSet<_> = BUILDERS.iter().chain(&others).copied().collect();
    assert_eq!(builders, listed);
    // These open what belongs to the host, in /dev, /proc and /sys, and what any user may read.
    let of_the_host = ["mig-resolve", "pin", "prefault", "zeroer"];
    assert_eq!(lacks("open", CapabilitySet::DAC_OVERRIDE), BTreeSet::from(of_the_host));
    // They have the groups of `main`, and no network device.
    let net = lacks("taps", CapabilitySet::NET_ADMIN);
    assert_eq!(net, BTreeSet::from(["page-server", "prezero-pool"]));
    assert_eq!(lacks("names", CapabilitySet::FOWNER), BTreeSet::from(["zeroer"]));
    assert_eq!(
        lacks("local sockets", CapabilitySet::DAC_OVERRIDE),
        BTreeSet::from(["mig-resolve"])
    );
}

/// Runs the test of this name in a process of its own, with `mode`; what it has printed.
fn run(test: &str, mode: SeccompMode) -> String {
    let mut command = again(&format!("sandbox::capabilities_tests::{test}"));
    let done = command.env(MODE_OF_TEST, mode.text()).env_remove("RUST_MIN_STACK").output();
    let done = done.unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{text} {done:?}");
    text
}

/// The mode, in the process that [`run`] starts.
fn mode_of_test() -> Option<SeccompMode> {
    std::env::var(MODE_OF_TEST).ok().map(|text| SeccompMode::parse(&text))
}

/// A thread's capabilities in any of its sets, and its bounding set.
fn status_of(thread: &str) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let set = |name: &str| {
        let text = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(text.trim(), 16).unwrap()
    };
    let sets = ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"];
    (sets.into_iter().map(set).fold(0, |all, set| all | set), set("CapBnd:"))
}

/// What a thread of a kind has while its body runs, in any set.
fn of_thread(kind: &str, before_hook: fn()) -> u64 {
    let (tell, told) = channel();
    let (end, ended) = channel::<()>();
    let body = move || {
        // SAFETY: takes nothing and cannot fail.
        tell.send(unsafe { libc::gettid() }).unwrap();
        let _ = ended.recv();
    };
    let thread = stoppable_thread::Builder::new(kind).before_hook(before_hook).spawn(body);
    let (found, _) = status_of(&told.recv().unwrap().to_string());
    drop(end);
    thread.unwrap().join().unwrap();
    found
}

/// Kinds that `main` starts, or what it has started.
const LOOKED_AT: [&str; 5] = ["open-device", "vcpu", "device-net", "mig-urgent", "throttle"];

/// What a process and its threads have after the start of the sandbox.
fn begun_and_looked_at(mode: SeccompMode) {
    // As a management program might have left it.
    let all = capabilities(None).unwrap();
    set_capabilities(None, CapabilitySets { inheritable: all.permitted, ..all }).unwrap();
    let ambient = CapabilitySet::SYS_CHROOT | CapabilitySet::DAC_OVERRIDE;
    for capability in (all.permitted & ambient).iter() {
        configure_capability_in_ambient_set(capability, true).unwrap();
    }
    begin(Process::Vmm, mode).unwrap();
    // SAFETY: takes nothing and cannot fail.
    let (main, bounding) = status_of(&unsafe { libc::gettid() }.to_string());
    println!("bounding {bounding:x}\nmain {main:x}");
    for kind in LOOKED_AT {
        let early = || println!("early {:x}", capabilities(None).unwrap().effective.bits());
        println!("{kind} {:x}", of_thread(kind, early));
    }
}

#[test]
fn a_process_and_its_threads_drop_what_they_do_not_need() {
    if let Some(mode) = mode_of_test() {
        return begun_and_looked_at(mode);
    }
    let test = "a_process_and_its_threads_drop_what_they_do_not_need";
    let text = run(test, SeccompMode::Enforce);
    let found = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        CapabilitySet::from_bits_retain(u64::from_str_radix(value.unwrap(), 16).unwrap())
    };
    // Without privileges there is nothing to be seen, and nothing goes wrong either.
    let given = capabilities(None).unwrap();
    let left = |name: &str| given.permitted & (kept(kind(name)) - unnecessary());
    assert_eq!(found("main"), left("main"), "{text}");
    for kind in LOOKED_AT {
        assert_eq!(found(kind), left(kind), "{kind}: {text}");
    }
    assert_eq!(found("early"), left("main") & given.effective, "before the hook: {text}");
    if given.effective.contains(CapabilitySet::SETPCAP) {
        let (_, bounding) = status_of(&std::process::id().to_string());
        let bounding = CapabilitySet::from_bits_retain(bounding);
        assert_eq!(found("bounding"), bounding & (kept(kind("main")) - unnecessary()), "{text}");
    }
    let text = run(test, SeccompMode::Off);
    assert!(text.contains(&format!("\nmain {:x}\n", given.permitted.bits())), "{text}");
    assert!(text.contains(&format!("\nthrottle {:x}\n", given.permitted.bits())), "{text}");
}

#[test]
fn no_thread_without_threads_of_its_own_changes_its_capabilities() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        let ask = || {
            crate::signals::block_signals();
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets).map_err(Errno::raw_os_error)
        };
        println!("leaf {:?}", stoppable_thread::spawn("throttle", ask).unwrap().join().unwrap());
        let drop = || remove_capability_from_bounding_set(CapabilitySet::CHOWN);
        println!("bounding {:?}", drop().map_err(Errno::raw_os_error));
        return;
    }
    let test = "no_thread_without_threads_of_its_own_changes_its_capabilities";
    let text = run(test, SeccompMode::Errno);
    let refused = format!("Err({})", libc::EPERM);
    assert!(text.contains(&format!("leaf {refused}")), "{text}");
    assert!(text.contains(&format!("bounding {refused}")), "{text}");
}

/// A page server begins under the filters of the VMM that starts it.
#[test]
fn a_page_server_can_drop_the_rest_of_what_it_is_given() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        let again = || {
            let (index, _) = Kind::of_thread("page-server").unwrap();
            limit_process(index, false).unwrap();
            capabilities(None).unwrap().permitted.bits()
        };
        let left = stoppable_thread::spawn("migration-send", again).unwrap().join().unwrap();
        println!("left {left:x}");
        return;
    }
    let text = run("a_page_server_can_drop_the_rest_of_what_it_is_given", SeccompMode::Enforce);
    let left = capabilities(None).unwrap().permitted & kept(kind("page-server"));
    assert!(text.contains(&format!("left {:x}\n", left.bits())), "{text}");
}
