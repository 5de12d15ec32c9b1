// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A back end of a disk, for the lab: `disk SOCKET IMAGE QUEUES`. It serves one VMM, and ends with its connection.
//!
//! Owns nothing but its arguments.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let socket = arguments.next().map(PathBuf::from);
    let image = arguments.next().map(PathBuf::from);
    let queues = arguments.next().and_then(|queues| queues.to_str()?.parse().ok());
    let (Some(socket), Some(image), Some(queues)) = (socket, image, queues) else {
        eprintln!("disk SOCKET IMAGE QUEUES");
        return ExitCode::FAILURE;
    };
    match vhost_user_disk::serve(&socket, &image, queues) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the back end ends: {error}");
            ExitCode::FAILURE
        }
    }
}
