// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a scrape can read without the VMM thread, and the page that is made of it.
//!
//! Owns the way from the figures to the page. The progress of a migration is here, too, so that a migration can be
//! watched although the VMM thread waits for a machine to end. It must never wait.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vm_migration::Progress;

use super::families::Family;
use super::migration;
use super::process::Process;
use super::reading::VmReading;
use super::requests::Requests;
use super::text::{Format, Page, Value};

/// What all threads that answer scrapes share.
pub struct Hub {
    process: Process,
    requests: Requests,
    /// Of the current or last migration. Locked for one copy.
    progress: Mutex<Option<Arc<Progress>>>,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hub")
    }
}

impl Default for Hub {
    fn default() -> Self {
        let (requests, progress) = (Requests::default(), Mutex::new(None));
        Self { process: Process::new(), requests, progress }
    }
}

/// The two versions of this program: its own, and that of the interface.
#[derive(Clone, Copy, Debug)]
pub struct Versions {
    /// Its own.
    pub own: &'static str,
    /// Of the program that it can replace.
    pub compatible: &'static str,
}

impl Hub {
    /// The requests that were counted.
    pub fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Has scrapes show this migration from now on.
    pub fn follow(&self, progress: &Arc<Progress>) {
        *self.progress.lock() = Some(Arc::clone(progress));
    }

    /// The text of a scrape. `reading`: `None` if the VMM thread has not answered in time; `took`: until it had.
    pub fn text(
        &self,
        versions: Versions,
        reading: Option<&VmReading>,
        took: Duration,
        format: Format,
    ) -> String {
        let mut page = Page::default();
        page.info(Family::Build, &[versions.own, versions.compatible]);
        page.add(Family::ScrapeComplete, &[], Value::flag(reading.is_some()));
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        page.add(Family::ScrapeDuration, &[], Value::micros(took_us));
        self.process.add_to(&mut page);
        self.requests.add_to(&mut page);
        if let Some(reading) = reading {
            reading.add_to(&mut page);
        }
        let progress = self.progress.lock().clone();
        if let Some(progress) = progress {
            migration::add(&mut page, &progress);
        }
        page.write(format)
    }
}

#[cfg(test)]
mod tests {
    use vm_migration::Side;

    use super::super::reading::states;
    use super::*;

    const VERSIONS: Versions = Versions { own: "a", compatible: "b" };

    #[test]
    fn without_the_vmm_thread_a_scrape_says_so_and_has_the_rest() {
        let hub = Hub::default();
        hub.follow(&Arc::new(Progress::new(Side::Source)));
        let text = |reading| hub.text(VERSIONS, reading, Duration::ZERO, Format::OpenMetrics);
        let cut = text(None);
        assert!(cut.contains("godwit_scrape_complete 0\n") && cut.ends_with("# EOF\n"), "{cut}");
        assert!(cut.contains("godwit_build_info{version=\"a\",compatible_version=\"b\"} 1\n"));
        assert!(cut.contains("godwit_migration_phase{") && !cut.contains("godwit_vm_state"));
        let reading = VmReading { state: states::NONE, ..VmReading::default() };
        let whole = text(Some(&reading));
        assert!(whole.contains("godwit_scrape_complete 1\n"), "{whole}");
        assert!(whole.contains("godwit_vm_state{state=\"none\"} 1\n"), "{whole}");
    }
}
