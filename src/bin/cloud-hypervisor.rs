// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `cloud-hypervisor`: runs a VMM. See [`godwit::cli`] for the command line and exit codes.

use std::process::ExitCode;

use godwit::cli::exit::{self, Failure};
use godwit::cli::launch::{self, Launch, RunArgs};
use godwit::cli::{logger, print_line};
use vmm::events;

fn main() -> ExitCode {
    events::start_clock();
    // SAFETY: umask only changes a number of this process, which has one thread yet. Sockets and
    // files of a VM are for its owner alone.
    unsafe { libc::umask(0o077) };
    let launch = match launch::parse(std::env::args_os()) {
        Ok(launch) => launch,
        // Help and mistakes, with exit codes 0 and 2.
        Err(error) => error.exit(),
    };
    let result = match launch {
        Ok(Launch::Print(text)) => {
            print_line(&text);
            Ok(())
        }
        Ok(Launch::Run(args)) => run(*args),
        Err(error) => Err(usage(&error)),
    };
    match result {
        Ok(()) => ExitCode::from(exit::OK),
        Err(failure) => failure.report(),
    }
}

fn usage(error: &dyn std::error::Error) -> Failure {
    Failure::usage(error).hint("cloud-hypervisor --help shows the options")
}

fn run(args: RunArgs) -> Result<(), Failure> {
    logger::start("cloud-hypervisor", args.verbosity, args.log_file.as_deref())
        .map_err(|e| Failure::failed(&e))?;
    let (options, event_target) = args.into_options().map_err(|error| usage(&error))?;
    if let Some(target) = event_target {
        events::start(target).map_err(|error| Failure::failed(&error))?;
    }
    log::info!("the sandbox of system calls is not built yet, --seccomp has no effect");
    let reason = vmm::run(options).map_err(|error| Failure::failed(&error))?;
    log::info!("the end: {reason:?}");
    Ok(())
}
