// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Decompression of memory contents, within bounds.
//!
//! Owns the limits and the buffers. A frame comes from a peer, and neither its length nor its header is
//! trusted: it must decompress to exactly the announced pages, otherwise it is an error. The output never
//! exceeds [`RAW_BYTES_MAX`].

use std::io;

use zstd::bulk::Decompressor;

use super::ProtocolError;
use super::codec::read_payload;
use crate::transport::ByteSource;

/// Most bytes of memory in one frame.
pub const RAW_BYTES_MAX: u64 = 4 << 20;

/// Decompresses the frames of one connection.
#[derive(Default)]
pub struct Inflater {
    decompressor: Option<Decompressor<'static>>,
    raw: Vec<u8>,
}

impl std::fmt::Debug for Inflater {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inflater")
            .field("buffer_bytes", &self.raw.capacity())
            .finish_non_exhaustive()
    }
}

impl Inflater {
    /// Reads a frame of `frame_bytes` that must hold `raw_bytes` of memory; returns the contents.
    ///
    /// # Errors
    /// When the frame is too long, does not decompress, or has another length.
    pub fn read(
        &mut self,
        from: &mut impl ByteSource,
        frame_bytes: u32,
        raw_bytes: u64,
    ) -> Result<&[u8], ProtocolError> {
        const WHAT: &str = "compressed memory";
        if raw_bytes > RAW_BYTES_MAX {
            let max_bytes = RAW_BYTES_MAX;
            return Err(ProtocolError::TooLong { what: WHAT, len_bytes: raw_bytes, max_bytes });
        }
        // A frame longer than its contents is never sent.
        let frame = read_payload(from, WHAT, frame_bytes.into(), raw_bytes)?;
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            none => none.insert(Decompressor::new().map_err(ProtocolError::Zstd)?),
        };
        let raw_len = crate::layout::to_usize(raw_bytes);
        self.raw.clear();
        self.raw.reserve_exact(raw_len);
        // Writes up to the capacity; what exceeds it is an error.
        let unpacked = decompressor
            .decompress_to_buffer(&frame, &mut self.raw)
            .map_err(ProtocolError::Zstd)?;
        if unpacked != raw_len || self.raw.len() != raw_len {
            let why = "it is not as long as the pages that it is for";
            return Err(ProtocolError::Zstd(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        Ok(&self.raw)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    fn read(frame: &[u8], frame_bytes: u32, raw_bytes: u64) -> Result<Vec<u8>, ProtocolError> {
        let mut inflater = Inflater::default();
        let mut from = frame;
        let result = inflater.read(&mut from, frame_bytes, raw_bytes).map(<[u8]>::to_vec);
        assert!(inflater.raw.capacity() as u64 <= RAW_BYTES_MAX, "a buffer without bound");
        result
    }

    fn len(bytes: &[u8]) -> u32 {
        u32::try_from(bytes.len()).unwrap()
    }

    #[test]
    fn a_frame_unpacks_to_its_pages_and_to_nothing_else() {
        let pages = vec![7; 8192];
        let frame = zstd::bulk::compress(&pages, 1).unwrap();
        assert_eq!(read(&frame, len(&frame), 8192).unwrap(), pages);
        for raw_bytes in [4096, 12288] {
            let error = read(&frame, len(&frame), raw_bytes).unwrap_err();
            assert!(matches!(error, ProtocolError::Zstd(_)), "{error:?}");
        }
        for cut in 0..len(&frame) {
            assert!(read(&frame, cut, 8192).is_err(), "cut to {cut} bytes");
        }
    }

    #[test]
    fn a_frame_that_would_unpack_to_gigabytes_is_refused() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
        assert!(bomb.len() < 8192);
        assert!(read(&bomb, len(&bomb), 8192).is_err());
        let error = read(&bomb, len(&bomb), RAW_BYTES_MAX + 4096).unwrap_err();
        assert!(matches!(error, ProtocolError::TooLong { .. }), "{error:?}");
        let error = read(&bomb, u32::MAX, 8192).unwrap_err();
        assert!(matches!(error, ProtocolError::TooLong { .. }), "{error:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_the_right_length(
            bytes in prop::collection::vec(any::<u8>(), 0..4096), pages in 1u64..4,
        ) {
            if let Ok(raw) = read(&bytes, len(&bytes), pages * 4096) {
                prop_assert_eq!(raw.len() as u64, pages * 4096);
            }
        }

        #[test]
        fn a_broken_frame_is_never_more_than_an_error(at in 0usize..10_000, with: u8) {
            let pages: Vec<u8> =
                (0..16384u32).flat_map(|i| (i * i).to_le_bytes()).take(16384).collect();
            let mut frame = zstd::bulk::compress(&pages, 1).unwrap();
            let at = at % frame.len();
            frame[at] ^= with;
            if let Ok(raw) = read(&frame, len(&frame), 16384) {
                prop_assert_eq!(raw.len(), 16384);
            }
        }
    }
}
