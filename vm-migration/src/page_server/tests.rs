// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The documents and the socket of a page server; whole migrations are in `crate::tests::handed_on`.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::Cause;
use crate::layout::{Backing, Layout, PAGE_BYTES};
use crate::protocol::ProtocolError;
use crate::protocol::codec::Header;
use crate::ram::GuestMemoryMap;
use crate::testing::FakeMemory;

const REGIONS: [(u64, u64); 2] = [(0, 1024), (1 << 32, 64)];

fn layout() -> Layout {
    let memory = FakeMemory::new(&REGIONS, Backing::Shared, PAGE_BYTES).unwrap();
    memory.layout().clone()
}

fn takeover(units: [(u64, u64); 2]) -> TakeoverRequest {
    let terms = Terms { id: [7; 16], attempt: 3, bulk: 2, urgent: 0, units: units.into() };
    let to = "tcp:host-b:6000".parse().unwrap();
    TakeoverRequest::new((&to, None), &Limits::default(), Duration::from_mins(1), 1 << 20, terms)
}

fn description() -> Vec<u8> {
    let memory = FakeMemory::new(&REGIONS, Backing::Shared, PAGE_BYTES).unwrap();
    ServedMemory::of(&*memory).unwrap().0.to_json()
}

fn changed(json: &[u8], path: &str, value: &Value) -> Vec<u8> {
    let mut document: Value = serde_json::from_slice(json).unwrap();
    *document.pointer_mut(path).unwrap() = value.clone();
    serde_json::to_vec(&document).unwrap()
}

fn frame(code: u16, payload: &[u8]) -> Vec<u8> {
    [&Header::new(code, payload.len() as u64).encode()[..], payload].concat()
}

#[test]
fn what_is_written_is_read() {
    let memory = ServedMemory::parse(&description()).unwrap();
    assert_eq!(memory.to_json(), description());
    assert_eq!(memory.layout().unwrap(), layout());
    let takeover = takeover([(1, 512), (1, 1)]);
    assert_eq!(TakeoverRequest::parse(&takeover.to_json(), &layout()).unwrap(), takeover);
    let options = takeover.options().unwrap();
    assert_eq!(options.recover_timeout, Duration::from_mins(1));
    assert_eq!(
        (options.limits.stall, options.limits.connect),
        (Limits::default().stall, Limits::default().connect)
    );
    assert_eq!(options.bandwidth_bytes_per_s, 1 << 20);
    assert!(!format!("{takeover:?}").contains('7'), "the proof must not be in a log");
}

#[test]
fn descriptions_that_make_no_sense_are_refused() {
    let whole = description();
    for (path, value) in [
        ("/version", json!(2)),
        ("/files", json!(1)),
        ("/files", json!(3)),
        ("/regions/0/file", json!(2)),
        ("/regions/0/file_offset", json!(1)),
        ("/regions/0/file_offset", json!(u64::MAX - 4095)),
        ("/regions/0/file_offset", json!(i64::MAX.cast_unsigned() - 4095)),
        ("/regions/1/region/backing", json!("anonymous")),
        ("/regions/1/region/gpa", json!(4096)),
        ("/regions/1/region/len_bytes", json!(0)),
        ("/regions/1/region/host_page_bytes", json!(3)),
        ("/regions", json!([])),
    ] {
        let bytes = changed(&whole, path, &value);
        assert!(ServedMemory::parse(&bytes).is_err(), "{path} {value}");
    }
    assert!(ServedMemory::parse(b"{}").is_err());
    let larger = String::from_utf8(whole).unwrap().replacen('{', r#"{"more":1,"#, 1);
    assert!(ServedMemory::parse(larger.as_bytes()).is_err());
}

#[test]
fn charges_that_make_no_sense_are_refused() {
    let whole = takeover([(1, 512), (1, 1)]).to_json();
    assert!(TakeoverRequest::parse(&whole, &layout()).is_ok());
    for (path, value) in [
        ("/version", json!(0)),
        ("/to", json!("host-b")),
        ("/id", json!([1, 2])),
        ("/attempt", json!(0)),
        ("/attempt", json!(u32::MAX)),
        ("/bulk", json!(0)),
        ("/bulk", json!(129)),
        ("/urgent", json!(513)),
        ("/connect_timeout_ms", json!(0)),
        ("/stall_timeout_ms", json!(u64::MAX)),
        ("/recover_timeout_ms", json!(u64::MAX)),
        ("/units", json!([[1, 1]])),
        ("/units/0", json!([0, 1])),
        ("/units/0", json!([1, 0])),
        ("/units/0", json!([2, 3])),
        ("/units/0", json!([1, 2048])),
        ("/units/1", json!([1, 3])),
    ] {
        let bytes = changed(&whole, path, &value);
        assert!(TakeoverRequest::parse(&bytes, &layout()).is_err(), "{path} {value}");
    }
}

#[test]
fn orders_that_are_too_long_are_refused_before_their_bytes_come() {
    // A description of memory, and a takeover request.
    for (code, most) in [(1, 4 << 20), (3, 1 << 20)] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut page_server = PageServerEnd::new(theirs).unwrap();
        ours.write_all(&Header::new(code, most + 1).encode()).unwrap();
        let error = page_server.take_memory(|_, _| -> Result<(), _> { unreachable!() });
        let error = error.map(drop).unwrap_err();
        assert!(
            matches!(&error, Cause::Protocol(ProtocolError::TooLong { max_bytes, .. }) if *max_bytes == most),
            "{error}"
        );
    }
}

#[test]
fn memory_without_a_file_is_refused_by_name() {
    let memory = FakeMemory::new(&REGIONS, Backing::Anonymous, PAGE_BYTES).unwrap();
    let error = ServedMemory::of(&*memory).unwrap_err();
    assert!(error.to_string().contains("'ram0', which is private"), "{error}");
}

/// Result of a page server's thread.
type Told = std::thread::JoinHandle<Result<Option<TakeoverRequest>, Cause>>;

/// Both ends, with a page server that waits for its takeover request.
fn linked(made: Result<(), &'static str>) -> (Result<SourceEnd, Cause>, Told) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let page_server = std::thread::spawn(move || {
        let mut page_server = PageServerEnd::new(theirs)?;
        let (_, files) = page_server.take_memory(|description, files| {
            assert_eq!((description.regions().len(), files.len()), (2, 2));
            made.map(|()| files).map_err(|why| Cause::Vm(why.into()))
        })?;
        assert_eq!(files[1].metadata().unwrap().len(), 64 * PAGE_BYTES);
        let takeover = page_server.wait_for_takeover(&layout())?;
        page_server.tell(Ok(TakeoverOutcome::Complete));
        Ok(takeover)
    });
    let memory = FakeMemory::new(&REGIONS, Backing::Shared, PAGE_BYTES).unwrap();
    let mut source_end = SourceEnd::new(ours, Limits::default()).unwrap();
    let given = source_end.give_memory(&*memory);
    (given.map(|()| source_end), page_server)
}

#[test]
fn memory_and_charge_arrive() {
    let (source_end, page_server) = linked(Ok(()));
    let takeover = takeover([(1, 512), (1, 1)]);
    assert_eq!(source_end.unwrap().takeover(&takeover).unwrap(), TakeoverOutcome::Complete);
    assert_eq!(page_server.join().unwrap().unwrap(), Some(takeover));
}

#[test]
fn a_charge_for_other_memory_is_refused_on_both_sides() {
    let (source_end, page_server) = linked(Ok(()));
    let error = source_end.unwrap().takeover(&takeover([(1, 2048), (1, 1)])).unwrap_err();
    assert!(matches!(&error, Cause::Refused(why) if why.contains("do not fit")), "{error}");
    assert!(page_server.join().unwrap().is_err());
}

#[test]
fn memory_that_cannot_be_mapped_is_refused_with_the_reason() {
    let (source_end, page_server) = linked(Err("no room for it"));
    let error = source_end.unwrap_err();
    assert!(matches!(&error, Cause::Refused(why) if why.contains("no room for it")), "{error}");
    assert!(page_server.join().unwrap().is_err());
}

#[test]
fn a_source_that_ends_has_no_charge() {
    let (source_end, page_server) = linked(Ok(()));
    drop(source_end);
    assert_eq!(page_server.join().unwrap().unwrap(), None);
}

#[test]
fn a_file_without_its_descriptor_is_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let page_server = std::thread::spawn(move || {
        PageServerEnd::new(theirs)?.take_memory(|_, files| Ok(files.len())).map(|(_, count)| count)
    });
    let mut ours = ours;
    std::io::Write::write_all(&mut ours, &frame(1, &description())).unwrap();
    std::io::Write::write_all(&mut ours, &frame(2, &[0; 4])).unwrap();
    let error = page_server.join().unwrap().unwrap_err();
    let malformed = matches!(error, Cause::Protocol(ProtocolError::Malformed { what: "file", .. }));
    assert!(malformed, "{error}");
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(
        code in 0_u16..5,
        bytes in proptest::collection::vec(any::<u8>(), 0..64),
        field in "/(version|files|regions/[01]/(file|file_offset|region/(gpa|len_bytes|host_page_bytes)))",
        other in "/(version|attempt|bulk|urgent|stall_timeout_ms|units/[01]/[01])",
        value: u64,
        cut in 0_usize..600,
    ) {
        let numbers = [json!(value), json!(value % 4096), json!(value % 8)];
        for number in numbers {
            let memory = changed(&description(), &field, &number);
            let takeover = changed(&takeover([(1, 512), (1, 1)]).to_json(), &other, &number);
            let mut stream = [frame(1, &memory), frame(1, &description()), frame(2, &[1; 4])].concat();
            stream.extend(frame(3, &takeover));
            fuzz_orders(&stream);
            stream.truncate(cut);
            fuzz_orders(&stream);
        }
        fuzz_orders(&frame(code, &bytes));
        fuzz_orders(&bytes);
    }
}
