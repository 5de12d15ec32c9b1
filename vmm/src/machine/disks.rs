// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of block devices.
//!
//! Owns the translation from options to devices, the locks of the images, and the moment at which
//! an image of unknown format is looked at: once, before the guest can write.

use std::path::PathBuf;

use devices::virtio::block::{
    Block, BlockConfig, BlockLimits, DiskError, DiskFormat, DiskLock, ImageFormat, LockGranularity,
    OnFull,
};
use thiserror::Error;

use super::exclusive::LockedImages;
use super::limits::RateGroups;
use crate::config::{self, DiskConfig, ImageType, VmConfig};

/// Why a disk cannot be created.
#[derive(Debug, Error)]
pub enum DiskWiringError {
    /// No path is configured.
    #[error("disk '{0}' has no path")]
    NoPath(String),
    /// The image has a format other than raw, and no type is configured.
    #[error(
        "disk '{id}': {path} is a {format} image, which this version does not read: convert it \
         (qemu-img convert -O raw), or say image_type=raw to give the guest the bytes of the file \
         as they are"
    )]
    Format {
        /// Id of the disk.
        id: String,
        /// Path of the image.
        path: PathBuf,
        /// The format found.
        format: ImageFormat,
    },
    /// The image has another format than raw, which is supported but not configured.
    #[error(
        "disk '{id}': {path} seems to be a {format} image: say image_type={option} to have it read as \
         such, or image_type=raw to give the guest the bytes of the file as they are, and if a guest \
         may have written what is there"
    )]
    FormatUnsaid {
        /// Id of the disk.
        id: String,
        /// Path of the image.
        path: PathBuf,
        /// The format found.
        format: ImageFormat,
        /// Value of `image_type` for it.
        option: &'static str,
    },
    /// The device cannot be created.
    #[error("cannot make disk '{id}'")]
    Make {
        /// Id of the disk.
        id: String,
        /// The cause.
        #[source]
        source: DiskError,
    },
}

/// Checks the format of images without a configured type, and records them as raw. A guest can later make
/// the first sector of a raw disk look like another format, so this must not be repeated when the VM
/// reboots, is migrated or restored.
///
/// # Errors
/// An image has another format, or cannot be read.
pub fn detect_formats(config: &mut VmConfig) -> Result<(), DiskWiringError> {
    let unknown = |disk: &&mut DiskConfig| disk.image_type == ImageType::Unknown;
    for disk in config.disks.iter_mut().flatten().filter(unknown) {
        let Some(path) = &disk.path else { continue };
        let id = disk.id.clone().unwrap_or_default();
        match ImageFormat::of(path) {
            Ok(None) => disk.image_type = ImageType::Raw,
            Ok(Some(format)) => {
                let path = path.clone();
                return Err(match format {
                    ImageFormat::Qcow => {
                        DiskWiringError::FormatUnsaid { id, path, format, option: "qcow2" }
                    }
                    ImageFormat::Vhd => {
                        DiskWiringError::FormatUnsaid { id, path, format, option: "vhd" }
                    }
                    ImageFormat::Vhdx => {
                        DiskWiringError::FormatUnsaid { id, path, format, option: "vhdx" }
                    }
                    _ => DiskWiringError::Format { id, path, format },
                });
            }
            Err(source) => return Err(DiskWiringError::Make { id, source }),
        }
    }
    Ok(())
}

/// Records disks of unknown type as raw: the guest that arrives has written to them, and its source has
/// checked them.
pub fn assume_raw(config: &mut VmConfig) {
    for disk in config.disks.iter_mut().flatten() {
        if disk.image_type == ImageType::Unknown {
            disk.image_type = ImageType::Raw;
        }
    }
}

fn affinity(config: &DiskConfig) -> Vec<Vec<usize>> {
    let mut queues = vec![Vec::new(); usize::from(config.num_queues)];
    for entry in config.queue_affinity.iter().flatten() {
        if let Some(cpus) = queues.get_mut(usize::from(entry.queue_index)) {
            cpus.extend(entry.host_cpus.iter().filter_map(|cpu| usize::try_from(*cpu).ok()));
        }
    }
    queues
}

/// Opens the image of a disk, or takes it with its lock from `images`; in the first case it is not locked
/// yet. `groups` are those that the disk may belong to, `limits` what its platform accepts of requests.
///
/// # Errors
/// Names the disk and its image.
pub fn make(
    config: &DiskConfig,
    limits: BlockLimits,
    images: &mut LockedImages,
    groups: &RateGroups,
) -> Result<(Block, DiskLock), DiskWiringError> {
    let id = config.id.clone().unwrap_or_default();
    let path = config.path.clone().ok_or_else(|| DiskWiringError::NoPath(id.clone()))?;
    let config = BlockConfig {
        id: id.clone(),
        path,
        // What an image of unknown format is was found out before.
        format: match config.image_type {
            ImageType::Qcow2 => DiskFormat::Qcow2,
            ImageType::FixedVhd => DiskFormat::FixedVhd,
            ImageType::Vhdx => DiskFormat::Vhdx,
            ImageType::Raw | ImageType::Unknown => DiskFormat::Raw,
        },
        backing_files: config.backing_files,
        readonly: config.readonly,
        direct: config.direct,
        sparse: config.sparse,
        num_queues: config.num_queues,
        queue_size: config.queue_size,
        serial: config.serial.clone(),
        disable_io_uring: config.disable_io_uring,
        lock_granularity: match config.lock_granularity {
            config::LockGranularity::ByteRange => LockGranularity::ByteRange,
            config::LockGranularity::Full => LockGranularity::Full,
        },
        queue_affinity: affinity(config),
        on_full: match config.on_full {
            config::OnFull::Report => OnFull::Report,
            config::OnFull::Pause => OnFull::Pause,
        },
        limiter: groups.limiter(config),
        limits,
    };
    let block = match images.take(&config) {
        Some(lock) => Block::over(config, &lock),
        None => Block::new(config),
    }
    .map_err(|source| DiskWiringError::Make { id, source })?;
    let lock = block.lock();
    Ok((block, lock))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::Write as _;

    use tempfile::NamedTempFile;

    use super::*;

    fn config(image: &NamedTempFile, image_type: ImageType) -> VmConfig {
        let path = Some(image.path().to_owned());
        let id = Some("root".to_owned());
        let disk = DiskConfig { path, id, image_type, ..DiskConfig::default() };
        VmConfig { disks: Some(vec![disk]), ..VmConfig::default() }
    }

    fn type_of(config: &VmConfig) -> ImageType {
        config.disks.as_ref().unwrap()[0].image_type
    }

    #[test]
    fn what_is_said_of_an_image_is_how_it_is_read() {
        let image = NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let make = |image_type| {
            let config = config(&image, image_type);
            let disk = config.disks.as_ref().and_then(|disks| disks.first()).unwrap();
            make(disk, BlockLimits::GODWIT, &mut LockedImages::default(), &RateGroups::default())
                .map(drop)
        };
        make(ImageType::Raw).unwrap();
        for (image_type, name) in [
            (ImageType::Qcow2, "qcow2"),
            (ImageType::FixedVhd, "fixed VHD"),
            (ImageType::Vhdx, "VHDX"),
        ] {
            let why = error_text::chain(&make(image_type).unwrap_err());
            assert!(why.contains("'root'") && why.contains(name), "{why}");
        }
    }

    #[test]
    fn an_image_is_looked_at_once_and_what_was_said_counts_more() {
        let mut image = NamedTempFile::new().unwrap();
        image.write_all(&[0; 4096]).unwrap();
        let mut unsaid = config(&image, ImageType::Unknown);
        detect_formats(&mut unsaid).unwrap();
        assert_eq!(type_of(&unsaid), ImageType::Raw);

        // The guest writes a first sector that looks like another format.
        image.as_file().set_len(0).unwrap();
        let mut image = image.reopen().map(|file| (image, file)).unwrap();
        image.1.write_all(b"QFI\xfb\0\0\0\x03").unwrap();
        image.1.set_len(4096).unwrap();
        detect_formats(&mut unsaid).unwrap();
        let mut said = config(&image.0, ImageType::Raw);
        detect_formats(&mut said).unwrap();

        let mut unsaid = config(&image.0, ImageType::Unknown);
        let error = detect_formats(&mut unsaid).unwrap_err().to_string();
        assert!(error.contains("'root'") && error.contains("image_type=qcow2"), "{error}");
        assert_eq!(type_of(&unsaid), ImageType::Unknown);
        assume_raw(&mut unsaid);
        assert_eq!(type_of(&unsaid), ImageType::Raw);
    }
}
