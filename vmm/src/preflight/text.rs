// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The report for people.
//!
//! Owns its form: a line for each finding, below it what a lack costs and what mends it, the verdict last. It must never
//! write a control character of what was found.

use std::fmt::Write as _;

use super::finding::{Finding, PreflightReport, Severity};

fn name(finding: &Finding) -> String {
    match &finding.about {
        Some(about) => format!("{} ({about})", finding.check),
        None => finding.check.clone(),
    }
}

/// Text without what would move the cursor of a terminal.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The text of a report, with no newline at its end.
pub fn of(report: &PreflightReport) -> String {
    let names: Vec<_> = report.findings.iter().map(|finding| shown(&name(finding))).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (finding, name) in report.findings.iter().zip(&names) {
        let (word, found) = (finding.severity.word(), shown(&finding.found));
        let _ = writeln!(text, "{name:<width$}  {word:<5}  {found}");
        let mut below = |what: &str, line: &str| {
            let _ = writeln!(text, "{:<width$}         {what:<6}{}", "", shown(line));
        };
        if let Some(cost) = &finding.cost {
            below("cost:", cost);
        }
        for (index, command) in finding.mend.iter().enumerate() {
            below(if index == 0 { "mend:" } else { "" }, command);
        }
    }
    let count =
        |severity| report.findings.iter().filter(|finding| finding.severity == severity).count();
    let (fails, costs) = (count(Severity::Fails), count(Severity::Costs));
    let verdict = match report.verdict {
        Severity::Ok => "this VM would start here, and nothing is lacking".to_owned(),
        Severity::Costs => format!("this VM would start here; lacking with a cost: {costs}"),
        Severity::Fails => {
            format!("this VM would NOT start here; lacking: {fails}, and with a cost: {costs}")
        }
    };
    let _ = write!(text, "\n{verdict}");
    text
}

#[cfg(test)]
mod tests {
    use super::super::definitions as defined;
    use super::*;

    #[test]
    fn lines_are_aligned_and_say_what_mends() {
        let lack = Finding::lack(&defined::TAP_MISSING, "tap\u{1b}[2J lan is missing");
        let findings =
            vec![Finding::ok(&defined::KVM, "fine"), lack.about("_net0").with("NAME", "lan")];
        let text = PreflightReport::of(findings).text();
        let wanted = "\
kvm          ok     fine
tap (_net0)  fails  tap?[2J lan is missing
                    cost: the network device has no tap
                    mend: sudo ip tuntap add dev lan mode tap user $USER
                          sudo ip link set dev lan up

this VM would NOT start here; lacking: 1, and with a cost: 0";
        assert_eq!(text, wanted);
    }
}
