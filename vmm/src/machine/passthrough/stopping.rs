// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The part of passed-through devices in a pause: they stop and continue.
//!
//! Owns the order for all devices together: none may reach another that has stopped, so all are
//! quiescent before the first stops, and before the first works again; one that cannot be stops first. A device whose call does
//! not return is left behind, and the others go on.

use std::sync::Arc;

use pci::PciDevice as _;
use vfio::VfioPciDevice;
use vfio::migration::{DeviceState, MigrationError};

use super::turns::{CallLimits, Patience, Unmade, call_apart};
use super::{Passthrough, PassthroughError};

/// A step that is applied to every device before the next one.
type Step = fn(&VfioPciDevice) -> Result<(), MigrationError>;

/// Such a step of one device.
type DeviceStep = (Arc<VfioPciDevice>, Step);

impl Passthrough {
    /// Stops the devices, as far as they support that. The vCPUs must be stopped. Idempotent.
    ///
    /// # Errors
    /// As [`Self::stop_within`], which waits for each with the usual limit here.
    pub fn stop(&self) -> Result<(), PassthroughError> {
        self.stop_within(&Patience::within(CallLimits::default()))
    }

    /// The same, and waits no longer for any of them.
    ///
    /// # Errors
    /// Names the device. Those that have stopped stay stopped; one that has failed or hangs is lost to the guest. If
    /// the machine is to resume, [`Self::run`] must be called: a failed attempt must not leave the devices
    /// of a paused machine running.
    pub fn stop_within(&self, patience: &Patience<'_>) -> Result<(), PassthroughError> {
        if self.one_would_be_reached() {
            // They cannot be moved, and stay as they are in a pause, as all such devices do.
            return Ok(());
        }
        let steps = [VfioPciDevice::quiesce, VfioPciDevice::stop];
        match self.make_steps(self.steps_to(DeviceState::Stop, steps), patience)? {
            None => Ok(()),
            Some((_, device, source)) => {
                self.report_lost(&device, &source);
                let id = device.id().to_owned();
                Err(PassthroughError::Stop { id, source })
            }
        }
    }

    /// Resumes the devices, before the vCPUs resume. One that fails or hangs is lost to the guest.
    pub fn run(&self) {
        self.run_within(CallLimits::default());
    }

    pub(super) fn run_within(&self, limits: CallLimits) {
        let steps = [VfioPciDevice::wake, VfioPciDevice::run];
        let mut steps = self.steps_to(DeviceState::Running, steps);
        let patience = Patience::within(limits);
        while !steps.is_empty() {
            let turn = match self.make_steps(steps.clone(), &patience) {
                Ok(None) => return,
                Ok(Some((turn, device, source))) => {
                    self.lose(&device, &source);
                    turn
                }
                Err(Unmade::Hangs(turn, _reported)) => turn,
                Err(Unmade::NoThread(error)) => {
                    // The guest waits for them in any case.
                    log::warn!("passed-through devices resume without a limit: {error}");
                    let (device, step) = &steps[0];
                    if let Err(source) = step(device) {
                        self.lose(device, &source);
                    }
                    0
                }
            };
            steps.drain(..=turn.min(steps.len() - 1));
        }
    }

    /// Whether [`Self::run`] has anything to do, and so may wait for a device.
    pub fn has_stopped(&self) -> bool {
        !self.steps_to(DeviceState::Running, [VfioPciDevice::wake, VfioPciDevice::run]).is_empty()
    }

    /// The steps for devices that are not known to be there already: each of them for all devices, before the next.
    fn steps_to(&self, state: DeviceState, steps: [Step; 2]) -> Vec<DeviceStep> {
        let may_move = |(device, _): &(&Arc<VfioPciDevice>, Step)| {
            device.movable().is_ok() && !device.is_known_in(state)
        };
        let steps = self.in_turn(steps).filter(may_move);
        steps.map(|(device, step)| (Arc::clone(device), step)).collect()
    }

    /// Makes the steps until one fails, which is returned with its number. A device that hangs in one may be working: it reaches
    /// memory no more when this returns, as the guest goes on.
    fn make_steps(
        &self,
        steps: Vec<DeviceStep>,
        patience: &Patience<'_>,
    ) -> Result<Option<(usize, Arc<VfioPciDevice>, MigrationError)>, Unmade> {
        if steps.is_empty() {
            return Ok(None);
        }
        let devices: Vec<_> = steps.iter().map(|(device, _)| Arc::clone(device)).collect();
        let made = call_apart(patience, &self.loss_reporter(), move |turns| {
            for (turn, (device, step)) in steps.into_iter().enumerate() {
                if let Err(source) = turns.take(turn, &device, step)? {
                    return Some((turn, device, source));
                }
            }
            None
        });
        if let Err(Unmade::Hangs(turn, _)) = &made
            && let Some(device) = devices.get(*turn)
            && !device.cut_off()
        {
            log::error!(
                "passed-through device '{}' hangs, and its bus mastering cannot be disabled: it may write to memory of the guest",
                device.id()
            );
        }
        made
    }

    /// Takes a device from the guest that does not run.
    fn lose(&self, device: &VfioPciDevice, error: &MigrationError) {
        device.disarm();
        self.report_lost(device, error);
    }

    /// Applies the steps to all devices, one step after the other: first to those without `RUNNING_P2P`.
    pub(super) fn in_turn(
        &self,
        steps: [Step; 2],
    ) -> impl Iterator<Item = (&Arc<VfioPciDevice>, Step)> {
        let (without, others) = self.by_p2p();
        let devices: Vec<_> = without.into_iter().chain(others).collect();
        steps
            .into_iter()
            .flat_map(move |step| devices.clone().into_iter().map(move |device| (device, step)))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;
    use pci::register;
    use vfio::HostFunction as _;
    use vfio::fakes::FakeFunction;
    use vfio::migration::fakes::FakeHang;

    use super::super::migration::tests::two_devices;
    use super::*;

    /// Longer than any of these tests takes.
    const LONG: Duration = Duration::from_secs(20);
    /// For calls that hang.
    pub(in super::super) const SHORT: CallLimits =
        CallLimits { call: Duration::from_millis(500), leave: LONG };

    /// Has calls of this kind hang until the returned lock is free.
    pub(in super::super) fn hang(host: &FakeFunction, kind: FakeHang) -> Arc<Mutex<()>> {
        let gate = Arc::new(Mutex::new(()));
        host.migration.hardware_mut().hang = Some((kind, Arc::clone(&gate)));
        gate
    }

    /// Does this on a thread, and fails if it waits forever.
    pub(in super::super) fn in_time<T: Send + 'static>(
        passthrough: Passthrough,
        body: impl FnOnce(&Passthrough) -> T + Send + 'static,
    ) -> (Passthrough, T) {
        let (tell, told) = channel();
        thread::spawn(move || {
            let done = body(&passthrough);
            let _ = tell.send((passthrough, done));
        });
        told.recv_timeout(LONG).expect("nothing waits for a device without a limit")
    }

    /// The device that hung is reset by the thread of its call, and by that alone.
    pub(in super::super) fn comes_back(device: &VfioPciDevice, host: &FakeFunction) {
        let end = Instant::now() + LONG;
        while !device.is_disarmed() && Instant::now() < end {
            thread::yield_now();
        }
        assert!(device.is_disarmed() && !device.is_hung(), "its thread resets it");
        assert_eq!(*host.resets.lock(), 1);
    }

    #[test]
    fn one_that_hangs_while_it_stops_is_left_and_the_others_run() {
        use DeviceState::{Running, RunningP2p, Stop};
        for (state, expected) in
            [(RunningP2p, "state RUNNING to RUNNING_P2P"), (Stop, "state RUNNING_P2P to STOP")]
        {
            let (passthrough, [one, two]) = two_devices();
            let device = Arc::clone(&passthrough.devices[0].1);
            // They work.
            for host in [&one, &two] {
                host.write_config(register::COMMAND, &[6, 0]);
            }
            let gate = hang(&one, FakeHang::Into(state));
            let closed = gate.lock();
            let stop = |it: &Passthrough| it.stop_within(&Patience::within(SHORT)).unwrap_err();
            let (passthrough, error) = in_time(passthrough, stop);
            let error = error.to_string();
            let expected = format!("the device 'one' hangs: its way from {expected} has not ended");
            assert!(error.starts_with(&expected), "{error}");
            assert!(device.is_lost() && device.is_hung());
            assert!(
                !one.is_bus_master() && two.is_bus_master(),
                "the guest goes on with its memory"
            );
            let (passthrough, ()) = in_time(passthrough, Passthrough::run);
            assert_eq!(two.migration.hardware_mut().state, Running);
            // Nor is it waited for by a later pause, or reset meanwhile.
            let _passthrough = in_time(passthrough, |it| it.stop().unwrap());
            assert_eq!(two.migration.hardware_mut().state, Stop);
            assert_eq!(*one.resets.lock(), 0, "the kernel would wait for the call");
            drop(closed);
            comes_back(&device, &one);
        }
    }

    #[test]
    fn one_that_hangs_while_it_continues_is_left_and_the_others_run() {
        use DeviceState::{Running, RunningP2p};
        for state in [RunningP2p, Running] {
            let (passthrough, [one, two]) = two_devices();
            let device = Arc::clone(&passthrough.devices[0].1);
            passthrough.stop().unwrap();
            one.write_config(register::COMMAND, &[6, 0]);
            let gate = hang(&one, FakeHang::Into(state));
            let closed = gate.lock();
            let _passthrough = in_time(passthrough, |it| it.run_within(SHORT));
            assert!(!one.is_bus_master(), "{state}");
            assert!(device.is_lost() && device.is_hung(), "{state}");
            assert_eq!(two.migration.hardware_mut().state, Running, "{state}");
            drop(closed);
            comes_back(&device, &one);
        }
    }

    /// A device that hangs as it stops is left, long before its call has taken too long.
    fn is_left_early(patience: impl Fn() -> Patience<'static> + Send + 'static) {
        let (passthrough, [one, _two]) = two_devices();
        let device = Arc::clone(&passthrough.devices[0].1);
        let gate = hang(&one, FakeHang::Into(DeviceState::Stop));
        let closed = gate.lock();
        let (_passthrough, error) =
            in_time(passthrough, move |it| it.stop_within(&patience()).unwrap_err());
        assert!(matches!(error, PassthroughError::Hangs { .. }), "{error}");
        drop(closed);
        comes_back(&device, &one);
    }

    #[test]
    fn one_that_hangs_when_its_request_is_cancelled_is_waited_for_shortly() {
        let limits = CallLimits { call: LONG * 2, leave: SHORT.call };
        is_left_early(move || Patience { is_cancelled: &|| true, ..Patience::within(limits) });
    }

    #[test]
    fn one_that_hangs_is_waited_for_until_the_time_of_all_is_over() {
        let limits = CallLimits { call: LONG * 2, leave: LONG * 2 };
        is_left_early(move || {
            let until = Instant::now().checked_add(SHORT.call);
            Patience { until, ..Patience::within(limits) }
        });
    }

    #[test]
    fn one_that_is_where_it_is_to_be_takes_no_thread() {
        let (passthrough, _hosts) = two_devices();
        assert!(!passthrough.has_stopped());
        passthrough.stop().unwrap();
        assert!(passthrough.has_stopped());
        let steps = [VfioPciDevice::quiesce, VfioPciDevice::stop];
        assert!(passthrough.steps_to(DeviceState::Stop, steps).is_empty());
    }
}
