// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks of a migration at the source: `vm.migrate-check`.
//!
//! Owns what is known before the destination is asked. A thread has the machine meanwhile, as in a migration, so that nothing
//! else starts a dirty log or changes memory; the guest runs. What ends a migration before anything is sent ends a check:
//! a cancel, a guest that resets, a second signal. It must never pause the guest, nor end without giving the machine back as
//! it was, whatever the destination says.

use std::sync::Arc;

use vm_migration::source::{KnownBefore, check};
use vm_migration::{
    Cancel, GuestLocation, MemoryMode, MigrationCheck, Progress, SendOptions, Side, Steering,
};

use super::inbox::{InboxSender, Message};
use super::sending::{self, Sending};
use super::threads::spawn_with;
use super::{Next, VmLifecycle, Vmm, cancel, describe, failed};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, ApiResult};
use crate::config::SendMigrationData;
use crate::machine::{Machine, StoppedMemoryWork};
use crate::migration::source::LeavingMachine;

/// The end of a check.
pub struct CheckEnd {
    machine: Box<Machine>,
    answer: ApiResult,
    responder: Responder,
}

/// What a check begins with.
struct Plan {
    options: SendOptions,
    known: KnownBefore,
}

fn check_machine(
    machine: Box<Machine>,
    plan: Plan,
    cancel: &Cancel,
) -> (Box<Machine>, Result<MigrationCheck, ApiError>) {
    let mut leaving = match LeavingMachine::for_check(machine) {
        Ok(leaving) => leaving,
        Err((machine, error)) => return (machine, Err(failed(&error))),
    };
    let found = check(&mut leaving, plan.known, &plan.options, cancel);
    (leaving.into_machine(), found.map_err(|error| failed(&error)))
}

/// Starts the thread that has the machine while it is checked.
fn start(
    machine: Box<Machine>,
    responder: Responder,
    plan: Plan,
    inbox_sender: InboxSender,
) -> Result<Sending, (Box<Machine>, Responder, std::io::Error)> {
    let cancel = match Cancel::new() {
        Ok(cancel) => cancel,
        Err(error) => return Err((machine, responder, error)),
    };
    let own_cancel = cancel.clone();
    let load = (machine, responder);
    let spawned = spawn_with("migration-send", load, move |(machine, responder)| {
        let (machine, found) = check_machine(machine, plan, &own_cancel);
        let answer = found.map(|found| ApiReply::Check(Box::new(found)));
        let end = CheckEnd { machine, answer, responder };
        inbox_sender.send(Message::CheckEnd(Box::new(end)));
    });
    match spawned {
        Ok(_detached) => Ok(Sending {
            progress: Arc::new(Progress::new(Side::Source)),
            cancel,
            steering: Steering::new(),
            mode: MemoryMode::Precopy,
            is_check: true,
            cancellers: Vec::new(),
            deleters: Vec::new(),
            resumers: Vec::new(),
        }),
        Err(((machine, responder), error)) => Err((machine, responder, error)),
    }
}

impl Vmm {
    /// `vm.migrate-check`.
    pub(super) fn check_migration_for(&mut self, data: &SendMigrationData, responder: Responder) {
        let plan = match self.plan_check(data) {
            Ok(plan) => plan,
            Err(error) => return responder.answer(Err(error)),
        };
        let mut machine = match std::mem::replace(&mut self.vm, VmLifecycle::None) {
            VmLifecycle::Live(machine) => machine,
            other => {
                self.vm = other;
                return responder.answer(Err(self.vm.why_not_live()));
            }
        };
        let stopped = machine.stop_memory_work();
        let info = Box::new(describe::of_machine(&machine));
        match start(machine, responder, plan, self.inbox_sender.clone()) {
            Ok(sending) => self.vm = VmLifecycle::Migrating { info, sending, stopped },
            Err((mut machine, responder, error)) => {
                machine.resume_memory_work(stopped);
                self.vm = VmLifecycle::Live(machine);
                responder.answer(Err(failed(&error)));
            }
        }
    }

    /// What `vm.send-migration` would refuse: a problem where it is of the VM, and an error where it is of the moment.
    fn plan_check(&mut self, data: &SendMigrationData) -> Result<Plan, ApiError> {
        let bad =
            |error: &dyn std::error::Error| ApiError::from_error(ApiErrorKind::BadRequest, error);
        let vcpus = self.machine_mut()?.config().cpus.boot_vcpus;
        let mut options = data.options().map_err(|error| bad(&error))?;
        options.vcpus = Some(vcpus);
        options.load_tls().map_err(|error| bad(&error))?;
        self.refuse_while_memory_arrives("checked")?;
        self.refuse_ending()?;
        let machine = self.machine_mut()?;
        let mut problems: Vec<String> =
            machine.refusals().iter().map(|error| error_text::chain(error)).collect();
        let may_postcopy = !machine.needs_all_pages();
        if !may_postcopy {
            problems.extend(
                sending::without_postcopy(&mut options).err().map(|error| error.to_string()),
            );
        }
        problems.extend(self.page_server(data).err().map(|error| error.to_string()));
        Ok(Plan { options, known: KnownBefore { problems, may_postcopy } })
    }

    /// Handles the end of a check: the machine is the VMM thread's again, as it was.
    pub(super) fn check_ended(&mut self, end: CheckEnd) -> Next {
        let CheckEnd { mut machine, answer, responder } = end;
        let before = std::mem::replace(&mut self.vm, VmLifecycle::None);
        let (sending, stopped) = match before {
            VmLifecycle::Migrating { sending, stopped, .. } => (Some(sending), stopped),
            _ => (None, StoppedMemoryWork::default()),
        };
        machine.resume_memory_work(stopped);
        self.vm = VmLifecycle::Live(machine);
        responder.answer(answer);
        if let Some(mut sending) = sending {
            let why = "the check of a migration has ended";
            cancel::confirm_all(&mut sending.cancellers, "source", GuestLocation::OnSource, why);
            for responder in sending.resumers {
                self.resume_live_for(responder);
            }
        }
        self.answer_progress_askers();
        self.go_on_ending()
    }
}
