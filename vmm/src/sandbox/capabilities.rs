// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Capabilities: which of them a process keeps, on which of its threads, and what for.
//!
//! Owns the table of what is kept and when all else is dropped: by the process as it begins, on its only thread, and by
//! each thread as it starts. Capabilities belong to threads, and a thread has at most those of the one that started it;
//! so a kind keeps what it needs itself and what the kinds need that it starts. Must never give a thread a capability
//! that the process was not started with.

use std::fs::File;
use std::io;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities,
};

use super::table::{BUILDERS, KINDS, Kind, MAX_KINDS};

/// How long a thread needs a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// As long as it runs.
    Life,
    /// Until its body begins.
    Start,
}

/// What makes a capability unnecessary on a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unless {
    /// Whether that is so; asked as the process begins.
    holds: fn() -> bool,
    /// The same in words.
    #[cfg_attr(not(test), expect(dead_code, reason = "what the page of the sandbox shows"))]
    pub(super) text: &'static str,
}

/// A capability that some threads keep.
#[derive(Debug)]
pub(super) struct Need {
    pub(super) capability: CapabilitySet,
    /// Threads that need it for what they do themselves.
    pub(super) threads: &'static [&'static [&'static str]],
    pub(super) span: Span,
    pub(super) unless: Option<Unless>,
    /// What they need it for.
    #[cfg_attr(not(test), expect(dead_code, reason = "what the page of the sandbox shows"))]
    pub(super) why: &'static str,
}

/// Threads that make or remove what has a path, besides [`BUILDERS`].
const REMOVING: &[&str] = &[
    "main",
    "http-server",
    "metrics-server",
    "put-back",
    "snapshot-write",
    "mig-hand-on",
    "mig-linger",
    "page-server",
    "serve",
    "prezero-pool",
];

/// Threads that only open what has a path, or connect to it.
const OPENING: &[&str] = &[
    "vfio-open",
    "drop-cache",
    "write-back",
    "disk-writer",
    "mig-connect",
    "mig-check",
    "mig-verdict",
    "device-vsock",
];

/// Threads that map guest memory for devices, besides [`BUILDERS`]; a vCPU does so for a balloon that its guest resets,
/// and while it waits for the devices that its guest starts.
const MAPPING: &[&str] = &[
    "main",
    "vcpu",
    "vfio-open",
    "pin",
    "prefault",
    "device-balloon",
    "device-mem",
    "prezero-pool",
    "zeroer",
];

/// What is kept. All that is not here is dropped.
pub(super) static NEEDS: &[Need] = &[
    Need {
        capability: CapabilitySet::DAC_OVERRIDE,
        threads: &[BUILDERS, REMOVING, OPENING],
        span: Span::Life,
        unless: None,
        why: "files, device nodes, directories and sockets of other users, for a process that runs as root: images, \
            snapshots, sockets of back ends and of the host's end of a vsock device",
    },
    Need {
        capability: CapabilitySet::DAC_READ_SEARCH,
        threads: &[BUILDERS, REMOVING, OPENING],
        span: Span::Life,
        unless: None,
        why: "the same for reading, where a process is given no more",
    },
    Need {
        capability: CapabilitySet::FOWNER,
        threads: &[BUILDERS, REMOVING],
        span: Span::Life,
        unless: None,
        why: "removing a socket that another user has left in a directory such as `/tmp`",
    },
    Need {
        capability: CapabilitySet::NET_ADMIN,
        threads: &[BUILDERS, &["main"]],
        span: Span::Life,
        unless: None,
        why: "making, opening and configuring taps, also by hot-plug, and opening again what has been in another \
            process",
    },
    Need {
        capability: CapabilitySet::NET_BIND_SERVICE,
        threads: &[&["main", "migration-recv"]],
        span: Span::Life,
        unless: None,
        why: "receiving a migration at a port below 1024",
    },
    Need {
        capability: CapabilitySet::IPC_LOCK,
        threads: &[BUILDERS, MAPPING, &["device-start"]],
        span: Span::Life,
        unless: None,
        why: "mapping guest memory for devices beyond `RLIMIT_MEMLOCK`, also by hot-plug, and as a balloon or memory \
            device gives memory back to the guest; rings of disks before Linux 5.12",
    },
    Need {
        capability: CapabilitySet::BPF,
        threads: &[&["main"]],
        span: Span::Life,
        unless: None,
        why: "loading the program that traces faults, for each migration that is received with `fault_source=sigbus`; \
            vCPUs read what it has recorded without (kernels before 5.19 may forbid that: then the migration is refused \
            before it begins)",
    },
    Need {
        capability: CapabilitySet::PERFMON,
        threads: &[&["main"]],
        span: Span::Life,
        unless: None,
        why: "the same program",
    },
    Need {
        capability: CapabilitySet::SYS_NICE,
        threads: &[&["mig-faults", "mig-urgent"]],
        span: Span::Start,
        unless: None,
        why: "real-time priority of the threads that resolve faults",
    },
    Need {
        capability: CapabilitySet::SYS_PTRACE,
        threads: &[&["migration-recv", "mig-build", "mig-check", "restore", "restore-wait"]],
        span: Span::Life,
        unless: Some(Unless {
            holds: has_userfaultfd_device,
            text: "the process can open `/dev/userfaultfd` when it begins (Linux 6.1)",
        }),
        why: "making a userfaultfd by the system call, for postcopy and on-demand restore",
    },
];

fn has_userfaultfd_device() -> bool {
    File::options().read(true).write(true).open("/dev/userfaultfd").is_ok()
}

/// What a thread of a kind has while its body runs, on a host where nothing makes a capability unnecessary.
pub(super) fn kept(kind: &Kind) -> CapabilitySet {
    let family = kind.family();
    let is_kept = |need: &&Need| {
        family.iter().any(|member| {
            let needs = need.threads.iter().copied().flatten().any(|name| *name == member.name);
            needs && (need.span == Span::Life || member.name != kind.name)
        })
    };
    NEEDS.iter().filter(is_kept).fold(CapabilitySet::empty(), |set, need| set | need.capability)
}

/// What this host makes unnecessary.
pub(super) fn unnecessary() -> CapabilitySet {
    let holds = |need: &&Need| need.unless.is_some_and(|unless| (unless.holds)());
    NEEDS.iter().filter(holds).fold(CapabilitySet::empty(), |set, need| set | need.capability)
}

/// What a kind keeps, found when its first thread starts.
static OF_KINDS: [OnceLock<CapabilitySet>; MAX_KINDS] = [const { OnceLock::new() }; MAX_KINDS];

/// Drops what is not in `kept` from the sets of the calling thread. The kernel takes from its ambient set what is then
/// neither permitted nor inheritable.
fn limit(kept: CapabilitySet) -> io::Result<()> {
    let sets = capabilities(None)?;
    let less = CapabilitySets {
        effective: sets.effective & kept,
        permitted: sets.permitted & kept,
        inheritable: sets.inheritable & kept,
    };
    if less == sets { Ok(()) } else { Ok(set_capabilities(None, less)?) }
}

/// Drops what no thread of this process needs, whose first thread is of the `index`th kind. To be called while it is
/// the only one. With `bounding` also from the bounding set: a page server keeps that of the VMM that started it, whose
/// filters let no process change it.
///
/// # Errors
/// The kernel's; the process must not go on.
pub(super) fn limit_process(index: usize, bounding: bool) -> io::Result<()> {
    let Some(kind) = KINDS.get(index) else { return Ok(()) };
    let kept = kept(kind) - unnecessary();
    if bounding {
        limit_bounding_set(kept)?;
    }
    limit(kept)
}

/// Takes from the bounding set what is not in `kept`. Without the privilege for that it stays as it is, and then gives
/// nothing either: the process gains no capability by executing a program (no_new_privs).
fn limit_bounding_set(kept: CapabilitySet) -> io::Result<()> {
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // The kernel has no more, or the process may not.
            Err(Errno::INVAL | Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Drops what the calling thread does not need, which is of the `index`th kind.
///
/// # Errors
/// The kernel's; the thread must not go on.
pub(super) fn limit_thread(index: usize) -> io::Result<()> {
    let (Some(kind), Some(kept_by_kind)) = (KINDS.get(index), OF_KINDS.get(index)) else {
        return Ok(());
    };
    limit(*kept_by_kind.get_or_init(|| kept(kind)))
}
