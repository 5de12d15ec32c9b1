// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a destination may say of what it has written, and whose turn it is to be sent.
#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::protocol::blobs::{BLOB_BYTES_MAX, BLOBS_MAX, WINDOW_BYTES_MAX};

/// Longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Calls `check` with a pipe for three blobs.
fn with_pipe(check: impl FnOnce(&Flows)) {
    with_pipe_for(3, check);
}

fn with_pipe_for(count: usize, check: impl FnOnce(&Flows)) {
    let info = |number| BlobInfo {
        name: format!("gpu{number}"),
        len_bytes_max: BLOB_BYTES_MAX,
        about: serde_json::Value::Null,
    };
    let infos: Vec<_> = (0..count).map(info).collect();
    check(&Flows::new(&infos).unwrap());
}

fn put(pipe: &Flows, blob: u16, offset: u64) {
    assert!(pipe.put(BlobChunk { blob, offset, bytes: vec![1; 4] }));
}

#[test]
fn a_destination_that_says_it_has_written_more_is_refused() {
    with_pipe(|pipe| {
        put(pipe, 0, 0);
        put(pipe, 2, 0);
        put(pipe, 2, 4);
        pipe.note_written(&[4, 0, 4]).unwrap();
        pipe.note_written(&[4, 0, 4]).unwrap();
        for wrong in [&[4, 0, 9][..], &[4, 1, 4], &[3, 0, 4], &[4, 0], &[4, 0, 4, 0], &[]] {
            let refused = pipe.note_written(wrong);
            assert!(matches!(refused, Err(ProtocolError::Malformed { .. })), "{wrong:?}");
        }
        assert!(super::super::blobs::one_less(0).is_err(), "an answer to nothing");
    });
}

#[test]
fn many_blobs_share_what_is_held() {
    with_pipe(|pipe| assert_eq!(pipe.window_bytes, WINDOW_BYTES_MAX));
    with_pipe_for(BLOBS_MAX, |pipe| assert_eq!(pipe.window_bytes, window_bytes(BLOBS_MAX)));
}

#[test]
fn the_chunks_of_each_blob_are_sent_in_turn() {
    with_pipe(|pipe| {
        for (blob, offset) in [(0, 0), (0, 4), (0, 8), (2, 0), (2, 4), (1, 0)] {
            put(pipe, blob, offset);
        }
        let mut state = pipe.state.lock();
        let order = std::iter::from_fn(|| state.take().map(|chunk| (chunk.blob, chunk.offset)));
        assert_eq!(order.collect::<Vec<_>>(), [(0, 0), (1, 0), (2, 0), (0, 4), (2, 4), (0, 8)]);
    });
}

#[test]
fn all_is_written_once_each_blob_is_read_sent_and_written() {
    with_pipe(|pipe| {
        put(pipe, 1, 0);
        let is = || {
            let state = pipe.state.lock();
            (state.is_taken(), state.is_written())
        };
        for flow in &mut pipe.state.lock().flows {
            flow.is_read = true;
        }
        assert_eq!(is(), (false, false));
        assert!(matches!(pipe.next(false), Next::Chunk(_)));
        assert_eq!(is(), (true, false));
        assert!(matches!(pipe.next(false), Next::Over));
        assert!(matches!(pipe.next_to_lead(true), Next::Nothing));
        pipe.note_written(&[0, 4, 0]).unwrap();
        assert_eq!(is(), (true, true));
        assert!(matches!(pipe.next_to_lead(true), Next::Over));
    });
}

/// Gives bytes or fails, and its end hangs until its gate says so.
struct HangsAtEnd {
    reads: Result<usize, ()>,
    gate: Receiver<()>,
}

impl BlobSource for HangsAtEnd {
    fn read(&mut self, room: &mut [u8]) -> Result<usize, crate::vm::VmError> {
        let read = self.reads.map_err(|()| "no more of it");
        Ok(read.map(|len| len.min(room.len()))?)
    }
}

impl Drop for HangsAtEnd {
    fn drop(&mut self) {
        let _ = self.gate.recv();
    }
}

/// A device that fails may hang as well: then the migration ends with why it has failed, at once.
#[test]
fn why_a_device_fails_is_known_before_it_ends() {
    for (reads, expected) in [(Err(()), "no more of it"), (Ok(64), "at most were announced")] {
        let info =
            BlobInfo { name: "gpu0".to_owned(), len_bytes_max: 5, about: serde_json::Value::Null };
        let flows = Arc::new(Flows::new(&[info]).unwrap());
        let (open, gate) = channel();
        let readers = flows.start(vec![Box::new(HangsAtEnd { reads, gate })]);
        let end = Instant::now() + PATIENCE;
        while !flows.has_failed() {
            assert!(Instant::now() < end, "it is not known");
            std::thread::yield_now();
        }
        // As it hangs, it is left.
        let Ended { lens, left } = flows.end(readers, Duration::ZERO, Duration::from_mins(1));
        assert_eq!(left.len(), 1);
        let why = error_text::chain(&lens.unwrap_err().cause);
        assert!(why.contains(expected), "{why}");
        drop(open);
        while !flows.state.lock().flows[0].stay.has_ended {
            std::thread::yield_now();
        }
    }
}
