// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Findings about a host, and the report of them.
//!
//! Owns their form, also as JSON. It must never know a particular finding.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::cpu_baseline::CpuBaseline;

/// Version of the report's JSON. Fields, checks and reasons may be added without a new one.
const VERSION: u32 = 1;

/// What a finding means for the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Nothing is lacking.
    Ok,
    /// The VM works, but slower or without a feature.
    Costs,
    /// The VM would not start, or not have a device that it is to have.
    Fails,
}

impl Severity {
    /// The word for it, as in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Costs => "costs",
            Self::Fails => "fails",
        }
    }
}

/// Something that is looked at.
#[derive(Debug)]
pub struct Check {
    /// Its name, which stays the same.
    pub name: &'static str,
    /// What is looked at.
    pub what: &'static str,
}

/// Something that a host may lack.
#[derive(Debug)]
pub struct Lack {
    /// The check that finds it.
    pub check: &'static Check,
    /// Its name among those of the check, which stays the same.
    pub reason: &'static str,
    /// What it means for the VM.
    pub severity: Severity,
    /// What it costs.
    pub cost: &'static str,
    /// Commands that mend it, with words in capitals in place of what is known when it is found.
    pub mend: &'static [&'static str],
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Name of the check.
    pub check: String,
    /// The device, zone or path that it is about, if not the host as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// What it means for the VM.
    pub severity: Severity,
    /// What is lacking, by its name; absent if nothing is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What was found, in words.
    pub found: String,
    /// What it costs, in a sentence; absent if nothing is lacking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// Commands for a shell that mend it, in order; none if nothing is lacking or no command mends it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mend: Vec<String>,
}

impl Finding {
    /// Nothing is lacking.
    pub fn ok(check: &Check, found: impl Into<String>) -> Self {
        Self {
            check: check.name.to_owned(),
            about: None,
            severity: Severity::Ok,
            reason: None,
            found: found.into(),
            cost: None,
            mend: Vec::new(),
        }
    }

    /// Something is lacking.
    pub fn lack(lack: &Lack, found: impl Into<String>) -> Self {
        Self {
            severity: lack.severity,
            reason: Some(lack.reason.to_owned()),
            cost: Some(lack.cost.to_owned()),
            mend: lack.mend.iter().map(|command| (*command).to_owned()).collect(),
            ..Self::ok(lack.check, found)
        }
    }

    /// The same about this device, zone or path.
    #[must_use]
    pub fn about(mut self, about: &str) -> Self {
        self.about = Some(about.to_owned());
        self
    }

    /// The same with a value, as a word of a shell, in place of a word in capitals in its commands.
    #[must_use]
    pub fn with(mut self, word: &str, value: &str) -> Self {
        let value = shell_word(value);
        for command in &mut self.mend {
            *command = command.replace(word, &value);
        }
        self
    }

    /// What it is, in a sentence.
    pub fn sentence(&self) -> String {
        let Self { check, about, found, cost, .. } = self;
        let about = about.as_ref().map(|about| format!(" ({about})")).unwrap_or_default();
        let cost = cost.as_ref().map(|cost| format!("; {cost}")).unwrap_or_default();
        format!("{check}{about}: {found}{cost}")
    }

    /// The same without commands, as they would not mend this one.
    #[must_use]
    pub fn unmended(mut self) -> Self {
        self.mend.clear();
        self
    }
}

/// A word that a shell takes as it is.
fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+,=@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// All findings about a host and a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreflightReport {
    /// Version of this document.
    pub version: u32,
    /// The worst severity of all findings.
    pub verdict: Severity,
    /// The findings.
    pub findings: Vec<Finding>,
    /// The features that vCPUs can have on this host, from which `cloud-hypervisor --cpu-baseline` makes those that several have in
    /// common; absent if KVM cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub cpu: Option<CpuBaseline>,
}

impl PreflightReport {
    pub(super) fn of(findings: Vec<Finding>) -> Self {
        let verdict = findings.iter().map(|finding| finding.severity).max();
        Self { version: VERSION, verdict: verdict.unwrap_or(Severity::Ok), findings, cpu: None }
    }

    /// The report as JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The report for people.
    pub fn text(&self) -> String {
        super::text::of(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static CHECK: Check = Check { name: "a", what: "something" };
    static LACK: Lack = Lack {
        check: &CHECK,
        reason: "none",
        severity: Severity::Costs,
        cost: "it is slower",
        mend: &["chmod 666 PATH", "echo NUMBER"],
    };

    #[test]
    fn values_in_commands_are_words_of_a_shell() {
        let finding = Finding::lack(&LACK, "x").with("PATH", "/a b/it's").with("NUMBER", "7");
        assert_eq!(finding.mend, [r"chmod 666 '/a b/it'\''s'", "echo 7"]);
        assert_eq!(shell_word(""), "''");
        assert_eq!(shell_word("/dev/vfio/7"), "/dev/vfio/7");
        assert_eq!(shell_word("$(reboot)"), "'$(reboot)'");
    }

    #[test]
    fn the_verdict_is_that_of_the_worst_finding() {
        let verdict = |findings| PreflightReport::of(findings).verdict;
        assert_eq!(verdict(vec![]), Severity::Ok);
        let (ok, lack) = (Finding::ok(&CHECK, "x"), Finding::lack(&LACK, "x"));
        assert_eq!(verdict(vec![ok.clone(), lack, ok]), Severity::Costs);
    }
}
