// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of the driver and their answers (virtio 1.3, 5.19.6), as bytes.
//!
//! Owns the two layouts.

/// Length of a request in bytes.
pub(super) const REQUEST_BYTES: usize = 4;
/// Length of a response in bytes.
pub(super) const RESPONSE_BYTES: usize = 4;

/// The only request: what was written to the memory must be on stable storage.
const FLUSH: u32 = 0;
const DONE: u32 = 0;
/// What drivers take as an input/output error.
const FAILED: u32 = 1;

/// Whether a request is a flush.
pub(super) fn is_flush(bytes: [u8; REQUEST_BYTES]) -> bool {
    u32::from_le_bytes(bytes) == FLUSH
}

/// The response to a request.
pub(super) fn response(is_done: bool) -> [u8; RESPONSE_BYTES] {
    (if is_done { DONE } else { FAILED }).to_le_bytes()
}
