// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The documents and the socket of a page server; whole migrations are in `crate::tests::handed_on`.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

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

fn charge(units: [(u64, u64); 2]) -> Charge {
    let terms = Terms { id: [7; 16], attempt: 3, bulk: 2, urgent: 0, units: units.into() };
    let to = "tcp:host-b:6000".parse().unwrap();
    Charge::new(&to, &Limits::default(), Duration::from_mins(1), 1 << 20, terms)
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
    let charge = charge([(1, 512), (1, 1)]);
    assert_eq!(Charge::parse(&charge.to_json(), &layout()).unwrap(), charge);
    let options = charge.options().unwrap();
    assert_eq!(options.recover_timeout, Duration::from_mins(1));
    assert_eq!(
        (options.limits.stall, options.limits.connect),
        (Limits::default().stall, Limits::default().connect)
    );
    assert_eq!(options.bandwidth_bytes_per_s, 1 << 20);
    assert!(!format!("{charge:?}").contains('7'), "the proof must not be in a log");
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
    let whole = charge([(1, 512), (1, 1)]).to_json();
    assert!(Charge::parse(&whole, &layout()).is_ok());
    for (path, value) in [
        ("/version", json!(0)),
        ("/to", json!("host-b")),
        ("/id", json!([1, 2])),
        ("/attempt", json!(0)),
        ("/attempt", json!(u32::MAX)),
        ("/bulk", json!(0)),
        ("/bulk", json!(129)),
        ("/urgent", json!(129)),
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
        assert!(Charge::parse(&bytes, &layout()).is_err(), "{path} {value}");
    }
}

#[test]
fn memory_without_a_file_is_refused_by_name() {
    let memory = FakeMemory::new(&REGIONS, Backing::Anonymous, PAGE_BYTES).unwrap();
    let error = ServedMemory::of(&*memory).unwrap_err();
    assert!(error.to_string().contains("'ram0', which is private"), "{error}");
}

/// What a deputy came to.
type Told = std::thread::JoinHandle<Result<Option<Charge>, Cause>>;

/// Both ends, with a deputy that waits for its charge.
fn linked(made: Result<(), &'static str>) -> (Result<Principal, Cause>, Told) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let deputy = std::thread::spawn(move || {
        let mut deputy = Deputy::new(theirs)?;
        let (_, files) = deputy.take_memory(|description, files| {
            assert_eq!((description.regions().len(), files.len()), (2, 2));
            made.map(|()| files).map_err(|why| Cause::Vm(why.into()))
        })?;
        assert_eq!(files[1].metadata().unwrap().len(), 64 * PAGE_BYTES);
        let charge = deputy.wait_for_charge(&layout())?;
        deputy.tell(Ok(Taken::Complete));
        Ok(charge)
    });
    let memory = FakeMemory::new(&REGIONS, Backing::Shared, PAGE_BYTES).unwrap();
    let mut principal = Principal::new(ours, Limits::default()).unwrap();
    let given = principal.give_memory(&*memory);
    (given.map(|()| principal), deputy)
}

#[test]
fn memory_and_charge_arrive() {
    let (principal, deputy) = linked(Ok(()));
    let charge = charge([(1, 512), (1, 1)]);
    assert_eq!(principal.unwrap().charge(&charge).unwrap(), Taken::Complete);
    assert_eq!(deputy.join().unwrap().unwrap(), Some(charge));
}

#[test]
fn a_charge_for_other_memory_is_refused_on_both_sides() {
    let (principal, deputy) = linked(Ok(()));
    let error = principal.unwrap().charge(&charge([(1, 2048), (1, 1)])).unwrap_err();
    assert!(matches!(&error, Cause::Refused(why) if why.contains("do not fit")), "{error}");
    assert!(deputy.join().unwrap().is_err());
}

#[test]
fn memory_that_cannot_be_mapped_is_refused_with_the_reason() {
    let (principal, deputy) = linked(Err("no room for it"));
    let error = principal.unwrap_err();
    assert!(matches!(&error, Cause::Refused(why) if why.contains("no room for it")), "{error}");
    assert!(deputy.join().unwrap().is_err());
}

#[test]
fn a_source_that_ends_has_no_charge() {
    let (principal, deputy) = linked(Ok(()));
    drop(principal);
    assert_eq!(deputy.join().unwrap().unwrap(), None);
}

#[test]
fn a_file_without_its_descriptor_is_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let deputy = std::thread::spawn(move || {
        Deputy::new(theirs)?.take_memory(|_, files| Ok(files.len())).map(|(_, count)| count)
    });
    let mut ours = ours;
    std::io::Write::write_all(&mut ours, &frame(1, &description())).unwrap();
    std::io::Write::write_all(&mut ours, &frame(2, &[0; 4])).unwrap();
    let error = deputy.join().unwrap().unwrap_err();
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
            let charge = changed(&charge([(1, 512), (1, 1)]).to_json(), &other, &number);
            let mut stream = [frame(1, &memory), frame(1, &description()), frame(2, &[1; 4])].concat();
            stream.extend(frame(3, &charge));
            fuzz_orders(&stream);
            stream.truncate(cut);
            fuzz_orders(&stream);
        }
        fuzz_orders(&frame(code, &bytes));
        fuzz_orders(&bytes);
    }
}
