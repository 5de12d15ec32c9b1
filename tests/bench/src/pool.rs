// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A pool of prezeroed memory, for the benchmarks that measure it or what it gives.
//!
//! Owns the daemon and its configuration. Must never measure anything.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prezero_pool_client::{PagesWanted, PoolConnection, PoolMemory, Take};
use tempfile::TempDir;

use crate::child::Killed;

/// Its configuration to work as fast as one thread can.
pub const UNLIMITED: &str = "bandwidth = '0'\nidle_only = false";
/// Time limit for slots to be created or cleared.
const LIMIT: Duration = Duration::from_mins(2);

/// A running pool.
pub struct Pool {
    _child: Killed,
    folder: TempDir,
    binary: PathBuf,
}

impl Pool {
    /// Starts one with slots of transparent huge pages of these sizes, and waits until they are ready. `manner`: more
    /// of its configuration.
    pub fn start(vmm: &Path, sizes_mib: &[u64], manner: &str) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let at = |name: &str| folder.path().join(name);
        let mut slots = String::new();
        for mib in sizes_mib {
            let _ = writeln!(slots, "[[slots]]\nsize = '{mib}M'\npages = 'thp'\ncount = 1");
        }
        let text = format!(
            "socket = '{}'\nstats_socket = '{}'\n{manner}\nmax_waste_percent = 0\n\
             {slots}",
            at("pool").display(),
            at("stats").display()
        );
        std::fs::write(at("config"), text)?;
        let binary = vmm.with_file_name("prezero-pool");
        let mut command = Command::new(&binary);
        command.args(["run", "--config"]).arg(at("config")).stdin(Stdio::null());
        let child = Killed::spawn(&mut command)?;
        let pool = Self { _child: child, folder, binary };
        pool.wait_until(|pool| pool.slots("ready") == Some(sizes_mib.len() as u64))?;
        Ok(pool)
    }

    fn stats(&self) -> Option<String> {
        let config = self.folder.path().join("config");
        let mut command = Command::new(&self.binary);
        command.args(["stats", "--config"]).arg(config).stderr(Stdio::null());
        let output = command.output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Sum of the counters whose lines contain this.
    pub fn sum(&self, part: &str) -> Option<u64> {
        let lines = self.stats()?;
        let values = lines.lines().filter(|line| !line.starts_with('#') && line.contains(part));
        Some(values.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum())
    }

    /// Number of slots in a state.
    pub fn slots(&self, state: &str) -> Option<u64> {
        self.sum(&format!("state=\"{state}\""))
    }

    /// Waits for a condition.
    pub fn wait_until(&self, is_so: impl Fn(&Self) -> bool) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        while !is_so(self) {
            if start.elapsed() > LIMIT {
                return Err("the pool does not get there".into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Takes memory from it.
    pub fn take(&self, mib: u64) -> Result<(Arc<PoolConnection>, PoolMemory), Box<dyn Error>> {
        let pool = PoolConnection::open(&self.folder.path().join("pool"))?;
        let wish = Take { size_bytes: mib << 20, pages: PagesWanted::Transparent, node: None };
        let memory = pool.take(&wish)?;
        Ok((Arc::new(pool), memory))
    }

    /// What names it among the options of a VM, behind a comma.
    pub fn option(&self) -> String {
        format!(",prezeroed={}", self.folder.path().join("pool").display())
    }
}
