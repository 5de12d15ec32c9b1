// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `cloud-hypervisor`: runs a VMM. See [`godwit::cli`] for the command line and exit codes.

use std::io::Write as _;
use std::process::ExitCode;

use godwit::cli::exit::{self, Failure};
use godwit::cli::launch::{self, Launch, PageServerArgs, RunArgs};
use godwit::cli::log_format::LogFormat;
use godwit::cli::logger::Before;
use godwit::cli::{logger, print_line, write_out};
use vmm::descriptor_limit;
use vmm::events::{self, EventTarget};
use vmm::page_server::{self, PageServerOptions};
use vmm::panicking;
use vmm::preflight;
use vmm::sandbox::{self, Process};

fn main() -> ExitCode {
    events::start_clock();
    // SAFETY: umask only changes a number of this process, which has one thread yet. Sockets and
    // files of a VM are for its owner alone.
    unsafe { libc::umask(0o077) };
    let launch = match launch::parse(std::env::args_os()) {
        Ok(launch) => launch,
        // Help and usage errors, with exit codes 0 and 2.
        Err(error) => error.exit(),
    };
    let result = match launch {
        Ok(Launch::Print(text)) => {
            print_line(&text);
            Ok(())
        }
        Ok(Launch::Check(args)) => match args.report() {
            Ok((text, code)) => {
                print_line(&text);
                return ExitCode::from(code);
            }
            Err(error) => Err(usage(&error)),
        },
        Ok(Launch::CpuBaseline(reports)) => match preflight::common_baseline(&reports) {
            Ok((baseline, notes)) => {
                eprint!("{notes}");
                let written = write_out(&format!("{baseline}\n"));
                written.map(drop).map_err(|error| Failure::failed(&error))
            }
            Err(error) => Err(Failure::failed(&error)),
        },
        Ok(Launch::Run(args)) => {
            let starter = args.starter();
            run(*args).inspect_err(|failure| {
                if let Some(mut starter) = starter {
                    // It may have ended.
                    let _ = starter.write_all(failure.message.as_bytes());
                }
            })
        }
        Ok(Launch::ServePages(args)) => serve_pages(args),
        Err(error) => Err(usage(&error)),
    };
    match result {
        Ok(()) => {
            log::logger().flush();
            ExitCode::from(exit::OK)
        }
        Err(failure) => failure.report(),
    }
}

fn usage(error: &dyn std::error::Error) -> Failure {
    Failure::usage(error).hint("cloud-hypervisor --help shows the options")
}

fn log_format(text: Option<&str>, program: &str) -> Result<LogFormat, Failure> {
    text.map_or_else(|| Ok(LogFormat::default_of(program)), LogFormat::parse)
        .map_err(|error| usage(&error))
}

fn run(args: RunArgs) -> Result<(), Failure> {
    descriptor_limit::raise();
    sandbox::begin(Process::Vmm, args.seccomp).map_err(|error| Failure::failed(&error))?;
    let format = log_format(args.log_format.as_deref(), "cloud-hypervisor")?;
    let before = if args.successor.is_some() { Before::Kept } else { Before::Truncated };
    let log = logger::start(format, args.verbosity, args.log_file.as_deref(), before)
        .map_err(|e| Failure::failed(&e))?;
    panicking::end_with_process();
    if args.confines_nothing {
        log::warn!(
            "--landlock confines nothing without a VM on the command line: a VM of the API or of a snapshot says by \
             landlock_enable whether it is confined"
        );
    }
    let (mut options, event_target) = args.into_options().map_err(|error| usage(&error))?;
    options.child_logging.log = log;
    if let Some(target) = event_target {
        events::start(target).map_err(|error| Failure::failed(&error))?;
    }
    let reason = vmm::run(options).map_err(|error| Failure::failed(&error))?;
    log::info!("the end: {reason:?}");
    Ok(())
}

/// Runs a page server, started by a VMM to send the last pages of its guest.
fn serve_pages(args: PageServerArgs) -> Result<(), Failure> {
    page_server::begin();
    sandbox::begin(Process::PageServer, args.seccomp).map_err(|error| Failure::failed(&error))?;
    events::continue_clock(args.uptime);
    let format = log_format(args.log_format.as_deref(), "page-server")?;
    logger::start(format, args.verbosity, None, Before::Truncated)
        .map_err(|e| Failure::failed(&e))?;
    if let Some(target) = args.event_monitor {
        let target = EventTarget::parse(&target).map_err(|error| usage(&error))?;
        events::start(target).map_err(|error| Failure::failed(&error))?;
    }
    let options = PageServerOptions { socket: args.socket };
    page_server::run(options).map_err(|error| Failure::failed(&error))
}
