// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! States of devices that are sent as bytes, beside the other state.
//!
//! Owns which devices these are, and how much of each is sent at most. It must never read one before all have stopped, nor
//! look at what the bytes mean, which only the device knows.

use std::sync::Arc;

use pci::{PciDeviceState, PciStateError};
use vfio::migration::{APART_LEN_BYTES_MAX, Hardware};
use vfio::{StateReader, StateWriter, VfioPciDevice};

use super::migration::{LossReporter, reason, refuse};
use super::turns::{Patience, call_one};
use super::{Passthrough, PassthroughError};
use crate::machine::MachineError;

/// What a driver may give of a state beyond its own estimate while the guest is stopped: so many times that, and this
/// much. Estimates are from before the stop, and a driver may have none.
const ESTIMATE_FACTOR: u64 = 4;
const ESTIMATE_SLACK_BYTES: u64 = 1 << 30;

/// A device whose state is sent as bytes.
pub struct StateApart {
    /// Its id.
    pub id: String,
    /// Its hardware, which that of the destination has to equal.
    pub hardware: Hardware,
    /// How long its state is, as its driver says.
    pub expected_bytes: u64,
    /// The most that is read of it.
    pub len_bytes_max: u64,
}

/// Reads the state of a device, on any thread. Dropping it ends the reading.
pub struct DeviceStateReader {
    /// Present until the reading ends.
    reader: Option<StateReader>,
    reporter: LossReporter,
}

impl Passthrough {
    /// The devices, whose states are to be sent as bytes.
    ///
    /// # Errors
    /// Names those whose state is too long for that.
    pub fn states_apart(&self) -> Result<Vec<StateApart>, PassthroughError> {
        let all: Vec<_> = self.devices.iter().map(|(_, device)| state_apart(device)).collect();
        let too_long = |state: &StateApart| {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let (has, most) = (mib(state.expected_bytes), mib(APART_LEN_BYTES_MAX));
            let why = format!("its state has {has} MiB, and may have {most}");
            (state.expected_bytes > APART_LEN_BYTES_MAX).then(|| reason(&state.id, &why))
        };
        refuse(&all.iter().filter_map(too_long).collect::<Vec<_>>())?;
        Ok(all)
    }

    /// Prepares to read the states of these devices.
    ///
    /// # Errors
    /// Names the device that cannot be stopped or read, or is gone.
    pub fn read_states(&self, ids: &[String]) -> Result<Vec<DeviceStateReader>, MachineError> {
        // Also those that were added since the pause, and run.
        self.stop()?;
        let read = |id: &String| {
            let reader = self.device_of(id)?.read_state()?;
            Ok(DeviceStateReader { reader: Some(reader), reporter: self.loss_reporter() })
        };
        ids.iter().map(read).collect()
    }

    /// Leaves the device to the thread that reads its state, in a call that does not return: it is lost to the guest, which
    /// runs again without it. Returns that call.
    pub fn leave_hung(&self, id: &str) -> String {
        let Ok(device) = self.device_of(id) else { return "reading its state".to_owned() };
        let call = device.leave();
        self.loss_reporter().report(device, &vfio::migration::MigrationError::Left);
        call
    }

    /// Prepares to write states of this hardware into the devices with these ids.
    ///
    /// # Errors
    /// Names the device that is not here, is named twice, or is of another kind.
    pub fn write_states(
        &self,
        states: &[(&str, Hardware)],
    ) -> Result<Vec<StateWriter>, MachineError> {
        let write =
            |(id, hardware): &(&str, Hardware)| Ok(self.device_of(id)?.write_state(hardware)?);
        states.iter().map(write).collect()
    }

    /// Restores the state of a device, once all memory is mapped. The machine must be paused.
    ///
    /// # Errors
    /// The device refuses it, or hangs and is left behind: then the machine cannot continue here.
    pub fn restore(
        &self,
        device: &Arc<VfioPciDevice>,
        state: PciDeviceState,
        patience: &Patience<'_>,
    ) -> Result<(), MachineError> {
        // Not a part of what the device takes, and it may take long.
        self.gate.wait().map_err(PassthroughError::from)?;
        let restore = move |device: &VfioPciDevice| pci::PciDevice::restore(device, &state);
        Ok(call_one(device, patience, &self.loss_reporter(), restore)??)
    }

    /// Saves the whole state of a device, which must be stopped.
    ///
    /// # Errors
    /// The device cannot be saved, or hangs and is left behind: then it is lost to the guest.
    pub fn save(
        &self,
        device: &Arc<VfioPciDevice>,
        patience: &Patience<'_>,
    ) -> Result<PciDeviceState, MachineError> {
        let saved = call_one(device, patience, &self.loss_reporter(), pci::PciDevice::save)?;
        Ok(saved.inspect_err(|error| self.report_lost(device, error))?)
    }

    /// Saves the rest of its state, if the hardware's part of this length was read already.
    ///
    /// # Errors
    /// The device is not stopped, or lost to the guest.
    pub fn save_beside(
        &self,
        device: &VfioPciDevice,
        len_bytes: u64,
    ) -> Result<PciDeviceState, MachineError> {
        let saved = device.save_beside(len_bytes);
        Ok(saved.inspect_err(|error| self.report_lost(device, error))?)
    }

    fn device_of(&self, id: &str) -> Result<&Arc<VfioPciDevice>, MachineError> {
        use pci::PciDevice as _;
        let mut devices = self.devices.iter().map(|(_, device)| device);
        let missing = || MachineError::StateMismatch(format!("there is no device '{id}' here"));
        devices.find(|device| device.id() == id).ok_or_else(missing)
    }
}

fn state_apart(device: &VfioPciDevice) -> StateApart {
    use pci::PciDevice as _;
    let expected_bytes = device.estimated_state_len_bytes();
    let most = expected_bytes.saturating_mul(ESTIMATE_FACTOR).saturating_add(ESTIMATE_SLACK_BYTES);
    StateApart {
        id: device.id().to_owned(),
        hardware: device.hardware(),
        expected_bytes,
        len_bytes_max: most.min(APART_LEN_BYTES_MAX),
    }
}

impl DeviceStateReader {
    /// Reads the next bytes; none at the end.
    ///
    /// # Errors
    /// The device has failed.
    pub fn read(&mut self, part: &mut [u8]) -> Result<usize, PciStateError> {
        let Some(reader) = &mut self.reader else { return Ok(0) };
        reader.read(part).inspect_err(|error| self.reporter.report_here(reader.device(), error))
    }
}

impl Drop for DeviceStateReader {
    fn drop(&mut self) {
        let Some(reader) = self.reader.take() else { return };
        let device = Arc::clone(reader.device());
        let was_lost = device.is_lost();
        drop(reader);
        if !was_lost {
            let error = vfio::migration::NotMigratable::Lost;
            self.reporter.report_here(&device, &error);
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::atomic::Ordering;

    use parking_lot::Mutex;
    use pci::PciDevice as _;
    use vfio::fakes::FakeFunction;
    use vfio::migration::DeviceState;
    use vfio::migration::fakes::{FakeHang, StepFailure};

    use super::super::migration::tests::two_devices;
    use super::super::stopping::tests::{SHORT, comes_back, hang, in_time};
    use super::*;

    fn read_all(reader: &mut DeviceStateReader, part_bytes: usize) -> Vec<Vec<u8>> {
        let mut parts = Vec::new();
        loop {
            let mut part = vec![0; part_bytes];
            match reader.read(&mut part).unwrap() {
                0 => return parts,
                len => parts.push(part[..len].to_vec()),
            }
        }
    }

    fn ids(states: &[StateApart]) -> Vec<String> {
        states.iter().map(|state| state.id.clone()).collect()
    }

    #[test]
    fn states_move_in_parts_and_the_rest_follows() {
        let (there, hosts) = two_devices();
        let (here, arrived) = two_devices();
        hosts[0].migration.hardware_mut().memory = b"rings and filters".to_vec();
        hosts[1].migration.hardware_mut().memory = vec![7; 1000];
        for host in &arrived {
            host.migration.hardware_mut().memory = Vec::new();
        }
        here.stop().unwrap();
        here.gate.open();
        let states = there.states_apart().unwrap();
        assert_eq!(
            (ids(&states), states[1].expected_bytes),
            (vec!["one".into(), "two".into()], 1009)
        );
        assert_eq!(states[1].len_bytes_max, (1 << 30) + 4 * 1009);
        let announced: Vec<_> =
            states.iter().map(|state| (state.id.as_str(), state.hardware.clone())).collect();
        let writers = here.write_states(&announced).unwrap();
        for writer in &writers {
            writer.begin().unwrap();
        }
        let is_safe = |host: &Arc<FakeFunction>| host.in_use.load(Ordering::Relaxed);
        assert!(arrived.iter().all(is_safe), "no reset of its bus takes it away");
        // Both are read at once, as both have stopped.
        let mut readers = there.read_states(&ids(&states)).unwrap();
        for (number, (reader, writer)) in readers.iter_mut().zip(&writers).enumerate() {
            let parts = read_all(reader, 4);
            for part in &parts {
                writer.write(part).unwrap();
            }
            let len_bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
            assert_eq!(len_bytes, states[number].expected_bytes);
        }
        drop(readers);
        for (number, host) in hosts.iter().enumerate() {
            assert_eq!(host.migration.hardware_mut().state, DeviceState::Stop);
            let (_, device) = &there.devices[number];
            let len_bytes = states[number].expected_bytes;
            let other = device.save_beside(len_bytes + 1).unwrap();
            let (_, arriving) = &here.devices[number];
            let error = error_text::chain(&arriving.restore(&other).unwrap_err());
            assert!(error.contains("have come in place of"), "{error}");
            let state = device.save_beside(len_bytes).unwrap();
            assert!(!state.data.to_string().contains("base64"));
            arriving.restore(&state).unwrap();
            let came = &arrived[number].migration;
            assert_eq!(came.hardware_mut().memory, host.migration.hardware_mut().memory);
            assert_eq!(came.hardware_mut().state, DeviceState::Stop);
            let error = error_text::chain(&arriving.restore(&state).unwrap_err());
            assert!(error.contains("is in state STOP, and has to be in RESUMING"), "{error}");
        }
        there.run();
        assert!(
            there.devices.iter().all(|(_, device)| device.save_beside(1).is_err()),
            "they work"
        );
    }

    #[test]
    fn what_cannot_be_read_or_written_is_named_and_the_device_continues() {
        let (there, [one, _two]) = two_devices();
        let states = there.states_apart().unwrap();
        one.migration.hardware_mut().breaks_after = Some(5);
        let mut readers = there.read_states(&ids(&states)).unwrap();
        let mut part = vec![0; 64];
        assert_eq!(readers[0].read(&mut part).unwrap(), 5);
        let error = error_text::chain(&readers[0].read(&mut part).unwrap_err());
        assert!(error.contains("one") && error.contains("beyond its first 5 bytes"), "{error}");
        drop(readers);
        assert_eq!(one.migration.hardware_mut().state, DeviceState::Stop);
        there.run();
        assert_eq!(one.migration.hardware_mut().state, DeviceState::Running);

        let (here, [one, two]) = two_devices();
        here.stop().unwrap();
        here.gate.open();
        let hardware = states[0].hardware.clone();
        let missing = here.write_states(&[("three", hardware.clone())]).err().unwrap();
        assert!(error_text::chain(&missing).contains("no device 'three' here"));
        let mut other = hardware.clone();
        other.device += 1;
        let refused = error_text::chain(&here.write_states(&[("one", other)]).err().unwrap());
        assert!(refused.contains("its vendor and device"), "{refused}");
        assert_eq!(one.migration.hardware_mut().state, DeviceState::Stop, "it has not heard of it");
        let twice = [("one", hardware.clone()), ("one", hardware.clone())];
        let writers = here.write_states(&twice).unwrap();
        writers[0].begin().unwrap();
        let refused = error_text::chain(&writers[1].begin().unwrap_err());
        assert!(refused.contains("is in state RESUMING, and has to be in STOP"), "{refused}");
        let writers = here.write_states(&[("two", hardware)]).unwrap();
        writers[0].begin().unwrap();
        two.migration.hardware_mut().takes_at_most = Some(3);
        writers[0].write(b"abc").unwrap();
        let refused = error_text::chain(&writers[0].write(b"defg").unwrap_err());
        assert!(refused.contains("its state of 4 bytes after 3 others"), "{refused}");
    }

    #[test]
    fn a_device_that_fails_while_it_is_read_is_gone_and_the_others_are_not() {
        let (there, [one, two]) = two_devices();
        let states = there.states_apart().unwrap();
        let mut readers = there.read_states(&ids(&states)).unwrap();
        readers[0].read(&mut [0; 4]).unwrap();
        one.migration.hardware_mut().failure = Some((DeviceState::Stop, StepFailure::Failed));
        drop(readers);
        assert!(there.devices[0].1.is_lost() && !there.devices[1].1.is_lost());
        assert!(there.devices[0].1.save_beside(14).is_err());
        there.run();
        assert_eq!(two.migration.hardware_mut().state, DeviceState::Running);
    }

    /// Waits until a device is in a call.
    fn wait_for_call(device: &VfioPciDevice, call: &str) {
        while device.call().is_none_or(|now| !now.to_string().contains(call)) {
            std::thread::yield_now();
        }
    }

    /// Whichever call hangs: the guest runs on without the device, with the other one, and nothing waits for it.
    #[test]
    fn a_device_that_hangs_while_it_is_read_is_left_and_the_others_run() {
        let calls = [
            (FakeHang::Into(DeviceState::StopCopy), "state STOP to STOP_COPY"),
            (FakeHang::Read, "beyond the first 0 bytes"),
            (FakeHang::Into(DeviceState::Stop), "state STOP_COPY to STOP"),
        ];
        for (hang, expected) in calls {
            let (there, [one, two]) = two_devices();
            let mut readers = there.read_states(&["one".to_owned()]).unwrap();
            let gate = Arc::new(Mutex::new(()));
            let closed = gate.lock();
            one.migration.hardware_mut().hang = Some((hang, Arc::clone(&gate)));
            let mut reader = readers.remove(0);
            let thread =
                std::thread::spawn(
                    move || while reader.read(&mut [0; 64]).is_ok_and(|len| len > 0) {},
                );
            let device = Arc::clone(&there.devices[0].1);
            wait_for_call(&device, expected);
            let call = there.leave_hung("one");
            assert!(call.contains(expected), "{call}");
            assert!(device.is_lost() && device.is_left() && !device.is_disarmed());
            there.run();
            assert_eq!(two.migration.hardware_mut().state, DeviceState::Running, "{hang:?}");
            assert_eq!(*one.resets.lock(), 0, "the kernel would wait for the call");
            // Nor does what the guest or the host does with it later.
            there.stop().unwrap();
            assert!(!device.is_stopped() && device.movable().is_err());
            device.disarm();
            assert!(!device.is_disarmed() && !device.silence());
            let mut data = [0; 4];
            device.read_config(0, &mut data);
            assert_eq!((data, *one.resets.lock()), ([0xff; 4], 0));
            drop(closed);
            thread.join().unwrap();
            assert!(device.is_disarmed(), "its thread has reset it");
            assert_eq!(*one.resets.lock(), 1, "{hang:?}");
        }
    }

    #[test]
    fn a_device_that_hangs_while_it_is_written_is_left() {
        for (hang, expected) in [
            (FakeHang::Into(DeviceState::Resuming), "state STOP to RESUMING"),
            (FakeHang::Write, "writing 3 bytes of its state after 0 others"),
        ] {
            let (here, [one, _two]) = two_devices();
            here.stop().unwrap();
            here.gate.open();
            let hardware = here.states_apart().unwrap()[0].hardware.clone();
            let writer = Arc::new(here.write_states(&[("one", hardware)]).unwrap().remove(0));
            let gate = Arc::new(Mutex::new(()));
            let closed = gate.lock();
            one.migration.hardware_mut().hang = Some((hang, Arc::clone(&gate)));
            let device = Arc::clone(&here.devices[0].1);
            let thread = {
                let writer = Arc::clone(&writer);
                std::thread::spawn(move || writer.begin().and_then(|()| writer.write(b"abc")))
            };
            wait_for_call(&device, expected);
            assert!(writer.device().leave().contains(expected));
            // The machine ends meanwhile.
            drop(here);
            drop(closed);
            let error = error_text::chain(&thread.join().unwrap().unwrap_err());
            assert!(error.contains("was left behind"), "{error}");
            assert!(device.is_disarmed());
        }
    }

    /// Whether all of its state is here, or was written before.
    #[test]
    fn a_device_that_hangs_at_the_end_of_its_load_is_named_and_left() {
        for is_apart in [false, true] {
            let (there, _hosts) = two_devices();
            there.stop().unwrap();
            let (here, [one, _two]) = two_devices();
            here.stop().unwrap();
            here.gate.open();
            let state = if is_apart {
                let mut reader = there.read_states(&["one".to_owned()]).unwrap().remove(0);
                let bytes = read_all(&mut reader, 64).concat();
                drop(reader);
                let hardware = there.states_apart().unwrap()[0].hardware.clone();
                let writer = here.write_states(&[("one", hardware)]).unwrap().remove(0);
                writer.begin().unwrap();
                writer.write(&bytes).unwrap();
                there.devices[0].1.save_beside(bytes.len() as u64).unwrap()
            } else {
                there.devices[0].1.save().unwrap()
            };
            let device = Arc::clone(&here.devices[0].1);
            let gate = hang(&one, FakeHang::Into(DeviceState::Stop));
            let closed = gate.lock();
            let (here, error) = in_time(here, move |it| {
                it.restore(&it.devices[0].1, state, &Patience::within(SHORT)).unwrap_err()
            });
            let error = error_text::chain(&error);
            let expected = "the device 'one' hangs: its way from state RESUMING to STOP has not";
            assert!(error.contains(expected), "{error}");
            assert!(device.is_lost() && device.is_hung());
            // The machine ends, and does not wait either.
            drop(here);
            drop(closed);
            comes_back(&device, &one);
        }
    }

    /// A snapshot fails then, and the paused machine can continue.
    #[test]
    fn a_device_that_hangs_while_it_is_saved_is_named_and_left() {
        for (kind, expected) in [
            (FakeHang::Into(DeviceState::StopCopy), "its way from state STOP to STOP_COPY"),
            (FakeHang::Read, "reading its state beyond the first 0 bytes"),
            (FakeHang::Into(DeviceState::Stop), "its way from state STOP_COPY to STOP"),
        ] {
            let (there, [one, two]) = two_devices();
            there.stop().unwrap();
            let device = Arc::clone(&there.devices[0].1);
            let gate = hang(&one, kind);
            let closed = gate.lock();
            let (there, error) = in_time(there, move |it| {
                it.save(&it.devices[0].1, &Patience::within(SHORT)).unwrap_err()
            });
            let error = error_text::chain(&error);
            assert!(error.contains(&format!("the device 'one' hangs: {expected} has")), "{error}");
            assert!(device.is_lost() && device.is_hung());
            let (there, ()) = in_time(there, Passthrough::run);
            assert_eq!(two.migration.hardware_mut().state, DeviceState::Running);
            drop(there);
            drop(closed);
            comes_back(&device, &one);
        }
    }

    #[test]
    fn a_device_that_fails_while_it_is_saved_whole_is_reported() {
        let (there, [one, _two]) = two_devices();
        there.stop().unwrap();
        one.migration.hardware_mut().failure = Some((DeviceState::StopCopy, StepFailure::Failed));
        let patience = Patience::within(SHORT);
        assert!(there.save(&there.devices[0].1, &patience).is_err());
        assert!(there.devices[0].1.is_disarmed());
        assert!(there.save(&there.devices[1].1, &patience).is_ok());
    }

    #[test]
    fn a_device_that_answers_in_the_last_moment_is_reset_at_once() {
        let (there, [one, _two]) = two_devices();
        let mut readers = there.read_states(&["one".to_owned()]).unwrap();
        readers[0].read(&mut [0; 4]).unwrap();
        there.leave_hung("one");
        assert!(there.devices[0].1.is_disarmed());
        drop(readers);
        assert_eq!(*one.resets.lock(), 1, "once");
    }

    #[test]
    fn a_state_beyond_the_limit_is_refused_by_name() {
        let (there, [_one, two]) = two_devices();
        two.migration.hardware_mut().estimate_bytes = Some(APART_LEN_BYTES_MAX);
        let states = there.states_apart().unwrap();
        assert_eq!(states[1].len_bytes_max, APART_LEN_BYTES_MAX);
        two.migration.hardware_mut().estimate_bytes = Some(APART_LEN_BYTES_MAX + 1);
        let error = there.states_apart().err().unwrap().to_string();
        assert!(error.contains("'two': its state has 1048577 MiB") && !error.contains("'one'"));
    }
}
