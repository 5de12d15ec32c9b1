// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The text that `top` shows.
//!
//! Owns which metrics are shown, and how. It must never make up a figure: what a VMM does not say has no line.

use std::fmt::Write as _;

use indicatif::BinaryBytes;

use super::samples::Samples;

/// The most vCPUs and devices that have a line of their own: those that do most.
const ROWS_MAX: usize = 16;
/// Cells of a bar.
const BAR: u8 = 20;
const MIB: f64 = 1_048_576.0;

/// Two moments of a VM.
pub struct Screen<'a> {
    /// What it is called: the path of its socket.
    pub vm: &'a str,
    /// The earlier moment.
    pub before: &'a Samples,
    /// The later one.
    pub now: &'a Samples,
}

/// The columns of a kind of device: heading, metric, and its unit in one that is shown.
struct Columns {
    title: &'static str,
    columns: &'static [(&'static str, &'static str, f64)],
}

const DISKS: Columns = Columns {
    title: "disk",
    columns: &[
        ("read/s", "godwit_disk_reads_total", 1.0),
        ("read MiB/s", "godwit_disk_read_bytes_total", MIB),
        ("write/s", "godwit_disk_writes_total", 1.0),
        ("write MiB/s", "godwit_disk_written_bytes_total", MIB),
        ("errors/s", "godwit_disk_errors_total", 1.0),
    ],
};
const NETWORKS: Columns = Columns {
    title: "network",
    columns: &[
        ("rx frames/s", "godwit_network_received_frames_total", 1.0),
        ("rx MiB/s", "godwit_network_received_bytes_total", MIB),
        ("tx frames/s", "godwit_network_sent_frames_total", 1.0),
        ("tx MiB/s", "godwit_network_sent_bytes_total", MIB),
        ("dropped/s", "godwit_network_dropped_frames_total", 1.0),
    ],
};
const SOCKETS: Columns = Columns {
    title: "vsock",
    columns: &[
        ("rx packets/s", "godwit_vsock_received_packets_total", 1.0),
        ("rx MiB/s", "godwit_vsock_received_bytes_total", MIB),
        ("tx packets/s", "godwit_vsock_sent_packets_total", 1.0),
        ("tx MiB/s", "godwit_vsock_sent_bytes_total", MIB),
        ("connections/s", "godwit_vsock_connections_total", 1.0),
    ],
};

impl Screen<'_> {
    /// The text, which ends with a line.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        self.head(out)?;
        self.memory(out)?;
        self.passthrough(out)?;
        self.migration(out)?;
        self.vcpus(out)?;
        for columns in [&DISKS, &NETWORKS, &SOCKETS] {
            self.devices(columns, out)?;
        }
        Ok(())
    }

    fn head(&self, out: &mut String) -> std::fmt::Result {
        let now = self.now;
        let state = now.chosen("godwit_vm_state", "state").unwrap_or("no VM");
        write!(out, "{}  {state}", self.vm)?;
        if let Some(activity) = now.chosen("godwit_vm_activity", "activity") {
            write!(out, " ({activity})")?;
        }
        if let (Some(vcpus), Some(max)) =
            (now.value("godwit_vcpus", &[]), now.value("godwit_vcpus_max", &[]))
        {
            write!(out, "  {vcpus} of {max} vCPUs")?;
        }
        writeln!(out)?;
        let busy = now.rate(self.before, "godwit_process_cpu_seconds_total", &[]).unwrap_or(0.0);
        write!(out, "process: {:.0} % of a CPU", busy * 100.0)?;
        if let Some(threads) = now.value("godwit_process_threads", &[]) {
            write!(out, ", {threads} threads")?;
        }
        if let Some(resident) = now.value("godwit_process_resident_memory_bytes", &[]) {
            write!(out, ", {} resident", bytes(resident))?;
        }
        let requests = now.sum("godwit_api_requests_total").unwrap_or(0.0)
            - self.before.sum("godwit_api_requests_total").unwrap_or(0.0);
        // The look itself is a request.
        let others = (requests - 1.0).max(0.0) / now.since(self.before).as_secs_f64();
        writeln!(out, ", {others:.1} API requests/s")?;
        if now.value("godwit_scrape_complete", &[]) == Some(0.0) {
            writeln!(out, "the VMM did not answer in time: what it alone knows is left out")?;
        }
        Ok(())
    }

    fn memory(&self, out: &mut String) -> std::fmt::Result {
        let now = self.now;
        for zone in now.label_values("godwit_memory_size_bytes", "zone") {
            let at = [("zone", zone)];
            let size = now.value("godwit_memory_size_bytes", &at).unwrap_or(0.0);
            write!(out, "memory: {zone} {}", bytes(size))?;
            if let Some(allocated) = now.value("godwit_memory_allocated_bytes", &at) {
                write!(out, ", {} on the host", bytes(allocated))?;
            }
            writeln!(out)?;
        }
        for device in now.label_values("godwit_balloon_actual_bytes", "device") {
            let at = [("device", device)];
            let value = |name| now.value(name, &at).unwrap_or(0.0);
            let returned = self.rate_of_all("godwit_balloon_returned_bytes_total");
            writeln!(
                out,
                "balloon: {device} {} of {} wanted, {}/s returned to the host",
                bytes(value("godwit_balloon_actual_bytes")),
                bytes(value("godwit_balloon_target_bytes")),
                bytes(returned)
            )?;
        }
        self.part_of(
            "prefault",
            "godwit_prefault_populated_bytes",
            "godwit_prefault_size_bytes",
            "populated",
            out,
        )
    }

    fn passthrough(&self, out: &mut String) -> std::fmt::Result {
        let (done, all) = ("godwit_passthrough_pinned_bytes", "godwit_passthrough_size_bytes");
        self.part_of("passthrough", done, all, "pinned", out)?;
        let lost = self.now.label_values("godwit_passthrough_device_lost", "device");
        for device in lost.into_iter().filter(|device| {
            self.now.value("godwit_passthrough_device_lost", &[("device", device)]) == Some(1.0)
        }) {
            writeln!(out, "passthrough: {device} is lost")?;
        }
        match self.now.value("godwit_passthrough_withheld_devices", &[]) {
            Some(withheld) if withheld > 0.0 => {
                writeln!(out, "passthrough: {withheld} devices the guest does not see yet")
            }
            _ => Ok(()),
        }
    }

    /// So much of so much, while it is less.
    fn part_of(
        &self,
        what: &str,
        done: &str,
        all: &str,
        verb: &str,
        out: &mut String,
    ) -> std::fmt::Result {
        match (self.now.value(done, &[]), self.now.value(all, &[])) {
            (Some(done), Some(all)) if done < all => {
                writeln!(out, "{what}: {} of {} {verb}", bytes(done), bytes(all))
            }
            _ => Ok(()),
        }
    }

    fn migration(&self, out: &mut String) -> std::fmt::Result {
        let now = self.now;
        let Some(phase) =
            now.chosen("godwit_migration_phase", "phase").filter(|phase| *phase != "idle")
        else {
            return Ok(());
        };
        let of = |label| now.label("godwit_migration_info", label).unwrap_or_default();
        write!(out, "migration: {} as {}, phase {phase}", of("mode"), of("side"))?;
        if let Some(elapsed) = now.value("godwit_migration_elapsed_seconds", &[]) {
            write!(out, ", {elapsed:.1} s")?;
        }
        for direction in ["sent", "received"] {
            let at = [("direction", direction)];
            let rate =
                now.rate(self.before, "godwit_migration_moved_bytes_total", &at).unwrap_or(0.0);
            if rate > 0.0 {
                write!(out, ", {}/s {direction}", bytes(rate))?;
            }
        }
        if let Some(left) =
            now.value("godwit_migration_remaining_bytes", &[]).filter(|left| *left > 0.0)
        {
            write!(out, ", {} left", bytes(left))?;
        }
        let downtime = |kind| now.value("godwit_migration_downtime_seconds", &[("kind", kind)]);
        for (kind, verb) in [("expected", "would be"), ("measured", "was")] {
            if let Some(seconds) = downtime(kind) {
                write!(out, ", the downtime {verb} {:.0} ms", seconds * 1000.0)?;
            }
        }
        writeln!(out)
    }

    fn vcpus(&self, out: &mut String) -> std::fmt::Result {
        const BUSY: &str = "godwit_vcpu_cpu_seconds_total";
        let busy =
            |vcpu: &str| self.now.rate(self.before, BUSY, &[("vcpu", vcpu)]).unwrap_or(0.0) * 100.0;
        let mut rows: Vec<_> = self
            .now
            .label_values(BUSY, "vcpu")
            .into_iter()
            .map(|vcpu| (vcpu, busy(vcpu)))
            .collect();
        if rows.is_empty() {
            return Ok(());
        }
        let total: f64 = rows.iter().map(|(_, busy)| busy).sum();
        writeln!(out, "\n{:>8}  {:>6}", "vCPU", "busy %")?;
        let most_first = rows.len() > ROWS_MAX;
        if most_first {
            rows.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        }
        for (vcpu, busy) in rows.iter().take(ROWS_MAX) {
            writeln!(out, "{vcpu:>8}  {busy:>6.1}  {}", bar(*busy))?;
        }
        if most_first {
            let others = rows.len() - ROWS_MAX;
            writeln!(out, "{others:>8} others; {total:.0} % all together")?;
        }
        Ok(())
    }

    fn devices(&self, kind: &Columns, out: &mut String) -> std::fmt::Result {
        let Some((_, first, _)) = kind.columns.first() else { return Ok(()) };
        let rate = |metric: &str, device: &str| {
            self.now.rate(self.before, metric, &[("device", device)]).unwrap_or(0.0)
        };
        let sum = |device: &str| {
            kind.columns.iter().map(|(_, metric, unit)| rate(metric, device) / unit).sum::<f64>()
        };
        let mut devices = self.now.label_values(first, "device");
        if devices.is_empty() {
            return Ok(());
        }
        let others = devices.len().saturating_sub(ROWS_MAX);
        if others > 0 {
            let mut busy: Vec<_> = devices.iter().map(|device| (sum(device), *device)).collect();
            busy.sort_by(|(one, _), (other, _)| other.total_cmp(one));
            devices = busy.into_iter().map(|(_, device)| device).collect();
        }
        write!(out, "\n{:<14}", kind.title)?;
        for (heading, ..) in kind.columns {
            write!(out, "  {heading:>13}")?;
        }
        writeln!(out)?;
        for device in devices.into_iter().take(ROWS_MAX) {
            write!(out, "{device:<14}")?;
            for (_, metric, unit) in kind.columns {
                write!(out, "  {:>13.1}", rate(metric, device) / unit)?;
            }
            writeln!(out)?;
        }
        if others > 0 {
            writeln!(out, "and {others} that do less")?;
        }
        Ok(())
    }

    /// The rate of a counter over all of its labels.
    fn rate_of_all(&self, name: &str) -> f64 {
        let sum = |samples: &Samples| samples.sum(name).unwrap_or(0.0);
        (sum(self.now) - sum(self.before)).max(0.0) / self.now.since(self.before).as_secs_f64()
    }
}

fn bytes(count: f64) -> String {
    // Above 2^63 and below zero it stays at the end of the range.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an amount to be shown"
    )]
    let count = count as u64;
    BinaryBytes(count).to_string()
}

fn bar(percent: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of cells, limited below"
    )]
    let cells = (percent / 100.0 * f64::from(BAR)).round() as usize;
    "#".repeat(cells.min(BAR.into()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn text(before: &str, now: &str) -> String {
        let at = Instant::now();
        let read = |text: &str, after| {
            Samples::read(&format!("{text}# EOF\n"), at + after).expect("samples")
        };
        let before = read(before, Duration::ZERO);
        let now = read(now, Duration::from_secs(2));
        Screen { vm: "/run/vm", before: &before, now: &now }.text()
    }

    #[test]
    fn a_vmm_without_a_vm_has_two_lines() {
        let text = text("", "");
        assert_eq!(text, "/run/vm  no VM\nprocess: 0 % of a CPU, 0.0 API requests/s\n");
    }

    #[test]
    fn what_is_busy_is_shown_as_rates() {
        let at = |vcpu: f64, reads: u32, bytes: u64, requests: u32| {
            format!(
                "godwit_vm_state{{state=\"Running\"}} 1\ngodwit_vcpus 1\ngodwit_vcpus_max 4\n\
                 godwit_process_cpu_seconds_total {vcpu}\ngodwit_vcpu_cpu_seconds_total{{vcpu=\"0\"}} {vcpu}\n\
                 godwit_memory_size_bytes{{zone=\"mem0\"}} 1073741824\n\
                 godwit_memory_allocated_bytes{{zone=\"mem0\"}} 536870912\n\
                 godwit_disk_reads_total{{device=\"root\"}} {reads}\n\
                 godwit_disk_read_bytes_total{{device=\"root\"}} {bytes}\n\
                 godwit_prefault_populated_bytes 1048576\ngodwit_prefault_size_bytes 2097152\n\
                 godwit_api_requests_total{{endpoint=\"vm.metrics\",outcome=\"success\"}} {requests}\n"
            )
        };
        let text = text(&at(10.0, 100, 0, 5), &at(11.0, 300, 8 << 20, 10));
        for wanted in [
            "/run/vm  Running  1 of 4 vCPUs",
            "process: 50 % of a CPU, 2.0 API requests/s",
            "memory: mem0 1.00 GiB, 512.00 MiB on the host",
            "prefault: 1.00 MiB of 2.00 MiB populated",
            "       0    50.0  ##########\n",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        let row: Vec<_> = text
            .lines()
            .find(|line| line.starts_with("root"))
            .expect("a row")
            .split_whitespace()
            .collect();
        assert_eq!(row, ["root", "100.0", "4.0", "0.0", "0.0", "0.0"]);
    }

    #[test]
    fn of_many_vcpus_the_busiest_are_shown() {
        let at = |busy: u32| -> String {
            let line = |vcpu: u32| {
                format!(
                    "godwit_vcpu_cpu_seconds_total{{vcpu=\"{vcpu}\"}} {}\n",
                    if vcpu == 150 { busy } else { 0 }
                )
            };
            (0..160).map(line).collect()
        };
        let text = text(&at(0), &at(2));
        assert!(text.contains("     150   100.0  ####################\n"), "{text}");
        assert!(text.contains("144 others; 100 % all together"), "{text}");
        assert_eq!(text.lines().count(), 2 + 2 + ROWS_MAX + 1, "{text}");
    }

    #[test]
    fn a_migration_has_its_line() {
        let at = |sent: u64| {
            format!(
                "godwit_migration_info{{side=\"source\",mode=\"precopy\"}} 1\ngodwit_migration_phase{{phase=\"precopy\"}} 1\n\
                 godwit_migration_elapsed_seconds 3.5\ngodwit_migration_remaining_bytes 1048576\n\
                 godwit_migration_moved_bytes_total{{direction=\"sent\"}} {sent}\n\
                 godwit_migration_downtime_seconds{{kind=\"expected\"}} 0.045\n"
            )
        };
        let text = text(&at(0), &at(4 << 20));
        let wanted = "migration: precopy as source, phase precopy, 3.5 s, 2.00 MiB/s sent, 1.00 MiB left, the downtime would be 45 ms\n";
        assert!(text.contains(wanted), "{text}");
        let idle = super::tests::text("", "godwit_migration_phase{phase=\"idle\"} 1\n");
        assert!(!idle.contains("migration"), "{idle}");
    }
}
