// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks whether memory is all zero, and zeroes it.
//!
//! Owns the check for bytes in a slice and for guest memory in place, and clearing memory without
//! filling the caches. Must never make a reference to guest memory: the guest may be writing it.

/// Bytes that are examined between two chances to stop early.
const STRIDE_BYTES: usize = 128;

/// True when every byte is zero. Written so that the compiler vectorises it.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (strides, tail) = bytes.as_chunks::<STRIDE_BYTES>();
    strides.iter().all(|stride| {
        let (words, _) = stride.as_chunks::<8>();
        words.iter().fold(0, |any, word| any | u64::from_ne_bytes(*word)) == 0
    }) && tail.iter().all(|byte| *byte == 0)
}

/// True when `len_bytes` bytes at `start` are zero; each is read once, without a reference to it.
///
/// The result may be outdated at once if another thread writes, but it was true at some time for
/// each word.
///
/// # Safety
/// `start` is aligned to 8 bytes, `len_bytes` is a multiple of [`STRIDE_BYTES`], and the range is
/// mapped readable for the whole call.
pub unsafe fn is_zero_volatile(start: *const u64, len_bytes: usize) -> bool {
    const STRIDE_WORDS: usize = STRIDE_BYTES / 8;
    debug_assert!(start.is_aligned() && len_bytes.is_multiple_of(STRIDE_BYTES));
    for stride in 0..len_bytes / STRIDE_BYTES {
        let mut any = 0;
        for word in 0..STRIDE_WORDS {
            // SAFETY: inside the range that the caller promised.
            any |= unsafe { start.add(stride * STRIDE_WORDS + word).read_volatile() };
        }
        if any != 0 {
            return false;
        }
    }
    true
}

/// Bytes per non-temporal store; ranges to clear are whole cache lines of 64 bytes.
const STORE_BYTES: usize = 16;

/// Zeroes `len_bytes` bytes at `start` with non-temporal stores, which neither read memory nor
/// evict cached data. The stores are complete, for other threads too, on return.
///
/// # Safety
/// `start` is aligned to 64 bytes, `len_bytes` is a multiple of 64, the range is mapped writable
/// for the whole call, and no reference to any of it exists.
#[expect(clippy::cast_ptr_alignment, reason = "aligned to 64 bytes, which the caller promises")]
pub unsafe fn zero_streaming(start: *mut u8, len_bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
    debug_assert!(start.addr().is_multiple_of(64) && len_bytes.is_multiple_of(64));
    // SAFETY: SSE2 is part of x86-64.
    let zero = unsafe { _mm_setzero_si128() };
    for offset in (0..len_bytes).step_by(4 * STORE_BYTES) {
        // SAFETY: four aligned stores inside the range that the caller promised.
        unsafe {
            let at = start.add(offset).cast::<__m128i>();
            _mm_stream_si128(at, zero);
            _mm_stream_si128(at.add(1), zero);
            _mm_stream_si128(at.add(2), zero);
            _mm_stream_si128(at.add(3), zero);
        }
    }
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn streaming_clears_the_range_and_nothing_else() {
        #[repr(align(64))]
        struct Lines([u8; 512]);
        let mut lines = Lines([0xa5; 512]);
        let start = lines.0.as_mut_ptr();
        // SAFETY: 256 bytes inside the array, from an aligned place.
        unsafe { zero_streaming(start.add(64), 256) };
        let cleared = |index: usize| (64..320).contains(&index);
        for (index, byte) in lines.0.iter().enumerate() {
            assert_eq!(*byte, if cleared(index) { 0 } else { 0xa5 }, "byte {index}");
        }
    }

    #[test]
    fn one_bit_anywhere_is_seen() {
        let mut page = vec![0_u64; 512];
        let bytes = |page: &[u64]| page.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>();
        assert!(is_zero(&bytes(&page)));
        // SAFETY: a whole vector of 4096 bytes.
        assert!(unsafe { is_zero_volatile(page.as_ptr(), 4096) });
        for bit in (0..4096 * 8).step_by(61) {
            page[bit / 64] = 1 << (bit % 64);
            assert!(!is_zero(&bytes(&page)), "bit {bit}");
            // SAFETY: as above.
            assert!(!unsafe { is_zero_volatile(page.as_ptr(), 4096) }, "bit {bit}");
            page[bit / 64] = 0;
        }
    }

    #[test]
    fn odd_lengths_are_looked_at_to_the_end() {
        for len in [0, 1, 127, 128, 129, 300] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            if let Some(last) = bytes.last_mut() {
                *last = 1;
                assert!(!is_zero(&bytes));
            }
        }
    }
}
