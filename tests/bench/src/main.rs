// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench NAME`: measures, beside something else in the same run, what the documents state.
//!
//! Owns the choice of the benchmark and how its report is printed. A figure is a median of several
//! alternating runs. Must never measure only our side of a comparison.

mod boot;
mod child;
mod loopback;
mod machine;
mod precopy;
mod process;
mod qemu;
mod report;
mod slots;
mod snapshot;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use report::Report;

fn main() -> ExitCode {
    let matches = Command::new("bench")
        .about("Measures the VMM beside others in one run")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            common("boot", "7")
                .about("Time to the first instruction and MMIO, memory beside guest RAM"),
        )
        .subcommand(
            common("precopy", "3")
                .about("Live migration while the guest writes, beside a raw copy and QEMU")
                .arg(number("downtime-ms", "300", "Downtime that every VMM may take")),
        )
        .subcommand(common("snapshot", "5").about(
            "Snapshot and restore beside the raw disk, time to run after an on-demand restore",
        ))
        .get_matches();
    let Some((name, arguments)) = matches.subcommand() else { return ExitCode::from(2) };
    match run(name, arguments) {
        Ok(report) => {
            if arguments.get_flag("json") {
                println!("{}", report.json());
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

fn run(name: &str, arguments: &ArgMatches) -> Result<Report, Box<dyn std::error::Error>> {
    let path = |name: &str| arguments.get_one::<PathBuf>(name).cloned().unwrap_or_default();
    let (vmm, guest) = (path("vmm"), path("guest"));
    let runs = arguments.get_one::<u64>("runs").copied().unwrap_or(1).max(1);
    let runs = usize::try_from(runs)?;
    if name == "boot" {
        return boot::run(&vmm, &guest, runs);
    }
    if name == "snapshot" {
        return snapshot::run(&vmm, &guest, runs);
    }
    let remote = vmm.with_file_name("ch-remote");
    let downtime_ms = arguments.get_one::<u64>("downtime-ms").copied().unwrap_or(300);
    let setup = precopy::Setup { vmm: &vmm, remote: &remote, guest: &guest, downtime_ms };
    precopy::run(&setup, runs)
}

/// A subcommand with what all of them have.
fn common(name: &'static str, runs: &'static str) -> Command {
    Command::new(name)
        .arg(flag("json", "Print one JSON object"))
        .arg(path("vmm", "The cloud-hypervisor binary, with ch-remote beside it").required(true))
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
