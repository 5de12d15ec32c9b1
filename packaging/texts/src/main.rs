// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `package-texts FOLDER`: writes the man pages and the completions of the programs into `FOLDER/man` and
//! `FOLDER/completions`.
//!
//! - [`completions`]: what shells complete.
//! - [`man`]: man pages.
//! - [`programs`]: the programs, and what is said of each besides its options.
//! - [`roff`]: the language of man pages.
//!
//! It is in no package itself. Options, keys and exit codes come from their definitions; it must never describe one.

mod completions;
mod man;
mod programs;
mod roff;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use programs::Program;

/// A file, below the folder of all.
struct File {
    path: PathBuf,
    contents: Vec<u8>,
}

fn files(program: &Program) -> Vec<File> {
    let page = File {
        path: Path::new("man").join(format!("{}.1", program.name)),
        contents: man::page(program).into_bytes(),
    };
    std::iter::once(page).chain(completions::files(program)).collect()
}

fn write(folder: &Path) -> io::Result<()> {
    for file in programs::all().iter().flat_map(files) {
        let path = folder.join(file.path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(path, file.contents)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let folder: Option<OsString> = arguments.next();
    let (Some(folder), None) = (folder, arguments.next()) else {
        eprintln!("usage: package-texts FOLDER");
        return ExitCode::from(2);
    };
    match write(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: the files cannot be written to {}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}
