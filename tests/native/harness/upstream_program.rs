// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The real cloud-hypervisor v53 as a peer: a process of it, its API, and the test guest in it.
//!
//! It is not part of this repository. `GODWIT_UPSTREAM_BIN` names it; without it the tests that need it are skipped.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use guest_reader::{AttachOptions, Guest, VerifyReport};
use tempfile::TempDir;

use super::vmm::GUEST_PATIENCE;
use super::{Api, skip, wait_for};

const PROGRAM: &str = "GODWIT_UPSTREAM_BIN";
/// Part of the name of the file that its guest RAM is in.
const RAM: &str = "ch_ram";

/// A process of it; it ends with this.
pub struct Program {
    child: Child,
    folder: TempDir,
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- cloud-hypervisor ---\n{}", self.log());
        }
    }
}

impl Program {
    /// Starts it with these arguments, and waits for its API. Skips if there is none.
    pub fn start(arguments: &[&str]) -> Self {
        let Some(program) = std::env::var_os(PROGRAM) else {
            skip(format!("{PROGRAM} names no cloud-hypervisor v53"));
        };
        let folder = TempDir::with_prefix("godwit-upstream-").expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let mut command = Command::new(program);
        command.arg("--api-socket").arg(at("api")).arg("-v").arg("--log-file").arg(at("log"));
        command.args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("the program can be started");
        let program = Self { child, folder };
        wait_for("its API", || program.api().connect().ok());
        program
    }

    /// A path in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Its API.
    pub fn api(&self) -> Api {
        Api::new(&self.path("api"))
    }

    /// Its log.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.path("log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Its guest.
    #[track_caller]
    pub fn guest(&self) -> Guest {
        let options = AttachOptions { names: vec![RAM.to_owned()], ..AttachOptions::default() };
        let attach = || Guest::attach_with(self.child.id(), &options).map(Some);
        let guest = GUEST_PATIENCE.until("the guest", attach);
        guest.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits until its guest has visited so many more pages.
    #[track_caller]
    pub fn wait_for_work(&self, pages: u64) {
        let guest = self.guest();
        let first = guest.status().expect("a status").iterations();
        let works =
            guest.wait_until("work", GUEST_PATIENCE, |now| now.iterations() > first + pages);
        works.expect("the guest works");
    }

    /// Pauses its VM, compares every page with what the guest should have written, and checks that the guest itself saw no
    /// error. It stays paused.
    #[track_caller]
    pub fn verify_and_pause(&self) -> VerifyReport {
        self.api().put("vm.pause", "").ok();
        let guest = self.guest();
        let report = guest.verify_all(2).expect("every page can be read");
        let status = guest.status().expect("the guest's status");
        assert!(report.is_clean() && report.written > 0, "{report:?}");
        assert_eq!(status.errors(), 0, "the guest saw errors: {status:?}");
        report
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
