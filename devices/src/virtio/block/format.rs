// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Detection of disk image formats by the first and last bytes of a file.
//!
//! Owns the signatures. It reads a file and never writes to it, never waits for one (a FIFO is not
//! opened), and is only to be asked before a guest can write: afterwards the first sector is the
//! guest's, which may make a raw disk look like anything.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::image::DiskError;

/// Bytes examined at each end.
const END_BYTES: usize = 512;
/// A 511-byte VHD footer, as written by early versions, has it one byte later.
const VHD_COOKIE: &[u8] = b"conectix";

/// An image format other than raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// QEMU copy-on-write image, versions 1 to 3.
    Qcow,
    /// QEMU enhanced disk.
    Qed,
    /// Fixed, dynamic or differencing VHD.
    Vhd,
    /// VHDX.
    Vhdx,
    /// VMware disk: sparse, or a descriptor.
    Vmdk,
    /// VirtualBox disk.
    Vdi,
    /// Parallels disk.
    Parallels,
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qcow => "qcow2",
            Self::Qed => "QED",
            Self::Vhd => "VHD",
            Self::Vhdx => "VHDX",
            Self::Vmdk => "VMDK",
            Self::Vdi => "VDI",
            Self::Parallels => "Parallels",
        })
    }
}

impl ImageFormat {
    /// The format of the image at `path`; `None` if it is raw.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn of(path: &Path) -> Result<Option<Self>, DiskError> {
        // Without O_NONBLOCK, opening a FIFO blocks.
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let path = path.to_owned();
        match opened {
            Ok(file) => Self::of_file(&file).map_err(|source| DiskError::Inspect { path, source }),
            Err(source) => Err(DiskError::Open { path, direct: false, source }),
        }
    }

    fn of_file(file: &File) -> io::Result<Option<Self>> {
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Ok(None);
        }
        let mut first = [0; END_BYTES];
        let len = read_up_to(file, &mut first, 0)?;
        if let Some(format) = Self::by_head(first.get(..len).unwrap_or_default()) {
            return Ok(Some(format));
        }
        // A fixed VHD is raw data with a footer. A block device is larger than its contents.
        let file_len_bytes = file.metadata()?.len();
        let Some(offset) = file_len_bytes.checked_sub(END_BYTES as u64) else { return Ok(None) };
        let mut last = [0; END_BYTES];
        let len = read_up_to(file, &mut last, offset)?;
        Ok(Self::by_footer(last.get(..len).unwrap_or_default()))
    }

    /// The format by the first bytes.
    fn by_head(bytes: &[u8]) -> Option<Self> {
        const HEADS: [(&[u8], ImageFormat); 9] = [
            (b"QFI\xfb", ImageFormat::Qcow),
            (b"QED\0", ImageFormat::Qed),
            (VHD_COOKIE, ImageFormat::Vhd),
            (b"vhdxfile", ImageFormat::Vhdx),
            (b"KDMV", ImageFormat::Vmdk),
            (b"COWD", ImageFormat::Vmdk),
            (b"# Disk DescriptorFile", ImageFormat::Vmdk),
            (b"WithoutFreeSpace", ImageFormat::Parallels),
            (b"WithouFreSpacExt", ImageFormat::Parallels),
        ];
        const VDI_OFFSET: usize = 0x40;
        const VDI: [u8; 4] = 0xbeda_107f_u32.to_le_bytes();
        if bytes.get(VDI_OFFSET..VDI_OFFSET + VDI.len()) == Some(&VDI) {
            return Some(Self::Vdi);
        }
        HEADS.iter().find(|(head, _)| bytes.starts_with(head)).map(|(_, format)| *format)
    }

    /// The format by the last [`END_BYTES`].
    fn by_footer(bytes: &[u8]) -> Option<Self> {
        let has = |at: usize| bytes.get(at..).is_some_and(|bytes| bytes.starts_with(VHD_COOKIE));
        (has(0) || has(1)).then_some(Self::Vhd)
    }
}

/// Reads until the buffer is full or the file ends; returns the number of bytes.
fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + done as u64) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::Write as _;

    use proptest::prelude::*;
    use tempfile::NamedTempFile;

    use super::*;

    fn of(parts: &[&[u8]]) -> Option<ImageFormat> {
        let mut file = NamedTempFile::new().unwrap();
        for part in parts {
            file.write_all(part).unwrap();
        }
        ImageFormat::of(file.path()).unwrap()
    }

    #[test]
    fn every_format_is_found_by_its_signature() {
        let zeros = [0; 4096];
        for (head, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], ImageFormat::Qcow),
            (b"QFI\xfb\0\0\0\x02", ImageFormat::Qcow),
            (b"QED\0", ImageFormat::Qed),
            (b"conectix", ImageFormat::Vhd),
            (b"vhdxfile", ImageFormat::Vhdx),
            (b"KDMV\x01\0\0\0", ImageFormat::Vmdk),
            (b"# Disk DescriptorFile\nversion=1", ImageFormat::Vmdk),
            (b"WithoutFreeSpace", ImageFormat::Parallels),
        ] {
            assert_eq!(of(&[head, &zeros]), Some(format));
            // The signature only counts at its offset.
            assert_eq!(of(&[&zeros, head, &zeros]), None);
        }
        assert_eq!(
            of(&[&zeros[..0x40], &[0x7f, 0x10, 0xda, 0xbe], &zeros]),
            Some(ImageFormat::Vdi)
        );
    }

    #[test]
    fn a_fixed_vhd_has_only_a_footer() {
        let (data, mut footer) = ([7; 8192], [0; 512]);
        footer[..8].copy_from_slice(b"conectix");
        assert_eq!(of(&[&data, &footer]), Some(ImageFormat::Vhd));
        assert_eq!(of(&[&data, &footer[..511]]), Some(ImageFormat::Vhd));
        assert_eq!(of(&[&data, &footer, &data]), None);
    }

    #[test]
    fn what_has_no_signature_is_raw() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[b"QF"]), None);
        let mut boot_sector = [0; 512];
        boot_sector[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(of(&[&boot_sector]), None);
        assert_eq!(ImageFormat::of(Path::new("/dev/null")).unwrap(), None);
        assert!(ImageFormat::of(Path::new("/nonexistent/disk.raw")).is_err());
    }

    #[test]
    fn a_fifo_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the name is a C string that lives across the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert_eq!(ImageFormat::of(&path).unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_looked_at(bytes in proptest::collection::vec(any::<u8>(), 0..1100)) {
            let found = of(&[&bytes]);
            prop_assert!(found.is_none() || bytes.len() >= 4);
        }
    }
}
