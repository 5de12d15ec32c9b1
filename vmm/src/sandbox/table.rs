// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of the sandbox: each kind of thread, the groups of system calls that it has, and the threads that it
//! starts.
//!
//! Owns who may call what. A thread inherits the filters of the thread that started it and can only add to them, so
//! what a kind may call is what it has itself and what the kinds have that it starts. It must never name a kind that
//! does not exist in `docs/architecture.md`.

use super::calls::{
    CAPABILITIES, CONNECTIONS, CORE_SCHEDULING, Call, DISKS, END_PAGE_SERVER, FAULT_LOOKUP,
    FAULT_TRACE, FILES, Group, INTERNET_SOCKETS, KERNEL, KVM_CREATION, KVM_REQUESTS, LANDLOCK,
    LEASES, LOCAL_SOCKETS, MEMORY, NAMES, OPEN, PROCESS, PSEUDOTERMINALS, RESOLVER, RING,
    RING_REQUESTS, RUNTIME, SCHEDULING, SET_TIMERS, SOCKET_PATHS, START_PAGE_SERVER, TAP_OF_DRIVER,
    TAPS, TIMERS, UNRECEIVED, VDPA_CONFIG, VDPA_REQUESTS, VFIO_REQUESTS,
};

/// Room for all kinds.
pub(super) const MAX_KINDS: usize = 128;
const _: () = assert!(KINDS.len() <= MAX_KINDS);

/// Threads with the same system calls and capabilities.
#[derive(Debug)]
pub(super) struct Kind {
    /// Name of the kind: what the start hook gets, without a number.
    pub(super) name: &'static str,
    /// What it has in addition to [`RUNTIME`].
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
    "device-image",
    "device-net",
    "device-console",
    "device-balloon",
    "device-iommu",
    "device-mem",
    "device-pmem",
    "device-rng",
    "device-rtc",
    "device-vsock",
    "device-vhost",
    "device-vdpa",
    "device-watchdog",
];

/// Other threads of a machine's devices.
const OTHER_OF_DEVICES: &[&str] = &[
    "device-start",
    "serial",
    "console-out",
    "announce",
    "vfio-unmask",
    "vfio-user",
    "vhost-limit",
    "vhost-requests",
    "tpm",
];

/// Other threads that belong to a machine.
const OF_MACHINE: &[&str] = &[
    "vcpu",
    "core-cookies",
    "prefault",
    "pin",
    "vfio-open",
    "vfio-events",
    "stage2-fill",
    "huge-pages",
    "throttle",
    "write-back",
    "drop-cache",
    "discard-vm",
    "open-device",
    "mig-state",
];

/// Threads started by one that builds, changes or continues a machine.
const MACHINE: &[&[&str]] = &[OTHER_OF_DEVICES, OF_MACHINE];

/// Threads that build, change, continue or end a machine.
pub(super) const BUILDERS: &[&str] = &[
    "discard-vm",
    "open-device",
    "vm-boot",
    "vm-reboot",
    "vm-shutdown",
    "vm-delete",
    "pause",
    "resume",
    "retry",
    "add-device",
    "eject",
    "resize-disk",
    "resize-vcpus",
    "resize-memory",
    "snapshot",
    "restore",
    "restore-wait",
    "migration-send",
    "migration-recv",
    "mig-build",
];

/// Groups that building, changing and ending a machine needs.
const BUILD: &[&Group] = &[
    &KVM_REQUESTS,
    &KVM_CREATION,
    &VFIO_REQUESTS,
    &VDPA_REQUESTS,
    &MEMORY,
    &OPEN,
    &FILES,
    &NAMES,
    &CONNECTIONS,
    &LOCAL_SOCKETS,
    &INTERNET_SOCKETS,
    &SCHEDULING,
    &TAPS,
    &DISKS,
    &PSEUDOTERMINALS,
    &PROCESS,
    &TIMERS,
];

/// The same for a thread that confines itself to the paths of the configuration first.
const CONFINE_AND_BUILD: &[&Group] = &with::<{ BUILD.len() + 1 }>(&LANDLOCK, BUILD);

/// Groups that owning the machine of an incoming migration needs.
const RECEIVE: &[&Group] = &with::<{ CONFINE_AND_BUILD.len() + 1 }>(&UNRECEIVED, CONFINE_AND_BUILD);

/// What `main` needs, which also loads the program that traces faults before it receives a migration.
const OF_MAIN: &[&Group] =
    &with::<{ CONFINE_AND_BUILD.len() + 1 }>(&FAULT_TRACE, CONFINE_AND_BUILD);

/// What the main thread of the pool needs.
const OF_POOL: &[&Group] = &with::<{ BUILD.len() + 1 }>(&LEASES, BUILD);

/// A group, and others after it.
const fn with<const COUNT: usize>(
    first: &'static Group,
    others: &[&'static Group],
) -> [&'static Group; COUNT] {
    let mut all = [first; COUNT];
    let mut at = 0;
    while at < others.len() {
        all[at + 1] = others[at];
        at += 1;
    }
    all
}

/// Groups that transferring pages over connections needs.
const MOVE: &[&Group] =
    &[&CONNECTIONS, &MEMORY, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING];

/// The same for the last owner of an address at which a migration was received.
const LINGER: &[&Group] = &with::<{ MOVE.len() + 1 }>(&SOCKET_PATHS, MOVE);

macro_rules! kinds {
    ($($name:literal: $groups:expr, starts $starts:expr, $why:literal;)*) => {
        &[$(Kind { name: $name, groups: $groups, starts: $starts, why: $why }),*]
    };
}

/// Each kind of thread.
pub(super) static KINDS: &[Kind] = kinds! {
    "main": OF_MAIN, starts &[&["http-server", "metrics-server", "vm-boot", "vm-reboot", "vm-shutdown", "vm-delete",
        "pause", "resume", "retry", "add-device", "eject", "resize-disk", "resize-vcpus", "resize-memory", "open-device", "discard-vm", "write-back", "log", "event-monitor", "put-back",
        "end", "print-error", "migration-send", "migration-recv", "snapshot", "restore",
        "restore-wait", "disk-writer", "trace-probe", "mig-state"]],
        "the VMM thread; it starts all other threads, directly or not";
    "log": &[&FILES], starts &[], "writes lines to a file or a pipe";
    "event-monitor": &[&FILES, &CONNECTIONS], starts &[],
        "writes events to a file, a pipe or a socket";
    "put-back": &[&SOCKET_PATHS], starts &[], "restores terminals and removes socket paths after a panic";
    "end": &[], starts &[], "ends the process at a time limit";
    "core-cookies": &[&CORE_SCHEDULING], starts &[], "keeps vCPUs apart from others on a core";
    "trace-probe": &[&FAULT_LOOKUP, &KVM_REQUESTS, &SCHEDULING], starts &[],
        "looks whether vCPUs may read the trace of faults, and runs one that makes an access which the host refuses";
    "print-error": &[], starts &[], "prints the error with which the process ends";
    "http-server": &[&CONNECTIONS, &FILES, &SOCKET_PATHS], starts &[],
        "serves API connections, and receives the descriptors passed over them";
    "metrics-server": &[&CONNECTIONS, &FILES, &SOCKET_PATHS], starts &[],
        "serves metrics";
    "vcpu": &[
        &KVM_REQUESTS, &VFIO_REQUESTS, &MEMORY, &FILES, &CONNECTIONS, &TAP_OF_DRIVER, &SCHEDULING,
        &FAULT_LOOKUP, &VDPA_CONFIG,
    ], starts &[&["vfio-unmask"]],
        "runs a vCPU, and handles its exits: device registers, offloads, configuration of passed-through and vDPA devices, \
        messages to the processes that emulate vfio-user devices, \
        discards of memory";
    "device-start": &[&RING, &FILES, &CONNECTIONS, &TAP_OF_DRIVER, &SCHEDULING, &TIMERS], starts &[DEVICES],
        "activates devices: opens what their queues work with, and starts the threads that serve them";
    "device-block": &[&RING_REQUESTS, &FILES, &DISKS, &SCHEDULING, &MEMORY, &SET_TIMERS], starts &[],
        "serves the queues of a disk";
    "device-image": &[&FILES, &DISKS, &SCHEDULING, &MEMORY], starts &[],
        "carries out requests on an image in a format";
    "device-net": &[&TAP_OF_DRIVER, &SCHEDULING, &CONNECTIONS, &SET_TIMERS], starts &[&["announce"]],
        "serves the queues of a network device";
    "device-console": &[&CONNECTIONS, &FILES, &SCHEDULING], starts &[&["console-out"]],
        "serves the queues of a console";
    "device-balloon": &[&MEMORY, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING, &TIMERS],
        starts &[],
        "discards and populates balloon pages, and unmaps and maps them for devices";
    "device-mem": &[&MEMORY, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING], starts &[],
        "plugs and unplugs memory, and maps and unmaps it for devices";
    "device-vsock": &[&CONNECTIONS, &LOCAL_SOCKETS, &TIMERS, &FILES, &SCHEDULING], starts &[],
        "forwards vsock connections, and connects to Unix sockets for the guest";
    "device-vhost": &[&CONNECTIONS, &SCHEDULING, &KVM_REQUESTS], starts &[],
        "starts and stops the queues of a vhost-user device, lets the driver signal them (ioeventfds), and forwards its interrupts";
    "device-vdpa": &[&VDPA_REQUESTS, &SCHEDULING, &KVM_REQUESTS], starts &[],
        "starts, suspends and resets a vDPA device, maps memory for it, and forwards its interrupts";
    "vhost-limit": &[], starts &[], "ends the connection to a vhost-user back end that does not answer";
    "vhost-requests": &[&CONNECTIONS], starts &[], "answers requests of a vhost-user back end";
    "device-watchdog": &[&TIMERS, &SCHEDULING], starts &[], "resets a guest that does not reset its watchdog";
    "tpm": &[&CONNECTIONS], starts &[], "passes the guest's commands to the process that implements its TPM";
    "device-pmem": &[&FILES, &SCHEDULING, &MEMORY], starts &[], "flushes persistent memory to its file";
    "device-rng": &[&FILES, &SCHEDULING, &MEMORY], starts &[], "reads random bytes";
    "device-iommu": &[&SCHEDULING, &MEMORY], starts &[], "answers the requests of the guest's IOMMU driver";
    "device-rtc": &[&SCHEDULING, &MEMORY], starts &[], "reads the host's clock";
    "serial": &[&CONNECTIONS, &FILES], starts &[&["console-out"]], "reads the input of the serial port";
    "console-out": &[&CONNECTIONS, &FILES], starts &[],
        "writes console output to endpoints that block";
    "announce": &[&KVM_REQUESTS, &CONNECTIONS], starts &[], "announces the guest to the network after a migration";
    "prefault": &[&MEMORY, &VFIO_REQUESTS, &KVM_REQUESTS, &OPEN, &FILES, &SCHEDULING],
        starts &[],
        "populates guest memory, and maps each chunk for devices";
    "pin": &[&MEMORY, &VFIO_REQUESTS, &KVM_REQUESTS, &OPEN, &FILES, &SCHEDULING],
        starts &[&["prefault"]],
        "populates guest memory and maps it for devices";
    "vfio-open": &[&VFIO_REQUESTS, &KVM_REQUESTS, &KVM_CREATION, &MEMORY, &OPEN, &FILES, &SCHEDULING,
        &CONNECTIONS],
        starts &[&["vfio-events", "vfio-unmask", "pin", "prefault"]],
        "opens passed-through devices";
    "vfio-events": &[&VFIO_REQUESTS, &KVM_REQUESTS, &FILES], starts &[],
        "handles device errors and unplug requests of the host";
    "vfio-unmask": &[&VFIO_REQUESTS, &KVM_REQUESTS, &CONNECTIONS], starts &[], "unmasks INTx interrupts of passed-through and vfio-user devices";
    "vfio-user": &[&CONNECTIONS, &KVM_REQUESTS], starts &[],
        "refuses commands of the process that emulates a device, and takes the device from the guest when that is lost";
    "stage2-fill": &[&KVM_REQUESTS, &SCHEDULING, &MEMORY], starts &[], "fills second-stage tables";
    "huge-pages": &[&MEMORY], starts &[], "collapses memory into huge pages";
    "throttle": &[&KVM_REQUESTS, &SCHEDULING], starts &[], "throttles vCPUs";
    "drop-cache": &[&FILES, &OPEN, &DISKS], starts &[],
        "drops cached pages of disk images that another host has written";
    "write-back": &[&FILES, &OPEN, &DISKS], starts &[], "writes the dirty pages of disk images to storage";
    "discard-vm": BUILD, starts MACHINE, "discards a machine whose boot was cancelled";
    "open-device": BUILD, starts MACHINE, "opens the image, tap or device node of an added device";
    "vm-boot": CONFINE_AND_BUILD, starts MACHINE, "builds a machine";
    "vm-reboot": BUILD, starts MACHINE, "ends a machine and builds its successor";
    "vm-shutdown": BUILD, starts MACHINE, "ends a machine";
    "vm-delete": BUILD, starts MACHINE, "ends a machine";
    "pause": BUILD, starts MACHINE, "pauses a machine and writes its disk images to storage";
    "resume": BUILD, starts MACHINE, "locks disk images, opens taps, and lets a machine run";
    "retry": BUILD, starts MACHINE, "repeats the requests that a full disk has refused";
    "add-device": BUILD, starts MACHINE, "adds a device to a machine";
    "eject": BUILD, starts MACHINE, "removes devices that the guest has ejected";
    "resize-disk": BUILD, starts MACHINE, "gives a disk another size";
    "resize-vcpus": BUILD, starts MACHINE, "adds vCPUs to a machine";
    "resize-memory": BUILD, starts MACHINE, "adds memory to a machine";
    "disk-writer": &[&FILES, &OPEN, &DISKS, &SCHEDULING], starts &[&["write-back"]], "writes the dirty pages of disk images to storage";
    "snapshot": BUILD, starts &[&["snapshot-write", "snapshot-mem", "mig-look", "mig-state", "vcpu",
        "write-back", "disk-writer"]],
        "saves a machine's state";
    "snapshot-write": &[&FILES, &OPEN, &NAMES, &MEMORY, &VFIO_REQUESTS], starts &[&["snapshot-mem",
        "mig-look"]],
        "writes the files of a snapshot";
    "snapshot-mem": &[&FILES, &MEMORY], starts &[], "writes or reads memory";
    "restore": CONFINE_AND_BUILD, starts &[OTHER_OF_DEVICES, OF_MACHINE, &["restore-fault",
        "restore-fill", "restore-wait", "snapshot-mem", "mig-look"]],
        "builds a machine from a snapshot";
    "restore-fault": MOVE, starts &[], "resolves faults from a snapshot";
    "restore-fill": MOVE, starts &[&["mig-look"]], "restores the pages that no fault requested";
    "restore-wait": BUILD, starts &[OTHER_OF_DEVICES, OF_MACHINE, &["restore-fill", "snapshot-mem", "mig-look"]], "waits for the end of an on-demand restore";
    "migration-send": &[
        &KVM_REQUESTS, &VFIO_REQUESTS, &MEMORY, &OPEN, &FILES, &NAMES, &CONNECTIONS,
        &LOCAL_SOCKETS,
        &INTERNET_SOCKETS, &SCHEDULING, &TAPS, &DISKS, &PSEUDOTERMINALS, &PROCESS,
        &TIMERS, &START_PAGE_SERVER, &END_PAGE_SERVER,
    ], starts &[OTHER_OF_DEVICES, &["page-server", "mig-send", "mig-state", "mig-connect", "mig-alive",
        "mig-urgent", "mig-bulk", "mig-verdict", "mig-hand-on", "mig-resolve", "mig-look",
        "disk-writer", "throttle", "vcpu", "write-back", "discard-vm"]],
        "owns the machine of an outgoing migration, and starts the page server, which inherits its filter";
    "migration-recv": RECEIVE, starts &[OTHER_OF_DEVICES, OF_MACHINE, &["mig-receive",
        "mig-build", "mig-prepare", "mig-faults", "mig-pages", "mig-urgent", "mig-linger",
        "mig-resolve", "mig-look", "mig-connect", "mig-alive", "mig-check"]], "owns the machine of an incoming migration";
    "mig-send": MOVE, starts &[&["mig-look"]], "sends memory over one connection";
    "mig-state": MOVE, starts &[&["vfio-unmask"]], "stops and continues passed-through devices, and reads and writes their states";
    "mig-connect": &[&CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &OPEN, &FILES],
        starts &[&["mig-resolve"]],
        "opens a connection";
    "mig-alive": &[&CONNECTIONS], starts &[], "sends keep-alive messages";
    "mig-urgent": MOVE, starts &[&["mig-look"]],
        "sends or receives requested pages";
    "mig-bulk": MOVE, starts &[&["mig-look"]], "sends the pages that no fault requested";
    "mig-verdict": &[&CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &OPEN, &FILES],
        starts &[&["mig-resolve"]],
        "asks the destination which side owns the guest";
    "mig-hand-on": &[
        &CONNECTIONS, &MEMORY, &FILES, &KVM_REQUESTS, &VFIO_REQUESTS, &SCHEDULING,
        &SOCKET_PATHS, &END_PAGE_SERVER,
    ], starts &[], "transfers the remaining pages to the page server, or ends it if that fails";
    "mig-resolve": &[&RESOLVER, &CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &OPEN, &FILES],
        starts &[],
        "resolves a host name";
    "mig-look": MOVE, starts &[], "polls a condition during other work";
    "mig-receive": MOVE, starts &[&["mig-look"]], "receives memory over one connection";
    "mig-build": BUILD, starts MACHINE, "builds the machine";
    "mig-check": &[&KVM_REQUESTS, &KVM_CREATION, &MEMORY, &OPEN, &FILES, &DISKS, &CONNECTIONS, &PROCESS, &LANDLOCK],
        starts &[&["mig-alive"]],
        "answers a check of a migration: what a VM would lack here";
    "mig-prepare": MOVE, starts &[], "populates memory before pages arrive";
    "mig-faults": MOVE, starts &[&["mig-look"]], "reads faults";
    "mig-pages": MOVE, starts &[&["mig-look"]], "receives the pages that no fault requested";
    "mig-linger": LINGER, starts &[&["mig-look"]], "answers a source that reconnects after the end of the migration";
    "page-server": BUILD, starts &[&["serve", "http-server", "log", "event-monitor", "put-back",
        "end", "print-error"]],
        "`main` of the page server";
    "serve": &[&CONNECTIONS, &LOCAL_SOCKETS, &INTERNET_SOCKETS, &MEMORY, &OPEN, &FILES,
        &SCHEDULING, &SOCKET_PATHS], starts &[&["mig-send", "mig-connect", "mig-alive", "mig-urgent", "mig-bulk",
        "mig-verdict", "mig-resolve", "mig-look"]], "sends the last pages of a guest";
    "prezero-pool": OF_POOL, starts &[&["zeroer", "log", "put-back", "end", "print-error"]],
        "`main` of the pool daemon: memory, its I/O address space, its sockets";
    "zeroer": &[&MEMORY, &KERNEL, &LEASES, &VFIO_REQUESTS, &SCHEDULING, &FILES, &OPEN, &NAMES], starts &[],
        "populates and zeroes memory";
};

impl Kind {
    /// Whether this is the first thread of a process.
    pub(super) fn is_first(&self) -> bool {
        ["main", "page-server", "prezero-pool"].contains(&self.name)
    }

    /// Whether a thread of this kind keeps the filters of the thread that starts it and adds none. `vm-boot` needs
    /// nearly all that `main` has, and is on the path to the first instruction of the guest: a filter of this size takes
    /// the kernel half a millisecond.
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

    /// What it may call: its own, and what the threads need that it starts. Those drop capabilities before they add
    /// filters of their own.
    pub(super) fn calls(&self) -> impl Iterator<Item = &'static Call> {
        let mut groups: Vec<&'static Group> = vec![&RUNTIME];
        if !self.starts.is_empty() {
            groups.push(&CAPABILITIES);
        }
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
