// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What this host lacks for a VM that arrives, whose guest runs at its source meanwhile.
//!
//! Owns which findings of a start are those of an arrival: what is booted is not read, what the source holds is not looked
//! at, and memory is judged by what the VM has of it. What the guest was shown of the processor is not asked here. It must
//! never open anything for writing, or connect to anything.

use ::memory::HostMemory;
use ::memory::available::InsufficientMemory;
use rustix::fs::Access;

use super::definitions as of;
use super::devices::{self, DeviceFacts};
use super::finding::{Finding, Severity};
use super::host_files::HostFiles;
use super::kvm::vcpu_numbers;
use super::limits::{self, LimitFacts};
use super::memory::{self, MemoryFacts};
use super::net::{self, NetFacts};
use super::passthrough::{self, PassthroughFacts};
use super::rights::Rights;
use crate::config::VmConfig;
use crate::machine::{Host, ahead};
use crate::sandbox::landlock;

/// What is known of an arrival besides the configuration.
#[derive(Clone, Copy, Debug)]
pub struct ArrivalPlan {
    /// Memory is handed over as files.
    pub local: bool,
    /// Bytes of memory that arrive.
    pub move_bytes: u64,
    /// Rules say what the configuration may name. None is about the paths to which a process confines itself, which are then not
    /// looked at.
    pub has_rules: bool,
}

/// What is lacking for a VM of this complete configuration; nothing that is in order.
pub fn of_arrival(config: &VmConfig, host: &Host, plan: ArrivalPlan) -> Vec<Finding> {
    let mut config = config.clone();
    let files = HostFiles::real();
    let rights = Rights::of(&files.text("/proc/self/status").unwrap_or_default());
    let layout = ahead::layout(&mut config, Some(host));
    let limits = LimitFacts::read(&files, &rights);
    let mut findings = vcpu_numbers(&config, host.capabilities().vcpus_max, limits.cpus);
    findings.extend(confining(&config, plan));
    let memory = MemoryFacts::read(&HostMemory::real(), &config, layout);
    let has_devices = config.devices.as_ref().is_some_and(|devices| !devices.is_empty());
    if !plan.local {
        let of_memory = memory::findings(&memory, &config);
        findings.extend(of_memory.into_iter().filter(|it| it.check != of::MEMORY_ROOM.name));
        findings.extend(room(&memory.room.for_all, has_devices, plan.move_bytes));
    }
    if has_devices {
        let zones = memory.zones.as_ref().ok();
        let stand_in = zones.and_then(|zones| ahead::stand_in(zones, layout));
        let facts = PassthroughFacts::read(&files, &config, stand_in.as_deref());
        findings.extend(passthrough::findings(&facts, &memory, &config));
    }
    let taps = net::findings(&NetFacts::read(&files, &rights), &config);
    findings.extend(taps.into_iter().filter(|it| it.check == of::TAP.name).map(tap));
    findings.extend(devices::findings(&DeviceFacts::of_arrival(&config)));
    findings.extend(payload(&config));
    findings.extend(limits::findings(&limits, &config));
    findings.retain(|finding| finding.severity != Severity::Ok);
    findings
}

/// The paths to which the process would confine itself.
fn confining(config: &VmConfig, plan: ArrivalPlan) -> Vec<Finding> {
    if !config.landlock_enable {
        return Vec::new();
    }
    let kernel = landlock::check_kernel().err();
    let kernel = kernel.map(|error| Finding::lack(&of::LANDLOCK_WANTED, error_text::chain(&error)));
    let rules = config.landlock_rules.iter().flatten().filter(|_| !plan.has_rules);
    let missing = rules.filter(|rule| !rule.path.exists()).map(|rule| {
        let path = rule.path.display().to_string();
        Finding::lack(&of::LANDLOCK_PATH, format!("{path} is not there")).about(&path)
    });
    kernel.into_iter().chain(missing).collect()
}

/// Whether there is room for what arrives, and for all that the guest may use later. Pinned memory is all there at once.
fn room(
    for_all: &Result<(), InsufficientMemory>,
    has_devices: bool,
    move_bytes: u64,
) -> Option<Finding> {
    let Err(why) = for_all else { return None };
    let InsufficientMemory { needed_bytes, limit, available_bytes, .. } = why;
    if has_devices {
        return Some(Finding::lack(&of::ROOM_PINNED, why.to_string()));
    }
    let (now, mib) = (move_bytes.min(*needed_bytes), |bytes: u64| bytes >> 20);
    let available = mib(*available_bytes);
    if now > *available_bytes {
        let found = format!("{} MiB arrive, and {limit} has {available} MiB available", mib(now));
        let lack = Finding::lack(&of::ROOM_LATER, found);
        let cost = "the kernel swaps, or ends this or another process for lack of memory";
        return Some(Finding { severity: Severity::Fails, cost: Some(cost.to_owned()), ..lack });
    }
    let needed = mib(*needed_bytes);
    let found =
        format!("the guest may use {needed} MiB, and {limit} has {available} MiB available");
    Some(Finding::lack(&of::ROOM_LATER, found))
}

/// A tap that is in use may be so by the source, on this host.
fn tap(finding: Finding) -> Finding {
    if finding.reason.as_deref() != Some(of::TAP_IN_USE.reason) {
        return finding;
    }
    let cost = "the VM does not start here, unless it is the source on this host that uses it";
    Finding { severity: Severity::Costs, cost: Some(cost.to_owned()), ..finding }
}

/// What the guest has booted with, which is read when it reboots.
fn payload(config: &VmConfig) -> Vec<Finding> {
    let payload = &config.payload;
    let named = [("kernel", &payload.kernel), ("firmware", &payload.firmware)];
    let named = named.into_iter().chain([("initramfs", &payload.initramfs)]);
    let of_each = |(what, path): (&str, &Option<std::path::PathBuf>)| {
        let path = path.as_ref()?;
        let errno = ahead::refusal(path, Access::READ_OK)?;
        let why = std::io::Error::from_raw_os_error(errno);
        let found = format!("{}: {why}", path.display());
        let cost = "the VM cannot be rebooted here".to_owned();
        let lack = Finding::lack(&of::PAYLOAD_FAILED, found).about(what);
        Some(Finding { severity: Severity::Costs, cost: Some(cost), ..lack })
    };
    named.filter_map(of_each).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use ::memory::available::MemoryLimit;
    use serde_json::{Value, json};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn config(values: &Value) -> VmConfig {
        let mut all = json!({"payload": {"kernel": "/nonexistent"}, "console": {"mode": "Off"}});
        for (key, value) in values.as_object().unwrap() {
            all[key] = value.clone();
        }
        serde_json::from_value::<VmConfig>(all).unwrap().complete().unwrap()
    }

    fn found(config: &VmConfig, local: bool) -> Vec<(String, String, Severity)> {
        let host = Host::open().unwrap();
        let plan = ArrivalPlan { local, move_bytes: MIB, has_rules: false };
        let of_each = |it: Finding| (it.check, it.reason.unwrap_or_default(), it.severity);
        of_arrival(config, &host, plan).into_iter().map(of_each).collect()
    }

    #[test]
    fn all_that_is_missing_is_found_and_what_is_booted_only_costs() {
        if !test_skip::kvm() {
            return;
        }
        let config = config(&json!({
            "disks": [{"path": "/nonexistent/a"}, {"path": "/nonexistent/b"}],
            "rng": {"src": "/nonexistent/rng"},
            "memory": {"size": 1 << 30, "hugepages": true, "hugepage_size": 1 << 30},
        }));
        let all = found(&config, true);
        let has = |check: &str, severity| {
            all.iter().filter(|(name, _, found)| name == check && *found == severity).count()
        };
        assert_eq!(has("disk", Severity::Fails), 2, "{all:?}");
        assert_eq!(has("rng", Severity::Fails), 1, "{all:?}");
        assert_eq!(has("payload", Severity::Costs), 1, "{all:?}");
        let about_memory = |it: &&(String, String, Severity)| it.0 == "huge-pages";
        assert_eq!(all.iter().find(about_memory), None, "it is handed over: {all:?}");
    }

    #[test]
    fn paths_that_no_rule_is_about_are_not_looked_at() {
        let mut config = config(&json!({}));
        config.landlock_enable = true;
        let rule = json!([{"path": "/nonexistent/place", "access": "r"}]);
        config.landlock_rules = serde_json::from_value(rule).unwrap();
        let found = |has_rules| {
            let plan = ArrivalPlan { local: true, move_bytes: 0, has_rules };
            let all = confining(&config, plan);
            all.iter().filter(|it| it.check == of::LANDLOCK_PATH.check.name).count()
        };
        assert_eq!((found(false), found(true)), (1, 0));
    }

    #[test]
    fn an_image_that_the_source_holds_is_no_problem() {
        use ::devices::virtio::block::{Block, BlockConfig};
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(MIB).unwrap();
        let path = image.path();
        let config = config(&json!({"disks": [{"path": path, "image_type": "Raw"}]}));
        let disk = &config.disks.as_ref().unwrap()[0];
        // As the source has it.
        let source = BlockConfig { path: path.to_owned(), ..BlockConfig::default() };
        let source = Block::new(source).unwrap();
        source.lock().lock().unwrap();
        assert!(ahead::disk(disk, &config).is_err(), "it is locked");
        assert!(ahead::arriving_disk(disk, &config).is_ok());
    }

    #[test]
    fn memory_that_arrives_needs_room_and_what_may_come_later_costs() {
        let lacking = |available_bytes| {
            Err(InsufficientMemory {
                needed_bytes: 100 * MIB,
                available_bytes,
                limit: MemoryLimit::Host,
                margin_bytes: 0,
            })
        };
        let of = |found: &Result<(), InsufficientMemory>, has_devices, bytes| {
            room(found, has_devices, bytes).map(|it| (it.reason.unwrap_or_default(), it.severity))
        };
        let named = |reason: &str, severity| Some((reason.to_owned(), severity));
        assert_eq!(of(&Ok(()), true, u64::MAX), None);
        let later = named("too-little-later", Severity::Costs);
        assert_eq!(of(&lacking(50 * MIB), false, 50 * MIB), later);
        let now = named("too-little-later", Severity::Fails);
        assert_eq!(of(&lacking(50 * MIB), false, 51 * MIB), now);
        let pinned = named("too-little-to-pin", Severity::Fails);
        assert_eq!(of(&lacking(50 * MIB), true, 0), pinned);
    }

    #[test]
    fn a_tap_in_use_may_be_the_sources() {
        let busy = tap(Finding::lack(&of::TAP_IN_USE, "tap lan is in use"));
        assert_eq!(busy.severity, Severity::Costs);
        let missing = tap(Finding::lack(&of::TAP_MISSING, "tap lan is missing"));
        assert_eq!(missing.severity, Severity::Fails);
    }
}
