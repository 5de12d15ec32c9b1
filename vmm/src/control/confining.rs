// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Confining the process to the paths of its VM, before the VM is built.
//!
//! Owns the way of a set of paths between the thread that builds the machine, which knows its configuration first, and
//! the VMM thread, from which all later threads come: both are confined before anything of the configuration is opened,
//! so before the guest runs. A machine that is built anew after a reset has what its VM has had.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::Vmm;
use super::inbox::{InboxSender, Message};
use super::successor::Successor;
use crate::config::VmConfig;
use crate::sandbox::PathRule;
use crate::sandbox::landlock::{Confinement, LandlockError, PathSet};

/// For the VMM thread to answer. It waits for other threads at times, and for none longer than this.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// What confines a thread that builds a machine, and the process with it.
pub struct Confiner {
    /// What the thread has inherited.
    confinement: Confinement,
    api_socket: Option<PathBuf>,
    of_request: Vec<PathRule>,
    inbox_sender: InboxSender,
}

/// A set of paths for the VMM thread.
pub struct ConfineRequest {
    set: Arc<PathSet>,
    answer: Sender<Result<(), LandlockError>>,
    turn: Arc<Turn>,
}

/// Which of the two threads comes first: the VMM thread, which applies a set, or the other, which no longer waits
/// for that. A set is never applied for a VM that has been refused.
#[derive(Debug, Default)]
struct Turn(AtomicBool);

impl Turn {
    /// True for the first thread that asks.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

impl Confiner {
    /// With rules for what the request names by which the VM comes.
    #[must_use]
    pub fn with(mut self, rules: impl IntoIterator<Item = PathRule>) -> Self {
        self.of_request.extend(rules);
        self
    }

    /// Confines the calling thread and the VMM thread, if the VM is to be confined and they are not yet.
    ///
    /// # Errors
    /// [`LandlockError`]; the VM must not be built.
    pub fn confine(&self, config: &VmConfig) -> Result<(), LandlockError> {
        if !config.landlock_enable {
            return Ok(());
        }
        let (socket, rules) = (self.api_socket.as_deref(), self.of_request.clone());
        let Some(set) = PathSet::of(config, socket, rules, &self.confinement)? else {
            return Ok(());
        };
        let set = Arc::new(set);
        let (answer, answered) = channel();
        let turn = Arc::new(Turn::default());
        let request = ConfineRequest { set: Arc::clone(&set), answer, turn: Arc::clone(&turn) };
        self.inbox_sender.send(Message::Confine(request));
        let confined = match answered.recv_timeout(ANSWER_TIME) {
            Ok(confined) => confined,
            // A VMM thread that ends takes no message any more.
            Err(_) if turn.take() => return Err(LandlockError::NoVmmThread),
            // It is applying the set.
            Err(_) => answered.recv().map_err(|_| LandlockError::NoVmmThread)?,
        };
        confined?;
        set.confine_thread()?;
        log::info!("Landlock confines this process to the paths of its VM");
        Ok(())
    }
}

impl Vmm {
    /// For a thread that is about to be started.
    pub(super) fn confiner(&self) -> Confiner {
        Confiner {
            confinement: self.confinement.clone(),
            api_socket: self.api_path.clone(),
            of_request: self.successor.iter().flat_map(Successor::rules).collect(),
            inbox_sender: self.inbox_sender.clone(),
        }
    }

    /// A thread that builds a machine knows what its VM may use.
    pub(super) fn confine(&mut self, request: ConfineRequest) {
        let ConfineRequest { set, answer, turn } = request;
        if !turn.take() {
            return;
        }
        let confined = set.confine_thread();
        if confined.is_ok() {
            self.confinement.note(&set);
        }
        // The thread may have ended.
        let _ = answer.send(confined);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs;
    use std::thread;

    use super::*;
    use crate::control::inbox::Inbox;

    fn confiner(inbox_sender: InboxSender) -> Confiner {
        let confinement = Confinement::default();
        Confiner { confinement, api_socket: None, of_request: Vec::new(), inbox_sender }
    }

    fn config(landlock_enable: bool) -> VmConfig {
        VmConfig { landlock_enable, ..VmConfig::default() }
    }

    #[test]
    fn both_threads_are_confined_before_the_machine_is_built() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        let file_of_main = file.clone();
        let (inbox_sender, inbox) = Inbox::new().unwrap();
        let main = thread::spawn(move || {
            let request = loop {
                match inbox.take() {
                    Some(Message::Confine(request)) => break request,
                    Some(_) => unreachable!("nothing else is sent"),
                    None => thread::yield_now(),
                }
            };
            let ConfineRequest { set, answer, turn } = request;
            assert!(turn.take(), "the other thread waits");
            answer.send(set.confine_thread()).unwrap();
            fs::read(file_of_main).is_err()
        });
        let builder = thread::spawn(move || {
            confiner(inbox_sender).confine(&config(true)).unwrap();
            fs::read(file).is_err()
        });
        assert!(builder.join().unwrap(), "the thread that builds the machine");
        assert!(main.join().unwrap(), "the VMM thread");
    }

    #[test]
    fn without_the_vmm_thread_no_machine_is_built() {
        let (inbox_sender, inbox) = Inbox::new().unwrap();
        drop(inbox);
        let free = thread::spawn(move || {
            let confiner = confiner(inbox_sender);
            confiner.confine(&config(false)).unwrap();
            let error = confiner.confine(&config(true)).unwrap_err();
            assert!(matches!(error, LandlockError::NoVmmThread), "{error}");
        });
        free.join().unwrap();
    }

    #[test]
    fn a_set_is_applied_or_given_up_and_never_both() {
        let turn = Turn::default();
        assert!(turn.take() && !turn.take());
    }
}
