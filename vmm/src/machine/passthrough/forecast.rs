// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Passed-through devices that were put on the bus because their guest's drivers would not wait for memory for long, and
//! what is done when that turns out wrong.
//!
//! The forecast is repeated while memory is mapped. A device that the guest has not looked at by then is withheld after
//! all, as if it had been from the start. Of one that it has seen the log and an event say that its driver may wait.
//!
//! Owns which devices that concerns. It must never withhold one that the guest has seen, to which it would be lost. Runs
//! where the machine is at hand, also while it is made and the start waits for a device: the mapping thread only tells.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pci::{Bdf, PciDevice};
use vfio::{P2pBars, PinState, Pinning};

use super::Passthrough;
use crate::events;
use crate::machine::events::GuestEvent;
use crate::machine::segments::Segments;

/// The longest time that is told as expected: a day stands for more, and for what is not known.
const LONGEST_SAID: Duration = Duration::from_hours(24);

/// Devices that the guest may see before memory is mapped.
#[derive(Default)]
pub(super) struct Watched {
    devices: Vec<Bdf>,
    /// How long memory will be mapped, when that turns out to be too long.
    long: Arc<Mutex<Option<Duration>>>,
}

impl Watched {
    /// Forgets a device, which is removed.
    pub(super) fn forget(&mut self, bdf: Bdf) {
        self.devices.retain(|device| *device != bdf);
    }

    /// How long memory will be mapped, once it turns out to be too long.
    pub(super) fn take_long(&self) -> Option<Duration> {
        self.long.lock().take()
    }
}

impl Passthrough {
    /// How long BARs will take to be mapped for other devices, after memory.
    pub(super) fn time_for_bars(&self) -> Duration {
        self.peers.as_deref().map_or(Duration::ZERO, P2pBars::time_to_map)
    }

    /// Has the forecast repeated for these devices, which are on the bus, until it is too long or memory is mapped. Of small
    /// memory there is none.
    pub(super) fn watch_forecast(&mut self, devices: Vec<Bdf>, bars: Duration) {
        if !devices.is_empty() && !self.pinning.as_ref().is_some_and(Pinning::is_small) {
            self.repeat_forecast(devices, bars);
        }
    }

    fn repeat_forecast(&mut self, devices: Vec<Bdf>, bars: Duration) {
        self.watched.devices.extend(devices);
        if let Some(pinning) = &self.pinning {
            let (sink, long) = (Arc::clone(&self.sink), Arc::clone(&self.watched.long));
            let on_long = move |left| {
                *long.lock() = Some(left);
                sink(GuestEvent::LongMapping { left });
            };
            pinning.watch(bars, Box::new(on_long));
        }
    }

    /// Withholds those devices that the guest has not seen, as memory will be mapped for so long.
    pub fn withhold_unseen(&mut self, segments: &Segments, left: Duration) {
        let watched = std::mem::take(&mut self.watched.devices);
        if !self.progress().is_some_and(|progress| progress.state == PinState::Pinning) {
            return;
        }
        // Nothing is known where nothing is done.
        let expected_ms = left.min(LONGEST_SAID).as_millis().to_string();
        for bdf in watched {
            let device = self.devices.iter().find(|(at, _)| *at == bdf);
            let Some(id) = device.map(|(_, device)| device.id().to_owned()) else { continue };
            let properties = [("id", id.as_str()), ("expected_ms", expected_ms.as_str())];
            if segments.hide_unseen(bdf) {
                self.withheld.add(bdf);
                log::info!(
                    "mapping memory takes longer than was forecast: the guest, which has not seen '{id}', finds it \
                     once memory is mapped"
                );
                events::emit("vm", "passthrough-withheld", &properties);
            } else {
                log::warn!(
                    "mapping memory takes longer than was forecast: the guest has seen '{id}', whose driver may wait \
                     for some {expected_ms} ms from now on"
                );
                events::emit("vm", "passthrough-wait", &properties);
            }
        }
        if self.withholds_any() {
            // Memory may have been mapped meanwhile.
            (self.sink)(GuestEvent::WithheldDevice);
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use pci::DeviceNumber;

    use super::super::announcing::tests::held_target;
    use super::super::starting::tests::Made;
    use super::super::{DeviceStart, DiscardingDevices};
    use super::*;
    use crate::config::PinMode;
    use crate::machine::pausing::CancelToken;

    /// Longer than any of these tests takes.
    const PATIENCE: Duration = Duration::from_mins(1);

    /// A machine whose guest has two devices before memory is mapped, and what is told of its mapping.
    fn made(first: PinMode) -> (Made, impl Drop, Receiver<GuestEvent>) {
        let (target, at_map, kernel) = held_target();
        let mut made = Made::new(target);
        let (tell, told) = channel();
        let tell = Mutex::new(tell);
        made.passthrough.sink = Arc::new(move |event| {
            let _ = tell.lock().send(event);
        });
        let gives = [made.expect("one", 7, first), made.expect("two", 8, PinMode::Auto)];
        for gives in &gives {
            gives.send(made.host()).unwrap();
        }
        made.passthrough.pending.iter().for_each(|pending| pending.wait(PATIENCE));
        made.start_without_late();
        assert!(
            made.passthrough.watched.devices.is_empty(),
            "nothing is forecast of so little memory"
        );
        let auto = if first == PinMode::Auto { [7, 8].as_slice() } else { &[8] };
        let bdf = |number: &u8| Bdf::on_root_bus(0, DeviceNumber::new(*number).unwrap());
        made.passthrough.repeat_forecast(auto.iter().map(bdf).collect(), Duration::ZERO);
        at_map.recv_timeout(PATIENCE).unwrap();
        (made, kernel, told)
    }

    fn long(told: &Receiver<GuestEvent>) -> Duration {
        loop {
            if let GuestEvent::LongMapping { left } = told.recv_timeout(PATIENCE).unwrap() {
                return left;
            }
        }
    }

    #[test]
    fn what_the_guest_has_not_seen_is_withheld_and_shown_when_memory_is_mapped() {
        let (mut made, kernel, told) = made(PinMode::Auto);
        assert!(made.sees(7), "before the forecast is corrected");
        let left = long(&told);
        made.passthrough.withhold_unseen(&made.segments, left);
        assert!(made.sees(7) && !made.sees(8));
        let withheld = made.passthrough.withheld_devices();
        assert_eq!(withheld.iter().map(|it| it.id.as_str()).collect::<Vec<_>>(), ["two"]);
        drop(kernel);
        made.passthrough.await_memory(&|| false).unwrap();
        let shown = made.passthrough.show_ready(&made.segments);
        assert_eq!(shown.iter().map(|(_, id)| id.as_str()).collect::<Vec<_>>(), ["two"]);
        assert!(made.sees(8));
    }

    #[test]
    fn a_start_that_waits_for_another_device_withholds_it_as_well() {
        let (target, at_map, kernel) = held_target();
        let mut made = Made::new(target);
        // Let go before the machine ends, which waits for it.
        let _kernel = kernel;
        let (tell, told) = channel();
        let tell = Mutex::new(tell);
        made.passthrough.sink = Arc::new(move |event| {
            let _ = tell.lock().send(event);
        });
        let one = made.expect("one", 7, PinMode::Auto);
        let needed = made.expect("needed", 8, PinMode::Overlap);
        one.send(made.host()).unwrap();
        made.await_pending("one");
        made.receive_now();
        let cancel = CancelToken::default();
        let mut start = DeviceStart::new(DiscardingDevices::default(), &cancel);
        made.passthrough.put_on_bus(&made.segments, &start).unwrap();
        at_map.recv_timeout(PATIENCE).unwrap();
        let seven = Bdf::on_root_bus(0, DeviceNumber::new(7).unwrap());
        made.passthrough.repeat_forecast(vec![seven], Duration::ZERO);
        let host = made.host();
        let opener = std::thread::spawn(move || {
            long(&told);
            let withheld = told.recv_timeout(PATIENCE);
            assert!(matches!(withheld, Ok(GuestEvent::WithheldDevice)), "{withheld:?}");
            needed.send(host).unwrap();
        });
        let received = made.receive(&mut start, None);
        opener.join().unwrap();
        received.unwrap();
        assert!(made.passthrough.withholds(seven) && !made.sees(7));
    }

    #[test]
    fn a_device_that_its_guest_is_to_see_in_any_case_stays() {
        let (mut made, _kernel, told) = made(PinMode::Overlap);
        made.passthrough.withhold_unseen(&made.segments, long(&told));
        assert!(made.sees(7) && !made.sees(8));
    }

    #[test]
    fn a_forecast_that_comes_after_the_end_changes_nothing() {
        let (mut made, kernel, _told) = made(PinMode::Auto);
        drop(kernel);
        made.passthrough.await_memory(&|| false).unwrap();
        made.passthrough.withhold_unseen(&made.segments, PATIENCE);
        assert!(!made.passthrough.withholds_any() && made.sees(7) && made.sees(8));
    }
}
