// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that open devices, and what is left of them when nothing waits for their device any more.
//!
//! A call of the kernel that opens or resets a device cannot be ended. So a machine that ends, or a device that is removed,
//! leaves the thread to itself, which closes the device as soon as it is open.
//!
//! Owns the knowledge which devices are in use that way: the host gives none of them, nor another device of its IOMMU
//! group, to a machine that comes later. An opener of that machine waits. Must never keep a thread that has not yet asked
//! the kernel for its device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use vfio::HostPlace;

use super::backend::{place_of, real_place};
use crate::config::DeviceConfig;
use crate::machine::pausing::{CancelToken, POLL_INTERVAL};

/// The end of a thread that opens a device: it has nothing of the device any more, but for what it has handed over.
#[derive(Clone, Default)]
pub(super) struct OpenerEnd(Arc<EndState>);

#[derive(Default)]
struct EndState {
    is_over: Mutex<bool>,
    changed: Condvar,
}

/// Held by the thread; its end is when this is dropped.
pub(super) struct EndMark(OpenerEnd);

impl OpenerEnd {
    /// What the thread holds.
    pub(super) fn mark(&self) -> EndMark {
        EndMark(self.clone())
    }

    pub(super) fn is_over(&self) -> bool {
        *self.0.is_over.lock()
    }

    /// Waits for it, up to `timeout`; returns whether it is over.
    pub(super) fn is_over_within(&self, timeout: Duration) -> bool {
        let mut is_over = self.0.is_over.lock();
        self.0.changed.wait_while_for(&mut is_over, |is_over| !*is_over, timeout);
        *is_over
    }
}

impl Drop for EndMark {
    fn drop(&mut self) {
        let OpenerEnd(state) = &self.0;
        *state.is_over.lock() = true;
        state.changed.notify_all();
    }
}

/// What a device is recognised by on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OpenerPlace {
    place: String,
    /// Its IOMMU group, if it is known.
    group: Option<PathBuf>,
}

impl OpenerPlace {
    pub(super) fn of(config: &DeviceConfig) -> Self {
        Self::with_group(config, HostPlace::group)
    }

    fn with_group(
        config: &DeviceConfig,
        group: impl FnOnce(&HostPlace) -> Option<PathBuf>,
    ) -> Self {
        let group = place_of(config).ok().and_then(|place| group(&place));
        Self { place: real_place(config), group }
    }

    /// Whether both are of one device.
    pub(super) fn is_of_device(&self, other: &Self) -> bool {
        self.place == other.place
    }

    /// The location on the host, for messages.
    pub(super) fn into_text(self) -> String {
        self.place
    }

    /// Whether one cannot be opened while another machine has the other.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        self.is_of_device(other) || (self.group.is_some() && self.group == other.group)
    }
}

/// A device that a thread still opens, which nothing waits for.
pub(super) struct Abandoned {
    pub(super) place: OpenerPlace,
    pub(super) end: OpenerEnd,
}

impl Abandoned {
    pub(super) fn is_in_use(&self) -> bool {
        !self.end.is_over()
    }
}

/// The devices that are still being opened for machines of this process that have ended.
#[derive(Clone, Default)]
pub struct LeftOpenings(Arc<Mutex<Vec<Abandoned>>>);

impl LeftOpenings {
    pub(super) fn add(&self, abandoned: impl IntoIterator<Item = Abandoned>) {
        let mut left = self.0.lock();
        left.retain(Abandoned::is_in_use);
        left.extend(abandoned);
    }

    /// The ends that come before a device can be opened.
    pub(super) fn before(&self, place: &OpenerPlace) -> Vec<OpenerEnd> {
        let left = self.0.lock();
        let before = left.iter().filter(|left| left.is_in_use() && left.place.excludes(place));
        before.map(|left| left.end.clone()).collect()
    }
}

/// Waits for all of these ends; returns whether they are over, and not the wait was cancelled.
pub(super) fn wait_for(ends: &[OpenerEnd], cancel: &CancelToken) -> bool {
    for end in ends {
        while !end.is_over_within(POLL_INTERVAL) {
            if cancel.is_cancelled() {
                return false;
            }
        }
    }
    !cancel.is_cancelled()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::config::ConfigFd;

    fn place(place: &str, group: Option<&str>) -> OpenerPlace {
        OpenerPlace { place: place.to_owned(), group: group.map(PathBuf::from) }
    }

    #[test]
    fn a_device_waits_for_what_is_left_of_its_group_and_for_nothing_else() {
        let (left, end) = (LeftOpenings::default(), OpenerEnd::default());
        let mark = end.mark();
        left.add([Abandoned { place: place("/gpu", Some("/groups/7")), end }]);
        let count = |other: OpenerPlace| left.before(&other).len();
        assert_eq!(count(place("/gpu", None)), 1);
        assert_eq!(count(place("/gpu-audio", Some("/groups/7"))), 1);
        assert_eq!(count(place("/nic", Some("/groups/8"))), 0);
        assert_eq!(count(place("descriptor 9", None)), 0, "without a group it is in no other's");
        drop(mark);
        assert_eq!(count(place("/gpu", None)), 0);
        left.add([]);
        assert!(left.0.lock().is_empty(), "it is forgotten");
    }

    #[test]
    fn a_device_given_by_its_descriptor_is_in_the_group_that_the_host_names() {
        let node = std::fs::File::open("/dev/null").expect("a character device");
        let number = node.metadata().map(|metadata| metadata.rdev()).expect("a number");
        let mut config: DeviceConfig =
            serde_json::from_value(serde_json::json!({"id": "gpu"})).expect("a configuration");
        config.fd = Some(ConfigFd::received(node.into()));
        let given = OpenerPlace::with_group(&config, |place| {
            let HostPlace::Descriptor(node) = place else { return None };
            let node = std::fs::File::from(node.try_clone().ok()?);
            (node.metadata().ok()?.rdev() == number).then(|| PathBuf::from("/groups/7"))
        });
        assert!(given.excludes(&place("/gpu-audio", Some("/groups/7"))));
        assert!(!given.excludes(&place("/nic", Some("/groups/8"))));
        assert!(OpenerPlace::of(&config).group.is_none(), "this one is in none");
    }

    #[test]
    fn a_wait_ends_with_the_thread_or_when_it_is_cancelled() {
        let (end, cancel) = (OpenerEnd::default(), CancelToken::default());
        let mark = end.mark();
        let ends = [OpenerEnd(Arc::clone(&end.0))];
        let waits = std::thread::spawn({
            let cancel = cancel.clone();
            let ends = ends.clone();
            move || wait_for(&ends, &cancel)
        });
        assert!(!end.is_over_within(Duration::from_millis(30)) && !waits.is_finished());
        drop(mark);
        assert!(waits.join().is_ok_and(|is_over| is_over));
        assert!(end.is_over() && wait_for(&ends, &cancel));
        let (never, _mark) = {
            let never = OpenerEnd::default();
            let mark = never.mark();
            (never, mark)
        };
        cancel.cancel();
        assert!(!wait_for(&[never], &cancel));
    }

    #[test]
    fn a_thread_that_panics_has_ended() {
        let end = OpenerEnd::default();
        let mark = end.mark();
        let panics = std::thread::spawn(move || {
            let _mark = mark;
            std::panic::resume_unwind(Box::new("a test"));
        });
        assert!(panics.join().is_err() && end.is_over());
    }
}
