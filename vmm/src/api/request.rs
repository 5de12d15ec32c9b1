// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The messages between the HTTP server (or `main`) and the VMM thread.
//!
//! Owns the closed set of requests, answers and errors, and the queue with its event descriptor.
//! A request is answered exactly once; one that is dropped unanswered answers itself with an
//! error, so that no client waits forever. It must never know HTTP beyond one table of status codes.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use tokio::sync::oneshot;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::types::{
    MigrationCancelled, MigrationCheck, MigrationReport, PciDeviceInfo, ProgressDocument,
    VmCounters, VmInfo, VmmPingResponse,
};
use super::watchers::Watchers;
use crate::config::{
    MigrationRecoverData, NewDevice, ReceiveMigrationData, RestoreConfig, SendMigrationData,
    VmConfig, VmCoredumpData, VmRemoveDevice, VmResize, VmResizeDisk, VmResizeZone,
    VmSnapshotConfig,
};
use crate::metrics::{Hub, VmReading};

/// A request to the VMM.
#[derive(Debug)]
pub enum VmmRequest {
    /// Check that the VMM responds.
    Ping,
    /// Create a VM with this (complete) configuration.
    Create(Box<VmConfig>),
    /// Start the guest.
    Boot,
    /// Return configuration and state.
    Info,
    /// Return the counters of the devices.
    Counters,
    /// Return what a scrape shows of the VM.
    Metrics,
    /// Stop the vCPUs.
    Pause,
    /// Resume the vCPUs.
    Resume {
        /// Also if the VM may run at the destination of a migration.
        force: bool,
    },
    /// Shut the guest down and keep the configuration.
    Shutdown,
    /// Reboot the guest.
    Reboot,
    /// Press the power button.
    PowerButton,
    /// Send a non-maskable interrupt to each vCPU.
    Nmi,
    /// Delete the VM.
    Delete {
        /// Also while a migrated VM still needs pages from this process, or may not run elsewhere.
        force: bool,
    },
    /// Add a device.
    AddDevice(Box<NewDevice>),
    /// Ask the guest to eject a device.
    RemoveDevice(VmRemoveDevice),
    /// Change the size of the VM.
    Resize(Box<VmResize>),
    /// Change the size of a memory zone.
    ResizeZone(VmResizeZone),
    /// `vm.resize-disk`.
    ResizeDisk(VmResizeDisk),
    /// Start migrating the VM; answered once the migration has started.
    SendMigration(Box<SendMigrationData>),
    /// Check a migration of the VM, which moves nothing; answered when that is over.
    MigrateCheck(Box<SendMigrationData>),
    /// Receive a VM; answered when it has arrived.
    ReceiveMigration(Box<ReceiveMigrationData>),
    /// Return the progress of the migration.
    MigrationProgress,
    /// Return the report of the migration.
    MigrationReport,
    /// Cancel the migration; answered when it has ended.
    MigrationCancel,
    /// Switch the migration to postcopy.
    MigrationStartPostcopy,
    /// Re-establish the connections of a postcopy migration.
    MigrationRecover(Box<MigrationRecoverData>),
    /// Save the paused VM; answered when the snapshot is complete.
    Snapshot(Box<VmSnapshotConfig>),
    /// Dump the paused VM's memory for debuggers; answered when the file is complete.
    CoreDump(Box<VmCoredumpData>),
    /// Cancel the snapshot or core dump being written; answered when the VM is paused as before.
    SnapshotCancel,
    /// Restore a VM; answered when it is restored.
    Restore(Box<RestoreConfig>),
    /// End the process.
    VmmShutdown {
        /// Also while a migrated VM still needs pages from this process.
        force: bool,
    },
}

/// An answer of the VMM.
#[derive(Debug)]
pub enum ApiReply {
    /// Done.
    Empty,
    /// To [`VmmRequest::Ping`].
    Ping(VmmPingResponse),
    /// To [`VmmRequest::Info`].
    Info(Box<VmInfo>),
    /// To [`VmmRequest::Counters`].
    Counters(VmCounters),
    /// To [`VmmRequest::Metrics`].
    Metrics(Box<VmReading>),
    /// To [`VmmRequest::MigrationProgress`].
    Progress(Box<ProgressDocument>),
    /// To [`VmmRequest::MigrationReport`].
    Report(Box<MigrationReport>),
    /// To [`VmmRequest::AddDevice`] while the guest runs.
    Device(PciDeviceInfo),
    /// To [`VmmRequest::MigrateCheck`].
    Check(Box<MigrationCheck>),
    /// To [`VmmRequest::MigrationCancel`].
    Cancelled(MigrationCancelled),
}

/// The kind of a failure, from which the HTTP status follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiErrorKind {
    /// The request is malformed.
    BadRequest,
    /// The configuration is invalid.
    BadConfig,
    /// There is no VM.
    NotCreated,
    /// There is no device or zone of that name.
    NotFound,
    /// The VM is not in the running state that the request needs.
    NotBooted,
    /// A VM exists already.
    AlreadyCreated,
    /// An operation in progress, such as a migration, excludes this one.
    Conflict,
    /// Another operation is in progress; the same request may succeed later.
    NotNow,
    /// The operation failed.
    Failed,
}

impl ApiErrorKind {
    /// The HTTP status; the only place that maps errors to one.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::BadRequest | Self::BadConfig => 400,
            Self::NotCreated | Self::NotFound => 404,
            Self::NotBooted => 405,
            Self::AlreadyCreated | Self::Conflict => 409,
            Self::NotNow => 429,
            Self::Failed => 500,
        }
    }
}

/// An error with its whole chain of causes, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The kind of the failure.
    pub kind: ApiErrorKind,
    /// One sentence per layer.
    pub chain: Vec<String>,
}

impl ApiError {
    /// A failure with one sentence.
    pub fn new(kind: ApiErrorKind, message: impl Into<String>) -> Self {
        Self { kind, chain: vec![message.into()] }
    }

    /// A failure from an error and its chain of sources.
    pub fn from_error(kind: ApiErrorKind, error: &dyn std::error::Error) -> Self {
        Self { kind, chain: error_text::sentences(error) }
    }

    /// Prepends a sentence to the chain.
    #[must_use]
    pub fn context(mut self, message: impl Into<String>) -> Self {
        self.chain.insert(0, message.into());
        self
    }

    /// The failure of a request that needs a VM.
    pub fn not_created() -> Self {
        Self::new(ApiErrorKind::NotCreated, "there is no VM, create one first")
    }

    /// The failure of a request that needs a booted VM.
    pub fn not_booted() -> Self {
        Self::new(ApiErrorKind::NotBooted, "the VM is not running, boot it first")
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.chain.join(": "))
    }
}

impl std::error::Error for ApiError {}

/// The answer to a request.
pub type ApiResult = Result<ApiReply, ApiError>;

/// A request and the obligation to answer it.
#[derive(Debug)]
pub struct ApiCall {
    request: VmmRequest,
    responder: Responder,
}

impl ApiCall {
    /// Reassembles a call from its parts.
    pub fn new(request: VmmRequest, responder: Responder) -> Self {
        Self { request, responder }
    }

    /// The request.
    pub fn request(&self) -> &VmmRequest {
        &self.request
    }

    /// Whether the client has disconnected before the answer.
    pub fn is_abandoned(&self) -> bool {
        self.responder.is_abandoned()
    }

    /// Splits the call; the responder may outlive the request, so that another thread can answer a long one
    /// later.
    pub fn into_parts(self) -> (VmmRequest, Responder) {
        (self.request, self.responder)
    }
}

/// The obligation to answer a request, once.
#[derive(Debug)]
pub struct Responder {
    name: &'static str,
    reply: Option<oneshot::Sender<ApiResult>>,
}

impl Responder {
    /// Name of the request as in the HTTP path, for logs.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether the client has disconnected.
    pub fn is_abandoned(&self) -> bool {
        self.reply.as_ref().is_some_and(oneshot::Sender::is_closed)
    }

    /// Sends the answer. A client that has disconnected is not an error.
    pub fn answer(mut self, result: ApiResult) {
        if let Err(error) = &result {
            log::warn!("{} failed: {error}", self.name);
        }
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(result);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(Err(gone()));
        }
    }
}

fn gone() -> ApiError {
    ApiError::new(ApiErrorKind::Failed, "the VMM ended before it answered")
}

/// The requesting end of the queue; cheap to clone.
#[derive(Clone)]
pub struct ApiHandle {
    calls: Sender<ApiCall>,
    event: Arc<EventFd>,
    hub: Arc<Hub>,
    watchers: Watchers,
}

impl fmt::Debug for ApiHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiHandle")
    }
}

impl ApiHandle {
    /// What scrapes show without the VMM thread.
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    /// Clients that follow a migration on a connection that they keep.
    pub fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    /// Puts a request into the queue and wakes the VMM thread.
    ///
    /// # Errors
    /// The VMM thread is gone.
    fn submit(
        &self,
        name: &'static str,
        request: VmmRequest,
    ) -> Result<oneshot::Receiver<ApiResult>, ApiError> {
        let (reply, answer) = oneshot::channel();
        let responder = Responder { name, reply: Some(reply) };
        self.calls.send(ApiCall { request, responder }).map_err(|_| gone())?;
        // A saturated counter wakes the thread as well; no other failure is possible.
        let _ = self.event.write(1);
        Ok(answer)
    }

    /// Sends a request and awaits the answer without blocking the thread. `name` is the path of the
    /// endpoint.
    ///
    /// # Errors
    /// The error of the VMM, or that its thread has ended.
    pub async fn ask(&self, name: &'static str, request: VmmRequest) -> ApiResult {
        self.submit(name, request)?.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Sends a request and blocks until the answer; must not be called on the VMM thread or the HTTP
    /// thread.
    ///
    /// # Errors
    /// The error of the VMM, or that its thread has ended.
    pub fn ask_blocking(&self, name: &'static str, request: VmmRequest) -> ApiResult {
        self.submit(name, request)?.blocking_recv().unwrap_or_else(|_| Err(gone()))
    }
}

/// The answering end of the queue, for the event loop of the VMM thread.
#[derive(Debug)]
pub struct ApiQueue {
    calls: Receiver<ApiCall>,
    event: Arc<EventFd>,
    hub: Arc<Hub>,
    watchers: Watchers,
}

impl ApiQueue {
    /// The same as of its handles.
    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// The same as of its handles.
    pub fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    /// Readable while there may be calls; never blocks when read.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The next call, if any. Call [`ApiQueue::clear`] *before* taking calls, or a wake-up is lost.
    pub fn take(&self) -> Option<ApiCall> {
        self.calls.try_recv().ok()
    }

    /// Blocks until a call arrives, for tests without an event loop; `None` if no sender is left.
    #[cfg(test)]
    pub(super) fn wait(&self) -> Option<ApiCall> {
        self.calls.recv().ok()
    }

    /// Makes the event unreadable.
    pub fn clear(&self) {
        // WouldBlock: it was clear already.
        let _ = self.event.read();
    }
}

/// A call without a queue, and where its answer comes.
#[cfg(test)]
pub fn call_for_tests(
    name: &'static str,
    request: VmmRequest,
) -> (ApiCall, oneshot::Receiver<ApiResult>) {
    let (reply, answer) = oneshot::channel();
    (ApiCall { request, responder: Responder { name, reply: Some(reply) } }, answer)
}

/// Makes the two ends of the queue.
///
/// # Errors
/// The event descriptor cannot be created.
pub fn channel() -> std::io::Result<(ApiHandle, ApiQueue)> {
    let event = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    let (sender, receiver) = std::sync::mpsc::channel();
    let hub = Arc::<Hub>::default();
    let watchers = Watchers::new(&event);
    let handle = ApiHandle {
        calls: sender,
        event: Arc::clone(&event),
        hub: Arc::clone(&hub),
        watchers: watchers.clone(),
    };
    Ok((handle, ApiQueue { calls: receiver, event, hub, watchers }))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn a_dropped_call_answers_itself() {
        let (handle, queue) = channel().unwrap();
        let asker = std::thread::spawn(move || handle.ask_blocking("vm.boot", VmmRequest::Boot));
        loop {
            if let Some(call) = queue.take() {
                drop(call);
                break;
            }
            std::thread::yield_now();
        }
        assert_eq!(asker.join().unwrap().unwrap_err(), gone());
    }

    #[test]
    fn without_a_vmm_thread_asking_fails() {
        let (handle, queue) = channel().unwrap();
        drop(queue);
        assert_eq!(handle.ask_blocking("vmm.ping", VmmRequest::Ping).unwrap_err(), gone());
    }

    #[test]
    fn the_event_is_readable_while_a_call_waits() {
        let (handle, queue) = channel().unwrap();
        assert!(queue.event().read().is_err());
        let _answer = handle.submit("vm.info", VmmRequest::Info).unwrap();
        assert_eq!(queue.event().read().unwrap(), 1);
        assert!(matches!(queue.take().unwrap().into_parts().0, VmmRequest::Info));
        assert!(queue.take().is_none());
    }

    #[test]
    fn chains_keep_every_layer() {
        let error = crate::config::VmParams {
            disks: vec!["x".into()],
            ..crate::config::VmParams::default()
        }
        .into_config()
        .unwrap_err();
        let error = ApiError::from_error(ApiErrorKind::BadConfig, &error).context("vm.create");
        assert_eq!(error.chain.len(), 3);
        assert!(error.to_string().starts_with("vm.create: --disk cannot be read: 'x'"));
    }
}
