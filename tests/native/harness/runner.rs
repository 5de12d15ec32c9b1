// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs the tests one after the other, and at the same time those that do not mind, and prints what came of them, in the
//! words of cargo's own test harness.
//!
//! Owns the order, the time limit of each test and the third outcome alongside passed and failed: a
//! test that cannot run on this machine says why (`SKIPPED name: reason`). The usual harness has no
//! such outcome, and it would run these tests at the unit level too; here they need
//! `GODWIT_NATIVE=1`. Must never know what is tested.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::beside::{self, Beside};
use super::programs;
use super::vmm::kill_all;

/// Longest time for a test that names no other.
const USUAL_LIMIT: Duration = Duration::from_mins(2);
/// Set to run the tests.
const SWITCH: &str = "GODWIT_NATIVE";

/// Why a test did not run; the payload of an unwinding that is no panic.
struct Skip(String);

/// Ends the test as one that cannot run here.
pub fn skip(reason: impl Into<String>) -> ! {
    resume_unwind(Box::new(Skip(reason.into())))
}

/// One test.
pub struct Case {
    name: String,
    limit: Duration,
    /// It runs while another one does.
    is_beside: bool,
    run: Box<dyn FnOnce() + Send>,
}

/// All tests.
#[derive(Default)]
pub struct Suite {
    cases: Vec<Case>,
    /// Whether those that are added run beside others.
    adds_beside: bool,
}

impl Suite {
    /// Adds a test.
    pub fn add(&mut self, name: &str, run: impl FnOnce() + Send + 'static) {
        self.add_long(name, USUAL_LIMIT, run);
    }

    /// Adds a test that may take so long.
    pub fn add_long(&mut self, name: &str, limit: Duration, run: impl FnOnce() + Send + 'static) {
        let (name, is_beside) = (name.to_owned(), self.adds_beside);
        self.cases.push(Case { name, limit, is_beside, run: Box::new(run) });
    }

    /// Adds tests that do not mind that another one runs: they measure no time, have what they use of the host for
    /// themselves, and mostly wait, or need one processor at most.
    pub fn beside(&mut self, add: impl FnOnce(&mut Self)) {
        self.adds_beside = true;
        add(self);
        self.adds_beside = false;
    }

    /// Runs what the arguments choose: parts of names, `--exact`, `--skip PART`, `--list`.
    pub fn main(self) -> ExitCode {
        let selection = Selection::from_arguments(std::env::args().skip(1));
        let enabled = std::env::var_os(SWITCH).is_some_and(|value| value == "1");
        let total = self.cases.len();
        let chosen: Vec<Case> =
            self.cases.into_iter().filter(|case| selection.takes(&case.name)).collect();
        if selection.list {
            for case in &chosen {
                println!("{}: test", case.name);
            }
            return ExitCode::SUCCESS;
        }
        let start = Instant::now();
        let mut tally = Tally { filtered: total - chosen.len(), ..Tally::default() };
        if !enabled {
            println!("these tests need real KVM: scripts/test native (or {SWITCH}=1)");
            tally.ignored = chosen.len();
            return tally.report(start.elapsed());
        }
        if let Err(error) = programs::build() {
            eprintln!("the programs under test cannot be built:\n{error}");
            return ExitCode::from(101);
        }
        let (beside, alone): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|case| case.is_beside);
        let beside = beside.into_iter().enumerate();
        if beside::is_it() || alone.is_empty() {
            println!("\nrunning {} tests", beside.len());
            for (number, case) in beside {
                if beside::take(number) {
                    tally.run(case);
                }
            }
            return tally.report(start.elapsed());
        }
        let other = (beside.len() > 0).then(Beside::start).transpose();
        println!("\nrunning {} tests", alone.len());
        for case in alone {
            tally.run(case);
        }
        if let Ok(Some(other)) = &other {
            // The other process goes from the first to the last.
            for (number, case) in beside.rev() {
                if other.leaves(number) {
                    tally.run(case);
                }
            }
        }
        let code = tally.report(start.elapsed());
        match other.and_then(|other| other.map(Beside::finish).transpose()) {
            Ok(None | Some(true)) => code,
            Ok(Some(false)) => ExitCode::from(101),
            Err(error) => {
                eprintln!("the tests that run beside others cannot be run: {error}");
                ExitCode::from(101)
            }
        }
    }
}

#[derive(Default)]
struct Selection {
    parts: Vec<String>,
    without: Vec<String>,
    exact: bool,
    list: bool,
}

impl Selection {
    fn from_arguments(mut arguments: impl Iterator<Item = String>) -> Self {
        let mut selection = Self::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--exact" => selection.exact = true,
                "--list" => selection.list = true,
                "--skip" => selection.without.extend(arguments.next()),
                // The tests always run one at a time, and print as they go.
                "--test-threads" | "--color" | "--format" => drop(arguments.next()),
                flag if flag.starts_with('-') => {}
                part => selection.parts.push(part.to_owned()),
            }
        }
        selection
    }

    fn takes(&self, name: &str) -> bool {
        let fits =
            |part: &String| if self.exact { name == part } else { name.contains(part.as_str()) };
        (self.parts.is_empty() || self.parts.iter().any(fits)) && !self.without.iter().any(fits)
    }
}

#[derive(Default)]
struct Tally {
    passed: usize,
    failed: Vec<String>,
    skipped: usize,
    ignored: usize,
    filtered: usize,
}

impl Tally {
    fn run(&mut self, case: Case) {
        let start = Instant::now();
        let outcome = run_limited(case.run, case.limit);
        kill_all();
        let took = start.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("test {} ... ok ({took:.1} s)", case.name);
            }
            Err(payload) => {
                if let Some(Skip(reason)) = payload.downcast_ref() {
                    self.skipped += 1;
                    println!("SKIPPED {}: {reason}", case.name);
                } else {
                    println!("test {} ... FAILED ({took:.1} s)", case.name);
                    self.failed.push(case.name);
                }
            }
        }
    }

    fn report(self, took: Duration) -> ExitCode {
        if !self.failed.is_empty() {
            println!("\nfailures:");
            for name in &self.failed {
                println!("    {name}");
            }
        }
        println!(
            "\ntest result: {}. {} passed; {} failed; {} ignored; 0 measured; {} filtered out; \
             finished in {:.2}s ({} skipped)",
            if self.failed.is_empty() { "ok" } else { "FAILED" },
            self.passed,
            self.failed.len(),
            self.ignored,
            self.filtered,
            took.as_secs_f64(),
            self.skipped,
        );
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(101) }
    }
}

/// Runs a test on a thread of its own. One that takes too long has failed; its processes are ended,
/// and its thread is left behind.
fn run_limited(run: Box<dyn FnOnce() + Send>, limit: Duration) -> Result<(), Box<dyn Any + Send>> {
    let (report, outcome) = channel();
    let worker = std::thread::Builder::new().name("test".to_owned()).spawn(move || {
        let _ = report.send(catch_unwind(AssertUnwindSafe(run)));
    });
    if let Err(error) = worker {
        return Err(Box::new(format!("no thread: {error}")));
    }
    match outcome.recv_timeout(limit) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => {
            eprintln!("not done after {} s", limit.as_secs());
            Err(Box::new("not done in time"))
        }
        Err(RecvTimeoutError::Disconnected) => Err(Box::new("the test thread is gone")),
    }
}
