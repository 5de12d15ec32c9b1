// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The IOMMU groups of a VM that uses type1.
//!
//! A group's file can be open once. In a container, it carries the container's mappings: the kernel drops them when the last
//! group leaves, and a group leaves when its file is closed. Devices have files of their own, which come and go meanwhile. So a
//! [`Lease`] keeps a group's file open, for a device or for mappings that are to stay without one.
//!
//! Owns what needs which group. The kernel may keep a thread that opens a group's file, or a device, waiting for as long as hardware
//! takes. So no lock is held while a device is opened, and while a group's file is opened only that group's, of which no lease
//! exists then: nothing that is closed waits for it here.

#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::VfioError;
use crate::sysfs::{SysfsFunction, group_of};

/// How long a vCPU waits at most for the reset of a bus: as long as for a device that is opened.
pub(crate) const USE_WAIT: Duration = Duration::from_secs(5);

/// Why a device that is left to a call is not touched.
const HANGS: &str = "which hangs in a call of an earlier migration";

/// Digits of a segment's number that are left where the kernel describes a reset: `vfio_pci_dependent_device` has 16 bits.
const SEGMENT_DIGITS: usize = 4;

/// A registration with KVM, until dropped.
pub type Told = Box<dyn Any + Send + Sync>;

/// What the kernel says of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStatus {
    /// No function of it is used by a driver of the host.
    pub is_viable: bool,
    /// It is in a container.
    pub is_in_container: bool,
}

/// The calls that groups need, so that their order can be tested without an IOMMU.
pub trait Kernel: Send + Sync {
    /// Opens the file of a group.
    ///
    /// # Errors
    /// There is none, or it is open elsewhere.
    fn open_group(&self, group: &str) -> io::Result<OwnedFd>;
    /// What there is to say of an open group.
    ///
    /// # Errors
    /// It is no group, or none any more: the host has taken all of its functions from VFIO since.
    fn status(&self, group: BorrowedFd<'_>) -> io::Result<GroupStatus>;
    /// Puts the group into the container, until its file is closed everywhere.
    ///
    /// # Errors
    /// The IOMMU does not take it.
    fn join(&self, group: BorrowedFd<'_>) -> io::Result<()>;
    /// Whether the container has a driver of an IOMMU, and with it what is mapped.
    fn has_driver(&self) -> bool;
    /// Gives the container a driver of an IOMMU, which it has until the last group has left.
    ///
    /// # Errors
    /// The IOMMU does not take the group that is in it.
    fn set_driver(&self) -> io::Result<()>;
    /// Registers the group with KVM.
    ///
    /// # Errors
    /// KVM's, or there is no VM.
    fn tell_kvm(&self, group: BorrowedFd<'_>) -> Result<Told, VfioError>;
    /// Opens a device of the group.
    ///
    /// # Errors
    /// It is of another, or cannot be opened.
    fn open_device(&self, group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd>;
}

#[derive(Default)]
struct State {
    /// Open, and in the container, while there are leases.
    file: Option<Arc<OwnedFd>>,
    leases: usize,
    /// Those of devices.
    devices: usize,
    /// The VM in KVM that has the group; it belongs to one only while a device is open.
    told: Option<Told>,
}

/// A group that the VM has had.
#[derive(Default)]
struct Slot(Mutex<State>);

/// All groups of a container.
pub struct Groups {
    kernel: Arc<dyn Kernel>,
    /// Locked briefly.
    slots: Mutex<BTreeMap<String, Arc<Slot>>>,
    /// How often the container was given a driver, with nothing mapped; held while a group enters or leaves. Locked after a slot.
    /// Which groups are in the container only the kernel knows: the host may take one whose file is held, and one whose file
    /// was closed stays while anything, such as a mapping of a BAR, keeps a device of it.
    drivers: Mutex<u64>,
    /// By group, a function that is to be opened. Locked briefly.
    expected: Mutex<BTreeMap<String, SysfsFunction>>,
    /// Locked briefly: the kernel may keep the reset of a bus waiting.
    uses: Mutex<Uses>,
    /// A claim has ended.
    unclaimed: Condvar,
}

/// A function, by what the kernel says of those that a reset of a bus affects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Affected {
    /// Its address, with no more of the segment than that says.
    name: String,
    group: String,
}

impl Affected {
    /// The function with this address, or another name, in a group.
    pub fn new(name: &str, group: &str) -> Self {
        let name = match name.split_once(':') {
            Some((segment, rest)) => {
                let cut = segment.len().saturating_sub(SEGMENT_DIGITS);
                format!("{}:{rest}", segment.get(cut..).unwrap_or(segment))
            }
            None => name.to_owned(),
        };
        Self { name, group: group.to_owned() }
    }
}

/// Which devices the guest uses, and which are being reset for the sake of others.
#[derive(Default)]
struct Uses {
    /// By how many leases each is used.
    in_use: BTreeMap<Affected, usize>,
    /// How many claims there are to each.
    claimed: BTreeMap<Affected, usize>,
    /// How many leases each device has.
    open: BTreeMap<Affected, usize>,
    /// Devices that hang in a call, until they are closed. The kernel lets one be opened again, and reset, and either would
    /// wait for the call.
    left: BTreeSet<Affected>,
}

impl Uses {
    /// Whether a device is open more than once: for one that should have been closed when its guest ended.
    fn is_left_over(&self, device: &Affected) -> bool {
        self.open.get(device).is_some_and(|leases| *leases > 1)
    }
}

/// Takes one of those that are counted.
fn uncount(counts: &mut BTreeMap<Affected, usize>, device: &Affected) {
    let is_last = counts.get_mut(device).is_none_or(|count| {
        *count = count.saturating_sub(1);
        *count == 0
    });
    if is_last {
        counts.remove(device);
    }
}

/// The right to reset a bus, until dropped.
pub struct Claim {
    container: Arc<Groups>,
    groups: Vec<Lease>,
    /// The functions that are reset besides.
    others: Vec<Affected>,
}

impl Claim {
    /// Files of the groups with functions on the bus, each once.
    pub fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.groups.iter().filter_map(Lease::file)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut uses = self.container.uses.lock();
        for function in &self.others {
            uncount(&mut uses.claimed, function);
        }
        drop(uses);
        self.container.unclaimed.notify_all();
    }
}

impl Groups {
    /// Without groups.
    pub fn new(kernel: Arc<dyn Kernel>) -> Arc<Self> {
        Arc::new(Self {
            kernel,
            slots: Mutex::default(),
            drivers: Mutex::default(),
            expected: Mutex::default(),
            uses: Mutex::default(),
            unclaimed: Condvar::new(),
        })
    }

    /// Opens a device, and its group if that is not open yet. The device has to be closed before the lease is dropped.
    ///
    /// # Errors
    /// Names what the host lacks.
    pub fn open(self: &Arc<Self>, function: &SysfsFunction) -> Result<(File, Lease), VfioError> {
        let name = function.path.file_name().unwrap_or_default();
        let lease = self.lease(function, &name.to_string_lossy())?;
        let device = CString::new(name.as_bytes())
            .map_err(io::Error::other)
            .and_then(|name| {
                let group = lease.file().ok_or(io::ErrorKind::NotConnected)?;
                self.kernel.open_device(group, &name)
            })
            .map_err(|source| refused(function, source))?;
        Ok((File::from(device), lease))
    }

    fn lease(self: &Arc<Self>, function: &SysfsFunction, device: &str) -> Result<Lease, VfioError> {
        let device = Affected::new(device, &function.group);
        if self.uses.lock().left.contains(&device) {
            return Err(VfioError::Left { path: function.path.clone() });
        }
        let slot = self.slot(&function.group);
        let mut state = slot.0.lock();
        let file = self.file_of(&mut state, function)?;
        // Before a device is opened: the kernel tells its driver of the VM then.
        if state.told.is_none() {
            match self.kernel.tell_kvm(file.as_fd()) {
                Ok(told) => state.told = Some(told),
                Err(error) => {
                    drop(file);
                    self.close_unneeded(&mut state);
                    return Err(error);
                }
            }
        }
        state.leases += 1;
        state.devices += 1;
        drop(state);
        self.expected.lock().remove(&function.group);
        if self.note_open(&device) {
            log::warn!(
                "passed-through device {} is still open for a guest that has ended, and may keep its bus from being reset",
                device.name
            );
        }
        Ok(self.new_lease(slot, file, Some(device)))
    }

    /// Returns whether it is open already.
    fn note_open(&self, device: &Affected) -> bool {
        let mut uses = self.uses.lock();
        *uses.open.entry(device.clone()).or_default() += 1;
        uses.is_left_over(device)
    }

    /// A lease without a device of the group of a function that is to be opened.
    fn reserve(self: &Arc<Self>, function: &SysfsFunction) -> Result<Lease, VfioError> {
        let slot = self.slot(&function.group);
        let mut state = slot.0.lock();
        let file = self.file_of(&mut state, function)?;
        state.leases += 1;
        drop(state);
        Ok(self.new_lease(slot, file, None))
    }

    fn new_lease(
        self: &Arc<Self>,
        slot: Arc<Slot>,
        file: Arc<OwnedFd>,
        device: Option<Affected>,
    ) -> Lease {
        let (is_used, is_left) = (AtomicBool::new(false), AtomicBool::new(false));
        Lease { groups: Arc::clone(self), slot, file: Some(file), device, is_used, is_left }
    }

    fn slot(&self, group: &str) -> Arc<Slot> {
        Arc::clone(self.slots.lock().entry(group.to_owned()).or_default())
    }

    /// The file of a group in the container, which is opened if there is none, or none any more.
    fn file_of(
        &self,
        state: &mut State,
        function: &SysfsFunction,
    ) -> Result<Arc<OwnedFd>, VfioError> {
        if let Some(file) = &state.file {
            // With a device open the host waits until that is closed.
            if state.devices > 0 || self.is_there(file, function)? {
                return Ok(Arc::clone(file));
            }
            let group = &function.group;
            log::warn!(
                "the host has taken IOMMU group {group} from this VM while no device of it was open: it is opened anew"
            );
            (state.file, state.told) = (None, None);
        }
        let file = Arc::new(self.begin(function)?);
        state.file = Some(Arc::clone(&file));
        Ok(file)
    }

    /// Whether a group that was held without a device is still in the container. Once its last function has left VFIO it is
    /// not, and its file is of no use, whatever driver the function has got since.
    fn is_there(&self, file: &OwnedFd, function: &SysfsFunction) -> Result<bool, VfioError> {
        match self.kernel.status(file.as_fd()) {
            Ok(GroupStatus { is_in_container: true, is_viable: false }) => {
                Err(not_viable(function))
            }
            Ok(status) => Ok(status.is_in_container),
            Err(_) => Ok(false),
        }
    }

    /// Opens the file of a group, and puts the group into the container.
    fn begin(&self, function: &SysfsFunction) -> Result<OwnedFd, VfioError> {
        let group = &function.group;
        let file = self.kernel.open_group(group).map_err(|source| refused(function, source))?;
        let status =
            self.kernel.status(file.as_fd()).map_err(|source| refused(function, source))?;
        if !status.is_viable {
            return Err(not_viable(function));
        }
        let mut drivers = self.drivers.lock();
        let entered = self.kernel.join(file.as_fd()).and_then(|()| {
            if *drivers == 0 || !self.kernel.has_driver() {
                self.kernel.set_driver()?;
                *drivers = drivers.saturating_add(1);
            }
            Ok(())
        });
        if let Err(source) = entered {
            // It leaves the container while no other enters.
            drop(file);
            let (path, group) = (function.path.clone(), group.clone());
            return Err(VfioError::Join { path, group, source });
        }
        Ok(file)
    }

    /// How often the container was given a driver. As long as that stays the same, and a device is open, all that was mapped
    /// is.
    pub fn drivers(&self) -> u64 {
        *self.drivers.lock()
    }

    /// Notes which functions are to be opened: until then, their groups are opened for resets of buses that affect them, in
    /// whichever order the functions come.
    pub fn expect(&self, functions: impl IntoIterator<Item = SysfsFunction>) {
        let functions = functions.into_iter();
        *self.expected.lock() =
            functions.map(|function| (function.group.clone(), function)).collect();
    }

    fn close_unneeded(&self, state: &mut State) {
        if state.leases > 0 {
            return;
        }
        state.told = None;
        let _entering = self.drivers.lock();
        state.file = None;
    }

    /// A lease of a group that the VM has; `None` of any other.
    fn hold(self: &Arc<Self>, group: &str) -> Option<Lease> {
        let slot = Arc::clone(self.slots.lock().get(group)?);
        let mut state = slot.0.lock();
        let file = Arc::clone(state.file.as_ref()?);
        state.leases += 1;
        drop(state);
        Some(self.new_lease(slot, file, None))
    }

    /// Leases of all groups that the VM has. Each is free of a VM in KVM from here on, until a device of it is opened. Called
    /// when none is being opened.
    pub fn hold_all(self: &Arc<Self>) -> Vec<Lease> {
        let groups: Vec<_> = self.slots.lock().keys().cloned().collect();
        let leases: Vec<_> = groups.iter().filter_map(|group| self.hold(group)).collect();
        for lease in &leases {
            lease.slot.0.lock().told = None;
        }
        leases
    }

    /// That of a function which is to be opened, if it is in a group that the VM does not have yet.
    fn hold_for_reset(self: &Arc<Self>, affected: &Affected) -> Result<Lease, String> {
        let Affected { name, group } = affected;
        // Of one that is to be opened, what the VM has of the group may be of before the host took it.
        let expected = self.expected.lock().get(group).cloned();
        let Some(function) = expected else {
            return self.hold(group).ok_or_else(|| {
                format!("that resets {name}, too, whose IOMMU group {group} this VM does not have")
            });
        };
        self.reserve(&function).map_err(|error| {
            let why = error_text::chain(&error);
            format!("that resets {name}, too, whose IOMMU group {group} cannot be opened: {why}")
        })
    }

    /// Claims a bus with these functions for a reset, which the function `own` asks for. As long as the claim is there,
    /// the guest begins to use none of the others, unless the kernel takes too long.
    ///
    /// # Errors
    /// Names a function that must not be reset.
    pub fn claim(self: &Arc<Self>, own: &Affected, affected: &[Affected]) -> Result<Claim, String> {
        let mut groups = BTreeMap::new();
        for function in affected {
            if !groups.contains_key(&function.group) {
                groups.insert(function.group.clone(), self.hold_for_reset(function)?);
            }
        }
        let others: Vec<_> = affected.iter().filter(|function| *function != own).cloned().collect();
        let mut uses = self.uses.lock();
        if let Some(left) = others.iter().find(|function| uses.left.contains(*function)) {
            return Err(format!("that resets {}, too, {HANGS}", left.name));
        }
        if let Some(used) = others.iter().find(|function| uses.in_use.contains_key(*function)) {
            let name = &used.name;
            let why = if uses.is_left_over(used) {
                "which is still open for a guest that has ended"
            } else {
                "which the guest uses"
            };
            return Err(format!("that resets {name}, too, {why}"));
        }
        for function in &others {
            *uses.claimed.entry(function.clone()).or_default() += 1;
        }
        drop(uses);
        let groups = groups.into_values().collect();
        Ok(Claim { container: Arc::clone(self), groups, others })
    }

    /// Notes that the guest uses the device of a lease, when no reset of its bus is under way any more, or after `limit`;
    /// returns whether none is.
    fn begin_use(&self, device: &Affected, is_used: &AtomicBool, limit: Duration) -> bool {
        let mut uses = self.uses.lock();
        let is_claimed = |uses: &mut Uses| uses.claimed.contains_key(device);
        let result = self.unclaimed.wait_while_for(&mut uses, is_claimed, limit);
        if !is_used.swap(true, Ordering::Relaxed) {
            *uses.in_use.entry(device.clone()).or_default() += 1;
        }
        !result.timed_out()
    }

    fn end_use(&self, device: &Affected, is_used: &AtomicBool) {
        let mut uses = self.uses.lock();
        if is_used.swap(false, Ordering::Relaxed) {
            uncount(&mut uses.in_use, device);
        }
    }
}

/// The need of a group, until dropped.
pub struct Lease {
    groups: Arc<Groups>,
    slot: Arc<Slot>,
    /// Always there, but while this is dropped.
    file: Option<Arc<OwnedFd>>,
    /// The device that needs it.
    device: Option<Affected>,
    /// The guest uses it. Changed with `uses` locked.
    is_used: AtomicBool,
    /// The device hangs. Changed with `uses` locked.
    is_left: AtomicBool,
}

impl Lease {
    /// Notes whether the device hangs in a call: no other lease of it is given until it does not, or this one is dropped.
    pub fn note_left(&self, is_left: bool) {
        let Some(device) = &self.device else { return };
        let mut uses = self.groups.uses.lock();
        self.is_left.store(is_left, Ordering::Relaxed);
        if is_left {
            uses.left.insert(device.clone());
        } else {
            uses.left.remove(device);
        }
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }

    /// All groups of the container.
    pub fn groups(&self) -> &Arc<Groups> {
        &self.groups
    }

    /// The device that needs it, if one does.
    pub fn device(&self) -> Option<&Affected> {
        self.device.as_ref()
    }

    /// Whether the guest uses the device. Waits for the reset of its bus for the sake of another, but not for long.
    pub fn set_in_use(&self, is_used: bool) {
        let Some(device) = &self.device else { return };
        if !is_used {
            self.groups.end_use(device, &self.is_used);
        } else if !self.groups.begin_use(device, &self.is_used, USE_WAIT) {
            let name = &device.name;
            log::warn!("the guest uses {name}, which is still being reset with its bus");
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.set_in_use(false);
        if let Some(device) = &self.device {
            let mut uses = self.groups.uses.lock();
            uncount(&mut uses.open, device);
            if self.is_left.load(Ordering::Relaxed) {
                uses.left.remove(device);
            }
        }
        let mut state = self.slot.0.lock();
        self.file = None;
        state.leases = state.leases.saturating_sub(1);
        if self.device.is_some() {
            state.devices = state.devices.saturating_sub(1);
            if state.devices == 0 {
                state.told = None;
            }
        }
        self.groups.close_unneeded(&mut state);
    }
}

fn refused(function: &SysfsFunction, source: io::Error) -> VfioError {
    VfioError::Open { path: function.path.clone(), group: function.group.clone(), source }
}

/// Names the functions whose drivers are in the way.
fn not_viable(function: &SysfsFunction) -> VfioError {
    let (_, members) = group_of(&function.path).unwrap_or_default();
    let in_the_way = members.into_iter().filter(crate::GroupMember::is_in_the_way);
    let named = in_the_way.filter_map(|member| {
        member.driver.map(|driver| format!("{} (which belongs to {driver})", member.name))
    });
    let named: Vec<_> = named.collect();
    let members = if named.is_empty() { "another function".to_owned() } else { named.join(", ") };
    VfioError::NotViable { path: function.path.clone(), group: function.group.clone(), members }
}
