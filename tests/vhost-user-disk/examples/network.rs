// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A back end of networks that send each frame back, for the lab: `network SOCKET QUEUES`. It serves each VMM that connects.
//!
//! Owns nothing but its arguments.

use std::path::PathBuf;
use std::process::ExitCode;

use vhost_user_disk::peer::{Kind, serve_all};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let socket = arguments.next().map(PathBuf::from);
    let queues = arguments.next().and_then(|queues| queues.to_str()?.parse().ok());
    let (Some(socket), Some(queues)) = (socket, queues) else {
        eprintln!("network SOCKET QUEUES");
        return ExitCode::FAILURE;
    };
    let ended = serve_all(&socket, Kind::Net, queues);
    eprintln!("the back end ends: {ended:?}");
    ExitCode::FAILURE
}
