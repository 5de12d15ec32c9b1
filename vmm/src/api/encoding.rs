// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers of the VMM as bodies of responses.
//!
//! Owns which answer has a body. It must never know sockets.

use super::request::{ApiError, ApiErrorKind, ApiReply};
use crate::json_text;

/// Encodes an answer as JSON; `None` for [`ApiReply::Empty`], and for one that is no JSON.
///
/// # Errors
/// The answer cannot be serialised.
pub fn encode(reply: &ApiReply) -> Result<Option<Vec<u8>>, ApiError> {
    let json = match reply {
        ApiReply::Empty | ApiReply::Metrics(_) => return Ok(None),
        ApiReply::Ping(ping) => json_text::answer(ping),
        ApiReply::Info(info) => json_text::answer(info),
        ApiReply::Counters(counters) => json_text::answer(counters),
        ApiReply::Device(device) => json_text::answer(device),
        ApiReply::Progress(progress) => json_text::answer(progress),
        ApiReply::Report(report) => json_text::answer(report),
        ApiReply::Check(check) => json_text::answer(check),
        ApiReply::Cancelled(cancelled) => json_text::answer(cancelled),
    };
    json.map(Some).map_err(|error| {
        ApiError::new(ApiErrorKind::Failed, format!("the answer cannot be written: {error}"))
    })
}
