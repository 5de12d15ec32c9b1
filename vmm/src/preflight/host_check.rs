// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a VM would fail with that a source only asks about.
//!
//! Owns the order in which it is found out. It must never look at what the configuration names on this host unless the rules
//! of `receive-migration` allow all of it, as a peer would learn of files that it may not name. The rules of
//! an arrival, and of a start, are asked of the modules that have them.

use std::sync::Arc;

use vm_migration::VmError;
use vm_migration::vm::{ArrivalCheck, AskedMigration, CheckFindings};

use super::arrival::{ArrivalPlan, of_arrival};
use super::finding::Severity;
use crate::config::zone_update::MemoryUpdates;
use crate::config::{ArrivingFds, Grant};
use crate::machine::Host;
use crate::migration::destination::{check_grants, complete};
use crate::migration::document::MachineDocument;
use crate::migration::grants;

/// Answers checks as the request for a migration, which waits, says.
pub struct HostCheck {
    /// The host.
    pub host: Arc<Host>,
    /// Descriptors for the devices.
    pub fds: ArrivingFds,
    /// Where memory comes from on this host.
    pub memory: MemoryUpdates,
    /// What the configuration may name; `None`: no restriction.
    pub rules: Option<Vec<Grant>>,
}

impl ArrivalCheck for HostCheck {
    fn findings(&self, config_json: &[u8], asked: AskedMigration) -> CheckFindings {
        let mut found = CheckFindings::default();
        if let Err(error) = self.find(config_json, asked, &mut found) {
            found.problems.push(error_text::chain(&*error));
        }
        found
    }
}

impl HostCheck {
    /// # Errors
    /// Why nothing more can be found out.
    fn find(
        &self,
        config_json: &[u8],
        asked: AskedMigration,
        found: &mut CheckFindings,
    ) -> Result<(), VmError> {
        let MachineDocument { vm_config, common_cpuid, feature_msrs } =
            MachineDocument::read(config_json)?;
        let config = complete(&self.fds, &self.memory, vm_config)?;
        let shown = [
            self.host.check_msrs(&common_cpuid, &feature_msrs),
            self.host.check_shown(&config, &common_cpuid, &[]),
        ];
        let lacking = shown.iter().filter_map(|shown| shown.as_ref().err());
        found.problems.extend(lacking.map(|error| error_text::chain(error)));
        let refused = check_grants(self.rules.as_deref(), &self.memory, &config, grants::refused);
        if !refused.is_empty() {
            found.problems.extend(refused.iter().map(|error| error_text::chain(error)));
            return Ok(());
        }
        let AskedMigration { local, move_bytes, .. } = asked;
        let plan = ArrivalPlan { local, move_bytes, has_rules: self.rules.is_some() };
        for finding in of_arrival(&config, &self.host, plan) {
            let list = match finding.severity {
                Severity::Fails => &mut found.problems,
                Severity::Ok | Severity::Costs => &mut found.warnings,
            };
            list.push(finding.sentence());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use hypervisor::CpuidEntry;
    use serde_json::{Value, json};
    use vm_migration::MemoryMode;

    use super::*;

    fn check(rules: Option<Vec<Grant>>) -> HostCheck {
        HostCheck {
            host: Arc::new(Host::open().unwrap()),
            fds: ArrivingFds::default(),
            memory: MemoryUpdates::default(),
            rules,
        }
    }

    fn asked() -> AskedMigration {
        AskedMigration { mode: MemoryMode::Precopy, local: false, move_bytes: 1 << 20 }
    }

    fn document(values: &Value, common_cpuid: Vec<CpuidEntry>) -> Vec<u8> {
        let mut all = json!({
            "payload": {"kernel": "/nonexistent/kernel"}, "console": {"mode": "Off"},
            "memory": {"size": 64 << 20},
        });
        for (key, value) in values.as_object().unwrap() {
            all[key] = value.clone();
        }
        let vm_config = serde_json::from_value(all).unwrap();
        MachineDocument { vm_config, common_cpuid, feature_msrs: Vec::new() }.to_json().unwrap()
    }

    #[test]
    fn a_vm_that_could_arrive_has_no_problem() {
        if !test_skip::kvm() {
            return;
        }
        let found = check(None).findings(&document(&json!({}), Vec::new()), asked());
        assert_eq!(found.problems, [""; 0]);
        let of_kernel = |text: &&String| text.starts_with("payload (kernel): /nonexistent/kernel");
        assert_eq!(found.warnings.iter().filter(of_kernel).count(), 1, "{found:?}");
    }

    #[test]
    fn everything_that_is_lacking_is_told_at_once() {
        if !test_skip::kvm() {
            return;
        }
        // Bits of no processor, and two disks that are not there.
        let shown = CpuidEntry { function: 7, index: 0, flags: 1, answer: [0, u32::MAX, 0, 0] };
        let disks = json!({"disks": [{"path": "/nonexistent/a"}, {"path": "/nonexistent/b"}]});
        let found = check(None).findings(&document(&disks, vec![shown]), asked());
        assert_eq!(found.problems.len(), 3, "{found:?}");
        assert!(found.problems[0].contains("CPUID 0x7.0x0 EBX"), "{found:?}");
        assert!(found.problems[1].contains("/nonexistent/a"), "{found:?}");
        assert!(found.problems[2].contains("/nonexistent/b"), "{found:?}");
    }

    #[test]
    fn what_rules_do_not_allow_is_not_looked_at() {
        if !test_skip::kvm() {
            return;
        }
        let disks = json!({"disks": [{"path": "/proc/version"}, {"path": "/nonexistent/b"}]});
        let found = check(Some(Vec::new())).findings(&document(&disks, Vec::new()), asked());
        // The kernel, and both disks.
        assert_eq!(found.problems.len(), 3, "{found:?}");
        let refused =
            |text: &String| text.contains("no rule of this receive-migration allows that");
        assert!(found.problems.iter().all(refused), "{found:?}");
        assert!(found.warnings.is_empty(), "{found:?}");
    }

    #[test]
    fn what_is_no_configuration_is_the_only_problem() {
        if !test_skip::kvm() {
            return;
        }
        for wrong in [&b"rubbish"[..], b"{}", &[0xff; 9]] {
            let found = check(None).findings(wrong, asked());
            assert_eq!((found.problems.len(), found.warnings.len()), (1, 0), "{found:?}");
        }
        let refused = document(&json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 1}}), Vec::new());
        assert_eq!(check(None).findings(&refused, asked()).problems.len(), 1);
    }
}
