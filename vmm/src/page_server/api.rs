// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests that a page server answers, and how long it stays for watching clients.
//!
//! Owns the answers: how far it is, connecting again, and giving up. Everything else is refused,
//! with what this process is. It decides nothing about pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_migration::{Phase, Progress, ProgressDocument, Steering};

use super::PageServerError;
use crate::api::request::Responder;
use crate::api::{ApiCall, ApiError, ApiErrorKind, ApiReply, VmmPingResponse, VmmRequest};
use crate::control::{WATCHER_TIME, recover_request};
use crate::events;

/// How long a client that follows a migration may take from the VMM to here: a few looks of ch-remote.
const ARRIVAL_TIME: Duration = Duration::from_millis(500);

/// What the loop does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Waits.
    Continue,
    /// Ends the process.
    End,
}

/// Answers requests.
pub struct PageServerApi {
    progress: Arc<Progress>,
    steering: Steering,
    /// When a client last asked how far it is.
    watched_at: Option<Instant>,
    /// Clients that asked to discard the pages, and wait until that is done.
    abandoners: Vec<Responder>,
    /// When the process exits, once all pages are served and watching clients have had time to see it.
    exit_at: Option<Instant>,
}

fn conflict(text: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Conflict, text)
}

impl PageServerApi {
    /// No request yet.
    pub fn new(progress: Arc<Progress>, steering: Steering) -> Self {
        Self { progress, steering, watched_at: None, abandoners: Vec::new(), exit_at: None }
    }

    /// Answers a request, or keeps it until it can be answered.
    pub fn call(&mut self, call: ApiCall) {
        let (request, responder) = call.into_parts();
        log::debug!("request {}", responder.name());
        let answer = match request {
            VmmRequest::Ping => Ok(ApiReply::Ping(VmmPingResponse::default())),
            VmmRequest::MigrationProgress => Ok(self.show_progress()),
            VmmRequest::MigrationReport => Ok(ApiReply::Report(Box::new(self.progress.history()))),
            VmmRequest::MigrationRecover(data) => recover_request(&data, self.progress.phase())
                .map(|(recover, connections_max)| {
                    self.steering.recover_over(recover, connections_max);
                    ApiReply::Empty
                }),
            VmmRequest::VmmShutdown { force: true } | VmmRequest::Delete { force: true } => {
                return self.abandon(responder);
            }
            _ => Err(conflict(
                "this is the page server of a VM that runs at the destination of its migration, \
                 which gets its last pages from here; it ends by itself when the destination has \
                 them, and with force (vmm.shutdown, vm.delete) the VM is lost",
            )),
        };
        responder.answer(answer);
    }

    /// The progress document.
    pub fn snapshot(&self) -> ProgressDocument {
        self.progress.snapshot()
    }

    fn show_progress(&mut self) -> ApiReply {
        let snapshot = self.progress.snapshot();
        if snapshot.phase == Phase::Done {
            // A client that has seen the end needs no more time.
            self.watched_at = None;
            self.exit_at = self.exit_at.map(|_| Instant::now());
        } else {
            self.watched_at = Some(Instant::now());
        }
        ApiReply::Progress(Box::new(snapshot))
    }

    fn abandon(&mut self, responder: Responder) {
        match self.progress.phase() {
            Phase::Idle => responder.answer(Err(conflict(
                "the VM has not left its VMM yet; cancel the migration there",
            ))),
            Phase::Done => responder.answer(Ok(ApiReply::Empty)),
            _ => {
                log::warn!("told to discard pages that a migrated VM needs: it is lost");
                self.abandoners.push(responder);
                self.steering.abandon();
            }
        }
    }

    /// The destination has everything.
    pub fn served(&mut self, now: Instant) {
        let watched = self.watched_at.is_some_and(|at| now.duration_since(at) < WATCHER_TIME);
        // A client that was sent on here by the VMM may be on the way.
        self.exit_at = Some(now + if watched { WATCHER_TIME } else { ARRIVAL_TIME });
        for responder in self.abandoners.drain(..) {
            responder.answer(Ok(ApiReply::Empty));
        }
    }

    /// It serves no more, because a client asked for that, or for `error`.
    pub fn abandoned(&mut self, error: PageServerError) -> Result<(), PageServerError> {
        if self.abandoners.is_empty() {
            return Err(error);
        }
        let reason = ApiError::from_error(ApiErrorKind::Failed, &error).to_string();
        events::emit("vm", "migration-failed", &[("error", &reason)]);
        for responder in self.abandoners.drain(..) {
            responder.answer(Ok(ApiReply::Empty));
        }
        Ok(())
    }

    /// Whether there is still a client to wait for.
    pub fn next(&self, now: Instant) -> Next {
        if self.exit_at.is_some_and(|until| until <= now) { Next::End } else { Next::Continue }
    }

    /// How long the loop may sleep.
    pub fn timeout_ms(&self) -> i32 {
        self.exit_at.map_or(-1, |until| {
            let left: Duration = until.saturating_duration_since(Instant::now());
            i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
        })
    }
}
