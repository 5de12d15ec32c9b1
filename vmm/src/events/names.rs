// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The names of all events, and the page of the documents that lists them.
//!
//! Owns the list; a test compares it with the events that are written, in both directions.

use std::fmt::Write as _;

/// All events: source, name and meaning.
pub const NAMES: &[(&str, &str, &str)] = &[
    ("vmm", "starting", "the VMM begins to start"),
    ("vmm", "started", "the VMM takes requests"),
    ("vmm", "shutdown", "the VMM ends"),
    ("vmm", "panic", "a thread has met a defect, and the VMM ends (place, error: why)"),
    ("vm", "created", "the VM has a configuration"),
    ("vm", "booting", "the VM begins to boot"),
    ("vm", "booted", "the vCPUs run"),
    ("vm", "boot-failed", "the VM could not boot, or was to end before it ran (error: why)"),
    ("vm", "prefault-started", "memory begins to be populated (mode: boot or background)"),
    ("vm", "prefault-progress", "another tenth of it is populated (percent, done_bytes)"),
    ("vm", "prefault-completed", "all of it is populated"),
    ("vm", "prefault-cancelled", "the VM ends or leaves before all of it is populated"),
    ("vm", "prefault-failed", "it cannot be populated any further (error: why)"),
    ("vm", "prezeroed-taken", "a zone has memory of the pool (zone, bytes, pages)"),
    ("vm", "prezeroed-unavailable", "a zone does without the pool (zone, error: why)"),
    ("vm", "pausing", "the vCPUs are being stopped"),
    ("vm", "paused", "the vCPUs stand still"),
    ("vm", "resizing", "the VM, its balloon or a memory zone is to have another size"),
    ("vm", "balloon-resized", "the balloon is to have another size (size)"),
    ("vm", "memory-resized", "a memory zone is to have another size (zone, size)"),
    ("vm", "resized", "all that was to have another size has been told so"),
    ("vm", "resize-failed", "it keeps its size, or a part of it does (error: why)"),
    ("vm", "resuming", "the vCPUs are about to continue"),
    ("vm", "resumed", "the vCPUs run again"),
    ("vm", "resume-failed", "the VM stays paused (error: why)"),
    ("vm", "snapshotting", "the VM is being saved"),
    (
        "vm",
        "pause-failed",
        "the VM could not be paused, as a device does not finish, or not wanted any more: it runs on \
         (error: why)",
    ),
    ("vm", "snapshotted", "the snapshot is whole and on the disk"),
    ("vm", "snapshot-failed", "the VM could not be saved and stays paused (error: why)"),
    ("vm", "restoring", "a VM is being restored"),
    ("vm", "restored", "the VM is there, paused; memory may still be on its way"),
    ("vm", "restore-memory-completed", "all memory is here after an on-demand restore"),
    (
        "vm",
        "stage2-prefault-completed",
        "the tables of the vCPUs are filled for memory that came from elsewhere",
    ),
    ("vm", "restore-failed", "the VM could not be restored, or its memory is lost (error: why)"),
    ("vm", "rebooting", "the VM begins to reboot"),
    ("vm", "rebooted", "the VM runs again after a reboot"),
    ("vm", "reboot-failed", "the VM did not come back, and is shut down (error: why)"),
    ("vm", "shutdown", "the VM was shut down"),
    ("vm", "deleted", "the VM was deleted"),
    ("vm", "device-added", "a device was added while the VM runs (id, bdf)"),
    ("vm", "device-removing", "the guest is asked to eject a device (id)"),
    ("vm", "device-removed", "the guest has ejected a device, and it is gone (id)"),
    ("vm", "passthrough-device-opened", "a passed-through device is open and reset (id, took_ms)"),
    (
        "vm",
        "prepinned-taken",
        "a pool gave memory that is mapped for a passed-through device (zone, bytes, device)",
    ),
    (
        "vm",
        "prepinned-unavailable",
        "a pool gave none, and memory is mapped as without it (device, error: why)",
    ),
    ("vm", "passthrough-pinned", "all memory is ready for passed-through devices (bytes, took_ms)"),
    ("vm", "passthrough-failed", "memory cannot be made ready for them (error: why)"),
    (
        "vm",
        "passthrough-device-lost",
        "a passed-through device is gone for the guest (id: its name, error: why)",
    ),
    ("vm", "passthrough-device-wanted", "the host wants a passed-through device back (id)"),
    ("vm", "migration-starting", "the VM is about to be sent"),
    ("vm", "migration-started", "the destination takes the VM"),
    ("vm", "migration-memory-iteration", "a round of precopy is done (id: its number)"),
    ("vm", "migration-stalled", "a round of precopy did not help (id: its number, and downtimes)"),
    ("vm", "migration-throttled", "the vCPUs are slowed down (percent: time out of the guest)"),
    ("vm", "migration-downtime-allowed", "a longer downtime is allowed from now on"),
    ("vm", "migration-phase", "the migration is in a new phase (phase: its name)"),
    (
        "vm",
        "migration-finished",
        "the VM runs at the destination, with all its memory (final figures)",
    ),
    ("vm", "migration-failed", "the VM could not be sent (error: why)"),
    ("vm", "migration-cancelling", "a request to stop the migration has come (side: which)"),
    ("vm", "migration-cancelled", "the migration was stopped (side, guest: where it is now)"),
    (
        "vm",
        "migration-in-doubt",
        "the connection was lost at the commit (side: destination: whether the VM is its own is not \
         known; source: whether the destination knows that it is)",
    ),
    (
        "vm",
        "postcopy-migration-recovering",
        "postcopy connects again; the phase says what came of it",
    ),
    ("vm", "migration-handed-over", "the guest belongs to the destination, pages still go there"),
    (
        "vm",
        "migration-handed-on",
        "a page server sends the pages that are left (socket, pid, took_us, figures)",
    ),
    ("vm", "page-server-failed", "it has not taken over, and the VMM continues by itself"),
    ("vm", "page-server-serving", "the page server says so itself, in the VMM's place from now on"),
    ("vm", "disk-write-back-failed", "a disk could not be written back (id: which, error: why)"),
    (
        "vm",
        "disk-full",
        "the host has no room for what the guest writes to a disk with on_full=pause, and the VM is \
         paused (id, path)",
    ),
    (
        "vm",
        "disk-has-room",
        "a disk that was full has taken what it kept, and the VM continues (id, path)",
    ),
    (
        "vm",
        "migration-receive-ready",
        "the destination listens (address, tls: on, or off where no source has to show who it is)",
    ),
    ("vm", "migration-receive-started", "the source was accepted"),
    ("vm", "migration-receive-finished", "the VM runs here (figures, in precopy the final ones)"),
    ("vm", "migration-receive-failed", "the VM could not be received (error: why)"),
    ("vm", "postcopy-migration-completed", "all memory is here (final figures)"),
    (
        "vm",
        "postcopy-migration-paused",
        "pages do not come, as a connection or the source is lost (side; vm.migration-progress says why)",
    ),
    (
        "guest",
        "triple-fault",
        "a triple fault resets the guest (vcpu, in_a_row: starts that ended so, ran_ms: if it was \
         started here)",
    ),
    ("guest", "watchdog-expired", "the guest has not set its watchdog back in time, and is reset"),
    (
        "guest",
        "panic",
        "a vCPU cannot go on, and the VM ends (vcpu: which); or the guest has reported an event to its \
         pvpanic device (event: panic, crash_loaded or unknown_event), and keeps running",
    ),
];

/// The text of `docs/events.md`.
pub fn page() -> String {
    let mut page = String::from(
        "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n\
         # Events\n\n\
         This page is made from the list in `vmm/src/events/names.rs`; a test keeps it up to date, and \
         the list to what the program tells.\n\n\
         What `--event-monitor` writes: one JSON object after the other, behind each a blank line. An \
         event has the time since the VMM was started (`timestamp`: `secs`, `nanos`), the host's clock \
         (`wallclock`: UTC, RFC 3339), `source`, `event` and `properties`, an object of texts or `null`. \
         It is at most 4095 bytes long, the least that a pipe takes in one piece; longer properties are cut \
         (`...`). Braces and all that is not ASCII stand as escapes in its strings, so that readers \
         may count braces.\n\n\
         Of cloud-hypervisor's events `coredumping` does not occur, as there is no `vm.coredump`, nor do \
         those of the source `virtio-device`.\n\n\
         | source | event | meaning (and properties) |\n\
         | --- | --- | --- |\n",
    );
    for (source, event, meaning) in NAMES {
        // Writing into a string cannot fail.
        let _ = writeln!(page, "| {source} | `{event}` | {meaning} |");
    }
    page
}
