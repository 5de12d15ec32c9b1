// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Differences from cloud-hypervisor v53 that no table of options, fields, requests or events shows, for the page of
//! compatibility.
//!
//! Owns their texts: what it is about, how it is there, how it is here. A difference that ends is removed.

/// What, there, here.
pub const BEHAVIOUR: &[(&str, &str, &str)] = &[
    (
        "a request that needs a running VM (`vm.pause`, `vm.resume`, `vm.counters`, `vm.snapshot`, ...) and meets none",
        "status 500; `vm.reboot` 404",
        "405 before boot and 404 without a VM, as the description of its API says",
    ),
    ("`vm.create` or `vm.restore` with a VM there", "500", "409"),
    ("`vm.boot` of a VM that runs, `vm.pause` of one that is paused", "500", "405"),
    (
        "a configuration that is not valid",
        "taken by `vm.create`, refused by `vm.boot` (500)",
        "refused by `vm.create` (400), with the reason",
    ),
    (
        "a field that is unknown, in JSON",
        "ignored",
        "refused by its name (400), unless it is `null`",
    ),
    ("`vm.add-*` that is refused", "500", "400, or 409 for an id or resource in use"),
    ("`vm.remove-device` of an unknown device", "500", "404"),
    ("`vm.resize` that names no size", "204, and changes nothing", "400"),
    ("`vm.resize` of a running VM beyond a limit", "500", "400"),
    (
        "`vm.resize` of vCPUs while the guest still gives some back",
        "429",
        "taken: what is asked last holds",
    ),
    ("`vmm.shutdown` that is carried out", "200", "204, as the description of its API says"),
    ("`vm.snapshot` of a VM that runs", "500", "405"),
    (
        "`vm.resize` before boot",
        "any number is stored, and found wrong at boot; a balloon that is not there is ignored (204)",
        "what could not boot is refused (400), and the configuration stays",
    ),
    (
        "`desired_ram` before boot of a VM with a `hotplugged_size`",
        "is `memory.size`: the hot-plugged memory comes on top",
        "is all memory: `hotplugged_size` is dropped",
    ),
    ("`vm.resize-zone` of an unknown zone", "500", "400"),
    ("a method that the request does not have", "400", "405, with `Allow`"),
    ("a body where none is expected", "400", "ignored"),
    (
        "connections to the API at a time",
        "10, and one request is carried out after another: all wait for `vm.receive-migration`",
        "128; while a VM boots, moves or is saved, the others are answered (`doing` in `vm.info`, 409)",
    ),
    ("header `Server` of an answer", "`Cloud Hypervisor API`", "none"),
    (
        "`vmm.ping`",
        "`build_version` is its version",
        "`build_version` is `godwit v...`; `version` is 53.0.0",
    ),
    (
        "`vm.counters`",
        "devices",
        "devices, with `errors` and sums of latencies of disks, and `dropped` of networks; and `__vmm` with times of the \
         VMM itself",
    ),
    (
        "`vm.pause`, `vm.shutdown`, `vm.delete`",
        "do not wait for the host's storage to have what was written",
        "answered when disks are written back (by `vm.reboot` images in a format); `vm.pause` fails after 60 s if \
         requests are in flight, and the VM runs on",
    ),
    (
        "terminals of `pty`",
        "made by `vm.create`, so that `vm.info` names them before the boot, and anew by a reboot",
        "made by `vm.boot`, and kept through reboots",
    ),
    (
        "`--serial`, `--console` and `--debug-console` with `file=`",
        "the file is truncated, also by a reboot",
        "appended to; not through a link into a file of another owner",
    ),
    (
        "`--serial socket=` at a path that is there",
        "refused",
        "a socket at which no process listens is replaced; `--console socket=` is possible",
    ),
    (
        "a single newline that a client of the serial port sends",
        "becomes a carriage return",
        "stays a newline",
    ),
    (
        "`--event-monitor path=`",
        "truncated",
        "appended to; a pipe may lack a reader; each event also has `wallclock`, and at most 4095 bytes",
    ),
    (
        "events",
        "those of the table below",
        "more: `created`, `started`, and a `-failed` with the reason for what failed ([events.md](events.md))",
    ),
    (
        "log, at the same `-v`",
        "each event is a line; a guest can cause any number of lines; a reader that does not read delays the VMM",
        "other lines in the same format; each device writes 32 at once and then one a minute; no reader delays the VMM",
    ),
    (
        "SIGHUP, SIGQUIT",
        "kill the process",
        "end the VM in order, exit code 0, unless they were ignored at the start",
    ),
    ("SIGUSR1, SIGUSR2, SIGALRM", "kill the process", "ignored"),
    (
        "SIGTERM, SIGINT during a migration",
        "the process ends with an error, exit code 1",
        "it ends when the migration has; a second signal, a second later or more, cancels it",
    ),
    (
        "a forbidden system call, with `--seccomp true`",
        "the process is killed by SIGSYS",
        "exit code 102; a panic of a thread is 101 ([exit-codes.md](exit-codes.md))",
    ),
    (
        "an error on standard error",
        "`Error: ... exited with the following chain of errors:` and a line for each",
        "one line, `Error: ` and the chain; sometimes `Hint: `",
    ),
    (
        "an argument of `ch-remote` that cannot be read",
        "exit code 1",
        "2; refusals and failures are 1 in both",
    ),
    (
        "a file beside the API socket",
        "`PATH.lock`, which stays",
        "none; a socket at which no process listens is replaced",
    ),
    ("vCPUs", "up to 8192", "up to 254"),
    (
        "a qcow2 image with clusters compressed by zstd",
        "read",
        "refused by name: convert it with `qemu-img convert`, which takes `compression_type=zlib`",
    ),
    (
        "a qcow2 image that was not closed",
        "its reference counts are made anew as it is opened",
        "refused for writing, with the command that repairs it (`qemu-img check -r all`)",
    ),
    (
        "`vm.resize-disk` of a qcow2 image",
        "grows one without a backing file",
        "of raw images alone",
    ),
    (
        "moves and snapshots with a vhost-user disk; moves with a vDPA device",
        "possible, of vDPA if the device can be suspended",
        "refused by name",
    ),
    (
        "postcopy with a vhost-user network or a file system",
        "not refused",
        "refused by name: such a VM moves by precopy",
    ),
    ("resets by the guest", "any number", "32 at once, then one a second"),
    (
        "what firmware writes to port 0x402",
        "goes to standard output",
        "goes to the log, at debug level",
    ),
    (
        "the machine that the guest sees",
        "its own",
        "Godwit's, or that of v53 with `--platform platform=cloud-hypervisor-53` ([platforms.md](platforms.md))",
    ),
    (
        "a snapshot",
        "for itself",
        "for Godwit, unless `format` says otherwise; those of v53 can be restored ([snapshot.md](snapshot.md))",
    ),
];
