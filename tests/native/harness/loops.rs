// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loop devices, each with a page cache of its own over the same file: one disk as several hosts see it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{is_root, skip};

fn run(words: &[&str]) -> Result<String, String> {
    let output = Command::new(words[0]).args(&words[1..]).output();
    let output = output.map_err(|error| format!("{}: {error}", words[0]))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("{words:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A loop device, until it is dropped.
pub struct Loop(PathBuf);

impl Loop {
    /// Over `file`; the test is SKIPPED where there are none.
    pub fn over(file: &Path) -> Self {
        if !is_root() {
            skip("only root may give a VMM a loop device");
        }
        match run(&["losetup", "--find", "--show", text(file)]) {
            Ok(path) => Self(path.into()),
            Err(why) => skip(format!("no loop device: {why}")),
        }
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // It goes with the last that has it open.
        let _ = run(&["losetup", "--detach", text(&self.0)]);
    }
}

/// A mounted file system, until it is dropped.
pub struct Mounted(PathBuf);

impl Mounted {
    /// At `folder`, of a kind and with options as mount(8) takes them; the test is SKIPPED where that
    /// cannot be.
    pub fn at(folder: &Path, what: &[&str]) -> Self {
        let mut words = vec!["mount"];
        words.extend(what);
        words.push(text(folder));
        match run(&words) {
            Ok(_) => Self(folder.to_owned()),
            Err(why) => skip(format!("nothing can be mounted: {why}")),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes every write to it wait, until the answer is dropped.
    pub fn freeze(&self) -> Frozen {
        run(&["fsfreeze", "--freeze", text(&self.0)]).expect("it can be frozen");
        Frozen(self.0.clone())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = run(&["umount", "--lazy", text(&self.0)]);
    }
}

/// A file system on which writes wait.
pub struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = run(&["fsfreeze", "--unfreeze", text(&self.0)]);
    }
}

/// Makes an ext4 in `file`.
pub fn format(file: &Path) {
    if let Err(why) = run(&["mkfs.ext4", "-q", "-F", text(file)]) {
        skip(format!("no file system can be made: {why}"));
    }
}
