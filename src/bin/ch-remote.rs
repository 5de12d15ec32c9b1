// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `ch-remote`: asks a running VMM for one thing. See [`godwit::cli::remote`].

use std::process::ExitCode;

use godwit::cli::exit::{self, Failure};
use godwit::cli::remote;

fn main() -> ExitCode {
    // clap prints help and usage errors itself, with exit codes 0 and 2.
    let matches = remote::command().get_matches();
    let printed = remote::run(&matches)
        .and_then(|answer| answer.map_or(Ok(()), |answer| remote::print(&matches, &answer)));
    match printed {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) if error.is_usage() => {
            Failure::usage(&error).hint("ch-remote <command> --help shows the syntax").report()
        }
        Err(error) => Failure::failed(&error).with_code(error.exit_code()).report(),
    }
}
