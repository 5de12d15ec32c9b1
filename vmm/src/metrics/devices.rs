// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of devices as `vm.counters` names them, and which metric each is.
//!
//! Owns that table. A counter of a device that is not in it is missing in a scrape, which a test finds. It must never reach a
//! device: a scrape has counters that were read before.

use std::collections::BTreeMap;

use super::families::Family;
use super::text::{Page, Value};

/// Size of the pages of a balloon.
const BALLOON_PAGE_BYTES: u64 = 4096;

/// How a counter becomes a value.
type Scale = fn(u64) -> Value;

const WHOLE: Scale = Value::whole;
const MICROS: Scale = Value::micros;
const BALLOON_PAGES: Scale = |pages| Value::whole(pages.saturating_mul(BALLOON_PAGE_BYTES));

/// A counter, the metric that it is, and the values of the labels after that of the device.
type Row = (&'static str, Family, &'static [&'static str], Scale);

/// What only some kind of device has tells which kind it is.
const KINDS: &[(&str, &[Row])] = &[
    ("read_ops", DISK),
    ("rx_frames", NET),
    ("rx_packets", VSOCK),
    ("inflated_pages", BALLOON),
    ("interrupts", PEER),
    ("lost", PASSTHROUGH),
];

const DISK: &[Row] = &[
    ("read_bytes", Family::DiskRead, &[], WHOLE),
    ("read_ops", Family::DiskReads, &[], WHOLE),
    ("read_latency_total", Family::DiskReadTime, &[], MICROS),
    ("read_latency_min", Family::DiskReadTimeMin, &[], MICROS),
    ("read_latency_max", Family::DiskReadTimeMax, &[], MICROS),
    ("write_bytes", Family::DiskWritten, &[], WHOLE),
    ("write_ops", Family::DiskWrites, &[], WHOLE),
    ("write_latency_total", Family::DiskWriteTime, &[], MICROS),
    ("write_latency_min", Family::DiskWriteTimeMin, &[], MICROS),
    ("write_latency_max", Family::DiskWriteTimeMax, &[], MICROS),
    ("errors", Family::DiskErrors, &[], WHOLE),
];

const NET: &[Row] = &[
    ("rx_bytes", Family::NetReceived, &[], WHOLE),
    ("rx_frames", Family::NetReceivedFrames, &[], WHOLE),
    ("tx_bytes", Family::NetSent, &[], WHOLE),
    ("tx_frames", Family::NetSentFrames, &[], WHOLE),
    ("dropped", Family::NetDropped, &[], WHOLE),
];

const VSOCK: &[Row] = &[
    ("rx_bytes", Family::VsockReceived, &[], WHOLE),
    ("rx_packets", Family::VsockReceivedPackets, &[], WHOLE),
    ("tx_bytes", Family::VsockSent, &[], WHOLE),
    ("tx_packets", Family::VsockSentPackets, &[], WHOLE),
    ("connections", Family::VsockConnections, &[], WHOLE),
];

const BALLOON: &[Row] = &[
    ("target_bytes", Family::BalloonTarget, &[], WHOLE),
    ("actual_bytes", Family::BalloonActual, &[], WHOLE),
    ("inflated_pages", Family::BalloonInflated, &[], BALLOON_PAGES),
    ("deflated_pages", Family::BalloonDeflated, &[], BALLOON_PAGES),
    ("inflated_given_back_bytes", Family::BalloonReturned, &["inflated"], WHOLE),
    ("reported_bytes", Family::BalloonReported, &[], WHOLE),
    ("reported_given_back_bytes", Family::BalloonReturned, &["reported"], WHOLE),
    ("give_back_calls", Family::BalloonReturnCalls, &[], WHOLE),
    ("deferred_bytes", Family::BalloonDeferred, &[], WHOLE),
    ("hinted_bytes", Family::BalloonHinted, &[], WHOLE),
    ("rejected_pages", Family::BalloonRejected, &[], WHOLE),
    ("give_back_failures", Family::BalloonReturnFailures, &[], WHOLE),
    ("statistics_updates", Family::BalloonStatisticsUpdates, &[], WHOLE),
    ("guest_free_bytes", Family::GuestMemory, &["free"], WHOLE),
    ("guest_total_bytes", Family::GuestMemory, &["total"], WHOLE),
    ("guest_available_bytes", Family::GuestMemory, &["available"], WHOLE),
    ("guest_disk_cache_bytes", Family::GuestMemory, &["disk_cache"], WHOLE),
    ("guest_swap_in_bytes", Family::GuestSwapped, &["in"], WHOLE),
    ("guest_swap_out_bytes", Family::GuestSwapped, &["out"], WHOLE),
    ("guest_major_faults", Family::GuestMemoryEvents, &["major_faults"], WHOLE),
    ("guest_minor_faults", Family::GuestMemoryEvents, &["minor_faults"], WHOLE),
    ("guest_hugetlb_allocations", Family::GuestMemoryEvents, &["hugetlb_allocations"], WHOLE),
    ("guest_hugetlb_failures", Family::GuestMemoryEvents, &["hugetlb_failures"], WHOLE),
    ("guest_oom_kills", Family::GuestMemoryEvents, &["oom_kills"], WHOLE),
    ("guest_allocation_stalls", Family::GuestMemoryEvents, &["allocation_stalls"], WHOLE),
    ("guest_async_scanned_pages", Family::GuestMemoryEvents, &["async_scanned_pages"], WHOLE),
    ("guest_direct_scanned_pages", Family::GuestMemoryEvents, &["direct_scanned_pages"], WHOLE),
    ("guest_async_reclaimed_pages", Family::GuestMemoryEvents, &["async_reclaimed_pages"], WHOLE),
    ("guest_direct_reclaimed_pages", Family::GuestMemoryEvents, &["direct_reclaimed_pages"], WHOLE),
];

/// Devices that another process or the host's kernel serves.
const PEER: &[Row] = &[
    ("interrupts", Family::DeviceInterrupts, &[], WHOLE),
    ("config_changes", Family::DeviceConfigChanges, &[], WHOLE),
];

const PASSTHROUGH: &[Row] = &[
    ("lost", Family::PassthroughLost, &[], WHOLE),
    ("bus_master_waited_us", Family::PassthroughWaited, &[], MICROS),
];

/// Adds the metrics of a device.
pub fn add(page: &mut Page, id: &str, counters: &BTreeMap<String, u64>) {
    let kind = KINDS.iter().find(|(mark, _)| counters.contains_key(*mark));
    for (name, family, labels, scale) in kind.into_iter().flat_map(|(_, rows)| *rows) {
        if let Some(count) = counters.get(*name) {
            let labels: Vec<&str> = [id].into_iter().chain(labels.iter().copied()).collect();
            page.add(*family, &labels, scale(*count));
        }
    }
}

/// Names of all counters that are metrics, by kind of device.
#[cfg(test)]
pub fn all_counters() -> Vec<Vec<&'static str>> {
    KINDS.iter().map(|(_, rows)| rows.iter().map(|row| row.0).collect()).collect()
}

#[cfg(test)]
mod tests {
    use ::devices::virtio::Counters;
    use ::devices::virtio::block::BlockCounters;
    use ::devices::virtio::net::NetCounters;
    use ::devices::virtio::vdpa::VdpaCounters;
    use ::devices::virtio::vhost_user::VhostUserCounters;
    use ::devices::virtio::vsock::VsockCounters;

    use super::super::text::Format;
    use super::*;

    /// In `vm.counters` and not here: what follows from the other two.
    const DERIVED: [&str; 2] = ["read_latency_avg", "write_latency_avg"];

    #[test]
    fn each_counter_of_a_device_is_a_metric() {
        let of_kind: [(&dyn Counters, &[Row]); 5] = [
            (&BlockCounters::default(), DISK),
            (&NetCounters::default(), NET),
            (&VsockCounters::default(), VSOCK),
            (&VhostUserCounters::default(), PEER),
            (&VdpaCounters::default(), PEER),
        ];
        for (counters, rows) in of_kind {
            let counters: BTreeMap<String, u64> =
                counters.counters().into_keys().map(|name| (name.to_owned(), 0)).collect();
            let (_, of_marks) = KINDS
                .iter()
                .find(|(mark, _)| counters.contains_key(*mark))
                .expect("a kind that is known");
            assert_eq!(of_marks.as_ptr(), rows.as_ptr(), "{counters:?} are of another kind");
            for name in counters.keys().filter(|name| !DERIVED.contains(&name.as_str())) {
                assert!(rows.iter().any(|row| row.0 == name), "{name} is no metric");
            }
        }
    }

    #[test]
    fn values_have_base_units_and_the_name_of_the_device() {
        let text = |counters: &[(&str, u64)]| {
            let mut page = Page::default();
            let counters = counters.iter().map(|(name, count)| ((*name).to_owned(), *count));
            add(&mut page, "d\"0", &counters.collect());
            page.write(Format::OpenMetrics)
        };
        let disk = text(&[("read_ops", 3), ("read_latency_total", 1_500_000), ("new", 1)]);
        assert!(disk.contains("godwit_disk_reads_total{device=\"d\\\"0\"} 3\n"), "{disk}");
        assert!(disk.contains("godwit_disk_read_time_seconds_total{device=\"d\\\"0\"} 1.5\n"));
        assert_eq!(disk.lines().filter(|line| !line.starts_with('#')).count(), 2, "{disk}");
        let balloon = text(&[("inflated_pages", 2), ("inflated_given_back_bytes", 4096)]);
        assert!(balloon.contains("godwit_balloon_inflated_bytes_total{device=\"d\\\"0\"} 8192\n"));
        let returned = "returned_bytes_total{device=\"d\\\"0\",cause=\"inflated\"} 4096\n";
        assert!(balloon.contains(returned), "{balloon}");
        assert!(!text(&[("first_mmio_monotonic_us", 7)]).contains("godwit"), "of the VMM itself");
    }
}
