// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of groups, with a kernel that writes down what it is asked.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use super::*;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

type Wait = Box<dyn Fn(&str) + Send + Sync>;

/// A file is the end of a pipe, the other end of which says when it was closed.
#[derive(Default)]
struct Fake {
    calls: Arc<Mutex<Vec<String>>>,
    files: Mutex<BTreeMap<String, io::PipeReader>>,
    /// Errors of calls by their names.
    refuses: Mutex<BTreeMap<&'static str, i32>>,
    /// Groups that a driver of the host uses.
    not_viable: Mutex<BTreeSet<String>>,
    /// Groups whose open file is of no use: the host has taken all functions meanwhile.
    taken: Mutex<BTreeSet<String>>,
    /// Groups that have joined the container.
    joined: Mutex<BTreeSet<String>>,
    has_driver: Mutex<bool>,
    /// Called when a group's file is opened.
    before_open: Option<Wait>,
}

/// Writes down when it is dropped.
struct Forgets(Arc<Mutex<Vec<String>>>);

impl Drop for Forgets {
    fn drop(&mut self) {
        self.0.lock().push("KVM forgets".to_owned());
    }
}

impl Fake {
    fn call(&self, what: &'static str, of: &str) -> io::Result<()> {
        self.calls.lock().push(format!("{what} {of}").trim_end().to_owned());
        match self.refuses.lock().get(what) {
            Some(errno) => Err(io::Error::from_raw_os_error(*errno)),
            None => Ok(()),
        }
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock())
    }

    /// Whether the group's file, that was opened, is closed everywhere.
    fn is_closed(&self, group: &str) -> bool {
        let files = self.files.lock();
        let Some(file) = files.get(group) else { return true };
        let mut poll = [rustix::event::PollFd::new(file, rustix::event::PollFlags::IN)];
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&none)).unwrap() == 1
    }

    /// Takes a group whose devices are closed, as the kernel does when its last function leaves VFIO.
    fn take(&self, group: &str) {
        self.taken.lock().insert(group.to_owned());
        self.joined.lock().remove(group);
    }

    /// The group with this open file.
    fn group_of(&self, file: BorrowedFd<'_>) -> Option<String> {
        // Both ends of a pipe are one inode.
        let inode = |file: BorrowedFd<'_>| rustix::fs::fstat(file).unwrap().st_ino;
        let files = self.files.lock();
        let mut found = files.iter().filter(|(_, theirs)| inode(theirs.as_fd()) == inode(file));
        found.next().map(|(group, _)| group.clone())
    }

    fn wait_closed(&self, group: &str) {
        let mut file = self.files.lock().remove(group).unwrap();
        assert_eq!(file.read(&mut [0]).unwrap(), 0);
    }
}

impl Kernel for Fake {
    fn open_group(&self, group: &str) -> io::Result<OwnedFd> {
        if let Some(before) = &self.before_open {
            before(group);
        }
        self.call("open", group)?;
        let (theirs, ours) = io::pipe()?;
        self.files.lock().insert(group.to_owned(), theirs);
        self.taken.lock().remove(group);
        Ok(ours.into())
    }

    fn status(&self, file: BorrowedFd<'_>) -> io::Result<GroupStatus> {
        let group = self.group_of(file).filter(|group| !self.taken.lock().contains(group));
        let group = group.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        let is_viable = !self.not_viable.lock().contains(&group);
        Ok(GroupStatus { is_viable, is_in_container: self.joined.lock().contains(&group) })
    }

    fn join(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.call("join", "")?;
        self.joined.lock().insert(self.group_of(file).unwrap());
        Ok(())
    }

    fn has_driver(&self) -> bool {
        let mut has_driver = self.has_driver.lock();
        let joined = self.joined.lock().clone();
        // The one that asks has just joined.
        let others = joined.iter().filter(|group| !self.is_closed(group)).count() > 1;
        *has_driver &= others;
        *has_driver
    }

    fn set_driver(&self) -> io::Result<()> {
        self.call("driver", "")?;
        assert!(!std::mem::replace(&mut *self.has_driver.lock(), true), "EINVAL");
        Ok(())
    }

    fn tell_kvm(&self, _group: BorrowedFd<'_>) -> Result<Told, VfioError> {
        self.call("KVM hears", "").map_err(|_| VfioError::NoVm)?;
        Ok(Box::new(Forgets(Arc::clone(&self.calls))))
    }

    fn open_device(&self, _group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
        self.call("device", name.to_str().unwrap())?;
        Ok(io::pipe()?.1.into())
    }
}

fn function(name: &str, group: &str) -> SysfsFunction {
    SysfsFunction { path: PathBuf::from("/none").join(name), group: group.to_owned() }
}

fn groups(fake: Fake) -> (Arc<Fake>, Arc<Groups>) {
    let fake = Arc::new(fake);
    (Arc::clone(&fake), Groups::new(fake))
}

fn opened(groups: &Arc<Groups>, name: &str, group: &str) -> Lease {
    groups.open(&function(name, group)).unwrap().1
}

#[test]
fn a_group_is_opened_for_its_first_device_and_closed_after_its_last() {
    let (fake, groups) = groups(Fake::default());
    let first = opened(&groups, "one", "5");
    assert_eq!(fake.calls(), ["open 5", "join", "driver", "KVM hears", "device one"]);
    let second = opened(&groups, "two", "5");
    assert_eq!(fake.calls(), ["device two"]);
    let other = opened(&groups, "three", "6");
    // The container has its driver.
    assert_eq!(fake.calls(), ["open 6", "join", "KVM hears", "device three"]);
    drop(first);
    assert!(fake.calls().is_empty() && !fake.is_closed("5"));
    drop(second);
    assert_eq!(fake.calls(), ["KVM forgets"]);
    assert!(fake.is_closed("5") && !fake.is_closed("6"));
    drop(other);
    fake.calls();
    // The last group took the driver along.
    drop(opened(&groups, "one", "5"));
    assert_eq!(fake.calls()[..3], ["open 5", "join", "driver"]);
}

#[test]
fn what_is_held_stays_open_without_a_device_and_is_told_to_the_next_vm() {
    let (fake, groups) = groups(Fake::default());
    let devices = [opened(&groups, "one", "5"), opened(&groups, "two", "6")];
    drop(opened(&groups, "gone", "7"));
    fake.calls();
    let held = groups.hold_all();
    assert_eq!(held.len(), 2, "that of a device that is gone is not held");
    assert_eq!(fake.calls(), ["KVM forgets"; 2], "the VM in KVM can end before devices are closed");
    drop(devices);
    assert!(fake.calls().is_empty() && !fake.is_closed("5") && !fake.is_closed("6"));
    let device = opened(&groups, "one", "5");
    assert_eq!(fake.calls(), ["KVM hears", "device one"]);
    drop(held);
    assert!(!fake.is_closed("5") && fake.is_closed("6"), "a device needs the one only");
    drop(device);
    assert!(fake.is_closed("5"));
}

#[test]
fn a_device_that_cannot_be_opened_leaves_no_group() {
    for (call, calls) in [
        ("open", vec!["open 5"]),
        ("join", vec!["open 5", "join"]),
        ("driver", vec!["open 5", "join", "driver"]),
        ("KVM hears", vec!["open 5", "join", "driver", "KVM hears"]),
        ("device", vec!["open 5", "join", "driver", "KVM hears", "device one", "KVM forgets"]),
    ] {
        let (fake, groups) = groups(Fake::default());
        fake.refuses.lock().insert(call, libc::EBUSY);
        let error = groups.open(&function("one", "5")).err().unwrap();
        assert_eq!(fake.calls(), calls);
        assert!(call == "open" || fake.is_closed("5"), "{call}");
        match call {
            "open" | "device" => assert!(matches!(error, VfioError::Open { .. }), "{error:?}"),
            "KVM hears" => assert!(matches!(error, VfioError::NoVm), "{error:?}"),
            _ => assert!(matches!(error, VfioError::Join { .. }), "{error:?}"),
        }
        fake.refuses.lock().clear();
        let _device = opened(&groups, "one", "5");
        assert_eq!(fake.calls()[..3], ["open 5", "join", "driver"], "as if nothing had been");
    }
}

#[test]
fn a_group_with_a_driver_of_the_host_is_refused_before_it_joins() {
    let (fake, groups) = groups(Fake::default());
    fake.not_viable.lock().insert("5".to_owned());
    let error = groups.open(&function("one", "5")).err().unwrap().to_string();
    assert!(error.contains("another function of its IOMMU group 5"), "{error}");
    assert_eq!(fake.calls(), ["open 5"]);
    assert!(fake.is_closed("5"));
}

/// Group 9 is being opened in the kernel until the returned sender is used or dropped.
fn stuck() -> (Fake, Receiver<()>, std::sync::mpsc::Sender<()>) {
    let (tell, told) = channel();
    let (release, released) = channel();
    let (tell, released) = (Mutex::new(tell), Mutex::new(released));
    let before: Wait = Box::new(move |group| {
        if group == "9" {
            let _ = tell.lock().send(());
            let _ = released.lock().recv();
        }
    });
    (Fake { before_open: Some(before), ..Fake::default() }, told, release)
}

#[test]
fn a_group_that_the_kernel_lets_wait_keeps_no_other_from_anything() {
    let (fake, waits, release) = stuck();
    let (fake, groups) = groups(fake);
    let before = opened(&groups, "one", "5");
    let opener = thread::spawn({
        let groups = Arc::clone(&groups);
        move || opened(&groups, "nine", "9")
    });
    waits.recv_timeout(PATIENCE).unwrap();
    let (tell, told) = channel();
    let others = thread::spawn({
        let (groups, fake) = (Arc::clone(&groups), Arc::clone(&fake));
        move || {
            drop(opened(&groups, "two", "6"));
            fake.wait_closed("6");
            drop(before);
            fake.wait_closed("5");
            tell.send(()).unwrap();
        }
    });
    told.recv_timeout(PATIENCE).unwrap();
    others.join().unwrap();
    release.send(()).unwrap();
    drop(opener.join().unwrap());
    assert!(fake.is_closed("9"));
}

#[test]
fn two_devices_of_a_group_open_it_once() {
    let (fake, waits, release) = stuck();
    let (fake, groups) = groups(fake);
    let open = |name: &'static str| {
        let groups = Arc::clone(&groups);
        thread::spawn(move || opened(&groups, name, "9"))
    };
    let openers = [open("one"), open("two")];
    waits.recv_timeout(PATIENCE).unwrap();
    drop(release);
    let devices = openers.map(|opener| opener.join().unwrap());
    let calls = fake.calls();
    assert_eq!(calls.iter().filter(|call| *call == "open 9").count(), 1, "{calls:?}");
    assert_eq!(calls.len(), 6, "{calls:?}");
    drop(devices);
    assert!(fake.is_closed("9"));
}

fn affected(name: &str, group: &str) -> Affected {
    Affected::new(name, group)
}

/// What the host has taken meanwhile of two groups that are held over a reboot, and whether what was mapped still is.
fn taken_over_a_reboot(taken: &[&str]) -> bool {
    let (fake, groups) = groups(Fake::default());
    let devices = [opened(&groups, "one", "5"), opened(&groups, "two", "6")];
    let (held, before) = (groups.hold_all(), groups.drivers());
    drop(devices);
    for group in taken {
        fake.take(group);
    }
    fake.calls();
    let mut devices = Vec::new();
    for (name, group) in [("one", "5"), ("two", "6")] {
        devices.push(opened(&groups, name, group));
        let calls = fake.calls();
        let device = format!("device {name}");
        if taken.contains(&group) {
            assert_eq!(calls[..2], [format!("open {group}"), "join".to_owned()]);
        } else {
            assert_eq!(calls[..2], ["KVM hears".to_owned(), device]);
        }
    }
    drop((devices, held));
    assert!(fake.is_closed("5") && fake.is_closed("6"));
    groups.drivers() == before
}

#[test]
fn a_held_group_that_the_host_has_taken_meanwhile_is_opened_anew() {
    assert!(taken_over_a_reboot(&[]));
    assert!(taken_over_a_reboot(&["5"]), "the other group keeps what is mapped");
    assert!(taken_over_a_reboot(&["6"]));
    assert!(!taken_over_a_reboot(&["5", "6"]), "with the last all was unmapped");
}

#[test]
fn a_held_group_with_a_driver_of_the_host_is_refused() {
    let (fake, groups) = groups(Fake::default());
    let device = opened(&groups, "one", "5");
    let held = groups.hold_all();
    drop(device);
    fake.calls();
    fake.not_viable.lock().insert("5".to_owned());
    let error = groups.open(&function("one", "5")).err().unwrap();
    assert!(matches!(error, VfioError::NotViable { .. }), "{error}");
    assert!(fake.calls().is_empty() && !fake.is_closed("5"));
    fake.not_viable.lock().clear();
    drop((opened(&groups, "one", "5"), held));
    assert!(fake.is_closed("5"));
}

#[test]
fn a_group_that_stays_in_the_container_although_it_was_closed_keeps_its_driver() {
    let (fake, groups) = groups(Fake::default());
    let device = opened(&groups, "one", "5");
    // As a mapping of a BAR, which the IOMMU does not let go.
    let stuck = device.file().unwrap().try_clone_to_owned().unwrap();
    drop(device);
    assert!(!fake.is_closed("5"));
    fake.calls();
    let _other = opened(&groups, "two", "6");
    assert_eq!(fake.calls()[..3], ["open 6", "join", "KVM hears"], "a second driver is refused");
    drop(stuck);
}

#[test]
fn a_device_that_is_still_open_for_the_guest_before_is_noticed() {
    let (_fake, groups) = groups(Fake::default());
    let (one, left) = (opened(&groups, "one", "5"), opened(&groups, "two", "5"));
    left.set_in_use(true);
    let two = opened(&groups, "two", "5");
    assert!(groups.note_open(&affected("two", "5")) && !groups.note_open(&affected("new", "5")));
    let bus = [affected("one", "5"), affected("two", "5")];
    let why = groups.claim(one.device().unwrap(), &bus).err().unwrap();
    assert!(why.contains("two, too, which is still open for a guest that has ended"), "{why}");
    two.set_in_use(true);
    drop(left);
    let why = groups.claim(one.device().unwrap(), &bus).err();
    assert!(why.is_some(), "the guest that is there uses it");
    two.set_in_use(false);
    assert!(groups.claim(one.device().unwrap(), &bus).is_ok());
}

#[test]
fn a_group_of_a_device_that_is_still_to_be_opened_is_opened_for_a_reset_of_its_bus() {
    let (fake, groups) = groups(Fake::default());
    groups.expect([function("one", "5"), function("two", "6"), function("three", "7")]);
    let one = opened(&groups, "one", "5");
    fake.calls();
    let bus = [affected("one", "5"), affected("two", "6")];
    let claim = groups.claim(one.device().unwrap(), &bus).unwrap();
    assert_eq!(
        (fake.calls(), claim.files().count()),
        (vec!["open 6".to_owned(), "join".to_owned()], 2)
    );
    drop(claim);
    assert!(fake.is_closed("6"));
    fake.not_viable.lock().insert("7".to_owned());
    let why = groups.claim(one.device().unwrap(), &[affected("three", "7")]).err().unwrap();
    assert!(
        why.contains("group 7 cannot be opened: ") && why.contains("another function"),
        "{why}"
    );
    // Over a reboot, in which the host has taken it meanwhile.
    let two = opened(&groups, "two", "6");
    let held = groups.hold_all();
    drop(two);
    fake.take("6");
    groups.expect([function("two", "6")]);
    fake.calls();
    drop(groups.claim(one.device().unwrap(), &bus).unwrap());
    assert_eq!(fake.calls()[..2], ["open 6".to_owned(), "join".to_owned()]);
    drop(held);
    // Once it was there, it is the VM's only as long as the device is.
    drop(opened(&groups, "two", "6"));
    let why = groups.claim(one.device().unwrap(), &bus).err().unwrap();
    assert!(why.contains("group 6 this VM does not have"), "{why}");
}

#[test]
fn a_function_is_known_by_what_the_kernel_says_of_its_segment() {
    for (name, known) in [
        ("0000:65:00.0", "0000:65:00.0"),
        ("ffff:65:00.1", "ffff:65:00.1"),
        // Behind a volume management device.
        ("10000:e1:00.0", "0000:e1:00.0"),
        ("deadbeef:01:1f.7", "beef:01:1f.7"),
        ("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"),
    ] {
        assert_eq!(affected(name, "5").name, known);
    }
    let (_fake, groups) = groups(Fake::default());
    let one = opened(&groups, "10000:e1:00.0", "5");
    let other = opened(&groups, "10000:e1:00.1", "5");
    let bus = [affected("0000:e1:00.0", "5"), affected("0000:e1:00.1", "5")];
    assert!(groups.claim(one.device().unwrap(), &bus).is_ok());
    other.set_in_use(true);
    let why = groups.claim(one.device().unwrap(), &bus).err().unwrap();
    assert!(why.contains("0000:e1:00.1, too, which the guest uses"), "{why}");
    other.set_in_use(false);
    one.set_in_use(true);
    assert!(groups.claim(one.device().unwrap(), &bus).is_ok(), "its own use is its own matter");
}

#[test]
fn a_bus_is_claimed_with_each_of_its_groups_once() {
    let (fake, groups) = groups(Fake::default());
    let one = opened(&groups, "one", "5");
    let other = opened(&groups, "three", "6");
    let bus = [affected("one", "5"), affected("two", "5"), affected("three", "6")];
    let claim = groups.claim(&affected("one", "5"), &bus).unwrap();
    assert_eq!(claim.files().count(), 2);
    drop((one, other));
    assert!(!fake.is_closed("5") && !fake.is_closed("6"), "not while it is reset");
    drop(claim);
    assert!(fake.is_closed("5") && fake.is_closed("6"));
}

#[test]
fn a_bus_with_a_function_of_others_or_that_the_guest_uses_is_not_claimed() {
    let (_fake, groups) = groups(Fake::default());
    let one = opened(&groups, "one", "5");
    let two = opened(&groups, "two", "6");
    drop(opened(&groups, "gone", "7"));
    let refusal = |bus: &[Affected]| groups.claim(&affected("one", "5"), bus).err();
    for group in ["7", "8"] {
        let why = refusal(&[affected("one", "5"), affected("else", group)]).unwrap();
        assert!(why.contains(&format!("else, too, whose IOMMU group {group} ")), "{why}");
    }
    let bus = [affected("one", "5"), affected("two", "6")];
    one.set_in_use(true);
    assert_eq!(refusal(&bus), None, "its own use is the asker's matter");
    two.set_in_use(true);
    assert!(refusal(&bus).unwrap().contains("two, too, which the guest uses"));
    two.set_in_use(false);
    assert_eq!(refusal(&bus), None);
    two.set_in_use(true);
    drop(two);
    let _two = opened(&groups, "two", "6");
    assert_eq!(refusal(&bus), None, "the next guest does not use it yet");
}

#[test]
fn the_guest_begins_to_use_no_function_of_a_bus_that_is_reset() {
    let (_fake, groups) = groups(Fake::default());
    let one = opened(&groups, "one", "5");
    let two = opened(&groups, "two", "5");
    let bus = [affected("one", "5"), affected("two", "5")];
    let claim = groups.claim(&affected("one", "5"), &bus).unwrap();
    let other_claim = groups.claim(&affected("one", "5"), &bus).unwrap();
    let is_used = AtomicBool::new(false);
    let begins = groups.begin_use(&affected("two", "5"), &is_used, Duration::ZERO);
    assert!(!begins, "a vCPU does not wait forever");
    groups.end_use(&affected("two", "5"), &is_used);
    two.set_in_use(false);
    one.set_in_use(true);
    opened(&groups, "elsewhere", "6").set_in_use(true);
    let (tell, told) = channel();
    let user = thread::spawn(move || {
        tell.send(false).unwrap();
        two.set_in_use(true);
        tell.send(true).unwrap();
        two
    });
    assert!(!told.recv_timeout(PATIENCE).unwrap());
    drop(other_claim);
    assert!(told.try_recv().is_err());
    drop(claim);
    assert!(told.recv_timeout(PATIENCE).unwrap());
    drop(user.join().unwrap());
}

#[test]
fn a_device_that_hangs_is_not_opened_again_and_its_bus_not_reset_before_it_is_closed() {
    let (fake, groups) = groups(Fake::default());
    let (one, left) = (opened(&groups, "one", "5"), opened(&groups, "0000:e1:00.0", "5"));
    let bus = [affected("one", "5"), affected("0000:e1:00.0", "5")];
    left.note_left(true);
    fake.calls();
    let error = groups.open(&function("0000:e1:00.0", "5")).err().unwrap();
    assert!(matches!(error, VfioError::Left { .. }), "{error}");
    assert!(fake.calls().is_empty(), "the kernel would let it be opened");
    let why = groups.claim(one.device().unwrap(), &bus).err().unwrap();
    assert!(why.contains("0000:e1:00.0, too, which hangs"), "{why}");
    drop(opened(&groups, "two", "5"));
    left.note_left(false);
    assert!(groups.claim(one.device().unwrap(), &bus).is_ok(), "its call has returned");
    left.note_left(true);
    assert!(groups.claim(one.device().unwrap(), &bus).is_err());
    drop(left);
    assert!(groups.claim(one.device().unwrap(), &bus).is_ok());
    drop(opened(&groups, "0000:e1:00.0", "5"));
}
