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
use crate::api::watchers::Watchers;
use crate::api::{ApiCall, ApiError, ApiErrorKind, ApiReply, VmmPingResponse, VmmRequest};
use crate::control::{WATCHER_TIME, exit_time, recover_request};
use crate::events;
use crate::metrics::{VmReading, states};

/// Time that a client which follows a migration needs to switch from the VMM to the page server: a few
/// polls of ch-remote.
const ARRIVAL_TIME: Duration = Duration::from_millis(500);

/// Next action of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Wait for the next event.
    Continue,
    /// End the process.
    End,
}

/// Answers the API requests of a page server.
pub struct PageServerApi {
    progress: Arc<Progress>,
    steering: Steering,
    /// Clients that follow it on a connection that they keep.
    watchers: Watchers,
    /// When a client last requested the progress.
    watched_at: Option<Instant>,
    /// When a client first read the end.
    seen_at: Option<Instant>,
    /// Requests to discard the pages, answered once that is done.
    abandoners: Vec<Responder>,
    /// When the process exits at the latest, once all pages are served and clients have had time to read that.
    exit_at: Option<Instant>,
}

fn conflict(text: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Conflict, text)
}

impl PageServerApi {
    /// No requests yet.
    pub fn new(progress: Arc<Progress>, steering: Steering, watchers: Watchers) -> Self {
        let (watched_at, seen_at, exit_at) = (None, None, None);
        let abandoners = Vec::new();
        Self { progress, steering, watchers, watched_at, seen_at, abandoners, exit_at }
    }

    /// Answers a request, or keeps it until it can be answered.
    pub fn call(&mut self, call: ApiCall) {
        let (request, responder) = call.into_parts();
        log::debug!("request {}", responder.name());
        let answer = match request {
            VmmRequest::Ping => Ok(ApiReply::Ping(VmmPingResponse::default())),
            VmmRequest::MigrationProgress => Ok(self.show_progress()),
            // What else there is to show, any thread can read.
            VmmRequest::Metrics => Ok(ApiReply::Metrics(Box::new(VmReading {
                state: states::MIGRATED,
                ..VmReading::default()
            }))),
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
            // A client that has read the end needs no more time.
            self.watched_at = None;
            self.seen_at.get_or_insert_with(Instant::now);
        } else {
            self.watched_at = Some(Instant::now());
        }
        ApiReply::Progress(Box::new(snapshot))
    }

    fn abandon(&mut self, responder: Responder) {
        match self.progress.phase() {
            Phase::Idle => responder.answer(Err(conflict(
                "the page server has not taken over yet; cancel the migration at the VMM",
            ))),
            Phase::Done => responder.answer(Ok(ApiReply::Empty)),
            _ => {
                log::warn!("told to discard pages that a migrated VM needs: it is lost");
                self.abandoners.push(responder);
                self.steering.abandon();
            }
        }
    }

    /// Handles that the destination has all pages.
    pub fn served(&mut self, now: Instant) {
        let asked = self.watched_at.is_some_and(|at| now.duration_since(at) < WATCHER_TIME);
        let watched = asked || self.watchers.count() > 0;
        // A client that the VMM has referred to the page server may be about to connect.
        self.exit_at = Some(now + if watched { WATCHER_TIME } else { ARRIVAL_TIME });
        for responder in self.abandoners.drain(..) {
            responder.answer(Ok(ApiReply::Empty));
        }
    }

    /// Handles the end of serving on request, or because of `error`.
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

    /// Whether the process can end.
    pub fn next(&self, now: Instant) -> Next {
        if self.exit_due().is_some_and(|until| until <= now) { Next::End } else { Next::Continue }
    }

    fn exit_due(&self) -> Option<Instant> {
        Some(exit_time(self.exit_at?, self.seen_at, self.watchers.count()))
    }

    /// Timeout of the loop's poll.
    pub fn timeout_ms(&self) -> i32 {
        self.exit_due().map_or(-1, |until| {
            let left: Duration = until.saturating_duration_since(Instant::now());
            i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
        })
    }
}
