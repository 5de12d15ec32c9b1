// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What this host lacks for a VM (`cloud-hypervisor --check`), found without starting one.
//!
//! Facts about the host are read first, then judged by functions that read nothing; rules that a start has are asked of
//! the modules that have them (`machine::ahead`, `memory::HostMemory`, `migration::fault_choice`), so that both say the
//! same. Owns which findings there are, their names, and what mends them. It must never start anything, and change nothing
//! of the host: no file is made, no tap is opened, no lock is taken, no page is reserved.
//!
//! | module | owns |
//! | --- | --- |
//! | `finding` | what a finding is, and the report |
//! | `common` | what the processors of several reports have in common |
//! | `definitions` | every check, and every lack with what it costs and what mends it |
//! | `host_files` | reading `/proc`, `/sys` and `/dev` |
//! | `rights` | what this process is allowed |
//! | `facts` | all that is read |
//! | `kernel`, `kvm`, `faults`, `memory`, `passthrough`, `net`, `devices`, `limits` | the judgement of each subject |
//! | `arrival` | the same for a VM that arrives in a migration |
//! | `host_check` | answers a source that only asks |
//! | `text` | the report for people |

mod arrival;
mod common;
mod definitions;
mod devices;
mod facts;
mod faults;
mod finding;
mod host_check;
mod host_files;
mod kernel;
mod kvm;
mod limits;
mod memory;
mod net;
mod passthrough;
#[cfg(test)]
mod reference;
mod rights;
#[cfg(test)]
mod tests;
mod text;

use crate::config::VmConfig;
use crate::options::SeccompMode;
use facts::Facts;

pub use common::{CommonError, common as common_baseline};
pub use finding::{Finding, PreflightReport, Severity};
pub use host_check::HostCheck;

/// Finds out what this host lacks for a VM. The configuration is complete, but need not have anything to boot.
pub fn run(mut config: VmConfig, seccomp: SeccompMode) -> PreflightReport {
    let facts = Facts::read(&mut config);
    judge(&facts, &config, seccomp)
}

/// What these facts mean for this VM.
fn judge(facts: &Facts, config: &VmConfig, seccomp: SeccompMode) -> PreflightReport {
    let mut findings = Vec::new();
    findings.extend(kernel::findings(&facts.kernel, config, seccomp));
    findings.extend(kvm::findings(&facts.kvm, &facts.limits, config));
    findings.extend(faults::findings(&facts.faults, &facts.kvm, &facts.memory));
    findings.extend(memory::findings(&facts.memory, config));
    findings.extend(passthrough::findings(&facts.passthrough, &facts.memory, config));
    findings.extend(net::findings(&facts.net, config));
    findings.extend(devices::findings(&facts.devices));
    findings.extend(limits::findings(&facts.limits, config));
    PreflightReport { cpu: facts.kvm.baseline(), ..PreflightReport::of(findings) }
}
