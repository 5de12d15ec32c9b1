// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `guest-reader`: the library's abilities as a command.
//!
//! Exit codes: 0 as wanted, 1 the guest has errors or could not be read, 2 wrong usage, 3 what
//! was awaited did not happen in time.

use std::io::Write;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use guest_reader::{AttachOptions, Guest, GuestError, Patience, Status, VerifyReport, rtt};
use serde_json::{Value, json};

/// Prints a line. A reader that has gone away (`| head`) is no reason to panic.
macro_rules! say {
    ($($part:tt)*) => {{ let _ = writeln!(std::io::stdout(), $($part)*); }};
}

fn main() -> ExitCode {
    let matches = command().get_matches();
    match run(&matches) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let mut text = error.to_string();
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                text.push_str(": ");
                text.push_str(&cause.to_string());
                source = cause.source();
            }
            eprintln!("guest-reader: {text}");
            ExitCode::from(if matches!(error, GuestError::TimedOut { .. }) { 3 } else { 1 })
        }
    }
}

fn command() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_parser(value_parser!(u64)).help(help)
    };
    Command::new("guest-reader")
        .about("Reads the test guest's memory from outside its VMM")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .arg(number("pid", "Process id of the VMM").default_value("0"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON"))
        .arg(number("low-bytes", "RAM below the MMIO hole, when it cannot be found out"))
        .arg(number("tsc-khz", "The guest's TSC frequency, when it is not the host's"))
        .arg(
            Arg::new("name")
                .long("name")
                .action(ArgAction::Append)
                .help("Part of the name of a file that holds guest RAM"),
        )
        .arg(number("timeout-ms", "How long to wait").default_value("10000"))
        .subcommand(Command::new("status").about("What the guest says of itself"))
        .subcommand(
            Command::new("wait-for")
                .about("Waits until all the given conditions hold")
                .arg(
                    Arg::new("heartbeat")
                        .long("heartbeat")
                        .action(ArgAction::SetTrue)
                        .help("Every vCPU has shown a new sign of life"),
                )
                .arg(number("iterations", "So many page visits in all"))
                .arg(number("passes", "So many passes on every vCPU"))
                .arg(Arg::new("state").long("state").help("Every vCPU is in this state")),
        )
        .subcommand(
            Command::new("histogram")
                .about("Access times")
                .arg(number("cut-us", "Cut between local faults and others").default_value("40"))
                .arg(
                    Arg::new("buckets")
                        .long("buckets")
                        .action(ArgAction::SetTrue)
                        .help("Add the buckets themselves"),
                ),
        )
        .subcommand(
            Command::new("verify-all")
                .about("Checks every page against the guest's shadow table")
                .arg(
                    Arg::new("hold")
                        .long("hold")
                        .action(ArgAction::SetTrue)
                        .help("Make the guest hold still meanwhile (else pause its VMM first)"),
                )
                .arg(number("threads", "Threads that check").default_value("2")),
        )
        .subcommand(
            Command::new("set")
                .about("Changes parameters, as on the guest's command line")
                .arg(Arg::new("words").required(true).num_args(1..).value_name("name=value")),
        )
        .subcommand(Command::new("hold").about("Makes the guest hold still"))
        .subcommand(Command::new("release").about("Lets it continue"))
        .subcommand(
            Command::new("raw-rtt")
                .about("Needs no guest: 16 bytes out and 4 KiB back over TCP on loopback")
                .arg(number("count", "Round trips").default_value("5000")),
        )
}

fn run(matches: &ArgMatches) -> Result<u8, GuestError> {
    let number = |name: &str| matches.get_one::<u64>(name).copied();
    let json = matches.get_flag("json");
    let patience = Patience::millis(number("timeout-ms").unwrap_or(0));
    let options = AttachOptions {
        names: matches.get_many::<String>("name").into_iter().flatten().cloned().collect(),
        order: Vec::new(),
        low_bytes: number("low-bytes"),
        segments: None,
        tsc_khz: number("tsc-khz"),
    };
    let pid = u32::try_from(number("pid").unwrap_or(0)).unwrap_or(0);
    let Some((name, arguments)) = matches.subcommand() else { return Ok(2) };
    if name == "raw-rtt" {
        return Ok(raw_rtt(arguments, json));
    }
    if pid == 0 {
        eprintln!("guest-reader: {name} needs --pid");
        return Ok(2);
    }
    let attach = || Guest::attach_with(pid, &options);
    let guest = if name == "wait-for" {
        patience.until("the start of the guest", || attach().map(Some))?
    } else {
        attach()?
    };
    match name {
        "status" => Ok(show_status(&guest.status()?, json)),
        "wait-for" => wait_for(&guest, arguments, patience, json),
        "histogram" => histogram(&guest, arguments, json),
        "verify-all" => verify(&guest, arguments, patience, json),
        "set" => {
            let words: Vec<&str> = arguments
                .get_many::<String>("words")
                .into_iter()
                .flatten()
                .map(String::as_str)
                .collect();
            let generation = guest.set(&words.join(" "))?;
            Ok(show_status(&guest.wait_for_generation(generation, patience)?, json))
        }
        "hold" => Ok(show_status(&guest.hold(patience)?, json)),
        _ => guest.release().map(|()| 0),
    }
}

fn raw_rtt(arguments: &ArgMatches, json: bool) -> u8 {
    let count = arguments.get_one::<u64>("count").copied().unwrap_or(1);
    match rtt::measure(usize::try_from(count).unwrap_or(usize::MAX).min(1_000_000)) {
        Ok(trips) if json => say!("{}", json!(trips)),
        Ok(trips) => say!(
            "round trips {}  p50 {}  p99 {}  max {}",
            trips.count,
            time(trips.p50_ns),
            time(trips.p99_ns),
            time(trips.max_ns),
        ),
        Err(error) => {
            eprintln!("guest-reader: no round trip: {error}");
            return 1;
        }
    }
    0
}

fn wait_for(
    guest: &Guest,
    arguments: &ArgMatches,
    patience: Patience,
    json: bool,
) -> Result<u8, GuestError> {
    let number = |name: &str| arguments.get_one::<u64>(name).copied().unwrap_or(0);
    let (iterations, passes) = (number("iterations"), number("passes"));
    let state = arguments.get_one::<String>("state");
    if arguments.get_flag("heartbeat") {
        guest.wait_for_heartbeat(patience)?;
    }
    let status = guest.wait_until("the wanted state", patience, |status| {
        status.stage == "running"
            && status.iterations() >= iterations
            && (passes == 0
                || status.complete() && status.known().all(|vcpu| vcpu.passes >= passes))
            && state.is_none_or(|state| status.all_in(state))
    })?;
    Ok(show_status(&status, json))
}

fn histogram(guest: &Guest, arguments: &ArgMatches, json: bool) -> Result<u8, GuestError> {
    let histogram = guest.histogram()?;
    let cut_us = arguments.get_one::<u64>("cut-us").copied().unwrap_or(40);
    let summary = histogram.summary(cut_us);
    let buckets = arguments.get_flag("buckets").then(|| histogram.buckets());
    if json {
        let mut value = json!(summary);
        if let (Some(buckets), Some(object)) = (buckets, value.as_object_mut()) {
            object.insert(String::from("buckets"), json!(buckets));
        }
        say!("{value}");
        return Ok(0);
    }
    say!(
        "accesses {}  mean {}  p50 {}  p90 {}  p99 {}  p99.9 {}  max {}",
        summary.count,
        time(summary.mean_ns),
        time(summary.p50_ns),
        time(summary.p90_ns),
        time(summary.p99_ns),
        time(summary.p999_ns),
        time(summary.max_ns),
    );
    let above = &summary.above_cut;
    say!(
        "above {cut_us} us {}  p50 {}  p90 {}  p99 {}",
        above.count,
        time(above.p50_ns),
        time(above.p90_ns),
        time(above.p99_ns),
    );
    for (edge_ns, count) in buckets.unwrap_or_default() {
        say!("{:>12}  {count}", time(edge_ns));
    }
    Ok(0)
}

fn verify(
    guest: &Guest,
    arguments: &ArgMatches,
    patience: Patience,
    json: bool,
) -> Result<u8, GuestError> {
    let hold = arguments.get_flag("hold");
    if hold {
        guest.hold(patience)?;
    }
    let threads = arguments.get_one::<u64>("threads").copied().unwrap_or(1);
    let outcome = guest.verify_all(usize::try_from(threads).unwrap_or(1));
    if hold {
        guest.release()?;
    }
    let report = outcome?;
    if json {
        say!("{}", json!(report));
    } else {
        show_report(&report);
    }
    Ok(u8::from(!report.is_clean()))
}

fn show_report(report: &VerifyReport) {
    say!(
        "pages {}  written {}  resident {}  in flight {}  errors {}  {} ms",
        report.pages,
        report.written,
        report.resident,
        report.in_flight,
        report.errors,
        report.elapsed_ms,
    );
    if report.moved {
        say!("  the guest moved meanwhile: pause its VMM, or use --hold");
        return;
    }
    for record in &report.records {
        say!(
            "  page {} at {:#x}: {:?}, counter {} (found {}), word {} is {:#x}, not {:#x}",
            record.page,
            record.gpa,
            record.kind,
            record.counter,
            record.found_counter,
            record.word,
            record.found,
            record.expected,
        );
    }
    for vcpu in &report.wrong_sums {
        say!("  the counters of vCPU {vcpu} do not add up: its shadow table is wrong");
    }
}

fn show_status(status: &Status, json: bool) -> u8 {
    if json {
        say!("{}", serde_json::to_value(status).unwrap_or(Value::Null));
        return u8::from(status.errors() > 0);
    }
    say!(
        "{}  workload {}  vCPUs {} of {}  pages {}  up after {}{}",
        status.stage,
        status.workload.unwrap_or("?"),
        status.vcpus_online,
        status.vcpus_wanted,
        status.pages,
        time(status.setup_ns),
        status.failure.map(|why| format!("  FAILURE: {why}")).unwrap_or_default(),
    );
    for (index, vcpu) in status.vcpus.iter().enumerate() {
        let Some(vcpu) = vcpu else {
            say!("  vCPU {index}: not resident yet");
            continue;
        };
        say!(
            "  vCPU {index}: {}  iterations {}  writes {}  verified {}  errors {}  \
             longest gap {}  stalls {} ({})  longest access {}",
            vcpu.state,
            vcpu.iterations,
            vcpu.writes,
            vcpu.verified,
            vcpu.errors,
            time(vcpu.gap_max.ns),
            vcpu.stalls,
            time(vcpu.stall_total_ns),
            time(vcpu.access_max_ns),
        );
        for record in &vcpu.error_records {
            say!("    {record:?}");
        }
    }
    u8::from(status.errors() > 0)
}

fn time(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{}.{} us", ns / 1000, ns % 1000 / 100),
        _ => format!("{}.{} ms", ns / 1_000_000, ns % 1_000_000 / 100_000),
    }
}
