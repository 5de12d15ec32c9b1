// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Full disks: the state that the owner of a machine sees.
//!
//! Owns what is reported about them, and the rule that a machine with such a disk is neither saved nor migrated: the
//! requests that it keeps are in no saved state. Must never answer a request of the guest.

use std::fmt;
use std::path::PathBuf;

use devices::virtio::block::FullDisk;
use thiserror::Error;

use super::{Machine, MachineError};

/// A disk with requests that wait for free space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FullDiskStatus {
    /// Id of the device.
    pub id: String,
    /// Path of the image.
    pub path: PathBuf,
    /// Number of waiting requests.
    pub requests: usize,
}

/// The host has no space for what the guest has written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct DisksFull(Vec<FullDiskStatus>);

impl fmt::Display for DisksFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(disks) = self;
        for (index, FullDiskStatus { id, path, .. }) in disks.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}disk '{id}' ({}) is full", path.display())?;
        }
        f.write_str(
            ": requests of the guest wait until the host has room for them; free room, or raise the quota, \
             and the VM continues",
        )
    }
}

impl Machine {
    /// The disks with requests that wait for free space. While the machine runs, a request being retried
    /// does not count.
    pub fn full_disks(&self) -> Vec<FullDiskStatus> {
        let status = |(id, disk): &(String, FullDisk)| {
            let requests = disk.kept();
            let path = disk.path().to_owned();
            (requests > 0).then(|| FullDiskStatus { id: id.clone(), path, requests })
        };
        self.parts.devices.full_disks.iter().filter_map(status).collect()
    }

    /// Whether no request waits for free space.
    ///
    /// # Errors
    /// Names the disks.
    pub fn check_room(&self) -> Result<(), DisksFull> {
        let full = self.full_disks();
        if full.is_empty() { Ok(()) } else { Err(DisksFull(full)) }
    }

    /// Retries the waiting requests and resumes the guest if all succeed. The machine must be paused. Takes
    /// as long as the storage does.
    ///
    /// # Errors
    /// [`MachineError::DisksFull`], and as [`Machine::resume`]; the machine stays paused.
    pub fn resume_with_room(&mut self) -> Result<(), MachineError> {
        let mut full = self.full_disks();
        if self.paused {
            full.retain(|status| {
                let disk = self.parts.devices.full_disks.iter().find(|(id, _)| *id == status.id);
                disk.is_some_and(|(_, disk)| disk.try_again().is_err())
            });
        }
        if !full.is_empty() {
            return Err(DisksFull(full).into());
        }
        self.resume()
    }
}
