// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench NAME`: measures the figures that the documents state, compared with something else in the
//! same run.
//!
//! Owns the choice of the benchmark and the printing of its report. A figure is a median of several
//! alternating runs. Must never measure only one side of a comparison.

mod after;
mod boot;
mod child;
mod cost;
mod faults;
mod hugepages;
mod loopback;
mod machine;
mod pair;
mod passthrough;
mod pool;
mod postcopy;
mod precopy;
mod prefault;
mod prezero;
mod process;
mod processor;
mod qemu;
mod raw;
mod report;
mod reuse;
mod sandbox;
mod scale;
mod slots;
mod snapshot;
mod tls;
mod trace;
mod upgrade;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use report::Report;

fn main() -> ExitCode {
    let matches = command().get_matches();
    let Some((name, arguments)) = matches.subcommand() else { return ExitCode::from(2) };
    match run(name, arguments) {
        Ok(report) => {
            if arguments.get_flag("json") {
                println!("{}", report.json());
            } else if name == "postcopy-waits" {
                print!("{}", postcopy::waits::table(&report));
            } else {
                print!("{}", report.text());
            }
            ExitCode::from(u8::from(!report.all_met()))
        }
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::from(3)
        }
    }
}

/// All benchmarks and their options.
fn command() -> Command {
    Command::new("bench")
        .about("Compares the VMM with others in one run")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            common("boot", "7")
                .about("Time to the first instruction and MMIO, memory other than guest RAM"),
        )
        .subcommand(
            common("precopy", "3")
                .about(
                    "Live migration of idle and writing guests, compared with a raw copy and QEMU",
                )
                .arg(number("downtime-ms", "300", "Downtime that every VMM may take"))
                .arg(flag("large", LARGE_HELP))
                .arg(path("baseline", BASELINE_HELP)),
        )
        .subcommand(common("migration-cost", "3").about(
            "Processor time that a migration costs on each side, compared with QEMU",
        ))
        .subcommand(common("after-migration", "3").about(
            "How fast a guest is after a migration or a restore, by that before, and its huge pages",
        ))
        .subcommand(common("snapshot", "5").about(
            "Snapshot and restore compared with the raw disk, start after an on-demand restore",
        ))
        .subcommand(common("prefault", "5").about(
            "Populating memory of every kind, compared with touching and with zeroing warm memory",
        ))
        .subcommand(common("prezero-pool", "5").about(
            "Handing over pool memory, clearing it, and what a busy neighbour loses meanwhile",
        ))
        .subcommand(common("prezero-hints", "3").about(
            "Balloon round trips, with and without hints of zeroed pages, compared with QEMU",
        ))
        .subcommand(
            Command::new("passthrough-boot")
                .about("VMs with a passed-through disk, from the log of the lab's machine")
                .arg(flag("json", "Print one JSON object"))
                .arg(path("log", "The log").required(true)),
        )
        .subcommand(
            Command::new("passthrough-scale")
                .about("VMs with a passed-through device on modelled hosts of up to 4 TiB")
                .arg(flag("json", "Print one JSON object"))
                .arg(number("runs", "3", "Runs of each")),
        )
        .subcommand(
            common("postcopy-latency", "3")
                .about("Guest accesses that wait for a page, compared with a raw socket and QEMU")
                .arg(path("baseline", BASELINE_HELP)),
        )
        .subcommand(common("postcopy-waits", "3").about(
            "Where an access that waits for a page spends its time, and how much of it without a processor",
        ))
        .subcommand(
            common("postcopy-throughput", "3")
                .about("Time until the last page compared with a raw copy, and the guest's speed meanwhile")
                .arg(flag("large", LARGE_HELP)),
        )
        .subcommand(
            common("postcopy-scaling", "3")
                .about("Faults per second for 1 to 160 threads, without KVM"),
        )
        .subcommand(common("fault-path", "3").about(
            "Pages that vCPUs wait for, by each fault source, for 1 to 160 vCPUs, beside a bare round trip",
        ))
        .subcommand(common("fault-model", "3").about(
            "Locks, shared lines, wake-ups and system calls of a page, and what 160 processors would give",
        ))
        .subcommand(common("tls", "3").about(
            "What TLS costs: the rate of precopy, and accesses that wait for a page in postcopy",
        ))
        .subcommand(common("upgrade", "5").about(
            "How long a guest stands still while another process takes the place of its VMM",
        ))
        .subcommand(common("sandbox", "5").about(
            "What the filters of system calls cost: boot, exits, requests to a disk, pages that arrive",
        ))
}

fn run(name: &str, arguments: &ArgMatches) -> Result<Report, Box<dyn std::error::Error>> {
    let path = |name: &str| arguments.get_one::<PathBuf>(name).cloned().unwrap_or_default();
    if name == "passthrough-boot" {
        return passthrough::run(&path("log"));
    }
    let runs = arguments.get_one::<u64>("runs").copied().unwrap_or(1).max(1);
    let runs = usize::try_from(runs)?;
    if name == "passthrough-scale" {
        return scale::run(runs);
    }
    let (vmm, guest) = (path("vmm"), path("guest"));
    let large = matches!(arguments.try_get_one::<bool>("large"), Ok(Some(true)));
    let remote = vmm.with_file_name("ch-remote");
    let programs = pair::Programs {
        vmm: &vmm,
        remote: &remote,
        guest: &guest,
        options: &[],
        memory: "",
        vcpus: pair::VCPUS,
        memory_mib: if large { pair::LARGE_MIB } else { pair::MEMORY_MIB },
    };
    let baseline = baseline(arguments)?;
    let baseline =
        baseline.as_ref().map(|(vmm, remote)| pair::Programs { vmm, remote, ..programs });
    match name {
        "boot" => boot::run(&vmm, &guest, runs),
        "migration-cost" => cost::run(&programs, runs),
        "after-migration" => after::run(&programs, runs),
        "snapshot" => snapshot::run(&vmm, &guest, runs),
        "prefault" => prefault::run(runs),
        "prezero-pool" => prezero::run(&vmm, &guest, runs),
        "prezero-hints" => reuse::run(&programs, runs),
        "postcopy-latency" => postcopy::latency::run(&programs, baseline.as_ref(), runs),
        "postcopy-waits" => postcopy::waits::run(&programs, runs),
        "postcopy-throughput" => postcopy::throughput::run(&programs, large, runs),
        "tls" => tls::run(&programs, runs),
        "sandbox" => sandbox::run(&programs, runs),
        "upgrade" => upgrade::run(&programs, runs),
        "postcopy-scaling" => postcopy::scaling::run(runs),
        "fault-path" => faults::path::run(&programs, runs),
        "fault-model" => faults::model::run(&programs, runs),
        _ => {
            let downtime_ms = arguments.get_one::<u64>("downtime-ms").copied().unwrap_or(300);
            precopy::run(&precopy::Setup { programs, baseline, downtime_ms, large }, runs)
        }
    }
}

const LARGE_HELP: &str =
    "A guest of 2.7 GiB instead, into memory of a pool, compared with QEMU and a raw copy";
const BASELINE_HELP: &str =
    "Another build of cloud-hypervisor, with its ch-remote alongside it, that is measured as well";

/// The programs of the other build, if one is given.
fn baseline(arguments: &ArgMatches) -> Result<Option<(PathBuf, PathBuf)>, String> {
    let Ok(Some(vmm)) = arguments.try_get_one::<PathBuf>("baseline") else { return Ok(None) };
    let remote = vmm.with_file_name("ch-remote");
    for program in [vmm, &remote] {
        if !program.is_file() {
            return Err(format!("--baseline: there is no file {}", program.display()));
        }
    }
    Ok(Some((vmm.clone(), remote)))
}

/// A subcommand with the options that all have in common.
fn common(name: &'static str, runs: &'static str) -> Command {
    Command::new(name)
        .arg(flag("json", "Print one JSON object"))
        .arg(path("vmm", "The cloud-hypervisor binary, with ch-remote alongside it").required(true))
        .arg(path("guest", "The test guest's image").required(true))
        .arg(number("runs", runs, "Runs of each"))
}

fn number(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_parser(value_parser!(u64)).default_value(default).help(help)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn path(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_parser(value_parser!(PathBuf)).help(help)
}
