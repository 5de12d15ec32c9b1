// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Statistics in the Prometheus text format.
//!
//! Owns the counters and their names. Must never decide anything.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use prezero_pool_client::Refusal;

use crate::config::{Class, SlotZone};

/// What has happened since the start.
#[derive(Debug, Default)]
pub struct Counters {
    pub grants: u64,
    pub returns: u64,
    pub scrubbed_bytes: u64,
    pub built_bytes: u64,
    /// Memory that could not be made or cleared.
    pub failures: u64,
    /// Memory that was not zero after it was cleared.
    pub not_zero: u64,
    /// Memory that came back and could not be proved free.
    pub unproved: u64,
    pub bad_requests: u64,
    /// Memory that could not be mapped for its device.
    pub pin_failures: u64,
    refusals: BTreeMap<&'static str, u64>,
    waits: BTreeMap<usize, Duration>,
}

impl Counters {
    pub fn refuse(&mut self, reason: Refusal) {
        *self.refusals.entry(reason.name()).or_default() += 1;
    }

    /// How long a kind of slot waits after another failure.
    pub fn back_off(&mut self, class: usize, min: Duration, max: Duration) -> Duration {
        let wait = self.waits.entry(class).or_insert(min);
        let now = *wait;
        *wait = (now * 2).min(max);
        now
    }

    /// The next failure of a kind of slot is its first.
    pub fn succeed(&mut self, class: usize) {
        self.waits.remove(&class);
    }
}

/// Slots of a kind in a state.
pub struct SlotCount<'a> {
    pub class: &'a Class,
    pub state: &'static str,
    pub count: usize,
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP prezero_pool_{name} {help}");
    let _ = writeln!(out, "# TYPE prezero_pool_{name} {kind}");
}

/// What differs between the zones of a slot, each value once, in their order.
fn of_zones(class: &Class, value: impl Fn(&SlotZone) -> String) -> String {
    let mut values: Vec<_> = class.zones.iter().map(value).collect();
    values.dedup();
    values.join("+")
}

/// All of it; `bytes_per_s` is the rate of work on memory.
pub fn render(counters: &Counters, slots: &[SlotCount<'_>], bytes_per_s: u64) -> String {
    let mut out = String::new();
    let (with_device, plain): (Vec<_>, Vec<_>) =
        slots.iter().partition(|slot| slot.class.device.is_some());
    let help = "Slots that are mapped for a device, by device, kind and state.";
    for (name, help, slots) in
        [("slots", "Slots by kind and state.", plain), ("device_slots", help, with_device)]
    {
        head(&mut out, name, "gauge", help);
        for SlotCount { class, state, count } in slots {
            let device = class.device.as_ref();
            let device =
                device.map_or_else(String::new, |slot| format!("device=\"{}\",", slot.address));
            let node = of_zones(class, |zone| {
                zone.node.map_or_else(|| "any".to_owned(), |node| node.to_string())
            });
            let pages = of_zones(class, |zone| zone.pages.name().to_owned());
            let _ = writeln!(
                out,
                "prezero_pool_{name}{{{device}bytes=\"{}\",pages=\"{pages}\",node=\"{node}\",\
                 state=\"{state}\"}} {count}",
                class.size_bytes(),
            );
        }
    }
    let name = "bandwidth_bytes_per_second";
    head(&mut out, name, "gauge", "Rate at which memory is cleared and verified; 0 for no limit.");
    let _ = writeln!(out, "prezero_pool_{name} {bytes_per_s}");
    let help = "Requests that got no memory, by reason.";
    head(&mut out, "refusals_total", "counter", help);
    for reason in Refusal::ALL {
        let count = counters.refusals.get(reason.name()).copied().unwrap_or(0);
        let _ =
            writeln!(out, "prezero_pool_refusals_total{{reason=\"{}\"}} {count}", reason.name());
    }
    for (name, help, value) in [
        ("grants_total", "Slots that were lent.", counters.grants),
        ("returns_total", "Slots whose user has gone.", counters.returns),
        ("scrubbed_bytes_total", "Bytes cleared in place and verified.", counters.scrubbed_bytes),
        ("built_bytes_total", "Bytes made anew and verified.", counters.built_bytes),
        ("failures_total", "Slots that could not be made or cleared.", counters.failures),
        ("not_zero_total", "Slots that were not zero when verified.", counters.not_zero),
        ("unproved_total", "Slots made anew, not provably free.", counters.unproved),
        ("pin_failures_total", "Slots not mapped for their device.", counters.pin_failures),
        ("bad_requests_total", "Connections cut for what they sent.", counters.bad_requests),
    ] {
        head(&mut out, name, "counter", help);
        let _ = writeln!(out, "prezero_pool_{name} {value}");
    }
    out
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]
mod tests {
    use prezero_pool_client::SlotPages;

    use super::*;
    use crate::config::SlotDevice;

    #[test]
    fn each_series_has_its_head_and_a_number() {
        let (pages, address) = (SlotPages::Small, "0000:65:00.0".parse().unwrap());
        let zone = |node| SlotZone { size_bytes: 4096, pages, node };
        let class = Class { zones: vec![zone(None)], count: 1, device: None };
        let device = Some(SlotDevice { address, users: Vec::new(), high_hole: None });
        let with_device = Class { zones: vec![zone(Some(0)), zone(Some(1))], count: 1, device };
        let mut counters = Counters { grants: 3, ..Counters::default() };
        counters.refuse(Refusal::Empty);
        let slots = [
            SlotCount { class: &class, state: "ready", count: 2 },
            SlotCount { class: &with_device, state: "waiting", count: 1 },
        ];
        let text = render(&counters, &slots, 5);
        for line in [
            "prezero_pool_slots{bytes=\"4096\",pages=\"4K\",node=\"any\",state=\"ready\"} 2",
            "prezero_pool_device_slots{device=\"0000:65:00.0\",bytes=\"8192\",pages=\"4K\",\
             node=\"0+1\",state=\"waiting\"} 1",
            "prezero_pool_refusals_total{reason=\"empty\"} 1",
            "prezero_pool_refusals_total{reason=\"not_allowed\"} 0",
            "prezero_pool_grants_total 3",
            "prezero_pool_bandwidth_bytes_per_second 5",
            "# TYPE prezero_pool_grants_total counter",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}\n{text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.rsplit(' ').next().is_some_and(|n| n.parse::<u64>().is_ok()), "{line}");
        }
    }
}
