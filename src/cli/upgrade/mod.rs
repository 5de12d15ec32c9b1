// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `ch-remote upgrade`: another program takes the place of the VMM under a guest that runs.
//!
//! ```text
//! look   at the old process and its VM           refused here: nothing was started
//! probe  the program: its version
//! start  it, beside the sockets of the old one   a failure from here on ends it, and removes what it has made
//! move   the VM by local=on
//!        the new process renames its sockets over the old ones and answers
//! end    of the old process
//! ```
//!
//! Owns the order of these steps, and where the guest is after a failure of each: in the old process until the migration
//! has handed it over, which the two VMMs decide between them. It must never end a process that may have the guest.

mod fit;
mod predecessor;
mod process;
mod successor;
mod surroundings;

use std::io::{IsTerminal as _, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thiserror::Error;
use vmm::api::client::{Client, ClientError, OpenClient};
use vmm::api::endpoints::Method;
use vmm::api::successor::beside;

use super::exit;
use fit::NotFit;
use predecessor::{Predecessor, PredecessorError};
use successor::{Start, Successor, SuccessorError};
use surroundings::{Surroundings, SurroundingsError};

/// Default of `--timeout-ms`: a process starts within a fraction of a second, on a busy host as well.
pub const TIMEOUT_MS: &str = "30000";

/// Longest path of a socket, in bytes (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;

/// Time between two questions whether a process that was just started, or told to end, has come so far.
const POLL: Duration = Duration::from_millis(2);

/// Time between two questions whether a VM that moves is back. That it has arrived is told without a question.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Time that the old VMM has to say where the guest is when the time is over.
const VERDICT_TIME: Duration = Duration::from_secs(20);

/// Time that the old process has to end: it waits for clients that have not read the end of the migration.
const END_TIME: Duration = Duration::from_secs(15);

/// Arguments of the command.
#[derive(Clone, Debug)]
pub struct UpgradeArgs {
    /// The program.
    pub binary: PathBuf,
    /// Time limit of the whole.
    pub timeout: Duration,
}

/// Why the VM is in no new process.
#[derive(Debug, Error)]
pub enum UpgradeError {
    /// Nothing was started.
    #[error("the VM cannot be upgraded, and goes on as it was")]
    Refused(#[source] Refusal),
    /// The new process has been ended.
    #[error("the upgrade failed, and the VM goes on in process {pid}, at the same socket")]
    Stays {
        /// The old process.
        pid: i32,
        /// The cause.
        #[source]
        source: StepError,
    },
    /// The VMMs do not say where the guest is.
    #[error(
        "where the VM is has to be looked at: it was being handed from process {old} to process {new} (docs/migration.md, \
         In doubt)"
    )]
    Unclear {
        /// The old process.
        old: i32,
        /// The new one.
        new: u32,
        /// The cause.
        #[source]
        source: StepError,
    },
    /// The guest has moved, and a path has not.
    #[error("the VM runs in process {pid}, which does not have the socket")]
    Elsewhere {
        /// The new process.
        pid: u32,
        /// The cause.
        #[source]
        source: ClientError,
    },
}

/// Why nothing was started.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The VMM does not answer.
    #[error("its VMM cannot be asked")]
    Ask(#[source] ClientError),
    /// An answer cannot be read.
    #[error("the answer of its VMM cannot be read")]
    Answer(#[source] serde_json::Error),
    /// The socket's path.
    #[error("the socket '{path}' cannot be found")]
    Path {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// No socket fits beside the old one.
    #[error("the path of the socket is too long by {bytes} bytes for another one beside it")]
    LongPath {
        /// How much.
        bytes: usize,
    },
    /// A terminal belongs to the session of the old process.
    #[error(
        "its console is at the terminal of the old process, which the new one cannot have: use another kind of console"
    )]
    Terminal,
    /// No name for the sockets of the new process.
    #[error("no number can be had from /dev/urandom")]
    Random(#[source] std::io::Error),
    /// The process at the other end cannot be seen.
    #[error("the process of the VMM is in another PID namespace: ch-remote has to run there, too")]
    Unseen,
    /// The VM.
    #[error(transparent)]
    Vm(#[from] NotFit),
    /// The process.
    #[error(transparent)]
    Process(#[from] PredecessorError),
    /// What the process has.
    #[error(transparent)]
    Surroundings(#[from] SurroundingsError),
}

/// What failed after that.
#[derive(Debug, Error)]
pub enum StepError {
    /// The new process.
    #[error(transparent)]
    Successor(#[from] SuccessorError),
    /// The new process refuses to receive the VM.
    #[error("the new process does not receive the VM")]
    Receive(#[source] ClientError),
    /// The old process refuses to send it.
    #[error("the old process does not send the VM")]
    Send(#[source] ClientError),
    /// The migration failed.
    #[error("the VM could not be handed over: {0}")]
    Migration(String),
    /// It took too long.
    #[error("it took longer than {ms} ms (--timeout-ms)")]
    TimeOver {
        /// The limit.
        ms: u128,
    },
}

impl UpgradeError {
    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unclear { .. } | Self::Elsewhere { .. } => exit::LOOK,
            Self::Refused(_) | Self::Stays { .. } => exit::FAILED,
        }
    }
}

fn parse(text: Option<&str>) -> Result<Value, Refusal> {
    serde_json::from_str(text.unwrap_or("null")).map_err(Refusal::Answer)
}

/// A number that no other user can foresee.
fn random() -> std::io::Result<u32> {
    let mut bytes = [0; 4];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Gives a socket the mode, user and group of another one, which an operator may have changed.
fn same_rights(of: &Path, to: &Path) -> std::io::Result<()> {
    let there = std::fs::symlink_metadata(of)?;
    // Of the file itself, whatever comes to be at the path.
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let file = std::fs::File::options().read(true).custom_flags(flags).open(to)?;
    let here = file.metadata()?;
    if !here.file_type().is_socket() || !there.file_type().is_socket() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    if (here.uid(), here.gid()) != (there.uid(), there.gid()) {
        std::os::unix::fs::chown(&path, Some(there.uid()), Some(there.gid()))?;
    }
    std::fs::set_permissions(&path, there.permissions())
}

/// What is known before anything is started.
struct Plan {
    /// The old VMM, whatever becomes of its socket.
    old: OpenClient,
    predecessor: Predecessor,
    surroundings: Surroundings,
    /// Path of its socket from here.
    seen: PathBuf,
    /// The same as the process sees it.
    own: PathBuf,
    metrics: Option<PathBuf>,
    arguments: Vec<std::ffi::OsString>,
    version: Value,
    suffix: String,
    /// For the operator.
    notes: Vec<String>,
}

impl Plan {
    fn make(client: &Client, socket: &Path) -> Result<Self, Refusal> {
        let failed = |source| Refusal::Path { path: socket.to_owned(), source };
        let seen = socket.canonicalize().map_err(failed)?;
        let mut old = client.open().map_err(Refusal::Ask)?;
        let ping = old.ask(Method::Get, "vmm.ping", None).map_err(Refusal::Ask)?;
        let version = parse(ping.as_deref())?["build_version"].take();
        let info = old.ask(Method::Get, "vm.info", None).map_err(Refusal::Ask)?;
        let info = parse(info.as_deref())?;
        fit::check(&info)?;
        let pid = old.peer_pid().filter(|pid| *pid > 0).ok_or(Refusal::Unseen)?;
        let predecessor = Predecessor::of(pid)?;
        let own = predecessor.socket(&seen)?;
        let metrics = predecessor.metrics()?;
        let arguments = predecessor.arguments(&own)?;
        let surroundings = Surroundings::of(pid, predecessor.directory())?;
        if fit::is_at_terminal(&info)
            && predecessor.descriptor(0).is_some_and(|input| input.is_terminal())
        {
            return Err(Refusal::Terminal);
        }
        let suffix = format!(".{}-{:08x}", std::process::id(), random().map_err(Refusal::Random)?);
        let longest = [Some(&seen), Some(&own), metrics.as_ref()];
        let longest = longest.into_iter().flatten().map(|path| path.as_os_str().len()).max();
        // That of the migration is longer by a letter.
        let bytes = longest.unwrap_or(0) + suffix.len() + 1;
        match bytes.checked_sub(SOCKET_PATH_BYTES) {
            None | Some(0) => {}
            Some(bytes) => return Err(Refusal::LongPath { bytes }),
        }
        let notes = surroundings.note.iter().cloned().collect();
        Ok(Self {
            old,
            predecessor,
            surroundings,
            seen,
            own,
            metrics,
            arguments,
            version,
            suffix,
            notes,
        })
    }

    /// Gives the sockets beside those of the old process the same rights; what cannot be done is said.
    fn give_rights(&mut self) {
        for path in [Some(&self.seen), self.metrics.as_ref()].into_iter().flatten() {
            if let Err(error) = same_rights(path, &beside(path, &self.suffix)) {
                let note = format!("'{}' has other rights than before: {error}", path.display());
                self.notes.push(note);
            }
        }
    }

    /// What the new process may leave, as far as it can be seen from here.
    fn files(&self) -> Vec<PathBuf> {
        let api = beside(&self.seen, &self.suffix);
        let migration = beside(&self.seen, &format!("{}m", self.suffix));
        let metrics = self.metrics.as_ref().map(|path| beside(path, &self.suffix));
        [api, migration].into_iter().chain(metrics).collect()
    }
}

/// How the VM's move has come out.
enum Moved {
    /// The guest is in the new process.
    Here,
    /// It is in the old one.
    There(StepError),
    /// It is not known.
    Unclear(StepError),
}

/// What the old process says.
enum Old {
    HasTheGuest,
    /// It moves, or nothing is said of it.
    Busy,
    /// The connection has ended.
    Gone,
}

/// A VM that moves.
struct Move<'a> {
    old: &'a mut OpenClient,
    successor: &'a mut Successor,
    /// The answer of the new process, when the VM has arrived or does not.
    arrival: Receiver<Result<(), ClientError>>,
    until: Instant,
    timeout: Duration,
}

impl Move<'_> {
    /// What the old VMM says of the migration that failed.
    fn reason(&mut self) -> Option<String> {
        let answer = self.old.ask(Method::Get, "vm.migration-progress", None).ok()?;
        let progress = parse(answer.as_deref()).ok()?;
        let chain = progress["error"]["chain"].as_array()?;
        let chain: Vec<_> = chain.iter().filter_map(Value::as_str).collect();
        (!chain.is_empty()).then(|| chain.join(": "))
    }

    /// Where the guest is by what the old process says. Reading the progress would be reading the end, after which that no
    /// longer waits for clients.
    fn look(&mut self) -> Old {
        let answer = match self.old.ask(Method::Get, "vm.info", None) {
            Ok(answer) => answer,
            Err(ClientError::Refused { .. }) => return Old::Busy,
            Err(_) => return Old::Gone,
        };
        let info = parse(answer.as_deref()).unwrap_or_default();
        let is_back =
            info["state"].is_string() && info["doing"].is_null() && info["in_doubt"].is_null();
        if is_back { Old::HasTheGuest } else { Old::Busy }
    }

    /// The guest is in the old process. What the new one said comes with it, if it said anything.
    fn there(&mut self, otherwise: StepError) -> Moved {
        Moved::There(self.reason().map_or(otherwise, StepError::Migration))
    }

    fn follow(&mut self) -> Moved {
        let mut failure = None;
        loop {
            match self.arrival.recv_timeout(LOOK_EVERY) {
                Ok(Ok(())) => return Moved::Here,
                Ok(Err(error)) => failure = Some(StepError::Receive(error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK_EVERY),
            }
            match self.look() {
                Old::HasTheGuest => {
                    let ended = self.successor.check().err().map(StepError::Successor);
                    let why = failure.or(ended);
                    return self.there(why.unwrap_or_else(|| StepError::Migration(String::new())));
                }
                Old::Gone => {
                    // Neither process says more than this.
                    if let Some(failure) = failure.take() {
                        return Moved::Unclear(failure);
                    }
                }
                Old::Busy => {}
            }
            if Instant::now() >= self.until {
                let late = StepError::TimeOver { ms: self.timeout.as_millis() };
                return self.end_late(failure.unwrap_or(late));
            }
        }
    }

    /// Cancels the move, which is answered when it is known where the guest is.
    fn end_late(&mut self, why: StepError) -> Moved {
        if self.old.ask(Method::Put, "vm.migration-cancel", None).is_ok() {
            return Moved::There(why);
        }
        // It came too late, or is not answered.
        match self.arrival.recv_timeout(VERDICT_TIME) {
            Ok(Ok(())) => Moved::Here,
            _ if matches!(self.look(), Old::HasTheGuest) => Moved::There(why),
            _ => Moved::Unclear(why),
        }
    }
}

/// Has another program take the place of the VMM; gives what is printed.
///
/// # Errors
/// [`UpgradeError`], which says where the guest is.
pub fn run(client: &Client, socket: &Path, args: &UpgradeArgs) -> Result<String, UpgradeError> {
    let until = Instant::now() + args.timeout;
    let asked = client.clone().with_limit(Some(args.timeout + VERDICT_TIME));
    let mut plan = Plan::make(&asked, socket).map_err(UpgradeError::Refused)?;
    let pid = plan.predecessor.pid;
    let stays = |source: StepError| UpgradeError::Stays { pid, source };
    let binary = std::path::absolute(&args.binary).unwrap_or_else(|_| args.binary.clone());
    let start = Start {
        binary: &binary,
        predecessor: &plan.predecessor,
        surroundings: &plan.surroundings,
        suffix: &plan.suffix,
    };
    let version = start.version(until).map_err(|error| stays(error.into()))?;
    let started = start.start(&plan.arguments, plan.files());
    let mut successor = started.map_err(|error| stays(error.into()))?;
    let beside_old = client.clone().at(beside(&plan.seen, &plan.suffix));
    let mut new =
        successor.wait_for_api(&beside_old, until).map_err(|error| stays(error.into()))?;
    let new_pid = successor.pid();
    let moved = hand_over(&mut plan, &mut successor, &beside_old, &mut new, until, args.timeout);
    match moved {
        Moved::Here => successor.may_have_the_guest(true),
        Moved::There(source) => {
            successor.may_have_the_guest(false);
            return Err(stays(source));
        }
        Moved::Unclear(source) => {
            return Err(UpgradeError::Unclear { old: pid, new: new_pid, source });
        }
    }
    let report = finish(client, &mut plan, &mut new, new_pid, &version)?;
    for note in &plan.notes {
        eprintln!("Note: {note}");
    }
    Ok(report)
}

/// Moves the VM.
fn hand_over(
    plan: &mut Plan,
    successor: &mut Successor,
    client: &Client,
    new: &mut OpenClient,
    until: Instant,
    timeout: Duration,
) -> Moved {
    let url = format!("unix:{}", beside(&plan.own, &format!("{}m", plan.suffix)).display());
    let receive = json!({"receiver_url": url}).to_string();
    let (tell, arrival) = channel();
    let receiver = client.clone().with_limit(None).open();
    let mut receiver = match receiver.map_err(StepError::Receive) {
        Ok(receiver) => receiver,
        Err(error) => return Moved::There(error),
    };
    if let Err(error) = successor.check_peer(&receiver) {
        return Moved::There(error.into());
    }
    plan.give_rights();
    let awaiting = move || {
        let answer = receiver.ask(Method::Put, "vm.receive-migration", Some(receive));
        // Its receiver is gone if the time is over.
        let _ = tell.send(answer.map(drop));
    };
    if let Err(error) = stoppable_thread::spawn("await-vm", awaiting) {
        return Moved::There(StepError::Migration(error.to_string()));
    }
    // The new process listens when there is a progress.
    while new.ask(Method::Get, "vm.migration-progress", None).is_err() {
        if let Ok(Err(error)) = arrival.recv_timeout(POLL) {
            return Moved::There(StepError::Receive(error));
        }
        if let Err(error) = successor.check() {
            return Moved::There(error.into());
        }
        if Instant::now() >= until {
            return Moved::There(SuccessorError::Silent.into());
        }
    }
    // A VMM that was asked for progress before stays until the end has been read: the socket of the new process is at its
    // path before that of the old one is removed.
    match plan.old.ask(Method::Get, "vm.migration-progress", None) {
        Ok(_) | Err(ClientError::Refused { .. }) => {}
        Err(error) => return Moved::There(StepError::Send(error)),
    }
    successor.may_have_the_guest(true);
    let send = json!({"destination_url": url, "local": true}).to_string();
    if let Err(error) = plan.old.ask(Method::Put, "vm.send-migration", Some(send)) {
        return match error {
            ClientError::Refused { .. } => Moved::There(StepError::Send(error)),
            _ => Moved::Unclear(StepError::Send(error)),
        };
    }
    Move { old: &mut plan.old, successor, arrival, until, timeout }.follow()
}

/// The guest is in the new process: looks at its socket, and waits for the end of the old one.
fn finish(
    client: &Client,
    plan: &mut Plan,
    new: &mut OpenClient,
    new_pid: u32,
    version: &str,
) -> Result<String, UpgradeError> {
    let progress = new.ask(Method::Get, "vm.migration-progress", None).ok().flatten();
    let progress = parse(progress.as_deref()).unwrap_or_default();
    let elsewhere = |source| UpgradeError::Elsewhere { pid: new_pid, source };
    let there = client.clone().with_limit(Some(END_TIME)).open().map_err(elsewhere)?;
    if there.peer_pid().and_then(|pid| u32::try_from(pid).ok()) != Some(new_pid) {
        let source = std::io::Error::other("another process listens there");
        let path = plan.seen.clone();
        return Err(elsewhere(ClientError::Connect { path, source }));
    }
    // The end has been read when the old process says so, or has ended.
    let until = Instant::now() + END_TIME;
    let mut downtime_us = Value::Null;
    while Instant::now() < until {
        let Ok(answer) = plan.old.ask(Method::Get, "vm.migration-progress", None) else { break };
        let progress = parse(answer.as_deref()).unwrap_or_default();
        downtime_us = progress["downtime_us"].clone();
        if progress["phase"] == "done" {
            break;
        }
        std::thread::sleep(POLL);
    }
    if downtime_us.is_null() {
        downtime_us = progress["downtime_us"].clone();
    }
    if !plan.predecessor.has_ended(until.saturating_duration_since(Instant::now())) {
        eprintln!("Note: the old process {} has not ended yet", plan.predecessor.pid);
    }
    let report = json!({
        "pid": new_pid,
        "version": version,
        "old_pid": plan.predecessor.pid,
        "old_version": plan.version,
        "downtime_us": downtime_us,
    });
    Ok(report.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_where_the_guest_is() {
        let late = || StepError::TimeOver { ms: 7 };
        let stays = UpgradeError::Stays { pid: 12, source: late() };
        let text = error_text::chain(&stays);
        assert_eq!(stays.exit_code(), exit::FAILED);
        assert!(text.contains("goes on in process 12") && text.contains("7 ms"), "{text}");
        let unclear = UpgradeError::Unclear { old: 12, new: 34, source: late() };
        assert_eq!(unclear.exit_code(), exit::LOOK);
        let refused = UpgradeError::Refused(NotFit::Private("mem0".to_owned()).into());
        let text = error_text::chain(&refused);
        assert!(text.contains("goes on as it was: memory zone 'mem0'"), "{text}");
    }
}
