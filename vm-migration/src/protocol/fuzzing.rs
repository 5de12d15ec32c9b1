// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All that is read from a peer, for fuzzing.
//!
//! Owns the small machine against which it is checked.

use std::sync::Arc;

use page_bitmap::PageBitmap;
use parking_lot::Mutex;

use super::blobs::{BlobChunk, BlobInfo, BlobList};
use super::capabilities::{Accepted, Offer};
use super::check::{CheckFindings, CheckRequest};
use super::message::{Answer, Command, Message, Role};
use super::{inflate, runs};
use crate::destination::Blobs;
use crate::error::Cause;
use crate::layout::{Backing, Layout, PAGE_BYTES, PageRun, RegionInfo};
use crate::vm::{BlobSink, VmError};

/// The bytes that a blob has received.
type Written = Arc<Mutex<Vec<u8>>>;

struct Sink(Written);

impl BlobSink for Sink {
    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        self.0.lock().extend_from_slice(bytes);
        Ok(())
    }

    fn leave(&self) -> String {
        "writing".to_owned()
    }
}

fn fuzzed_blobs(sinks: &[Written; 2]) -> Result<Blobs, Cause> {
    let info = |len_bytes_max| BlobInfo {
        name: format!("of {len_bytes_max}"),
        len_bytes_max,
        about: serde_json::Value::Null,
    };
    let sink = |sink: &Written| Box::new(Sink(Arc::clone(sink))) as Box<dyn BlobSink>;
    Blobs::new(vec![info(64), info(1 << 30)], sinks.iter().map(sink).collect())
}

fn fuzz_chunk(blobs: &Blobs, chunk: BlobChunk) {
    // A refused chunk ends a migration; here others follow, and must find everything as it was.
    let _ = blobs.put(chunk);
    blobs.write_now();
}

fn check_blobs(blobs: &Blobs, sinks: &[Written; 2]) {
    for (counted, sink) in blobs.written().zip(sinks) {
        assert_eq!(counted, sink.lock().len() as u64);
    }
    if let Ok(lens) = blobs.finish() {
        assert!(lens.iter().zip(sinks).all(|(len, sink)| *len == sink.lock().len() as u64));
    }
}

/// Reads messages and answers until the bytes end or are invalid, and checks every table against a small
/// machine, for fuzzing: covers all that is read from a peer.
pub fn fuzz_stream(data: &[u8]) {
    let region = |gpa, pages: u64| RegionInfo {
        name: String::new(),
        gpa,
        len_bytes: pages * PAGE_BYTES,
        host_page_bytes: PAGE_BYTES,
        backing: Backing::Shared,
    };
    let Ok(layout) = Layout::new(vec![region(0, 256), region(1 << 32, 64)]) else { return };
    let sinks = [Arc::default(), Arc::default()];
    let Ok(blobs) = fuzzed_blobs(&sinks) else { return };
    let mut from = data;
    while let Ok(message) = Message::read(&mut from) {
        assert_eq!(Command::from_code(message.command().code()).ok(), Some(message.command()));
        let again = Message::read(&mut &message.encode()[..]);
        assert!(again.is_ok_and(|again| again == message), "written otherwise: {message:?}");
        match &message {
            Message::Memory(ranges)
            | Message::PageFault(ranges)
            | Message::ZeroPages(ranges)
            | Message::Elsewhere(ranges)
            | Message::Ahead(ranges) => {
                for range in ranges {
                    let _ = layout.locate(*range);
                }
            }
            Message::MemoryZstd { ranges, frame_bytes } => {
                let mut inflater = inflate::Inflater::default();
                let Ok(runs) =
                    ranges.iter().map(|range| layout.locate(*range)).collect::<Result<Vec<_>, _>>()
                else {
                    return;
                };
                let raw_bytes = runs.iter().map(PageRun::len_bytes).sum();
                if inflater.read(&mut from, *frame_bytes, raw_bytes).is_err() {
                    return;
                }
            }
            Message::Pending(bytes) | Message::Stale(bytes) => {
                let maps: Vec<PageBitmap> =
                    layout.regions().iter().map(|r| PageBitmap::new(r.pages())).collect();
                let _ = runs::decode(bytes, &maps);
            }
            Message::Capabilities(bytes) => {
                let _ = Offer::parse(bytes);
                let _ = Accepted::parse(bytes);
                let _ = CheckRequest::parse(bytes);
            }
            Message::Blobs(bytes) => {
                let _ = BlobList::parse(bytes);
            }
            Message::BlobChunk(chunk) => fuzz_chunk(&blobs, chunk.clone()),
            _ => {}
        }
    }
    check_blobs(&blobs, &sinks);
    let mut from = data;
    while let Ok(message) = Message::read_plain(&mut from) {
        if let Message::Memory(ranges) = message {
            let runs = ranges.iter().flat_map(|range| layout.locate_all(*range));
            runs.for_each(drop);
        }
    }
    let mut from = data;
    while let Ok(answer) = Answer::read(&mut from) {
        if let Answer::Ok { payload, .. } = answer
            && let Ok(findings) = CheckFindings::parse(&payload)
        {
            // What was cut to the bounds stays as it is.
            assert_eq!(CheckFindings::parse(&findings.to_json()).ok(), Some(findings));
        }
    }
    let _ = Role::read(&mut &*data);
}
