// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Error and request interrupts (IRQs) of VFIO functions: the host reports a failure, or wants a device back.
//!
//! Owns a thread that waits for these interrupts, and their eventfds. Decides nothing: it calls the code that
//! started it, on that thread.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use log::warn;
use parking_lot::Mutex;
use stoppable_thread::StoppableThread;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::error::VfioError;
use super::host::{DeviceEvent, HostFunction};

/// Called with the function's id and the event; must not block.
pub type OnDeviceEvent = Box<dyn Fn(&str, DeviceEvent) + Send>;

/// Token of the event that ends the thread.
const STOP: u64 = 0;

struct Source {
    id: String,
    notice: DeviceEvent,
    event: EventFd,
}

struct Shared {
    epoll: Epoll,
    stop: EventFd,
    /// By token; locked for look-ups and for registration.
    sources: Mutex<Sources>,
}

#[derive(Default)]
struct Sources {
    last_token: u64,
    by_token: BTreeMap<u64, Source>,
}

/// Listens for events of functions until dropped.
pub struct DeviceEvents {
    shared: Arc<Shared>,
    _thread: StoppableThread,
}

fn new_event() -> io::Result<EventFd> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)
}

impl DeviceEvents {
    /// Starts the thread, with no function registered.
    ///
    /// # Errors
    /// The descriptors or the thread cannot be created.
    pub fn start(on_notice: OnDeviceEvent) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            epoll: Epoll::new()?,
            stop: new_event()?,
            sources: Mutex::default(),
        });
        let event = EpollEvent::new(EventSet::IN, STOP);
        shared.epoll.ctl(ControlOperation::Add, shared.stop.as_raw_fd(), event)?;
        let inner = Arc::clone(&shared);
        let stop = {
            let shared = Arc::clone(&shared);
            // A saturated counter wakes the thread as well.
            move || drop(shared.stop.write(1))
        };
        let body = move || inner.listen(&on_notice);
        let thread = StoppableThread::spawn("vfio-events", stop, body)?;
        Ok(Self { shared, _thread: thread })
    }

    /// Registers a function, for the events that it supports.
    ///
    /// # Errors
    /// The host refuses; earlier registrations are kept.
    pub fn watch(&self, id: &str, function: &dyn HostFunction) -> Result<(), VfioError> {
        for notice in [DeviceEvent::Failed, DeviceEvent::WantedBack] {
            let failed = |source| VfioError::Io { what: "make an eventfd for notices", source };
            let event = new_event().map_err(failed)?;
            // SAFETY: the eventfd is open for as long as `event` lives, which is beyond the call.
            let borrowed = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
            if function.connect_device_event(notice, borrowed)? {
                let source = Source { id: id.to_owned(), notice, event };
                self.shared.add(source).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Unregisters a function.
    pub fn forget(&self, id: &str) {
        let mut sources = self.shared.sources.lock();
        sources.by_token.retain(|_, source| {
            let stays = source.id != id;
            if !stays {
                let (fd, none) = (source.event.as_raw_fd(), EpollEvent::default());
                // It is closed next, so an error does not matter.
                let _ = self.shared.epoll.ctl(ControlOperation::Delete, fd, none);
            }
            stays
        });
    }
}

impl Shared {
    fn add(&self, source: Source) -> io::Result<()> {
        let mut sources = self.sources.lock();
        sources.last_token += 1;
        let token = sources.last_token;
        let event = EpollEvent::new(EventSet::IN, token);
        self.epoll.ctl(ControlOperation::Add, source.event.as_raw_fd(), event)?;
        sources.by_token.insert(token, source);
        Ok(())
    }

    fn listen(&self, on_notice: &OnDeviceEvent) {
        let mut ready = [EpollEvent::default(); 8];
        loop {
            let count = match self.epoll.wait(-1, &mut ready) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    warn!("events of passed-through devices cannot be received: {error}");
                    return;
                }
            };
            for token in ready.iter().take(count).map(EpollEvent::data) {
                if token == STOP {
                    return;
                }
                if let Some((id, notice)) = self.take(token) {
                    on_notice(&id, notice);
                }
            }
        }
    }

    /// The function and event of a token, unless it was unregistered.
    fn take(&self, token: u64) -> Option<(String, DeviceEvent)> {
        let sources = self.sources.lock();
        let source = sources.by_token.get(&token)?;
        source.event.read().ok()?;
        Some((source.id.clone(), source.notice))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::fakes::FakeFunction;
    use crate::gate::DmaGate;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn rig() -> (DeviceEvents, mpsc::Receiver<(String, DeviceEvent)>) {
        let (told, heard) = mpsc::channel();
        let on_notice =
            Box::new(move |id: &str, notice| told.send((id.to_owned(), notice)).unwrap());
        (DeviceEvents::start(on_notice).unwrap(), heard)
    }

    fn function() -> Arc<FakeFunction> {
        FakeFunction::new(FakeFunction::config(), Arc::new(DmaGate::default())).unwrap()
    }

    #[test]
    fn each_function_is_heard_by_its_name() {
        let (notices, heard) = rig();
        let (gpu, nic) = (function(), function());
        notices.watch("gpu", gpu.as_ref()).unwrap();
        notices.watch("nic", nic.as_ref()).unwrap();
        assert!(nic.tell(DeviceEvent::WantedBack));
        assert_eq!(heard.recv_timeout(PATIENCE).unwrap(), ("nic".into(), DeviceEvent::WantedBack));
        assert!(gpu.tell(DeviceEvent::Failed));
        assert_eq!(heard.recv_timeout(PATIENCE).unwrap(), ("gpu".into(), DeviceEvent::Failed));
        // The host repeats the request until it is met.
        assert!(nic.tell(DeviceEvent::WantedBack));
        assert_eq!(heard.recv_timeout(PATIENCE).unwrap(), ("nic".into(), DeviceEvent::WantedBack));
    }

    #[test]
    fn a_function_that_is_forgotten_is_not_heard() {
        let (notices, heard) = rig();
        let (gpu, nic) = (function(), function());
        notices.watch("gpu", gpu.as_ref()).unwrap();
        notices.watch("nic", nic.as_ref()).unwrap();
        notices.forget("gpu");
        gpu.tell(DeviceEvent::Failed);
        nic.tell(DeviceEvent::Failed);
        assert_eq!(heard.recv_timeout(PATIENCE).unwrap().0, "nic");
        drop(notices);
        assert!(heard.try_recv().is_err(), "and the thread has ended");
    }

    #[test]
    fn a_function_with_nothing_to_tell_is_no_failure() {
        let (notices, _heard) = rig();
        let silent = function();
        silent.be_silent();
        notices.watch("old", silent.as_ref()).unwrap();
        assert!(!silent.tell(DeviceEvent::Failed));
    }
}
