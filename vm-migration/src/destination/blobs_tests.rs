// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Chunks in every order, on several threads, and those that do not fit.
#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use proptest::prelude::*;

use super::*;
use crate::protocol::blobs::{
    BLOB_BYTES_MAX, BLOBS_MAX, CHUNK_BYTES_MAX, WINDOW_BYTES_MAX, WINDOWS_BYTES_MAX,
};
use crate::vm::VmError;

const LONG: Duration = Duration::from_mins(1);

type Written = Arc<Mutex<Vec<u8>>>;

/// Takes bytes; with a gate each time when that lets one through.
struct Sink {
    written: Written,
    begun: Sender<()>,
    /// How often it was left.
    left: Arc<AtomicUsize>,
    gate: Option<Mutex<Receiver<Result<(), VmError>>>>,
}

impl BlobSink for Sink {
    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        // Nothing listens in most tests.
        let _ = self.begun.send(());
        if let Some(gate) = &self.gate {
            gate.lock().recv()??;
        }
        self.written.lock().extend_from_slice(bytes);
        Ok(())
    }

    fn leave(&self) -> String {
        self.left.fetch_add(1, Ordering::Relaxed);
        "taking its state".to_owned()
    }
}

fn one(
    len_bytes_max: u64,
    gate: Option<Receiver<Result<(), VmError>>>,
) -> (Blobs, Written, Receiver<()>) {
    let (blobs, written, heard, _left) = one_counted(len_bytes_max, gate);
    (blobs, written, heard)
}

/// The same, and how often its device is left.
fn one_counted(
    len_bytes_max: u64,
    gate: Option<Receiver<Result<(), VmError>>>,
) -> (Blobs, Written, Receiver<()>, Arc<AtomicUsize>) {
    let left = Arc::<AtomicUsize>::default();
    let (begun, heard) = channel();
    let written = Written::default();
    let gate = gate.map(Mutex::new);
    let sink =
        Box::new(Sink { written: Arc::clone(&written), begun, left: Arc::clone(&left), gate });
    let about = serde_json::Value::Null;
    let info = BlobInfo { name: "gpu0".to_owned(), len_bytes_max, about };
    (Blobs::new(vec![info], vec![sink]).unwrap(), written, heard, left)
}

fn plain() -> (Blobs, Written) {
    let (blobs, written, _) = one(BLOB_BYTES_MAX, None);
    (blobs, written)
}

fn chunk(offset: u64, bytes: &[u8]) -> BlobChunk {
    BlobChunk { blob: 0, offset, bytes: bytes.to_vec() }
}

fn why(result: Result<(), BlobError>) -> BlobError {
    result.unwrap_err()
}

/// Puts a chunk and writes what can be written.
fn put(blobs: &Blobs, chunk: BlobChunk) {
    blobs.put(chunk).unwrap();
    blobs.write_now();
}

/// Waits until a condition holds for the only blob.
fn wait_until(blobs: &Blobs, condition: impl Fn(&Assembly) -> bool) {
    while !condition(&blobs.all[0].assembly.lock()) {
        std::thread::yield_now();
    }
}

#[test]
fn what_is_early_is_written_in_its_place() {
    let (blobs, written) = plain();
    for (offset, bytes) in [(4, b"efgh"), (12, b"mnop"), (0, b"abcd"), (8, b"ijkl")] {
        put(&blobs, chunk(offset, bytes));
    }
    assert!(blobs.finish().is_err(), "its end has not come");
    blobs.put(chunk(16, b"")).unwrap();
    assert_eq!(blobs.finish().unwrap(), [16]);
    assert_eq!(&written.lock()[..], b"abcdefghijklmnop");
}

#[test]
fn chunks_that_do_not_fit_are_named() {
    let name = || "gpu0".to_owned();
    let begun = || {
        let (blobs, written, _) = one(64, None);
        put(&blobs, chunk(0, b"abcd"));
        put(&blobs, chunk(8, b"ijkl"));
        (blobs, written)
    };
    for (offset, bytes) in [
        (0, &b"abcd"[..]),
        (3, b"x"),
        (2, b"xyz"),
        (8, b"i"),
        (6, b"ghi"),
        (9, b"j"),
        (7, b"hijklm"),
    ] {
        let (blobs, written) = begun();
        assert_eq!(why(blobs.put(chunk(offset, bytes))), BlobError::Twice { name: name(), offset });
        put(&blobs, chunk(4, b"efgh"));
        assert_eq!(&written.lock()[..], b"abcdefghijkl", "it changes nothing");
    }
    let (blobs, _) = begun();
    let too_long = |end| BlobError::TooLong { name: name(), end, len_bytes_max: 64 };
    assert_eq!(why(blobs.put(chunk(62, b"xyz"))), too_long(65));
    assert_eq!(why(blobs.put(chunk(u64::MAX, b"xyz"))), too_long(u64::MAX));
    assert_eq!(why(blobs.put(chunk(65, b""))), too_long(65));
    let other = BlobChunk { blob: 1, offset: 0, bytes: vec![1] };
    assert_eq!(why(blobs.put(other)), BlobError::Unknown { blob: 1, count: 1 });
    assert_eq!(why(blobs.put(chunk(11, b""))), BlobError::BeyondEnd { name: name(), at: 11 });
    blobs.put(chunk(12, b"")).unwrap();
    assert_eq!(why(blobs.put(chunk(12, b""))), BlobError::Twice { name: name(), offset: 12 });
    assert_eq!(why(blobs.put(chunk(12, b"x"))), BlobError::BeyondEnd { name: name(), at: 12 });
    let missing = blobs.finish().unwrap_err();
    assert!(missing.to_string().contains("'gpu0' is not complete: 4 bytes"), "{missing}");
    put(&blobs, chunk(4, b"efgh"));
    assert_eq!(blobs.finish().unwrap(), [12]);
}

#[test]
fn no_more_is_held_than_the_window() {
    let (blobs, written) = plain();
    let part = vec![5; 1 << 20];
    let parts = WINDOW_BYTES_MAX >> 20;
    for at in 0..parts {
        blobs.put(chunk(at << 20, &part)).unwrap();
    }
    let refused = why(blobs.put(chunk(WINDOW_BYTES_MAX, b"x")));
    let (name, end) = ("gpu0".to_owned(), WINDOW_BYTES_MAX + 1);
    assert_eq!(refused, BlobError::Ahead { name, end, written: 0 });
    assert!(written.lock().is_empty());
    blobs.write_now();
    assert_eq!(written.lock().len() as u64, WINDOW_BYTES_MAX);
    blobs.put(chunk(WINDOW_BYTES_MAX, b"x")).unwrap();
}

#[test]
fn the_sum_of_all_windows_is_bounded() {
    for count in 0..=BLOBS_MAX {
        let window = window_bytes(count);
        assert!((2 * CHUNK_BYTES_MAX..=WINDOW_BYTES_MAX).contains(&window), "{count}: {window}");
        assert!(window * count as u64 <= WINDOWS_BYTES_MAX, "{count}: {window}");
    }
    assert_eq!(window_bytes(16), WINDOW_BYTES_MAX);
    let about = serde_json::Value::Null;
    let len_bytes_max = BLOB_BYTES_MAX;
    let info = BlobInfo { name: "gpu0".to_owned(), len_bytes_max, about };
    let sink = || -> Box<dyn BlobSink> {
        Box::new(Sink {
            written: Written::default(),
            begun: channel().0,
            left: Arc::default(),
            gate: None,
        })
    };
    let sinks = (0..BLOBS_MAX).map(|_| sink()).collect();
    let blobs = Blobs::new(vec![info; BLOBS_MAX], sinks).unwrap();
    let (window, name) = (window_bytes(BLOBS_MAX), "gpu0".to_owned());
    let refused = why(blobs.put(chunk(window, b"x")));
    assert_eq!(refused, BlobError::Ahead { name, end: window + 1, written: 0 });
}

#[test]
fn small_pieces_do_not_fill_memory() {
    let (blobs, written) = plain();
    for at in 1..=HELD_MAX as u64 {
        blobs.put(chunk(at * 2, b"x")).unwrap();
    }
    let name = "gpu0".to_owned();
    assert_eq!(why(blobs.put(chunk(9000, b"x"))), BlobError::Pieces { name, max: HELD_MAX });
    assert!(written.lock().is_empty());
}

/// The thread of a connection never waits for a device, whatever it brings.
#[test]
fn what_follows_what_is_being_written_is_held_and_nobody_waits() {
    let (open, gate) = channel();
    let (blobs, written, begun) = one(64, Some(gate));
    let blobs = Arc::new(blobs);
    let writers = Writers::start(&blobs, LONG).unwrap();
    blobs.put(chunk(0, b"ab")).unwrap();
    begun.recv().unwrap();
    blobs.put(chunk(2, b"cd")).unwrap();
    blobs.put(chunk(6, b"gh")).unwrap();
    let name = "gpu0".to_owned();
    let twice = BlobError::Twice { name, offset: 1 };
    assert_eq!(why(blobs.put(chunk(1, b"b"))), twice, "it is being written");
    assert_eq!(blobs.news().unwrap(), None);
    open.send(Ok(())).unwrap();
    begun.recv().unwrap();
    assert_eq!(blobs.news().unwrap(), Some(vec![2]));
    open.send(Ok(())).unwrap();
    wait_until(&blobs, |assembly| assembly.written == 4);
    blobs.put(chunk(4, b"ef")).unwrap();
    open.send(Ok(())).unwrap();
    open.send(Ok(())).unwrap();
    blobs.put(chunk(8, b"")).unwrap();
    wait_until(&blobs, |assembly| assembly.written == 8);
    assert_eq!(blobs.finish().unwrap(), [8]);
    drop(writers);
    assert_eq!(&written.lock()[..], b"abcdefgh", "with what was early");
    assert_eq!(blobs.news().unwrap(), Some(vec![8]));
    assert_eq!(blobs.news().unwrap(), None, "once");
}

#[test]
fn a_device_that_refuses_its_state_ends_all_that_follows() {
    let (open, gate) = channel();
    let (blobs, _, begun) = one(64, Some(gate));
    let blobs = Arc::new(blobs);
    let writers = Writers::start(&blobs, LONG).unwrap();
    blobs.put(chunk(0, b"ab")).unwrap();
    begun.recv().unwrap();
    blobs.put(chunk(2, b"cd")).unwrap();
    open.send(Err("other firmware".into())).unwrap();
    // It ends by itself.
    drop(writers);
    assert!(matches!(blobs.news().unwrap_err().cause, Cause::Vm(_)));
    let (name, reason) = ("gpu0".to_owned(), "other firmware".to_owned());
    assert_eq!(why(blobs.put(chunk(4, b"ef"))), BlobError::Refused { name, reason });
    assert!(blobs.finish().is_err());
    assert!(begun.try_recv().is_err(), "nothing more is written");
}

#[test]
fn writers_end_with_what_has_not_come() {
    let (blobs, _, _) = one(64, None);
    let blobs = Arc::new(blobs);
    let writers = Writers::start(&blobs, LONG).unwrap();
    blobs.put(chunk(2, b"cd")).unwrap();
    drop(writers);
    assert!(blobs.finish().is_err());
}

/// The thread that hangs has nothing of the others, and is left behind; how many there are is known.
#[test]
fn the_end_of_writers_does_not_wait_for_a_device_that_hangs() {
    let (open, gate) = channel();
    let (blobs, written, begun) = one(64, Some(gate));
    let blobs = Arc::new(blobs);
    let writers = Writers::start(&blobs, Duration::from_millis(50)).unwrap();
    blobs.put(chunk(0, b"ab")).unwrap();
    begun.recv().unwrap();
    blobs.put(chunk(2, b"cd")).unwrap();
    assert!(blobs.check_calls(LONG).is_ok(), "it may take long");
    drop(writers);
    let blob = Arc::clone(&blobs.all[0]);
    assert!(blob.assembly.lock().stay.is_left && crate::left_threads() > 0);
    assert!(blob.assembly.lock().held.is_empty(), "nothing is kept for it");
    drop(blobs);
    open.send(Ok(())).unwrap();
    while !blob.assembly.lock().stay.has_ended {
        std::thread::yield_now();
    }
    assert_eq!(&written.lock()[..], b"ab", "it writes no more");
}

#[test]
fn a_device_that_hangs_is_named() {
    let (open, gate) = channel();
    let (blobs, _, begun, left) = one_counted(64, Some(gate));
    let blobs = Arc::new(blobs);
    let writers = Writers::start(&blobs, LONG).unwrap();
    blobs.put(chunk(0, b"ab")).unwrap();
    begun.recv().unwrap();
    let told = blobs.check_calls(Duration::ZERO).unwrap_err().to_string();
    assert!(told.contains("'gpu0' hangs: taking its state"), "{told}");
    assert!(blobs.check_calls(Duration::ZERO).is_ok(), "once");
    // It is not awaited any more.
    drop(writers);
    assert_eq!(left.load(Ordering::Relaxed), 1, "once");
    open.send(Ok(())).unwrap();
}

#[test]
fn a_machine_that_does_not_take_all_parts_is_refused() {
    let about = serde_json::Value::Null;
    let info = BlobInfo { name: "gpu0".to_owned(), len_bytes_max: 1, about };
    assert!(matches!(Blobs::new(vec![info], Vec::new()), Err(Cause::Unsupported { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Chunks of any lengths, in any order within the window: by one thread, or by several.
    #[test]
    fn chunks_on_several_threads_become_what_was_sent(
        lens in prop::collection::vec(1usize..40, 1..60), order: u64, threads in 1usize..5,
    ) {
        let total: usize = lens.iter().sum();
        let bytes: Vec<u8> = (0..total).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
        let mut chunks = Vec::new();
        let mut at = 0;
        for len in lens {
            chunks.push(chunk(at as u64, &bytes[at..at + len]));
            at += len;
        }
        chunks.push(chunk(total as u64, b""));
        let mut state = order;
        for left in (1..chunks.len()).rev() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            chunks.swap(left, usize::try_from(state >> 33).unwrap() % (left + 1));
        }
        let (blobs, written) = plain();
        let blobs = Arc::new(blobs);
        let writers = Writers::start(&blobs, LONG).unwrap();
        let queue = Mutex::new(chunks.into_iter().collect::<std::collections::VecDeque<_>>());
        std::thread::scope(|scope| {
            for thread in 0..threads as u64 {
                let (queue, blobs) = (&queue, &blobs);
                scope.spawn(move || loop {
                    let Some(chunk) = queue.lock().pop_front() else { return };
                    for _ in 0..(order >> (8 * thread) & 0xf) {
                        std::thread::yield_now();
                    }
                    blobs.put(chunk).unwrap();
                });
            }
        });
        wait_until(&blobs, |assembly| assembly.written == total as u64);
        drop(writers);
        prop_assert_eq!(blobs.finish().unwrap(), vec![total as u64]);
        prop_assert_eq!(&*written.lock(), &bytes);
    }
}
