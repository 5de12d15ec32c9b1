// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The start hook. In a process of its own, as there is one hook a process.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::cell::RefCell;

use stoppable_thread::{
    Builder, HookIsSet, Kinds, set_start_hook, spawn, spawn_scoped, start_group,
};

thread_local! {
    /// Kinds that the hook was called with on this thread.
    static SEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// Kinds of the threads that started it.
    static STARTERS: RefCell<Vec<Option<String>>> = const { RefCell::new(Vec::new()) };
}

fn note(kinds: Kinds<'_>) {
    SEEN.with_borrow_mut(|seen| seen.push(kinds.own.to_owned()));
    STARTERS.with_borrow_mut(|starters| starters.push(kinds.starter.map(ToOwned::to_owned)));
}

fn starters() -> Vec<Option<String>> {
    STARTERS.with_borrow(Vec::clone)
}

fn seen() -> Vec<String> {
    SEEN.with_borrow(Vec::clone)
}

/// What is done before the hook.
const EARLIER: Kinds<'_> = Kinds { own: "earlier", starter: None };

/// A name that Linux cuts off.
const LONG: &str = "a-name-of-more-than-fifteen-bytes";

#[test]
fn each_thread_runs_the_hook_once_before_its_body() {
    let before = spawn("early", seen).unwrap();
    assert!(before.join().unwrap().is_empty());
    set_start_hook(note).unwrap();
    assert_eq!(set_start_hook(|_| {}), Err(HookIsSet));

    let named = || (std::thread::current().name().unwrap().to_owned(), seen());
    let expected = |name: &str| (name.to_owned(), vec![name.to_owned()]);
    assert_eq!(spawn(LONG, named).unwrap().join().unwrap(), expected(LONG));
    let small = Builder::new("small").stack_bytes(64 << 10);
    assert_eq!(small.spawn(named).unwrap().join().unwrap(), expected("small"));
    let of_kind = Builder::new("_disk0_q0").kind("disk").spawn(named).unwrap();
    assert_eq!(of_kind.join().unwrap(), ("_disk0_q0".to_owned(), vec!["disk".to_owned()]));
    let begun = Builder::new("begun").before_hook(|| note(EARLIER)).spawn(seen).unwrap();
    assert_eq!(begun.join().unwrap(), ["earlier", "begun"]);
    std::thread::scope(|scope| {
        let scoped = spawn_scoped(scope, "scoped", named).unwrap();
        assert_eq!(scoped.join().unwrap(), expected("scoped"));
        let begun = Builder::new("begun").before_hook(|| note(EARLIER)).spawn_scoped(scope, seen);
        assert_eq!(begun.unwrap().join().unwrap(), ["earlier", "begun"]);
    });
    assert!(seen().is_empty(), "not on the thread that starts others");

    assert_eq!(spawn("first", starters).unwrap().join().unwrap(), [None]);
    let started = start_group("vcpu", || {
        let of_kind = Builder::new("_disk0_q0")
            .kind("disk")
            .spawn(|| (starters(), spawn("last", starters).unwrap().join().unwrap()));
        (starters(), of_kind.unwrap().join().unwrap())
    });
    let by = |kind: &str| vec![Some(kind.to_owned())];
    assert_eq!(started.unwrap(), (vec![None], (by("vcpu"), by("disk"))));
}
