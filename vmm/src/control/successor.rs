// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A process that takes the place of another one on the same host (`ch-remote upgrade`).
//!
//! Owns the moment at which it does: when the guest is here, and before the client that awaits it is told so, the sockets
//! are renamed to the paths of the other process's, and the service manager is told which process is the main one. Until
//! then the process is of use to its starter alone, and ends with it, unless the guest is on its way. It must never touch the
//! other process's sockets before the guest is here, nor end a process to which a guest may have come.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use vm_migration::Phase;

use super::{Next, VmLifecycle, Vmm};
use crate::api::successor::{NOTIFY_SOCKET, SuccessorArgs};
use crate::api::{ApiError, ApiErrorKind, SocketFile};
use crate::options::ExitReason;
use crate::panicking;
use crate::sandbox::PathRule;

/// What a successor still has to do.
pub(super) struct Successor {
    args: SuccessorArgs,
    /// The sockets, and their final paths.
    sockets: Vec<(Arc<SocketFile>, PathBuf)>,
    /// Its starter has ended.
    is_alone: bool,
}

impl Successor {
    pub(super) fn new(
        args: SuccessorArgs,
        sockets: impl IntoIterator<Item = (Arc<SocketFile>, PathBuf)>,
    ) -> Self {
        Self { args, sockets: sockets.into_iter().collect(), is_alone: false }
    }

    /// Rules for a process that is confined before it moves its sockets.
    pub(super) fn rules(&self) -> impl Iterator<Item = PathRule> {
        self.sockets.iter().map(|(_, path)| PathRule::replace_socket(path))
    }

    fn take_over(&self) -> Result<(), ApiError> {
        for (file, path) in &self.sockets {
            let before = file.path();
            file.move_to(path).map_err(|error| {
                let (from, to) = (before.display(), path.display());
                let text = format!("the socket '{from}' cannot be renamed to '{to}': {error}");
                ApiError::new(ApiErrorKind::Failed, text)
            })?;
            panicking::note_socket(path);
            panicking::forget_socket(&before);
        }
        Ok(())
    }
}

impl Vmm {
    /// What shows that the starter has ended, for polls; `None` if there is none.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub(super) fn starter(&self) -> io::Result<Option<UnixStream>> {
        self.successor.as_ref().map(|own| own.args.to_poll()).transpose()
    }

    /// Whether the end of the starter is still of interest: it has not come, and the guest has not either.
    pub(super) fn awaits_starter(&self) -> bool {
        self.successor.as_ref().is_some_and(|own| !own.is_alone)
    }

    /// The guest is here: takes the place of the process that had it.
    ///
    /// # Errors
    /// A socket stays beside its place. The guest is here all the same.
    pub(super) fn succeed(&mut self) -> Result<(), ApiError> {
        let Some(successor) = self.successor.take() else { return Ok(()) };
        // In any case: the guest is here, and a service ends with its main process.
        if let Some(socket) = std::env::var_os(NOTIFY_SOCKET)
            && let Err(error) = tell_service_manager(&socket)
        {
            log::warn!("the service manager cannot be told of its new main process: {error}");
        }
        if let Err(error) = successor.take_over() {
            log::error!("{error}");
            return Err(error.context("the VM has arrived, but this process is not where it was"));
        }
        log::info!("this process has taken the place of the one that had the VM");
        Ok(())
    }

    /// Handles a starter that may have ended.
    pub(super) fn look_at_starter(&mut self) -> Next {
        let Some(successor) = &mut self.successor else { return Next::Continue };
        if successor.is_alone || !successor.args.is_alone() {
            return Next::Continue;
        }
        successor.is_alone = true;
        if let VmLifecycle::Receiving(receiving) = &self.vm
            && matches!(receiving.progress.phase(), Phase::Idle | Phase::Listen)
        {
            receiving.cancel.cancel();
        }
        self.end_if_unneeded()
    }

    /// Ends a successor that nothing is going to come to any more.
    pub(super) fn end_if_unneeded(&self) -> Next {
        let is_alone = self.successor.as_ref().is_some_and(|own| own.is_alone);
        if is_alone && matches!(self.vm, VmLifecycle::None) {
            log::warn!("what has started this process for a VM has ended, and no VM has come");
            return Next::Exit(ExitReason::NotNeeded);
        }
        Next::Continue
    }
}

/// Has this process be the main one of its service: with `NotifyAccess=all` systemd takes that of any process of it.
fn tell_service_manager(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let kind = SocketType::DGRAM;
    let sender = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    let text = format!("MAINPID={}\n", std::process::id());
    // A manager that does not read must not hold the VMM thread up.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendto(&sender, text.as_bytes(), flags, &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    #[test]
    fn a_service_manager_is_told_of_this_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("godwit-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
        let with_path = UnixDatagram::bind(&path).unwrap();
        let without = UnixDatagram::bind_addr(&abstract_address).unwrap();
        tell_service_manager(path.as_os_str()).unwrap();
        tell_service_manager(OsStr::new(&format!("@{name}"))).unwrap();
        for manager in [with_path, without] {
            let mut text = [0; 64];
            let length = manager.recv(&mut text).unwrap();
            let expected = format!("MAINPID={}\n", std::process::id());
            assert_eq!(&text[..length], expected.as_bytes());
        }
        assert!(tell_service_manager(OsStr::new("/nonexistent/notify")).is_err());
    }
}
