// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device that offers less than it has, or has other queues, as a platform wants it.
//!
//! Owns what of a device's features and queues drivers see. All else is the device's. It must never offer what the
//! device does not keep: features are added only where they hold for it anyway.

use super::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use super::worker::Pausing;

/// What drivers see of a device's features and queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Features that are offered if the device has them.
    pub keep: u64,
    /// Features that are offered in any case: they hold for the device anyway.
    pub add: u64,
    /// Maximum size of each queue, if not as the device has them.
    pub queue_sizes: Option<&'static [u16]>,
}

/// All as the device has it.
pub const ALL_AS_THE_DEVICE: Offer = Offer { keep: u64::MAX, add: 0, queue_sizes: None };

/// A device with an offer.
pub struct Offering {
    device: Box<dyn VirtioDevice>,
    offer: Offer,
}

impl Offering {
    /// `device` with this offer.
    pub fn of(device: Box<dyn VirtioDevice>, offer: Offer) -> Self {
        Self { device, offer }
    }
}

impl VirtioDevice for Offering {
    fn device_id(&self) -> u16 {
        self.device.device_id()
    }

    fn queue_sizes_max(&self) -> &[u16] {
        self.offer.queue_sizes.unwrap_or_else(|| self.device.queue_sizes_max())
    }

    fn features(&self) -> u64 {
        self.device.features() & self.offer.keep | self.offer.add
    }

    fn shares_kicks(&self) -> bool {
        self.device.shares_kicks()
    }

    fn acknowledge_features(&mut self, features: u64) {
        self.device.acknowledge_features(features);
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.device.read_config(offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.device.activate(activation)
    }

    fn reset(&mut self) {
        self.device.reset();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        self.device.pausing()
    }

    fn save(&self) -> DeviceSnapshot {
        self.device.save()
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.device.restore(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::RING_FEATURES;
    use crate::virtio::rtc::{Rtc, RtcConfig};

    #[test]
    fn a_driver_sees_the_offer_and_no_more() {
        const IN_ORDER: u64 = 1 << 35;
        let rtc = || Box::new(Rtc::new(RtcConfig { id: "clock".to_owned() }));
        let offer = Offer { keep: 1 << 32 | 1 << 3, add: IN_ORDER, queue_sizes: Some(&[256]) };
        let offering = Offering::of(rtc(), offer);
        assert_eq!(offering.features(), 1 << 32 | IN_ORDER);
        assert_eq!(offering.queue_sizes_max(), [256]);
        let plain = Offering::of(rtc(), ALL_AS_THE_DEVICE);
        assert_eq!(plain.features(), RING_FEATURES);
        assert_eq!(plain.queue_sizes_max(), rtc().queue_sizes_max());
    }
}
