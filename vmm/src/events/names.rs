// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The names of all events, and the page of the documents that lists them.
//!
//! Owns the list; a test compares it with the events that are written, in both directions.

use std::fmt::Write as _;

/// All events: source, name and meaning.
pub const NAMES: &[(&str, &str, &str)] = &[
    ("vmm", "starting", "the VMM is starting"),
    ("vmm", "started", "the VMM accepts requests"),
    ("vmm", "shutdown", "the VMM is ending"),
    ("vmm", "panic", "a thread has panicked, and the VMM ends (place, error: why)"),
    ("vm", "created", "the VM was created: it has a configuration"),
    ("vm", "booting", "the VM is booting"),
    ("vm", "booted", "the VM has booted: the vCPUs run"),
    ("vm", "boot-failed", "the VM could not boot, or was ended before it ran (error: why)"),
    ("vm", "prefault-started", "population of guest memory has started (mode: boot or background)"),
    ("vm", "prefault-progress", "another tenth of guest memory is populated (percent, done_bytes)"),
    ("vm", "prefault-completed", "all guest memory is populated"),
    ("vm", "prefault-cancelled", "the VM ends or is migrated before all guest memory is populated"),
    ("vm", "prefault-failed", "guest memory cannot be populated any further (error: why)"),
    (
        "vm",
        "prezeroed-taken",
        "a memory zone has prezeroed memory from the pool (zone, bytes, pages)",
    ),
    (
        "vm",
        "prezeroed-unavailable",
        "a memory zone gets no prezeroed memory from the pool (zone, error: why)",
    ),
    ("vm", "pausing", "the vCPUs are being stopped"),
    ("vm", "paused", "the vCPUs are stopped"),
    ("vm", "resizing", "the VM, its balloon, a memory zone or a disk is being resized"),
    ("vm", "balloon-resized", "the balloon has a new target size (size)"),
    ("vm", "disk-resized", "a disk has another size (id, size)"),
    (
        "vm",
        "vcpus-resized",
        "vCPUs were added, or the guest was asked to eject some (vcpus: how many are wanted)",
    ),
    ("vm", "vcpus-removed", "the guest has ejected vCPUs (vcpus: how many are left)"),
    ("vm", "memory-resized", "a memory zone has a new target size (zone, size)"),
    ("vm", "resized", "the new target sizes are set for all devices concerned"),
    ("vm", "resize-failed", "all or part of a resize failed (error: why)"),
    ("vm", "resuming", "the vCPUs are about to resume"),
    ("vm", "resumed", "the vCPUs run again"),
    ("vm", "resume-failed", "the VM stays paused (error: why)"),
    ("vm", "snapshotting", "a snapshot of the VM is being saved"),
    (
        "vm",
        "pause-failed",
        "the VM could not be paused, because a device does not finish its requests or the pause \
         was cancelled; the VM keeps running (error: why)",
    ),
    ("vm", "snapshotted", "the snapshot is complete and on the disk"),
    ("vm", "snapshot-failed", "the snapshot could not be saved; the VM stays paused (error: why)"),
    ("vm", "coredumping", "the memory of the VM is being dumped for debuggers"),
    ("vm", "coredumped", "the core dump is complete and on the disk"),
    ("vm", "coredump-failed", "there is no core dump; the VM stays paused (error: why)"),
    (
        "vm",
        "tpm-lost",
        "the process that implements the TPM does not answer, and the guest's commands fail (error: why)",
    ),
    ("vm", "restoring", "a VM is being restored"),
    ("vm", "restored", "the VM is restored and paused; pages may still be missing"),
    ("vm", "restore-memory-completed", "all memory is resident after an on-demand restore"),
    (
        "vm",
        "stage2-prefault-completed",
        "the stage-2 tables are filled for memory that was received or restored",
    ),
    ("vm", "restore-failed", "the VM could not be restored, or its memory is lost (error: why)"),
    ("vm", "rebooting", "the VM is rebooting"),
    ("vm", "rebooted", "the VM runs again after a reboot"),
    ("vm", "reboot-failed", "the VM could not be rebooted, and is shut down (error: why)"),
    ("vm", "shutdown", "the VM was shut down"),
    ("vm", "deleted", "the VM was deleted"),
    ("vm", "device-added", "the running guest is told of a new device (id, bdf)"),
    (
        "vm",
        "device-removing",
        "the guest is asked to eject a device, unless it does not know of it (id)",
    ),
    (
        "vm",
        "device-removed",
        "a device that the guest has ejected, or never known of, is removed (id)",
    ),
    (
        "vm",
        "back-end-lost",
        "the process that serves a device over vhost-user or vfio-user has ended, does not answer or \
         has broken the protocol: the device needs a reset, over vfio-user it is gone for the guest; \
         once for each connection, and over vhost-user noticed only while the driver uses the device \
         (id, error: why)",
    ),
    ("vm", "passthrough-device-opened", "a passed-through device is open and reset (id, took_ms)"),
    (
        "vm",
        "prepinned-taken",
        "the pool provided memory that is already mapped for a passed-through device (zone: the ids \
         of all, bytes, device)",
    ),
    (
        "vm",
        "prepinned-unavailable",
        "the pool provided no such memory, and memory is mapped as without a pool (device: all \
         that were asked for, error: why)",
    ),
    (
        "vm",
        "passthrough-pinned",
        "all guest memory is mapped for passed-through devices (bytes, took_ms)",
    ),
    (
        "vm",
        "passthrough-kept",
        "guest memory stays mapped for passed-through devices while the guest reboots (bytes)",
    ),
    (
        "vm",
        "passthrough-withheld",
        "mapping memory takes longer than was forecast, and a passed-through device that the guest has not seen is \
         withheld until it is done (id, expected_ms)",
    ),
    (
        "vm",
        "passthrough-wait",
        "mapping memory takes longer than was forecast, and the driver of a passed-through device that the guest has \
         seen may wait for it (id, expected_ms)",
    ),
    (
        "vm",
        "passthrough-failed",
        "guest memory cannot be mapped for passed-through devices (error: why)",
    ),
    (
        "vm",
        "passthrough-device-lost",
        "the guest can no longer use a passed-through device (id: its name, error: why)",
    ),
    (
        "vm",
        "passthrough-device-wanted",
        "the host asks for the release of a passed-through device (id)",
    ),
    ("vm", "migration-starting", "the VM is about to be sent"),
    ("vm", "migration-started", "the destination has accepted the VM"),
    ("vm", "migration-memory-iteration", "a round of precopy is complete (id: its number)"),
    (
        "vm",
        "migration-stalled",
        "a round of precopy did not reduce the expected downtime (id: its number, and \
         downtimes)",
    ),
    (
        "vm",
        "migration-throttled",
        "the vCPUs are throttled (percent: share of time outside the guest)",
    ),
    ("vm", "migration-downtime-allowed", "the allowed downtime was raised"),
    ("vm", "migration-phase", "the migration has entered a new phase (phase: its name)"),
    (
        "vm",
        "migration-finished",
        "the VM runs at the destination, with all its memory (final figures)",
    ),
    ("vm", "migration-failed", "the VM could not be sent, and is here (error: why)"),
    (
        "vm",
        "migration-unanswered",
        "a destination that only answers, as cloud-hypervisor, may run the VM, which is stopped here until an operator \
         decides (error: why)",
    ),
    ("vm", "migration-cancelling", "a request to cancel the migration was received (side: which)"),
    ("vm", "migration-cancelled", "the migration was cancelled (side, guest: where it is now)"),
    (
        "vm",
        "migration-in-doubt",
        "the connection was lost at the commit (side: destination: it is not known whether the \
         destination owns the VM; source: it is not known whether the destination knows that it \
         owns the VM)",
    ),
    (
        "vm",
        "postcopy-migration-recovering",
        "postcopy is reconnecting; the next phase shows the result",
    ),
    (
        "vm",
        "migration-handed-over",
        "the destination owns the guest; pages are still being sent to it",
    ),
    (
        "vm",
        "migration-handed-on",
        "a page server sends the remaining pages (socket, pid, took_us, figures)",
    ),
    (
        "vm",
        "page-server-failed",
        "the page server did not take over, and the VMM keeps sending the pages",
    ),
    (
        "vm",
        "page-server-serving",
        "written by the page server itself, which has taken the VMM's place",
    ),
    ("vm", "disk-write-back-failed", "a disk could not be written back (id: which, error: why)"),
    (
        "vm",
        "disk-full",
        "the host's storage is too full for guest writes to a disk with on_full=pause, and the \
         VM is paused (id, path)",
    ),
    (
        "vm",
        "disk-has-room",
        "a disk that was full has completed the pending requests, and the VM continues (id, \
         path)",
    ),
    (
        "vm",
        "migration-receive-ready",
        "the destination is listening (address, tls: on, or off if sources are not \
         authenticated)",
    ),
    ("vm", "migration-receive-started", "a source was accepted"),
    (
        "vm",
        "migration-faults-by-uffd",
        "fault_source=auto takes uffd, as vCPUs cannot bring their missing pages themselves here (reason: why)",
    ),
    (
        "vm",
        "migration-receive-finished",
        "the VM runs at the destination (figures, in precopy the final ones)",
    ),
    ("vm", "migration-receive-failed", "the VM could not be received (error: why)"),
    ("vm", "postcopy-migration-completed", "all memory is resident (final figures)"),
    (
        "vm",
        "postcopy-migration-paused",
        "no pages are transferred, because a connection or the source is lost (side; \
         vm.migration-progress says why)",
    ),
    (
        "guest",
        "triple-fault",
        "a triple fault resets the guest (vcpu, in_a_row: consecutive starts that ended this \
         way, ran_ms: run time, if the VM was started here)",
    ),
    (
        "virtio-device",
        "activated",
        "the guest's driver has activated a device, or a guest has arrived with it (id; at most 32 events of each \
         device of this source, and then one a minute)",
    ),
    (
        "virtio-device",
        "reset",
        "the guest's driver has reset an active device or taken its right to DMA away, or its machine has ended here (id)",
    ),
    ("vdpa", "activated", "the same of a vDPA device (id)"),
    ("vdpa", "reset", "the same of a vDPA device (id)"),
    ("guest", "watchdog-expired", "the guest did not reset its watchdog in time, and is reset"),
    (
        "guest",
        "panic",
        "a vCPU cannot continue, and the VM ends (vcpu: which); or the guest reported an event \
         to its pvpanic device (event: panic, crash_loaded or unknown_event) and keeps running",
    ),
];

/// The text of `docs/events.md`.
pub fn page() -> String {
    let mut page = String::from(
        "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n\
         # Events\n\n\
         This page is generated from the list in `vmm/src/events/names.rs`; tests keep it up to \
         date, and compare the list with the events that the program writes.\n\n\
         `--event-monitor` writes one JSON object for each event, followed by a blank line. An \
         event has the time since the VMM was started (`timestamp`: `secs`, `nanos`), the host's \
         clock (`wallclock`: UTC, RFC 3339), `source`, `event` and `properties`, an object of \
         strings or `null`. An event is at most 4095 bytes long, the least that a pipe takes in one \
         piece; longer properties are cut (`...`). Braces and non-ASCII characters in strings are \
         escaped, so that readers may count braces.\n\n\
         | source | event | meaning (and properties) |\n\
         | --- | --- | --- |\n",
    );
    for (source, event, meaning) in NAMES {
        // Writing into a string cannot fail.
        let _ = writeln!(page, "| {source} | `{event}` | {meaning} |");
    }
    page
}
