// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench NAME`: measures, beside something else in the same run, what the documents state.
//!
//! Owns the choice of the benchmark and how its report is printed. A figure is a median of several
//! alternating runs. Must never measure only our side of a comparison.

mod boot;
mod machine;
mod process;
mod report;
mod slots;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, Command, value_parser};

fn main() -> ExitCode {
    let matches = Command::new("bench")
        .about("Measures the VMM beside others in one run")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("boot")
                .about("Time to the first instruction and MMIO, memory beside guest RAM")
                .arg(flag("json", "Print one JSON object"))
                .arg(path("vmm", "The cloud-hypervisor binary").required(true))
                .arg(path("guest", "The test guest's image").required(true))
                .arg(
                    Arg::new("runs")
                        .long("runs")
                        .value_parser(value_parser!(usize))
                        .default_value("7")
                        .help("Runs of each"),
                ),
        )
        .get_matches();
    let Some((_, arguments)) = matches.subcommand() else { return ExitCode::from(2) };
    let path = |name: &str| arguments.get_one::<PathBuf>(name).cloned().unwrap_or_default();
    let runs = arguments.get_one::<usize>("runs").copied().unwrap_or(7).max(1);
    match boot::run(&path("vmm"), &path("guest"), runs) {
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

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn path(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_parser(value_parser!(PathBuf)).help(help)
}
