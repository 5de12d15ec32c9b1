// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Touching real mappings, with pages that cannot be had.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;
use crate::PAGE_BYTES;
use crate::host::testing::is_mapped;
use crate::mapping::MapRequest;

const LEN_BYTES: u64 = 16 * PAGE_BYTES;

fn map(file: &File) -> Mapping {
    Mapping::new(&MapRequest {
        len_bytes: LEN_BYTES,
        align_bytes: PAGE_BYTES,
        congruent_to: 0,
        file: Some((file, 0)),
        shared: true,
        reserve: false,
    })
    .unwrap()
}

fn page(mapping: &Mapping, index: u64) -> *mut u8 {
    // SAFETY: the tests ask for pages of the mapping.
    unsafe { mapping.start().add(to_usize(index * PAGE_BYTES)) }
}

#[test]
fn each_step_is_populated_and_keeps_what_it_held() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN_BYTES).unwrap();
    let mapping = map(&file);
    // SAFETY: inside the mapping, for as long as it lives.
    unsafe { page(&mapping, 4).write_volatile(0xa5) };
    let range = 2 * PAGE_BYTES..LEN_BYTES - PAGE_BYTES;
    assert!(touch(&mapping, &range, 2 * PAGE_BYTES) >= range.end);
    for index in 0..16 {
        let is_touched = (2..15).contains(&index) && index % 2 == 0;
        assert_eq!(is_mapped(page(&mapping, index)), is_touched, "page {index}");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { page(&mapping, 4).read_volatile() }, 0xa5);
}

#[test]
fn a_page_that_cannot_be_had_ends_it() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN_BYTES).unwrap();
    let mapping = map(&file);
    file.set_len(5 * PAGE_BYTES).unwrap();
    for _ in 0..2 {
        assert_eq!(touch(&mapping, &(0..LEN_BYTES), PAGE_BYTES), 5 * PAGE_BYTES);
    }
    assert_eq!(touch(&mapping, &(6 * PAGE_BYTES..LEN_BYTES), PAGE_BYTES), 6 * PAGE_BYTES);
    file.set_len(LEN_BYTES).unwrap();
    assert_eq!(touch(&mapping, &(0..LEN_BYTES), PAGE_BYTES), LEN_BYTES);
}

#[test]
fn nothing_outside_the_mapping_is_touched() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN_BYTES).unwrap();
    let mapping = map(&file);
    assert_eq!(touch(&mapping, &(0..LEN_BYTES + 1), PAGE_BYTES), 0);
    #[expect(clippy::reversed_empty_ranges, reason = "what is to be refused")]
    let reversed = 2 * PAGE_BYTES..PAGE_BYTES;
    assert_eq!(touch(&mapping, &reversed, PAGE_BYTES), reversed.start);
    assert_eq!(touch(&mapping, &(0..LEN_BYTES), 0), 0);
    assert_eq!(touch(&mapping, &(PAGE_BYTES..PAGE_BYTES), PAGE_BYTES), PAGE_BYTES);
    assert!(!is_mapped(page(&mapping, 0)));
}

/// Set for a test that runs in a process of its own.
const IN_CHILD: &str = "GODWIT_TEST_BUS_ERROR";

fn is_child() -> bool {
    std::env::var_os(IN_CHILD).is_some()
}

/// Runs a test of this module in a process of its own.
fn run_alone(name: &str) -> std::process::ExitStatus {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = format!("touch::tests::{name}");
    let output = child.args([&name, "--exact"]).env(IN_CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("running 1 test"), "{name} is not there: {text}");
    output.status
}

#[test]
fn another_access_that_cannot_be_had_ends_the_process() {
    if is_child() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN_BYTES).unwrap();
        let mapping = map(&file);
        file.set_len(PAGE_BYTES).unwrap();
        assert_eq!(touch(&mapping, &(0..LEN_BYTES), PAGE_BYTES), PAGE_BYTES);
        // SAFETY: inside the mapping; that the signal ends the process is what is tested.
        unsafe { page(&mapping, 2).read_volatile() };
        std::process::exit(0);
    }
    let status = run_alone("another_access_that_cannot_be_had_ends_the_process");
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status:?}");
}

#[test]
fn nothing_is_touched_while_the_signal_is_not_handled() {
    if is_child() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN_BYTES).unwrap();
        let mapping = map(&file);
        let touched = || touch(&mapping, &(0..LEN_BYTES), PAGE_BYTES);
        assert_eq!(touched(), LEN_BYTES);
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        let mut change = |how| {
            // SAFETY: sigemptyset initialises the set, to which a valid number is added; only the mask of the calling
            // thread changes.
            unsafe {
                libc::sigemptyset(set.as_mut_ptr());
                libc::sigaddset(set.as_mut_ptr(), libc::SIGBUS);
                libc::pthread_sigmask(how, set.as_ptr(), std::ptr::null_mut());
            }
        };
        change(libc::SIG_BLOCK);
        assert_eq!(touched(), 0, "blocked");
        change(libc::SIG_UNBLOCK);
        assert_eq!(touched(), LEN_BYTES);
        // Sent, it comes to the handler of the runtime, after which there is none.
        // SAFETY: takes a number.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_eq!(touched(), 0, "no longer ours");
        return;
    }
    assert!(run_alone("nothing_is_touched_while_the_signal_is_not_handled").success());
}
