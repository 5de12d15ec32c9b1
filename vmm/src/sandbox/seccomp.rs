// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! seccomp filters: the table as programs of the kernel, made once a kind and installed on each thread.
//!
//! Owns what a filter answers to a call that is not in the table. It must never decide what is in the table.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use thiserror::Error;

use super::calls::{Call, Check};
use super::requests::FREQUENT;
use super::table::{KINDS, Kind, MAX_KINDS};
use crate::options::SeccompMode;

/// Why a thread has no filter.
#[derive(Debug, Error)]
pub enum FilterError {
    /// The thread is not in the table.
    #[error("threads of kind '{0}' are not in the table of the sandbox")]
    UnknownKind(String),
    /// The table cannot be written as a program.
    #[error("a seccomp filter cannot be built")]
    Compile(#[from] BackendError),
    /// The kernel.
    #[error("the kernel refused a seccomp filter")]
    Install(#[source] seccompiler::Error),
}

/// Filters by kind, made when the first thread of a kind starts.
static FILTERS: [OnceLock<Vec<BpfProgram>>; MAX_KINDS] = [const { OnceLock::new() }; MAX_KINDS];

/// Calls that fail on threads that may not make them, rather than end the process. The C library and a backtrace do
/// without opening anything. A socket may be dropped by any thread, and a path that it leaves is replaced by the next
/// process that listens there.
const FAILING: [i64; 4] = [libc::SYS_open, libc::SYS_openat, libc::SYS_unlink, libc::SYS_unlinkat];

/// Flags of clone(2) that ask for a namespace: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const NAMESPACES: u64 = 0x7e02_0000;

/// The number -1, of 32 bits as filters see it. It is no call: a tracer such as strace(1) leaves it where it has a call
/// fail without being made, and the kernel answers ENOSYS to one that a thread makes.
const NO_CALL: i64 = 0xffff_ffff;

fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: u32,
) -> Result<SeccompCondition, BackendError> {
    // The kernel itself takes no more of these arguments than 32 bits.
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value.into())
}

/// Rules of a call; none means that it is not checked.
fn rules(check: Check) -> Result<Vec<SeccompRule>, BackendError> {
    let executable = libc::PROT_EXEC.unsigned_abs();
    let each = |argument, values: &[u32]| {
        values
            .iter()
            .map(|value| SeccompRule::new(vec![condition(argument, SeccompCmpOp::Eq, *value)?]))
            .collect()
    };
    match check {
        Check::Any => Ok(Vec::new()),
        Check::NotExecutable => {
            let masked = SeccompCmpOp::MaskedEq(executable.into());
            Ok(vec![SeccompRule::new(vec![condition(2, masked, 0)?])?])
        }
        Check::NoNamespace => {
            let masked = SeccompCmpOp::MaskedEq(NAMESPACES);
            Ok(vec![SeccompRule::new(vec![condition(0, masked, 0)?])?])
        }
        Check::Library => {
            let protection = executable | libc::PROT_READ.unsigned_abs();
            let anonymous = SeccompCmpOp::MaskedEq(libc::MAP_ANONYMOUS.unsigned_abs().into());
            Ok(vec![SeccompRule::new(vec![
                condition(2, SeccompCmpOp::Eq, protection)?,
                condition(3, anonymous, 0)?,
            ])?])
        }
        Check::ThisProcess => each(0, &[std::process::id()]),
        Check::OwnPriority => {
            let zero = |argument| condition(argument, SeccompCmpOp::Eq, 0);
            Ok(vec![SeccompRule::new(vec![zero(0)?, zero(1)?])?])
        }
        Check::First(values) => each(0, values),
        Check::Second(values) => each(1, values),
        Check::Requests(requests) => requests
            .iter()
            .map(|request| {
                let masked = || SeccompCmpOp::MaskedEq(0xffff);
                SeccompRule::new(vec![condition(1, masked(), request.value)?])
            })
            .collect(),
    }
}

/// What a filter of these calls does.
pub(super) fn programs<'a>(
    calls: impl Iterator<Item = &'a Call>,
    mode: SeccompMode,
    is_first: bool,
) -> Result<Vec<BpfProgram>, BackendError> {
    let mut table: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let calls: Vec<&Call> = calls.collect();
    // Rules of a call are compared in their order.
    let frequent = FREQUENT.iter().filter_map(|value| {
        let has = |call: &&&Call| {
            matches!(call.check, Check::Requests(list) if list.iter().any(|one| one.value == *value))
        };
        calls.iter().find(has).map(|call| (call.number, *value))
    });
    for (number, value) in frequent {
        let masked = SeccompCmpOp::MaskedEq(0xffff);
        let rule = SeccompRule::new(vec![condition(1, masked, value)?])?;
        table.entry(number).or_default().push(rule);
    }
    for call in calls {
        let more = rules(call.check)?;
        table
            .entry(call.number)
            .and_modify(|known| {
                if known.is_empty() || more.is_empty() {
                    known.clear();
                } else {
                    known.extend(more.iter().cloned());
                }
            })
            .or_insert(more.clone());
    }
    table.insert(NO_CALL, Vec::new());
    let refusal = match mode {
        SeccompMode::Off => SeccompAction::Allow,
        SeccompMode::Enforce => SeccompAction::Trap,
        SeccompMode::Log => SeccompAction::Log,
        SeccompMode::Errno => SeccompAction::Errno(libc::EPERM.unsigned_abs()),
    };
    let mut programs = Vec::new();
    let failing: BTreeMap<_, _> = FAILING
        .into_iter()
        .filter(|number| !table.contains_key(number))
        .map(|number| (number, Vec::new()))
        .collect();
    if mode == SeccompMode::Enforce && !failing.is_empty() {
        table.extend(failing.clone());
        let fails = SeccompAction::Errno(libc::EACCES.unsigned_abs());
        programs.push(compile(failing, SeccompAction::Allow, fails)?);
    }
    programs.push(compile(table, refusal, SeccompAction::Allow)?);
    if matches!(mode, SeccompMode::Enforce | SeccompMode::Errno) && is_first {
        // The C library then calls clone(2), whose flags a filter sees. All threads inherit this program.
        let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
        let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
        programs.push(compile(clone3, SeccompAction::Allow, missing)?);
    }
    Ok(programs)
}

fn compile(
    table: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    listed: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(table, otherwise, listed, TargetArch::x86_64)?.try_into()
}

/// Installs the filters of the `index`th kind on the calling thread.
///
/// # Errors
/// [`FilterError`]; the thread must not go on.
pub(super) fn install(index: usize, mode: SeccompMode) -> Result<(), FilterError> {
    let (Some(kind), Some(filters)) = (KINDS.get(index), FILTERS.get(index)) else { return Ok(()) };
    let filters = if let Some(made) = filters.get() {
        made
    } else {
        let made = programs(Kind::calls(kind), mode, kind.is_first())?;
        filters.get_or_init(|| made)
    };
    filters
        .iter()
        .try_for_each(|filter| seccompiler::apply_filter(filter))
        .map_err(FilterError::Install)
}
