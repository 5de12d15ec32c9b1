// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A `prezero-pool` process in a folder of its own; killed when dropped.
//!
//! Owns starting, watching and ending it. Must never look into it other than a user could.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use prezero_pool_client::{PagesWanted, PoolConnection, PoolError, PoolMemory, Take};
use tempfile::TempDir;

use super::programs::POOL;
use super::wait_within;

/// For slots to be made on a machine that is busy.
const READY_TIME: Duration = Duration::from_mins(2);

/// A pool.
pub struct Pool {
    child: Child,
    folder: TempDir,
}

impl Pool {
    /// One with these slots (tables of its configuration), as fast as it can, once all are ready.
    pub fn start(slots: &[&str]) -> Self {
        Self::start_with("", slots)
    }

    /// The same with more lines of configuration.
    pub fn start_with(more: &str, slots: &[&str]) -> Self {
        let folder = TempDir::with_prefix("godwit-pool-").expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let config = format!(
            "socket = '{}'\nstats_socket = '{}'\nbandwidth = '0'\nidle_only = false\n{more}{}",
            at("pool").display(),
            at("stats").display(),
            slots.iter().fold(String::new(), |all, slot| all + "[[slots]]\n" + slot + "\n"),
        );
        std::fs::write(at("config"), config).expect("a file");
        let mut command = Command::new(POOL);
        command.args(["run", "-v", "--config"]).arg(at("config"));
        // SAFETY: between fork and exec only one system call is made, which takes no memory.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(at("log")).expect("a file"))
            .spawn()
            .expect("the pool can be started");
        let pool = Self { child, folder };
        let listens = || pool.try_stats().filter(|text| text.contains("prezero_pool_slots"));
        wait_within(READY_TIME, "statistics of the pool", listens);
        pool.wait_until_ready();
        pool
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("pool")
    }

    /// `,prezeroed=` and its socket.
    pub fn option(&self) -> String {
        format!(",prezeroed={}", self.socket().display())
    }

    /// Lets other users reach the socket.
    pub fn open_folder(&self) {
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.folder.path(), mode).expect("the folder is ours");
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn try_stats(&self) -> Option<String> {
        let config = self.folder.path().join("config");
        let output = Command::new(POOL).args(["stats", "--config"]).arg(config).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The sum of all series that begin with `name` and contain `label`.
    pub fn count(&self, name: &str, label: &str) -> u64 {
        let text = self.try_stats().unwrap_or_else(|| panic!("no statistics\n{}", self.log()));
        let series = format!("prezero_pool_{name}");
        text.lines()
            .filter(|line| line.starts_with(&series) && line.contains(label))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }

    /// Slots in this state.
    pub fn slots(&self, state: &str) -> u64 {
        self.count("slots{", &format!("state=\"{state}\""))
    }

    /// Waits until every slot is ready.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        let all = self.count("slots{", "");
        let ready = || (self.slots("ready") == all).then_some(());
        wait_within(READY_TIME, "slots that are ready", ready);
    }

    /// Takes memory as a VMM does; it goes back with the connection.
    pub fn take(&self, size_bytes: u64) -> Result<(PoolConnection, PoolMemory), PoolError> {
        let connection = PoolConnection::open(&self.socket())?;
        let wish = Take { size_bytes, pages: PagesWanted::Small, node: None };
        let memory = connection.take(&wish)?;
        Ok((connection, memory))
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.kill();
    }
}
