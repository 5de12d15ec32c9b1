// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Contents that are copied into missing pages.
//!
//! Owns whether a copy waits while the host has no memory for it. Must never use a page that is there already.

use std::io;

use super::sys::Descriptor;
use super::{Uffd, UffdError};
use crate::layout::{PAGE_BYTES, PageRun, to_usize};
use crate::ram::GuestMemoryMap;

/// In place of ENOMEM, after which [`Uffd::fill`] waits; no operation of userfaultfd fails with it.
const LACKS: i32 = libc::ENOBUFS;

impl<M: GuestMemoryMap> Uffd<M> {
    /// Copies contents in with `copy`.
    pub(super) fn copy_with(
        &self,
        run: PageRun,
        bytes: &[u8],
        copy: impl Fn(&Descriptor, u64, &[u8]) -> (u64, io::Result<()>),
    ) -> Result<(), UffdError> {
        for (part, piece) in self.pieces(run) {
            let start = part.address_of(piece.first);
            let skip = (piece.first - run.first) * PAGE_BYTES;
            self.fill(
                "fill",
                part,
                piece,
                |descriptor, address, len| {
                    let from = to_usize(skip + (address - start));
                    copy(descriptor, address, &bytes[from..from + to_usize(len)])
                },
                |descriptor, address| {
                    if part.shared {
                        // The copy was not used, and the present contents are unknown.
                        return Err(io::Error::from_raw_os_error(libc::EEXIST));
                    }
                    descriptor.wake(address, part.host_page_bytes)
                },
            )?;
        }
        Ok(())
    }
    /// Copies a host page in, or fails with ENOMEM where [`fill`](Self::fill) would wait for memory.
    pub(super) fn copy_now(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        let copy = |descriptor: &Descriptor, address, bytes: &[u8]| {
            let (done, copied) = descriptor.copy(address, bytes);
            let lacks = |error: io::Error| match error.raw_os_error() {
                Some(libc::ENOMEM) => io::Error::from_raw_os_error(LACKS),
                _ => error,
            };
            (done, copied.map_err(lacks))
        };
        self.copy_with(run, bytes, copy).map_err(|error| match error {
            UffdError::Pages { what, region, first, pages, source }
                if source.raw_os_error() == Some(LACKS) =>
            {
                let source = io::Error::from_raw_os_error(libc::ENOMEM);
                UffdError::Pages { what, region, first, pages, source }
            }
            error => error,
        })
    }
}
