// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A check of a migration: what it would fail with on either side, and what it would take, without moving anything.
//!
//! Owns the order of the steps, and what is a problem of the migration rather than a failure of the check. The guest runs all
//! the time; its writes are watched for a second. Must never send memory, and never stop the guest.

mod link;
mod model;
mod writes;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::counts::extra_connections;
use super::negotiate::{check_files, document, missing_features};
use crate::cancel::Cancel;
use crate::channel::{Channel, NO_REASON};
use crate::destination::{BEGINS_NOTHING, refusals};
use crate::error::{Cause, Failure, Step};
use crate::migration_check::{CHECK_VERSION, CheckFinding, MigrationCheck};
use crate::options::{MemoryMode, SendOptions};
use crate::phase::Side;
use crate::protocol::capabilities::{Accepted, FEATURE_BLOBS, FEATURE_CHECK, common, features};
use crate::protocol::check::{CheckFindings, CheckRequest, shown};
use crate::protocol::message::Message;
use crate::transport::{Connection, TransportError};
use crate::vm::{SourceVm, VmError};

use model::Measured;

/// How long the destination may look for what is lacking.
const FINDINGS_TIME_MAX: Duration = Duration::from_mins(1);

/// Why a migration could not be checked.
#[derive(Debug, thiserror::Error)]
#[error("the migration could not be checked, while {step}")]
pub struct CheckError {
    /// The step.
    pub step: &'static str,
    /// The reason.
    #[source]
    pub cause: Cause,
}

impl From<Failure> for CheckError {
    fn from(Failure { step, cause }: Failure) -> Self {
        Self { step, cause }
    }
}

/// What the machine's owner knows before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownBefore {
    /// Why the machine cannot be moved.
    pub problems: Vec<String>,
    /// Whether it may be moved by postcopy.
    pub may_postcopy: bool,
}

/// What the destination has answered.
struct Asked {
    software: String,
    round_trip: Duration,
    link_rate: Option<u64>,
}

/// What has been found on both sides.
struct Found {
    problems: Vec<CheckFinding>,
    warnings: Vec<CheckFinding>,
}

impl Found {
    fn problem(&mut self, error: &(dyn std::error::Error + 'static)) {
        let text = error_text::chain(error);
        if !self.problems.iter().any(|known| known.text == text) {
            self.problems.push(CheckFinding::new(Side::Source, text));
        }
    }

    fn problem_of_vm(&mut self, error: &VmError) {
        self.problem(&**error);
    }

    fn of_destination(&mut self, findings: CheckFindings) {
        let of_it = |text| CheckFinding::new(Side::Destination, text);
        self.problems.extend(findings.problems.into_iter().map(of_it));
        self.warnings.extend(findings.warnings.into_iter().map(of_it));
    }
}

/// Asks both sides whether a migration with these options would succeed, and measures what it would take. The destination
/// goes on waiting for a migration.
///
/// # Errors
/// The check itself is not possible: the options are not valid, the destination does not know checks, its connection was
/// lost, or it was cancelled.
pub fn check<V: SourceVm>(
    vm: &mut V,
    known: KnownBefore,
    options: &SendOptions,
    cancel: &Cancel,
) -> Result<MigrationCheck, CheckError> {
    options.check().step("checking the options")?;
    let KnownBefore { problems, may_postcopy } = known;
    let of_source = |text| CheckFinding::new(Side::Source, text);
    let mut found =
        Found { problems: problems.into_iter().map(of_source).collect(), warnings: Vec::new() };
    let memory = vm.memory();
    let (mut memory_bytes, mut writes) = (0, None);
    if options.local {
        if let Err(failure) = check_files(&*memory) {
            found.problem(&failure.cause);
        }
    } else {
        memory_bytes = writes::memory_to_move(&*memory, cancel)?;
    }
    let asked = ask(vm, memory_bytes, options, &mut found, cancel)?;
    let link_rate = asked.as_ref().and_then(|asked| asked.link_rate);
    // Without a link there is no forecast.
    if link_rate.is_some() {
        match writes::watch(vm, &*memory, cancel) {
            Ok(watched) => writes = Some(watched),
            Err(Failure { cause: Cause::Vm(error), .. }) => found.problem_of_vm(&error),
            Err(failure) => return Err(failure.into()),
        }
    }
    let is_known = asked.is_some() && (options.local || link_rate.is_some() && writes.is_some());
    let measured = is_known.then(|| Measured {
        memory_bytes,
        link_rate: link_rate.unwrap_or(0),
        round_trip: asked.as_ref().map_or(Duration::ZERO, |asked| asked.round_trip),
        dirty_rate: writes.as_ref().map_or(0, |writes| writes.bytes_per_s),
        scan: writes.as_ref().map_or(Duration::ZERO, |writes| writes.scan),
        switch_over: vm.switch_over_time(),
        state_bytes: vm.blob_bytes(),
        is_unlogged: writes.as_ref().is_some_and(|writes| !writes.unlogged.is_empty()),
    });
    let precopy = measured.as_ref().map(|measured| model::precopy(measured, options));
    let postcopy = measured.as_ref().filter(|_| may_postcopy && !options.local);
    let postcopy = postcopy.map(|measured| model::postcopy(measured, options));
    if let Some(writes) = &writes {
        found.warnings.extend(writes.warning().map(of_source));
    }
    if options.mode() == MemoryMode::Precopy && precopy.is_some_and(|it| !it.converges) {
        found.warnings.push(of_source(NOT_CONVERGING.to_owned()));
    }
    Ok(MigrationCheck {
        version: CHECK_VERSION,
        possible: found.problems.is_empty(),
        destination: asked.as_ref().map(|asked| asked.software.clone()),
        problems: found.problems,
        warnings: found.warnings,
        link_bytes_per_second: link_rate,
        round_trip_us: asked.as_ref().map(|asked| model::micros(asked.round_trip)),
        dirty_bytes_per_second: writes.as_ref().map(|writes| writes.bytes_per_s),
        memory_bytes,
        precopy,
        postcopy,
    })
}

/// What is said of a guest that writes too fast at present.
const NOT_CONVERGING: &str = "precopy does not reach the allowed downtime with what the guest writes now; raise downtime_ms, \
                              use convergence=throttle, timeout_strategy=ignore or memory_mode=postcopy";

/// Asks the destination; `None` if it cannot be reached, which is a problem of the migration.
fn ask<V: SourceVm>(
    vm: &mut V,
    move_bytes: u64,
    options: &SendOptions,
    found: &mut Found,
    cancel: &Cancel,
) -> Result<Option<Asked>, Failure> {
    const STEP: &str = "asking the destination";
    let limits = &options.limits;
    let tls = options.tls.as_ref();
    let connected =
        Connection::connect_secured(&options.to, tls, cancel, limits.connect, limits.answer);
    let mut control = match connected {
        Ok(connection) => Channel::new(connection),
        Err(TransportError::Cancelled) => return Err(Cause::Cancelled).step("connecting"),
        Err(error) => {
            found.problem(&error);
            describe(vm, None, options, found);
            return Ok(None);
        }
    };
    let began = Instant::now();
    let accepted = match control.ask(&Message::Check, limits.answer) {
        Ok(answer) => Accepted::parse(&answer.payload).step(STEP)?,
        Err(Cause::Refused(reason)) if reason == BEGINS_NOTHING || reason == NO_REASON => {
            return Err(unknown("an earlier version, or another program")).step(STEP);
        }
        Err(refused @ Cause::Refused(_)) if is_of_any_migration(&refused) => {
            found.problem(&refused);
            describe(vm, None, options, found);
            return Ok(None);
        }
        Err(cause) => return Err(cause).step(STEP),
    };
    let round_trip = began.elapsed();
    let software = shown(&accepted.software);
    if !accepted.features.contains(FEATURE_CHECK) {
        return Err(unknown(&software)).step(STEP);
    }
    let ours = features();
    for missing in missing_features(options, &common(&ours, &accepted.features)) {
        found.problem(&missing);
    }
    let Some(config) = describe(vm, Some(&accepted), options, found) else {
        return Ok(Some(Asked { software, round_trip, link_rate: None }));
    };
    let offer = document(&*vm.memory(), vm.formats(), extra_connections(options), options);
    let request = CheckRequest { offer, move_bytes };
    let began = Instant::now();
    control.ask(&Message::Capabilities(request.to_json()), limits.answer).step(STEP)?;
    let round_trip = round_trip.min(began.elapsed());
    let began = Instant::now();
    control.tell(&Message::Config(config)).step(STEP)?;
    let answer = control.answer_of_busy_while(limits.answer, || {
        if began.elapsed() < FINDINGS_TIME_MAX {
            return Ok(());
        }
        let what = "waiting for what the destination finds";
        Err(TransportError::Timeout { what, after: FINDINGS_TIME_MAX }.into())
    });
    found.of_destination(CheckFindings::parse(&answer.step(STEP)?.payload).step(STEP)?);
    let link_rate =
        if options.local { None } else { Some(link::measure(&mut control, limits.answer)?) };
    Ok(Some(Asked { software, round_trip, link_rate }))
}

fn unknown(what: &str) -> Cause {
    Cause::Unsupported {
        what: format!(
            "the destination is {what}, and does not answer checks as {} does",
            crate::protocol::capabilities::software()
        ),
        remedy: "update it, or migrate without a check; its receive-migration goes on if it is an earlier version",
    }
}

/// Whether a migration would be refused as well, by what the destination is or does now.
fn is_of_any_migration(refused: &Cause) -> bool {
    matches!(refused, Cause::Refused(reason) if refusals::is_of_any_migration(reason))
}

/// The configuration, for a destination that reads these formats. What keeps the machine from being described is a problem.
fn describe<V: SourceVm>(
    vm: &mut V,
    accepted: Option<&Accepted>,
    options: &SendOptions,
    found: &mut Found,
) -> Option<Vec<u8>> {
    let needed = vm.formats();
    if let Some(accepted) = accepted {
        if let Some(what) = needed.beyond(accepted.formats) {
            let what = format!("the guest needs {what}, at the destination");
            let remedy = "update the destination";
            found.problem(&Cause::Unsupported { what, remedy });
            return None;
        }
        vm.meet(accepted.formats);
    }
    let none = BTreeSet::new();
    let theirs = accepted.map_or(&none, |accepted| &accepted.features);
    let apart = options.mode() == MemoryMode::Precopy
        && (accepted.is_none() || theirs.contains(FEATURE_BLOBS));
    if let Err(error) = vm.blobs(apart) {
        found.problem_of_vm(&error);
    }
    vm.config_json().inspect_err(|error| found.problem_of_vm(error)).ok()
}
