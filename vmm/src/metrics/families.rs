// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of metrics: name, kind, unit, labels and meaning of each.
//!
//! Owns these definitions, from which the text of a scrape, the table in `docs/metrics.md` and the check of the
//! dashboard follow. A name is made of its parts here, so that it always ends with its unit. It must never know where a
//! value comes from.

/// What is before each name.
const PREFIX: &str = "godwit";

/// The kind of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that only grows, until what it belongs to begins anew.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// Facts as labels; the value is 1.
    Info,
    /// How many observations were at most so large.
    Histogram,
}

impl Kind {
    /// As in OpenMetrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Info => "info",
            Self::Histogram => "histogram",
        }
    }

    /// The end of the names of plain samples, by which OpenMetrics knows their kind.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Info => "_info",
            Self::Gauge | Self::Histogram => "",
        }
    }
}

/// The unit of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number of things that the name says.
    Plain,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// Seconds.
    Seconds,
    /// Parts of one.
    Ratio,
}

impl Unit {
    /// As in names; nothing for a plain number.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "bytes_per_second",
            Self::Seconds => "seconds",
            Self::Ratio => "ratio",
        }
    }
}

/// The definition of a family.
#[derive(Debug)]
pub struct Definition {
    /// The name between the prefix and the unit.
    stem: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its unit.
    pub unit: Unit,
    /// Names of the labels of each sample.
    pub labels: &'static [&'static str],
    /// Its meaning.
    pub help: &'static str,
}

impl Definition {
    /// Name of the family, without the suffix of its kind.
    pub fn name(&self) -> String {
        match self.unit {
            Unit::Plain => format!("{PREFIX}_{}", self.stem),
            unit => format!("{PREFIX}_{}_{}", self.stem, unit.name()),
        }
    }
}

macro_rules! families {
    ($($family:ident: $kind:ident $stem:literal $unit:ident [$($label:literal),*] $help:literal;)*) => {
        /// A family of metrics.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Family {
            $(#[doc = $help] $family),*
        }

        impl Family {
            /// All, in the order of a scrape.
            pub const ALL: &[Self] = &[$(Self::$family),*];

            /// Its definition.
            pub const fn definition(self) -> &'static Definition {
                match self {
                    $(Self::$family => &Definition {
                        stem: $stem,
                        kind: Kind::$kind,
                        unit: Unit::$unit,
                        labels: &[$($label),*],
                        help: $help,
                    }),*
                }
            }
        }
    };
}

families! {
    Build: Info "build" Plain ["version", "compatible_version"]
        "Version of this program, and of cloud-hypervisor whose interface it has.";
    ScrapeComplete: Gauge "scrape_complete" Plain []
        "1 if all is here; 0 if the VMM thread did not answer in time, and what it alone knows is left out.";
    ScrapeDuration: Gauge "scrape_duration" Seconds []
        "Time that it took to collect the values of this scrape.";
    ProcessStart: Gauge "process_start_time" Seconds []
        "When the process started, since 1970.";
    ProcessCpu: Counter "process_cpu" Seconds []
        "CPU time of all threads of the process.";
    ProcessResident: Gauge "process_resident_memory" Bytes []
        "Resident memory of the process, that of the guest included.";
    ProcessThreads: Gauge "process_threads" Plain []
        "Threads of the process.";
    ApiRequests: Counter "api_requests" Plain ["endpoint", "outcome"]
        "Answered requests to the API; outcome is success, refused (status 4xx) or failed (5xx).";
    ApiDuration: Histogram "api_request_duration" Seconds ["endpoint"]
        "Time from the head of a request to the API to its answer.";

    Vm: Info "vm" Plain ["uuid", "api_socket"]
        "The UUID that the guest sees, and the path of the API socket; empty if there is none.";
    VmState: Gauge "vm_state" Plain ["state"]
        "1 for the state of the VM, 0 for the others; migrated: it belongs to another VMM.";
    VmActivity: Gauge "vm_activity" Plain ["activity"]
        "1 for what is being done to the VM, as doing in vm.info; absent if nothing is.";
    Vcpus: Gauge "vcpus" Plain []
        "vCPUs of the guest.";
    VcpusMax: Gauge "vcpus_max" Plain []
        "vCPUs that the guest can have.";
    VcpuCpu: Counter "vcpu_cpu" Seconds ["vcpu"]
        "CPU time of the thread of a vCPU: in the guest, and in this process for it.";

    MemorySize: Gauge "memory_size" Bytes ["zone"]
        "Memory of a zone that the guest may use.";
    MemoryAllocated: Gauge "memory_allocated" Bytes ["zone"]
        "Memory of the host that a zone has, swapped pages included; absent for zones that are not shared.";
    MemoryActual: Gauge "memory_actual" Bytes []
        "Memory that the guest may use, without what is in its balloon.";
    PrefaultState: Gauge "prefault_state" Plain ["state"]
        "1 for the state of populating memory, 0 for the others; absent if it is not asked for.";
    PrefaultPopulated: Gauge "prefault_populated" Bytes []
        "Memory that has been populated ahead of time.";
    PrefaultSize: Gauge "prefault_size" Bytes []
        "Memory that is to be populated ahead of time.";
    PassthroughState: Gauge "passthrough_state" Plain ["state"]
        "1 for the state of mapping memory for passed-through devices, 0 for the others; absent without such devices.";
    PassthroughPinned: Gauge "passthrough_pinned" Bytes []
        "Memory that is pinned and mapped for passed-through devices.";
    PassthroughSize: Gauge "passthrough_size" Bytes []
        "Memory that is to be pinned and mapped for passed-through devices.";
    PassthroughWithheld: Gauge "passthrough_withheld_devices" Plain []
        "Passed-through devices that the guest does not see yet.";
    PassthroughLost: Gauge "passthrough_device_lost" Plain ["device"]
        "1 if a passed-through device is lost.";
    PassthroughWaited: Gauge "passthrough_bus_master_wait" Seconds ["device"]
        "How long the guest's write that enables DMA of a passed-through device waited for memory to be mapped.";

    BalloonTarget: Gauge "balloon_target" Bytes ["device"]
        "Size that the balloon is to have.";
    BalloonActual: Gauge "balloon_actual" Bytes ["device"]
        "Size of the balloon, as the guest reports it.";
    BalloonInflated: Counter "balloon_inflated" Bytes ["device"]
        "Memory that the guest has put into the balloon.";
    BalloonDeflated: Counter "balloon_deflated" Bytes ["device"]
        "Memory that the guest has taken out of the balloon.";
    BalloonReported: Counter "balloon_reported_free" Bytes ["device"]
        "Memory that the guest has reported free.";
    BalloonHinted: Counter "balloon_hinted_free" Bytes ["device"]
        "Memory that the guest has named free for a migration.";
    BalloonReturned: Counter "balloon_returned" Bytes ["device", "cause"]
        "Memory that was returned to the host; cause is inflated or reported.";
    BalloonReturnCalls: Counter "balloon_return_calls" Plain ["device"]
        "Calls to the kernel that returned memory to the host.";
    BalloonReturnFailures: Counter "balloon_return_failures" Plain ["device"]
        "Such calls that failed.";
    BalloonDeferred: Counter "balloon_deferred" Bytes ["device"]
        "Memory in the balloon that could not be returned at once.";
    BalloonRejected: Counter "balloon_rejected_pages" Plain ["device"]
        "Pages that the guest named and that are no memory, or not contiguous.";
    BalloonStatisticsUpdates: Counter "balloon_statistics_updates" Plain ["device"]
        "How often the guest has reported statistics of its memory.";
    GuestMemory: Gauge "guest_memory" Bytes ["device", "statistic"]
        "Memory as the guest last reported it to its balloon: free, total, available, disk_cache.";
    GuestSwapped: Counter "guest_swapped" Bytes ["device", "direction"]
        "Memory that the guest has swapped, as it last reported; direction is in or out.";
    GuestMemoryEvents: Counter "guest_memory_events" Plain ["device", "event"]
        "Events of the guest's memory management, as it last reported: major_faults, oom_kills and others.";

    DiskRead: Counter "disk_read" Bytes ["device"]
        "Bytes that the guest has read from a disk.";
    DiskReads: Counter "disk_reads" Plain ["device"]
        "Reads that have ended.";
    DiskReadTime: Counter "disk_read_time" Seconds ["device"]
        "Time that all reads together took.";
    DiskReadTimeMin: Gauge "disk_read_time_min" Seconds ["device"]
        "Time of the shortest read so far.";
    DiskReadTimeMax: Gauge "disk_read_time_max" Seconds ["device"]
        "Time of the longest read so far.";
    DiskWritten: Counter "disk_written" Bytes ["device"]
        "Bytes that the guest has written to a disk.";
    DiskWrites: Counter "disk_writes" Plain ["device"]
        "Writes that have ended.";
    DiskWriteTime: Counter "disk_write_time" Seconds ["device"]
        "Time that all writes together took.";
    DiskWriteTimeMin: Gauge "disk_write_time_min" Seconds ["device"]
        "Time of the shortest write so far.";
    DiskWriteTimeMax: Gauge "disk_write_time_max" Seconds ["device"]
        "Time of the longest write so far.";
    DiskErrors: Counter "disk_errors" Plain ["device"]
        "Requests that a disk has answered with an error.";
    DiskWaiting: Gauge "disk_full_waiting_requests" Plain ["device"]
        "Requests that wait for space on the host (on_full=pause); absent for a disk that is not full.";
    NetReceived: Counter "network_received" Bytes ["device"]
        "Bytes that a network device has given to the guest.";
    NetReceivedFrames: Counter "network_received_frames" Plain ["device"]
        "Frames that a network device has given to the guest.";
    NetSent: Counter "network_sent" Bytes ["device"]
        "Bytes that the guest has sent by a network device.";
    NetSentFrames: Counter "network_sent_frames" Plain ["device"]
        "Frames that the guest has sent by a network device.";
    NetDropped: Counter "network_dropped_frames" Plain ["device"]
        "Frames that did not fit, or that the host refused.";
    VsockReceived: Counter "vsock_received" Bytes ["device"]
        "Bytes that a socket device has given to the guest.";
    VsockReceivedPackets: Counter "vsock_received_packets" Plain ["device"]
        "Packets that a socket device has given to the guest.";
    VsockSent: Counter "vsock_sent" Bytes ["device"]
        "Bytes that the guest has sent by a socket device.";
    VsockSentPackets: Counter "vsock_sent_packets" Plain ["device"]
        "Packets that the guest has sent by a socket device.";
    VsockConnections: Counter "vsock_connections" Plain ["device"]
        "Connections that were made through a socket device.";
    DeviceInterrupts: Counter "device_interrupts" Plain ["device"]
        "Interrupts of a vhost-user or vDPA device that were passed on to its driver.";
    DeviceConfigChanges: Counter "device_config_changes" Plain ["device"]
        "Changes of its configuration of which a vhost-user device has informed its driver.";

    Migration: Info "migration" Plain ["side", "mode", "convergence", "fault_source"]
        "The current or last migration; a label is empty if it is not known, or of the other side.";
    MigrationPhase: Gauge "migration_phase" Plain ["phase"]
        "1 for the phase of the migration, 0 for the others.";
    MigrationStart: Gauge "migration_start_time" Seconds []
        "When the source connected, since 1970.";
    MigrationElapsed: Gauge "migration_elapsed" Seconds []
        "Time since then, up to the end of the migration.";
    MigrationPostcopy: Gauge "migration_postcopy" Plain []
        "1 once the guest runs at the destination before all of its memory is there.";
    MigrationMemory: Gauge "migration_memory" Bytes []
        "Guest memory of the VM that migrates.";
    MigrationRemaining: Gauge "migration_remaining" Bytes []
        "What remains to be moved: of this round in precopy, of all memory in postcopy.";
    MigrationMoved: Counter "migration_moved" Bytes ["direction"]
        "Page contents that were sent or received, repetitions included; direction is sent or received.";
    MigrationPages: Counter "migration_pages" Plain ["kind"]
        "Pages of 4 KiB: zero (known to be), free (not sent), urgent (requested), bulk (in the background), \
         prefetched (along with requested ones).";
    MigrationRounds: Counter "migration_rounds" Plain []
        "Rounds of precopy that were begun.";
    MigrationStalledRounds: Gauge "migration_stalled_rounds" Plain []
        "Consecutive rounds that did not reduce the expected downtime.";
    MigrationRate: Gauge "migration_rate" BytesPerSecond ["kind"]
        "Rates: link and dirty, of the last round of precopy; bulk and urgent, of the last second of postcopy.";
    MigrationDowntime: Gauge "migration_downtime" Seconds ["kind"]
        "Downtime: expected (if the guest were stopped now), allowed, measured.";
    MigrationThrottle: Gauge "migration_throttle" Ratio []
        "Part of the time for which the vCPUs are kept out of the guest.";
    MigrationCompressionInput: Counter "migration_compression_input" Bytes []
        "Memory that was sent compressed.";
    MigrationCompressionOutput: Counter "migration_compression_output" Bytes []
        "Size of that memory after compression.";
    MigrationCompressing: Gauge "migration_compressing_connections" Plain []
        "Connections that compress now.";
    MigrationLosses: Counter "migration_connection_losses" Plain []
        "How often the connections of postcopy were lost.";
    MigrationRecoveries: Counter "migration_connection_recoveries" Plain []
        "How often the connections of postcopy were made again.";
    MigrationReconnectLeft: Gauge "migration_reconnect_left" Seconds []
        "Time for which the source goes on to connect by itself; absent while there are connections.";
    MigrationPageServer: Gauge "migration_page_server" Plain ["state"]
        "1 for the state of the page server, 0 for the others; absent if none was asked for.";
    PostcopyFaults: Counter "postcopy_faults" Plain ["outcome"]
        "Faults in postcopy: requested (a page), merged (its page was requested already), local (no page was needed), \
         elsewhere (its page was on its way).";
    PostcopyFaultsLeft: Gauge "postcopy_left" Seconds []
        "Estimated time until the last page is there.";
    PostcopyFaultWait: Histogram "postcopy_fault_wait" Seconds []
        "How long faults waited for the peer; at the destination.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn is_name(text: &str) -> bool {
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        text.starts_with(|c: char| c.is_ascii_lowercase()) && text.chars().all(is_part)
    }

    #[test]
    fn names_follow_the_conventions() {
        let mut names = BTreeSet::new();
        for family in Family::ALL {
            let Definition { kind, unit, labels, help, .. } = family.definition();
            let name = family.definition().name();
            assert!(is_name(&name) && !name.contains("__") && !name.ends_with('_'), "{name}");
            // By these OpenMetrics tells kinds of samples apart.
            for end in ["_total", "_info", "_count", "_sum", "_bucket", "_created"] {
                assert!(!name.ends_with(end), "{name}");
            }
            assert!(name.ends_with(unit.name()), "{name}");
            // A unit is said by the definition, and is a base unit.
            let words: Vec<_> = name.split('_').collect();
            if *unit == Unit::Plain {
                assert!(!words.iter().any(|it| ["bytes", "seconds"].contains(it)), "{name}");
            }
            for word in ["ms", "us", "milliseconds", "kb", "mb", "percent", "counter", "gauge"] {
                assert!(!words.contains(&word), "{name}");
            }
            assert!(*unit == Unit::Plain || *kind != Kind::Info, "{name}");
            assert!(labels.iter().all(|label| is_name(label) && *label != "le"), "{name}");
            assert_eq!(labels.iter().collect::<BTreeSet<_>>().len(), labels.len(), "{name}");
            assert!(help.ends_with('.') && !help.contains(['"', '\\', '\n', '|', '`']), "{name}");
            assert!(names.insert(name), "a name is there twice");
        }
    }
}
