// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of the sandbox: each kind of thread, the groups of system calls that it has, and the threads that it
//! starts.
//!
//! Owns who may call what. A thread inherits the filters of the thread that started it and can only add to them, so
//! what a kind may call is what it has itself and what the kinds have that it starts. It must never name a kind that
//! does not exist in `docs/architecture.md`.

use super::calls::{
    CONNECTIONS, Call, DISKS, END_PAGE_SERVER, FAULT_TRACE, FILES, Group, INTERNET_SOCKETS,
    KVM_CREATION, KVM_REQUESTS, LANDLOCK, LOCAL_SOCKETS, MEMORY, NAMES, OPEN, PROCESS,
    PSEUDOTERMINALS, RESOLVER, RING, RUNTIME, SCHEDULING, START_PAGE_SERVER, TAPS, TAPS_AGAIN,
    TIMERS, VFIO_REQUESTS,
};

/// Threads that may call the same.
#[derive(Debug)]
pub(super) struct Kind {
    /// Name of the kind: what the start hook gets, without a number.
    pub(super) name: &'static str,
    /// What it has beside [`RUNTIME`].
    pub(super) groups: &'static [&'static Group],
    /// Kinds that it starts.
    pub(super) starts: &'static [&'static [&'static str]],
    /// What it does that needs these groups.
    #[cfg_attr(not(test), expect(dead_code, reason = "what the page of the sandbox shows"))]
    pub(super) why: &'static str,
}

/// Threads of virtio devices.
const DEVICES: &[&str] = &[
    "device-block",
    "device-net",
    "device-console",
    "device-balloon",
    "device-mem",
    "device-rng",
    "device-vsock",
    "device-watchdog",
];

/// Other threads that a device of a machine has.
const BESIDE_DEVICES: &[&str] = &["serial", "console-out", "announce", "vfio-unmask"];

/// Other threads that belong to a machine.
const OF_MACHINE: &[&str] = &[
    "vcpu",
    "prefault",
    "pin",
    "vfio-open",
    "vfio-notices",
    "stage2-fill",
    "huge-pages",
    "throttle",
    "write-back",
    "give-back",
    "open-device",
];

/// What a thread starts that makes a machine, changes it or goes on with it.
const MACHINE: &[&[&str]] = &[DEVICES, BESIDE_DEVICES, OF_MACHINE];

/// What building, changing and ending a machine needs.
const BUILD: &[&Group] = &[
    &KVM_REQUESTS,
    &KVM_CREATION,
    &VFIO_REQUESTS,
    &MEMORY,
    &OPEN,
    &FILES,
    &NAMES,
    &RING,
    &CONNECTIONS,
    &LOCAL_SOCKETS,
    &INTERNET_SOCKETS,
    &SCHEDULING,
    &TAPS,
    &DISKS,
    &FAULT_TRACE,
    &PSEUDOTERMINALS,
    &PROCESS,
    &TIMERS,
];

/// The same for a thread that confines itself to the paths of the configuration first.
const CONFINE_AND_BUILD: &[&Group] = &{
    let mut all: [&Group; BUILD.len() + 1] = [&LANDLOCK; BUILD.len() + 1];
    let mut at = 0;
    while at < BUILD.len() {
        all[at] = BUILD[at];
        at += 1;
    }
    all
};

/// What moving pages over connections needs.
const MOVE: &[&Group] =
    &[&CONNECTIONS, &MEMORY, &OPEN, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING];

macro_rules! kinds {
    ($($name:literal: $groups:expr, starts $starts:expr, $why:literal;)*) => {
        &[$(Kind { name: $name, groups: $groups, starts: $starts, why: $why }),*]
    };
}

/// Each kind of thread.
pub(super) static KINDS: &[Kind] = kinds! {
    "main": CONFINE_AND_BUILD, starts &[&["http-server", "vm-boot", "vm-reboot", "vm-shutdown", "vm-delete",
        "pause", "open-device", "give-back", "write-back", "log", "event-monitor", "put-back",
        "end", "print-error", "migration-send", "migration-recv", "snapshot", "restore",
        "restore-wait", "disk-writer"]],
        "the VMM thread, and `main` of the process: what it starts is all that is started";
    "log": &[&FILES], starts &[], "writes lines to a file or a pipe";
    "event-monitor": &[&FILES, &CONNECTIONS], starts &[],
        "writes events to a file, a pipe or a socket";
    "put-back": &[], starts &[], "removes a socket's path, puts terminals back";
    "end": &[], starts &[], "ends the process in time";
    "print-error": &[], starts &[], "prints why the process ends";
    "http-server": &[&CONNECTIONS, &FILES], starts &[],
        "serves connections, with the descriptors that come along";
    "vcpu": &[
        &KVM_REQUESTS, &VFIO_REQUESTS, &MEMORY, &RING, &FILES, &CONNECTIONS, &TAPS, &DISKS,
        &SCHEDULING, &FAULT_TRACE,
        &PSEUDOTERMINALS, &TIMERS,
    ], starts &[DEVICES, BESIDE_DEVICES],
        "runs a vCPU; what its guest asks of devices: a queue that starts, offloads, registers of passed-through \
        devices, memory that is given up";
    "device-block": &[&RING, &FILES, &DISKS, &SCHEDULING, &MEMORY], starts &[], "a disk";
    "device-net": &[&TAPS_AGAIN, &SCHEDULING, &CONNECTIONS], starts &[&["announce"]],
        "a network card and its control queue";
    "device-console": &[&CONNECTIONS, &FILES, &SCHEDULING], starts &[&["console-out"]],
        "a console and its endpoint";
    "device-balloon": &[&MEMORY, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING, &TIMERS],
        starts &[],
        "gives memory up and takes it back, also from devices";
    "device-mem": &[&MEMORY, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING], starts &[],
        "plugs memory and unplugs it, also from devices";
    "device-vsock": &[&CONNECTIONS, &LOCAL_SOCKETS, &TIMERS, &FILES, &SCHEDULING], starts &[],
        "carries connections, and connects to sockets of the host for the guest";
    "device-watchdog": &[&TIMERS, &SCHEDULING], starts &[], "waits for a guest that is stuck";
    "device-rng": &[&FILES, &SCHEDULING, &MEMORY], starts &[], "reads random bytes";
    "serial": &[&CONNECTIONS, &FILES], starts &[&["console-out"]], "input of the serial port";
    "console-out": &[&CONNECTIONS, &FILES], starts &[],
        "output that a terminal does not take at once";
    "announce": &[&KVM_REQUESTS, &CONNECTIONS], starts &[], "announces a guest that has arrived";
    "prefault": &[&MEMORY, &VFIO_REQUESTS, &KVM_REQUESTS, &OPEN, &FILES, &SCHEDULING],
        starts &[],
        "populates guest memory, and maps each chunk for devices";
    "pin": &[&MEMORY, &VFIO_REQUESTS, &KVM_REQUESTS, &OPEN, &FILES, &SCHEDULING],
        starts &[&["prefault"]],
        "populates guest memory and maps it for devices";
    "vfio-open": &[&VFIO_REQUESTS, &KVM_REQUESTS, &KVM_CREATION, &MEMORY, &OPEN, &FILES, &SCHEDULING,
        &CONNECTIONS],
        starts &[&["vfio-notices", "vfio-unmask", "pin", "prefault"]],
        "opens passed-through devices";
    "vfio-notices": &[&VFIO_REQUESTS, &KVM_REQUESTS, &FILES], starts &[],
        "errors and requests of the host";
    "vfio-unmask": &[&VFIO_REQUESTS, &KVM_REQUESTS], starts &[], "INTx";
    "stage2-fill": &[&KVM_REQUESTS, &SCHEDULING, &MEMORY], starts &[], "fills second-stage tables";
    "huge-pages": &[&MEMORY, &SCHEDULING, &OPEN], starts &[], "collapses memory into huge pages";
    "throttle": &[&KVM_REQUESTS, &SCHEDULING], starts &[], "slows vCPUs down";
    "write-back": &[&FILES, &OPEN, &DISKS, &RING], starts &[], "writes images back";
    "give-back": BUILD, starts MACHINE, "drops a machine that was not wanted any more";
    "open-device": BUILD, starts MACHINE, "opens what is behind a device";
    "vm-boot": CONFINE_AND_BUILD, starts MACHINE, "builds a machine";
    "vm-reboot": BUILD, starts MACHINE, "ends a machine and builds the next";
    "vm-shutdown": BUILD, starts MACHINE, "ends a machine";
    "vm-delete": BUILD, starts MACHINE, "ends a machine";
    "pause": BUILD, starts MACHINE, "pauses a machine and writes its images back";
    "disk-writer": &[&FILES, &OPEN, &DISKS, &RING, &SCHEDULING], starts &[], "writes images back";
    "snapshot": BUILD, starts &[&["snapshot-write", "snapshot-mem", "mig-look", "vcpu",
        "write-back", "disk-writer"]],
        "saves a machine's state";
    "snapshot-write": &[&FILES, &OPEN, &NAMES, &MEMORY, &VFIO_REQUESTS], starts &[&["snapshot-mem",
        "mig-look"]],
        "writes the files of a snapshot";
    "snapshot-mem": &[&FILES, &MEMORY, &OPEN], starts &[], "writes or reads memory";
    "restore": CONFINE_AND_BUILD, starts &[DEVICES, BESIDE_DEVICES, OF_MACHINE, &["restore-fault",
        "restore-fill", "restore-wait", "snapshot-mem", "mig-look"]],
        "builds a machine from a snapshot";
    "restore-fault": MOVE, starts &[], "answers faults from a snapshot";
    "restore-fill": MOVE, starts &[&["mig-look"]], "brings what no fault has asked for";
    "restore-wait": BUILD, starts MACHINE, "waits for a snapshot that is brought on demand";
    "migration-send": &[
        &KVM_REQUESTS, &VFIO_REQUESTS, &MEMORY, &OPEN, &FILES, &NAMES, &RING, &CONNECTIONS,
        &LOCAL_SOCKETS,
        &INTERNET_SOCKETS, &SCHEDULING, &TAPS, &DISKS, &FAULT_TRACE, &PSEUDOTERMINALS, &PROCESS,
        &TIMERS, &START_PAGE_SERVER, &END_PAGE_SERVER,
    ], starts &[DEVICES, BESIDE_DEVICES, &["page-server", "mig-send", "mig-connect", "mig-alive",
        "mig-urgent", "mig-bulk", "mig-verdict", "mig-hand-on", "mig-resolve", "mig-look",
        "disk-writer", "throttle", "vcpu", "write-back", "give-back"]],
        "owns a machine that leaves, and starts the page server, whose calls have to be among its own";
    "migration-recv": CONFINE_AND_BUILD, starts &[DEVICES, BESIDE_DEVICES, OF_MACHINE, &["mig-receive",
        "mig-build", "mig-prepare", "mig-faults", "mig-pages", "mig-urgent", "mig-linger",
        "mig-resolve", "mig-look", "mig-connect", "mig-alive"]], "owns a machine that arrives";
    "mig-send": MOVE, starts &[&["mig-look"]], "sends a part of the memory";
    "mig-connect": &[&CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &OPEN, &FILES],
        starts &[&["mig-resolve"]],
        "opens a connection";
    "mig-alive": &[&CONNECTIONS], starts &[], "tells the peer that this side is there";
    "mig-urgent": MOVE, starts &[&["mig-look"]],
        "sends pages that a fault waits for, or takes them";
    "mig-bulk": MOVE, starts &[&["mig-look"]], "sends the rest";
    "mig-verdict": &[&CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &OPEN, &FILES],
        starts &[&["mig-resolve"]],
        "asks who owns the guest";
    "mig-hand-on": &[
        &CONNECTIONS, &MEMORY, &OPEN, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING,
        &END_PAGE_SERVER,
    ], starts &[], "transfers the rest to the page server, or ends it where that fails";
    "mig-resolve": &[&RESOLVER, &CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &OPEN, &FILES],
        starts &[],
        "looks a host's name up";
    "mig-look": MOVE, starts &[], "looks at a condition beside other work";
    "mig-receive": MOVE, starts &[&["mig-look"]], "takes a part of the memory";
    "mig-build": BUILD, starts MACHINE, "builds the machine";
    "mig-prepare": BUILD, starts MACHINE, "prepares the machine";
    "mig-faults": MOVE, starts &[&["mig-look"]], "reads faults";
    "mig-pages": MOVE, starts &[&["mig-look"]], "takes pages that arrive";
    "mig-linger": MOVE, starts &[&["mig-look"]], "answers a source that comes back late";
    "page-server": BUILD, starts &[&["serve", "http-server", "log", "event-monitor", "put-back",
        "end", "print-error"]],
        "`main` of the page server";
    "serve": &[&CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &MEMORY, &OPEN, &FILES,
        &SCHEDULING], starts &[&["mig-send", "mig-connect", "mig-alive", "mig-urgent", "mig-bulk",
        "mig-verdict", "mig-resolve", "mig-look"]], "sends the last pages of a guest";
    "prezero-pool": BUILD, starts &[&["zeroer", "log", "put-back", "end", "print-error"]],
        "`main` of the daemon: memory, its address space for devices, its sockets";
    "zeroer": &[&MEMORY, &VFIO_REQUESTS, &SCHEDULING, &FILES, &OPEN, &NAMES], starts &[],
        "populates and zeroes memory";
};

impl Kind {
    /// Whether a thread of this kind keeps the filters of the thread that starts it and adds none. `vm-boot` needs
    /// nearly all that `main` has, runs before the guest does, and is on the path to its first instruction: a filter
    /// of this size takes the kernel half a millisecond.
    pub(super) fn adds_no_filter(&self) -> bool {
        self.name == "vm-boot"
    }

    /// The kind of a thread of this name: a name, or one with a number (`vcpu3`, `prefault0.1`).
    pub(super) fn of_thread(name: &str) -> Option<(usize, &'static Kind)> {
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        KINDS.iter().enumerate().find(|(_, kind)| {
            name == kind.name
                || NUMBERED.contains(&kind.name) && name.strip_prefix(kind.name).is_some_and(digits)
        })
    }

    /// This kind and all that it starts, and that those start.
    pub(super) fn family(&self) -> Vec<&'static Kind> {
        let mut family: Vec<&'static Kind> =
            KINDS.iter().filter(|kind| kind.name == self.name).collect();
        let mut at = 0;
        while let Some(kind) = family.get(at) {
            for name in kind.starts.iter().copied().flatten() {
                if let Some(started) = KINDS.iter().find(|kind| kind.name == *name)
                    && !family.iter().any(|known| known.name == started.name)
                {
                    family.push(started);
                }
            }
            at += 1;
        }
        family
    }

    /// What it may call: its own, and what the threads need that it starts.
    pub(super) fn calls(&self) -> impl Iterator<Item = &'static Call> {
        let mut groups: Vec<&'static Group> = vec![&RUNTIME];
        for group in self.family().into_iter().flat_map(|kind| kind.groups) {
            if !groups.iter().any(|known| known.name == group.name) {
                groups.push(group);
            }
        }
        groups.into_iter().flat_map(|group| group.calls)
    }
}

/// Kinds of which there are several, by a number after the name.
const NUMBERED: &[&str] = &["vcpu", "prefault"];
