// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread on which the devices of a machine are activated.
//!
//! Owns that thread. A driver activates a device by a register, on a vCPU thread; activation starts the device's
//! threads and opens what they work with. Threads inherit what the thread that starts them may ask of the kernel, so
//! a vCPU that activated devices itself would have to be allowed all that any device needs. The transport does not
//! notice: it drives [`Activated`], which passes `activate` on to this thread and all else to the device. It must never
//! do anything but activate.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use parking_lot::{Mutex, MutexGuard};
use stoppable_thread::StoppableThread;
use virtio_queue::QueueState;

use super::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use super::worker::{Pausing, PendingPause};
use crate::LogLimit;

/// The name of the thread.
const NAME: &str = "device-start";

type SharedDevice = Arc<Mutex<Box<dyn VirtioDevice>>>;

enum Message {
    Activate {
        device: SharedDevice,
        activation: Box<Activation>,
        result: Sender<Result<(), ActivateError>>,
    },
    Stop,
}

/// The thread on which devices are activated; ends when this is dropped.
#[derive(Debug)]
pub struct ActivationThread {
    messages: Sender<Message>,
    _thread: StoppableThread,
}

impl ActivationThread {
    /// Starts it.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn start() -> io::Result<Arc<Self>> {
        let (messages, received) = channel();
        let stop = messages.clone();
        let body = move || {
            while let Ok(Message::Activate { device, activation, result }) = received.recv() {
                let activated = device.lock().activate(*activation);
                // The sender waits for it, or has ended with its process.
                let _ = result.send(activated);
            }
        };
        let stop = move || {
            // Fails for a thread that has ended.
            let _ = stop.send(Message::Stop);
        };
        Ok(Arc::new(Self { messages, _thread: StoppableThread::spawn(NAME, stop, body)? }))
    }

    /// Activates a device, and waits for that.
    fn activate(&self, device: &SharedDevice, activation: Activation) -> Result<(), ActivateError> {
        let (result, activated) = channel();
        let (device, activation) = (Arc::clone(device), Box::new(activation));
        let ended = || ActivateError::Resource {
            what: "reach the thread that activates devices",
            source: io::ErrorKind::BrokenPipe.into(),
        };
        let message = Message::Activate { device, activation, result };
        self.messages.send(message).map_err(|_| ended())?;
        activated.recv().map_err(|_| ended())?
    }
}

/// What a driver has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverEvent {
    /// The device works for it; also where a guest has arrived with its driver.
    Activated,
    /// It has reset a device that worked for it.
    Reset,
}

/// Called after each, as often as log lines may be written that a guest causes; must not block.
pub type OnDriver = Box<dyn Fn(DriverEvent) + Send>;

/// A device that is activated on the thread of its machine.
pub struct Activated {
    device: SharedDevice,
    queue_sizes_max: Vec<u16>,
    thread: Arc<ActivationThread>,
    is_active: bool,
    on_driver: OnDriver,
    told: LogLimit,
}

impl Activated {
    /// `device`, to be activated on `thread`; what its driver does is told to `on_driver`.
    pub fn on(
        thread: &Arc<ActivationThread>,
        device: Box<dyn VirtioDevice>,
        on_driver: OnDriver,
    ) -> Self {
        Self {
            queue_sizes_max: device.queue_sizes_max().to_vec(),
            device: Arc::new(Mutex::new(device)),
            thread: Arc::clone(thread),
            is_active: false,
            on_driver,
            told: LogLimit::default(),
        }
    }

    fn tell(&self, event: DriverEvent) {
        if self.told.take().is_some() {
            (self.on_driver)(event);
        }
    }

    /// The device. The transport makes one call at a time, so nothing waits here.
    fn device(&self) -> MutexGuard<'_, Box<dyn VirtioDevice>> {
        self.device.lock()
    }
}

impl VirtioDevice for Activated {
    fn device_id(&self) -> u16 {
        self.device().device_id()
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &self.queue_sizes_max
    }

    fn features(&self) -> u64 {
        self.device().features()
    }

    fn shares_kicks(&self) -> bool {
        self.device().shares_kicks()
    }

    fn acknowledge_features(&mut self, features: u64) {
        self.device().acknowledge_features(features);
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.device().read_config(offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.device().write_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.thread.activate(&self.device, activation)?;
        self.is_active = true;
        self.tell(DriverEvent::Activated);
        Ok(())
    }

    fn reset(&mut self) {
        self.device().reset();
        if std::mem::take(&mut self.is_active) {
            self.tell(DriverEvent::Reset);
        }
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        self
    }

    fn save(&self) -> DeviceSnapshot {
        self.device().save()
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.device().restore(state)
    }
}

impl Pausing for Activated {
    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        self.device().pause()
    }

    fn begin_pause(&mut self) -> PendingPause {
        self.device().begin_pause()
    }

    fn resume(&mut self) {
        self.device().resume();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;
    use crate::virtio::test_driver::Driver;

    /// What a device does when it is activated.
    type Activate = fn(&Activation) -> Result<(), ActivateError>;

    /// A device that records on which thread it is activated.
    struct Recording {
        activate: Activate,
        threads: Arc<Mutex<Vec<Option<String>>>>,
    }

    impl VirtioDevice for Recording {
        fn device_id(&self) -> u16 {
            4
        }

        fn queue_sizes_max(&self) -> &[u16] {
            &[16]
        }

        fn features(&self) -> u64 {
            crate::virtio::RING_FEATURES
        }

        fn shares_kicks(&self) -> bool {
            true
        }

        fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
            self.threads.lock().push(std::thread::current().name().map(str::to_owned));
            (self.activate)(&activation)
        }

        fn reset(&mut self) {}

        fn pausing(&mut self) -> &mut dyn Pausing {
            self
        }

        fn save(&self) -> DeviceSnapshot {
            DeviceSnapshot {
                kind: "recording".to_owned(),
                version: 1,
                data: serde_json::Value::Null,
            }
        }

        fn restore(&mut self, _state: &DeviceSnapshot) -> Result<(), StateError> {
            Ok(())
        }
    }

    impl Pausing for Recording {
        fn pause(&mut self) -> Vec<(u16, QueueState)> {
            Vec::new()
        }

        fn begin_pause(&mut self) -> PendingPause {
            PendingPause::default()
        }

        fn resume(&mut self) {}
    }

    fn recording(activate: Activate) -> (Activated, Arc<Mutex<Vec<Option<String>>>>) {
        let threads = Arc::default();
        let device = Recording { activate, threads: Arc::clone(&threads) };
        let thread = ActivationThread::start().unwrap();
        (Activated::on(&thread, Box::new(device), Box::new(|_| ())), threads)
    }

    #[test]
    fn what_a_driver_does_is_told_as_often_as_lines_may_be_logged() {
        let driver = Driver::new(1, 16);
        let told = Arc::new(Mutex::new(Vec::new()));
        let (mut device, _) = recording(|_| Ok(()));
        let tell = Arc::clone(&told);
        device.on_driver = Box::new(move |event| tell.lock().push(event));
        device.reset();
        assert!(told.lock().is_empty(), "it was not active");
        device.activate(driver.fresh(0)).unwrap();
        device.reset();
        device.reset();
        let both = [DriverEvent::Activated, DriverEvent::Reset];
        assert_eq!(*told.lock(), both);
        let (mut failing, _) = recording(|_| Err(ActivateError::MissingQueue { index: 7 }));
        failing.on_driver = Box::new(|event| panic!("{event:?}"));
        failing.activate(driver.fresh(0)).unwrap_err();
        failing.reset();
        for _ in 0..100 {
            device.activate(driver.fresh(0)).unwrap();
            device.reset();
        }
        let count = told.lock().len();
        assert!((2..100).contains(&count), "{count} events of 202");
    }

    #[test]
    fn devices_are_activated_on_the_thread_and_their_errors_come_back() {
        let driver = Driver::new(1, 16);
        let (mut device, threads) = recording(|_| Ok(()));
        device.activate(driver.fresh(0)).unwrap();
        assert!(device.shares_kicks(), "the transport asks this device");
        let (mut failing, _) = recording(|_| Err(ActivateError::MissingQueue { index: 7 }));
        let error = failing.activate(driver.fresh(0)).unwrap_err();
        assert!(matches!(error, ActivateError::MissingQueue { index: 7 }), "{error}");
        assert_eq!(*threads.lock(), [Some(NAME.to_owned())]);
    }

    #[test]
    fn a_thread_that_has_ended_is_an_error() {
        let driver = Driver::new(1, 16);
        let (mut device, threads) = recording(|_| panic!("as the test wants it"));
        for _ in 0..2 {
            let error = device.activate(driver.fresh(0)).unwrap_err();
            assert!(matches!(error, ActivateError::Resource { .. }), "{error}");
        }
        assert_eq!(threads.lock().len(), 1);
    }
}
