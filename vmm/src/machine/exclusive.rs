// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Exclusive host resources: images and taps, which only one VM may use.
//!
//! Owns when they are taken and released, and what belongs to that: an image is written back before
//! it is released, and read anew when another host may have had it meanwhile. A guest runs only with
//! all of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use devices::virtio::block::{BlockConfig, DiskError, DiskLock};
use devices::virtio::net::TapError;
use devices::virtio::vsock::VsockSocketError;
use memory::{GuestRam, LockedFile};
use prezero_pool_client::PoolConnection;
use thiserror::Error;

use super::passthrough::KeptDmaSlot;
use super::virtio::VirtioDevices;
use super::write_back::{WriteBack, WriteBackError, report_write_back_failure};
use super::{Machine, MachineError};
use crate::config::VmConfig;

/// Why a resource that only one VM may hold cannot be taken or released.
#[derive(Debug, Error)]
pub enum ExclusiveError {
    /// An image cannot be locked.
    #[error("disk '{id}' cannot be locked")]
    Disk {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: DiskError,
    },
    /// The tables of an image in a format cannot be loaded.
    #[error("the image of disk '{id}' cannot be loaded")]
    Load {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: DiskError,
    },
    /// An image cannot be unlocked.
    #[error("disk '{id}' cannot be released")]
    Unlock {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: DiskError,
    },
    /// The cached contents of an image cannot be dropped, so reads may miss what another host wrote.
    #[error("disk '{id}' cannot be read anew")]
    Stale {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: DiskError,
    },
    /// The same, as no thread could be started for it and there is a time limit.
    #[error("disk '{id}' cannot be read anew, as its thread cannot be started")]
    Thread {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The same, as the storage does not respond in time.
    #[error("disk '{id}' ({path}) was not ready to be read anew within {} ms", .within.as_millis())]
    Slow {
        /// Id of the device.
        id: String,
        /// Path of the image.
        path: PathBuf,
        /// The time limit.
        within: Duration,
    },
    /// A tap cannot be opened.
    #[error("the tap of '{id}' cannot be opened")]
    Tap {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: TapError,
    },
    /// A socket cannot be bound.
    #[error("the socket of '{id}' cannot be bound")]
    Socket {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: VsockSocketError,
    },
}

/// Writes an image back and releases its lock; its device must be paused or gone. A failure is reported,
/// and the lock is released all the same, as nothing can recover the data.
pub(super) fn write_back_and_unlock(id: &str, lock: &DiskLock) {
    if !lock.is_held() {
        return;
    }
    if let Err(error) = WriteBack::start(writable(id, lock)).wait() {
        report_write_back_failure(&error);
    }
    if let Err(error) = lock.unlock() {
        log::warn!("disk '{id}' was not released as it should be: {error}");
    }
}

fn writable(id: &str, lock: &DiskLock) -> Option<(String, DiskLock)> {
    (lock.is_held() && lock.is_writable()).then(|| (id.to_owned(), lock.clone()))
}

/// What is kept while a machine is replaced on a reboot, so that no other VM takes it in between.
#[derive(Default)]
pub struct KeptForReboot {
    /// Whether there was a machine before, whose guest boots again.
    pub is_reboot: bool,
    /// Images of the disks.
    pub disks: LockedImages,
    /// Files of the memory.
    pub files: Vec<LockedFile>,
    /// Guest RAM, for a machine with the same memory.
    pub ram: Option<Arc<GuestRam>>,
    /// What of it stays mapped for passed-through devices, once the machine before has ended.
    pub dma: KeptDmaSlot,
    /// While it is open, a pool leaves the devices alone, which are opened again.
    pub pool: Option<Arc<PoolConnection>>,
}

/// Open images with their locks, passed from one machine to the next in the same process. Dropping this
/// releases those that no running machine holds.
#[derive(Default)]
pub struct LockedImages {
    disks: Vec<LockedImage>,
}

struct LockedImage {
    id: String,
    lock: DiskLock,
    /// Whether a device of the next machine has taken it.
    is_taken: bool,
}

impl LockedImages {
    /// The image for a device of this configuration, if it is here.
    pub fn take(&mut self, config: &BlockConfig) -> Option<DiskLock> {
        let fits = |image: &&mut LockedImage| image.id == config.id && image.lock.fits(config);
        let image = self.disks.iter_mut().find(fits)?;
        image.is_taken = true;
        Some(image.lock.clone())
    }

    /// The file of persistent memory, if it is here.
    pub fn take_file(&mut self, id: &str, path: &Path, readonly: bool) -> Option<DiskLock> {
        let fits = |image: &&mut LockedImage| {
            let lock = &image.lock;
            image.id == id && lock.path() == path && lock.is_writable() != readonly
        };
        let image = self.disks.iter_mut().find(fits)?;
        image.is_taken = true;
        Some(image.lock.clone())
    }

    /// Removes and returns the images that a machine of this configuration does not use.
    #[must_use]
    pub fn not_in(&mut self, config: &VmConfig) -> Self {
        let disks = config.disks.iter().flatten().filter_map(|disk| disk.id.as_deref());
        let pmems = config.pmem.iter().flatten().filter_map(|pmem| pmem.id.as_deref());
        let ids: std::collections::BTreeSet<_> = disks.chain(pmems).collect();
        let disks = std::mem::take(&mut self.disks);
        let (stay, go) = disks.into_iter().partition(|image| ids.contains(image.id.as_str()));
        self.disks = stay;
        Self { disks: go }
    }

    /// Leaves the taken images to the next machine, which runs.
    pub fn passed_on(mut self) {
        self.disks.retain(|image| !image.is_taken);
    }
}

impl Drop for LockedImages {
    fn drop(&mut self) {
        for LockedImage { id, lock, .. } in self.disks.drain(..) {
            write_back_and_unlock(&id, &lock);
        }
    }
}

impl VirtioDevices {
    /// Takes image locks and taps that are not held, and drops the cached contents of all images if they
    /// `are_stale`. On failure what was taken is released; what was held before is kept.
    ///
    /// # Errors
    /// Names the device that another VM holds, or whose cache cannot be dropped.
    pub fn take_exclusive(&self, are_stale: bool) -> Result<(), ExclusiveError> {
        let free_locks: Vec<_> = self.locks.iter().filter(|(_, lock)| !lock.is_held()).collect();
        let free_nets: Vec<_> = self.nets.iter().filter(|(_, net)| !net.is_attached()).collect();
        let free_sockets: Vec<_> =
            self.sockets.iter().filter(|(_, socket)| !socket.is_attached()).collect();
        let taken = self.take_all(are_stale);
        if taken.is_err() {
            for (_, socket) in free_sockets {
                socket.detach();
            }
            for (_, net) in free_nets {
                net.detach();
            }
            for (id, lock) in free_locks {
                // Logged by `release`; the reason for taking none is the more useful error.
                let _ = release(id, lock);
            }
        }
        taken
    }

    /// Whether the taps could be opened if no other process held them.
    ///
    /// # Errors
    /// Names the device.
    pub fn check_exclusive(&self) -> Result<(), ExclusiveError> {
        for (id, net) in &self.nets {
            net.check().map_err(|source| ExclusiveError::Tap { id: id.clone(), source })?;
        }
        for (id, socket) in &self.sockets {
            let refused = |source| ExclusiveError::Socket { id: id.clone(), source };
            socket.check().map_err(refused)?;
        }
        Ok(())
    }

    fn take_all(&self, are_stale: bool) -> Result<(), ExclusiveError> {
        for (id, lock) in &self.locks {
            lock.lock().map_err(|source| ExclusiveError::Disk { id: id.clone(), source })?;
        }
        if are_stale {
            self.drop_caches()?;
        }
        // Under the lock and without stale caches, so that the tables are the current ones.
        for (id, lock) in &self.locks {
            lock.load().map_err(|source| ExclusiveError::Load { id: id.clone(), source })?;
        }
        for (id, net) in &self.nets {
            net.attach().map_err(|source| ExclusiveError::Tap { id: id.clone(), source })?;
        }
        for (id, socket) in &self.sockets {
            let refused = |source| ExclusiveError::Socket { id: id.clone(), source };
            socket.attach().map_err(refused)?;
        }
        Ok(())
    }

    /// Releases image locks and taps; the devices must be paused, and their images written back.
    ///
    /// # Errors
    /// Names the first disk that stays locked; all others are released.
    pub fn release_exclusive(&self) -> Result<(), ExclusiveError> {
        for (id, net) in &self.nets {
            log::debug!("{id}: releasing its tap");
            net.detach();
        }
        for (id, socket) in &self.sockets {
            log::debug!("{id}: giving back its socket");
            socket.detach();
        }
        let mut result = Ok(());
        for (id, lock) in &self.locks {
            result = result.and(release(id, lock));
        }
        result
    }

    /// The disks that may need writing back.
    pub fn writable_disks(&self) -> Vec<(String, DiskLock)> {
        self.locks.iter().filter_map(|(id, lock)| writable(id, lock)).collect()
    }

    /// Drops the cached contents of all images.
    ///
    /// # Errors
    /// Names the device.
    pub fn drop_caches(&self) -> Result<(), ExclusiveError> {
        for (id, lock) in &self.locks {
            lock.drop_cache().map_err(|source| ExclusiveError::Stale { id: id.clone(), source })?;
        }
        Ok(())
    }

    /// The same with a time limit; also checks images in a format. Drops that have not finished by then
    /// continue.
    ///
    /// # Errors
    /// Names the device.
    pub fn drop_caches_within(&self, within: Duration) -> Result<(), ExclusiveError> {
        let drop_cache = |lock: &DiskLock| lock.drop_cache().and_then(|()| lock.check_format());
        drop_caches_of(self.locks.iter().cloned(), within, drop_cache)
    }

    /// Whether no flush of a disk has failed.
    ///
    /// # Errors
    /// Names the device.
    pub fn check_disks(&self) -> Result<(), WriteBackFailed> {
        for (id, lock) in &self.locks {
            let failed = |source| WriteBackFailed { id: id.clone(), source };
            lock.check_stable().map_err(failed)?;
        }
        Ok(())
    }
}

/// Runs `drop_cache` on each disk, on its own thread.
fn drop_caches_of(
    disks: impl Iterator<Item = (String, DiskLock)>,
    within: Duration,
    drop_cache: impl Fn(&DiskLock) -> Result<(), DiskError> + Clone + Send + 'static,
) -> Result<(), ExclusiveError> {
    let reading = WriteBack::start_other("drop-cache", disks, drop_cache);
    reading.wait_within(within).map_err(|error| match error {
        WriteBackError::Disk { id, source } => ExclusiveError::Stale { id, source },
        WriteBackError::Thread { id, source } => ExclusiveError::Thread { id, source },
        WriteBackError::Slow { id, path, within } => ExclusiveError::Slow { id, path, within },
    })
}

fn release(id: &str, lock: &DiskLock) -> Result<(), ExclusiveError> {
    lock.unlock().map_err(|source| {
        log::warn!("disk '{id}' was not released as it should be: {source}");
        ExclusiveError::Unlock { id: id.to_owned(), source }
    })
}

/// A flush of a disk has failed.
#[derive(Debug, Error)]
#[error(
    "a flush of disk '{id}' has failed, so its image may lack data that the guest regards as written; \
     only a VM that opens it anew (vm.shutdown, then vm.boot) can use it again"
)]
pub struct WriteBackFailed {
    id: String,
    #[source]
    source: DiskError,
}

impl Machine {
    /// Whether the taps can be opened once the guest runs; another VM may hold them now.
    ///
    /// # Errors
    /// Names the device.
    pub fn check_exclusive(&self) -> Result<(), MachineError> {
        Ok(self.parts.devices.check_exclusive()?)
    }

    /// Takes image locks and taps that are not held, and drops the cached contents of images that another
    /// host may have written to since they were opened or released.
    ///
    /// # Errors
    /// Names the device that another VM holds, or whose cache cannot be dropped. What was not held before
    /// is released again, so that another VM, such as the guest at the source of a migration, can continue
    /// with it.
    pub fn take_exclusive(&mut self) -> Result<(), MachineError> {
        self.parts.devices.take_exclusive(self.disks_are_stale)?;
        self.disks_are_stale = false;
        Ok(())
    }

    /// Whether [`Machine::resume`] has to take resources that another VM may hold, which may block.
    pub fn lacks_exclusive(&self) -> bool {
        self.disks_are_stale
            || self.parts.devices.locks.iter().any(|(_, lock)| !lock.is_held())
            || self.parts.devices.nets.iter().any(|(_, net)| !net.is_attached())
            || self.parts.devices.sockets.iter().any(|(_, socket)| !socket.is_attached())
    }

    /// Releases image locks and taps. The machine must be paused, and its disks written back
    /// ([`Machine::write_back`]).
    ///
    /// # Errors
    /// The machine runs, or a disk stays locked, so that no other VM can rely on it.
    pub fn release_exclusive(&mut self) -> Result<(), MachineError> {
        if !self.paused {
            return Err(MachineError::StateMismatch("it still runs".to_owned()));
        }
        // Some may be released already when one stays locked.
        self.disks_are_stale = true;
        Ok(self.parts.devices.release_exclusive()?)
    }

    /// Drops what this host's page cache holds of the disks, as far as possible before they are locked, to
    /// leave little for then. Takes as long as the write-back of dirty pages.
    ///
    /// # Errors
    /// Names the device.
    pub fn drop_disk_caches(&self) -> Result<(), MachineError> {
        Ok(self.parts.devices.drop_caches()?)
    }

    /// The same with a time limit, for use while the guest is stopped; also checks images in a format.
    ///
    /// # Errors
    /// Names the device, also if its storage has not responded in time.
    pub fn drop_disk_caches_within(&self, within: Duration) -> Result<(), MachineError> {
        Ok(self.parts.devices.drop_caches_within(within)?)
    }

    /// Starts to write back what the guest has written to its disks so far.
    pub fn write_back(&self) -> WriteBack {
        WriteBack::start(self.parts.devices.writable_disks())
    }

    /// The same for one device, if it is a disk.
    pub(super) fn write_back_early(&self, id: &str) -> WriteBack {
        let disks = self.parts.devices.writable_disks().into_iter();
        WriteBack::start(disks.filter(|(other, _)| other == id))
    }

    /// The backing files of its disks, with the ids of the disks.
    pub fn backing_files(&self) -> impl Iterator<Item = (&str, PathBuf)> {
        self.parts.devices.locks.iter().flat_map(|(id, lock)| {
            lock.backing_paths().into_iter().map(move |path| (id.as_str(), path))
        })
    }

    /// The disks that may need writing back.
    pub fn writable_disks(&self) -> Vec<(String, DiskLock)> {
        self.parts.devices.writable_disks()
    }

    /// Takes the open images out of a machine that ends, for the next one, so that no other VM locks them
    /// in between. Its devices use them until it is dropped. Tables of those in a format are written when it ends; the
    /// contents stay in this host's cache, where the next machine finds them.
    pub fn take_locked_images(&mut self) -> LockedImages {
        self.passed_on = self.parts.devices.writable_disks();
        self.passed_on.retain(|(_, lock)| lock.is_formatted());
        let locks = std::mem::take(&mut self.parts.devices.locks);
        let held = locks.into_iter().filter(|(_, lock)| lock.is_held());
        let image = |(id, lock)| LockedImage { id, lock, is_taken: false };
        LockedImages { disks: held.map(image).collect() }
    }

    /// Lets the devices finish their requests, writes the disks back and releases them.
    pub(super) fn end_devices(&mut self) {
        self.parts.devices.end_vdpas();
        self.parts.devices.pause();
        let disks = self.parts.devices.writable_disks().into_iter();
        let disks = disks.chain(std::mem::take(&mut self.passed_on));
        if let Err(error) = WriteBack::start(disks).wait() {
            report_write_back_failure(&error);
        }
        // Logged by the callee; closing the descriptors releases the locks.
        let _ = self.parts.devices.release_exclusive();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use devices::virtio::block::Block;
    use parking_lot::Mutex;

    use super::*;
    use crate::testing::{again, no_more_threads};

    const LONG: Duration = Duration::from_mins(1);

    fn disks(images: &[(&str, &tempfile::NamedTempFile)]) -> Vec<(String, DiskLock)> {
        let open = |(id, image): &(&str, &tempfile::NamedTempFile)| {
            let path = image.path().to_owned();
            let block = Block::new(BlockConfig { path, ..BlockConfig::default() }).unwrap();
            ((*id).to_owned(), block.lock())
        };
        images.iter().map(open).collect()
    }

    #[test]
    fn storage_that_does_not_answer_is_named_in_time_and_keeps_no_other_disk() {
        let images = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
        for image in &images {
            image.as_file().set_len(1 << 20).unwrap();
        }
        let disks = disks(&[("a", &images[0]), ("b", &images[1])]);
        let stalled = images[0].path().to_owned();
        let (answer, storage) = channel::<()>();
        let (storage, (done, others)) = (Arc::new(Mutex::new(storage)), channel());
        let drop_cache = move |lock: &DiskLock| {
            if lock.path() == stalled {
                let _ = storage.lock().recv_timeout(LONG);
            }
            let dropped = lock.drop_cache();
            let _ = done.send(lock.path().to_owned());
            dropped
        };
        let within = Duration::from_millis(20);
        let slow = drop_caches_of(disks.clone().into_iter(), within, drop_cache).unwrap_err();
        let told = slow.to_string();
        assert!(matches!(&slow, ExclusiveError::Slow { id, .. } if id == "a"), "{told}");
        assert!(told.contains("'a'") && told.contains("20 ms"), "{told}");
        assert_eq!(others.recv_timeout(LONG).unwrap(), images[1].path());
        // It continues, and ends when its storage responds.
        drop(answer);
        assert_eq!(others.recv_timeout(LONG).unwrap(), images[0].path());
        drop_caches_of(disks.into_iter(), LONG, DiskLock::drop_cache).unwrap();
    }

    #[test]
    fn a_disk_that_cannot_be_read_anew_is_named() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let failing = |lock: &DiskLock| {
            let source = std::io::Error::from_raw_os_error(libc::EIO);
            Err(DiskError::Cache { path: lock.path().to_owned(), source })
        };
        let failed = drop_caches_of(disks(&[("root", &image)]).into_iter(), LONG, failing);
        assert!(matches!(&failed, Err(ExclusiveError::Stale { id, .. }) if id == "root"));
    }

    const NO_THREADS: &str = "GODWIT_TEST_NO_THREADS";

    #[test]
    fn without_a_thread_a_disk_is_not_waited_for_by_what_has_no_time() {
        if std::env::var_os(NO_THREADS).is_some() {
            let image = tempfile::NamedTempFile::new().unwrap();
            image.as_file().set_len(1 << 20).unwrap();
            let disks = disks(&[("root", &image)]);
            no_more_threads();
            let work = |_: &DiskLock| -> Result<(), DiskError> { panic!("it may take forever") };
            let refused = drop_caches_of(disks.clone().into_iter(), LONG, work).unwrap_err();
            assert!(matches!(&refused, ExclusiveError::Thread { id, .. } if id == "root"));
            // A caller that may block does the work itself.
            return WriteBack::start(disks).wait().unwrap();
        }
        let test = "without_a_thread_a_disk_is_not_waited_for_by_what_has_no_time";
        let test = format!("machine::exclusive::tests::{test}");
        let ended = again(&test).env(NO_THREADS, "1").output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }
}
