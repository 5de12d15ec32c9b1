// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `prezero-pool`: keeps zeroed memory ready for virtual machines. See [`godwit::cli::pool`].

use std::process::ExitCode;

use godwit::cli::exit::{self, Failure};
use godwit::cli::log_format::LogFormat;
use godwit::cli::{logger, pool, print_line};
use vmm::sandbox::{self, Process};

fn main() -> ExitCode {
    vmm::events::start_clock();
    // clap prints help and usage errors itself, with exit codes 0 and 2.
    let call = pool::Call::new(&pool::command().get_matches());
    let result = sandbox::begin(Process::PrezeroPool, call.seccomp)
        .map_err(|error| Failure::failed(&error))
        .and_then(|()| {
            let format = LogFormat::default_of("prezero-pool");
            logger::start(format, call.verbosity, None, logger::Before::Truncated)
                .map_err(|error| Failure::failed(&error))
        })
        .and_then(|_| call.carry_out().map_err(|error| Failure::failed(&error)));
    match result {
        Ok(text) => {
            log::logger().flush();
            print_line(text.trim_end());
            ExitCode::from(exit::OK)
        }
        Err(failure) => failure.report(),
    }
}
