// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Backing files: when they are opened, how many, and what keeps others from writing to them.

use super::*;

#[test]
fn backing_files_are_opened_only_if_that_is_allowed() {
    let images = Images::new();
    images.add("base", small().image());
    let over = |name: &str, format: Option<&str>| {
        let backing = Some((name.to_owned(), format.map(str::to_owned)));
        images.add("top", Sample { backing, ..small() }.image())
    };
    let refused = |path: &Path| refusal(unloaded(&config(path)));
    let top = over("base", Some("qcow2"));
    let closed = BlockConfig { backing_files: false, ..config(&top) };
    let why = refusal(unloaded(&closed));
    assert!(why.contains("'base'") && why.contains("backing_files=on"), "{why}");
    unloaded(&config(&top)).unwrap();
    over("file:base", Some("qcow2"));
    unloaded(&config(&top)).unwrap();

    assert!(refused(&over("none", Some("raw"))).contains("cannot open its backing file"));
    assert!(refused(&over("/dev/null", Some("raw"))).contains("not a regular file"));
    assert!(refused(&over(".", Some("raw"))).contains("not a regular file"));
    assert!(refused(&over("top", Some("qcow2"))).contains("has it as a backing file"));
    assert!(refused(&over("base", None)).contains("does not say the format"));
    assert!(refused(&over("base", Some("vmdk"))).contains("the format vmdk"));
    for name in ["nbd://host/x", "json:{\"driver\": \"file\"}", "fat:rw:x"] {
        assert!(refused(&over(name, Some("raw"))).contains("not named by a path"));
    }
    images.add(
        "text",
        "some text that is not an image at all, and long enough for a header".repeat(3),
    );
    let why = refused(&over("text", Some("qcow2")));
    assert!(why.contains("text cannot be used") && why.contains("not a qcow2 image"), "{why}");
}

#[test]
fn a_chain_has_an_end() {
    let images = Images::new();
    images.add("0", small().image());
    for number in 1..=11 {
        let backing = Some(((number - 1).to_string(), Some("qcow2".to_owned())));
        images.add(&number.to_string(), Sample { backing, ..small() }.image());
    }
    open(&config(&images.path("10"))).unwrap();
    assert!(refusal(open(&config(&images.path("11")))).contains("more than 10 backing files"));
    // A circle that the image itself is not in.
    let backing = Some(("2".to_owned(), Some("qcow2".to_owned())));
    images.add("1", Sample { backing, ..small() }.image());
    assert!(refusal(open(&config(&images.path("5")))).contains("has it as a backing file"));
}

#[test]
fn a_backing_file_is_locked_shared() {
    let images = Images::new();
    let base = images.add("base", small().image());
    let backing = Some(("base".to_owned(), Some("qcow2".to_owned())));
    let tops = ["a", "b"]
        .map(|name| images.add(name, Sample { backing: backing.clone(), ..small() }.image()));
    let first = open(&config(&tops[0])).unwrap();
    let second = open(&config(&tops[1])).unwrap();
    assert!(matches!(open(&config(&base)), Err(DiskError::InUse { .. })));
    first.unlock().unwrap();
    assert!(matches!(open(&config(&base)), Err(DiskError::InUse { .. })));
    drop(second);
    let _writer = open(&config(&base)).unwrap();
    let why = refusal(Ok(()).and_then(|()| first.lock()).map(|()| first.clone()));
    assert!(why.contains("base is in use by another VM"), "{why}");
    // The image itself is not kept.
    assert!(!first.is_held());
    let own = BlockConfig { backing_files: true, ..config(&tops[0]) };
    assert!(matches!(
        open(&own),
        Err(DiskError::Format { source: FormatError::BackingInUse(_), .. })
    ));
}
