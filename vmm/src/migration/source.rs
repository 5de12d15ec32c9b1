// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The source side of a machine's migration.
//!
//! Owns the machine while it migrates: nothing else can reach it. Each type is a phase; what is
//! left after the handover has no way to run the guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hypervisor::VcpuThrottle;
use vm_migration::VmError;
use vm_migration::page_server::PageServerHandle;
use vm_migration::protocol::formats::Formats;
use vm_migration::vm::{
    BlobInfo, BlobSource, FreePageHints, PausedVm, PlainPeer, SourceVm, Throttle,
};

use super::blobs;
use super::dirty::{DeviceLogs, MachineDirtyLog};
use super::disk_writer::DiskWriter;
use super::document::{CONFIG_VERSION, MachineDocument};
use super::exported_machine::SentMachine;
use super::hints::MachineHints;
use super::memory::{MigratingRam, MigratingRamError};
use super::page_server::{PageServerPlan, PageServerProcess};
use crate::config::BalloonConfig;
use crate::machine::{
    CallLimits, INTEGRATED_ENDPOINTS_VERSION, Machine, MachineError, NARROW_BARS_VERSION,
    PCI_SEGMENTS_VERSION, PLATFORMS_VERSION, Patience, ROMS_VERSION, WriteBack, WriteBackError,
    features,
};
use crate::platform::PlatformName;

/// Downtime of a machine without vCPUs: pausing, saving, restoring and resuming the devices.
const SWITCH_OVER_BASE: Duration = Duration::from_millis(6);

/// Added downtime per vCPU: saving, sending and restoring its state.
const SWITCH_OVER_VCPU: Duration = Duration::from_millis(1);

/// Time that the write-back of disks may take while the guest is stopped. Less than a destination waits for
/// the next message, and than guests and their peers tolerate; a migration that needs more fails, and the
/// guest resumes.
const WRITE_BACK_TIME_MAX: Duration = Duration::from_secs(10);

/// Time to wait, while the guest runs, for a moment at which its devices would finish their requests within
/// the allowed downtime.
const DEVICES_TIME_MAX: Duration = Duration::from_secs(30);

/// Minimum time that devices have to finish, whatever downtime is allowed: no host is faster.
const DEVICES_TIME_MIN: Duration = Duration::from_millis(50);

/// Between two attempts devices run for this many times as long as the attempt has paused them.
const DEVICES_PACE: u32 = 4;

/// Poll interval for cancellation of the migration.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Limits of stopping the guest.
pub struct StopLimits {
    /// The currently allowed downtime.
    pub downtime: Box<dyn Fn() -> Duration + Send>,
    /// When the migration is cancelled by its timeout.
    pub until: Option<Instant>,
    /// Whether it is cancelled.
    pub is_cancelled: Box<dyn Fn() -> bool + Send>,
}

impl StopLimits {
    fn devices(&self) -> Duration {
        (self.downtime)().max(DEVICES_TIME_MIN)
    }
}

/// An outgoing machine whose guest may run.
pub struct LeavingMachine {
    machine: Box<Machine>,
    memory: Arc<MigratingRam>,
    page_server: Option<PageServerPlan>,
    disk_writer: Option<DiskWriter>,
    /// Who reads its documents.
    reader: Reader,
    limits: StopLimits,
    /// Devices whose hardware states are sent beside the state.
    apart: Vec<String>,
}

/// Who reads the documents of an outgoing machine.
enum Reader {
    /// This program, and the formats that it reads.
    Own(Formats),
    /// cloud-hypervisor v53, to which this is sent of the machine.
    CloudHypervisor53(Box<SentMachine>),
}

/// An outgoing machine whose guest is paused.
pub struct PausedMachine {
    machine: Box<Machine>,
    memory: Arc<MigratingRam>,
    ran_before: bool,
    /// The write-back of its disks, until it has been waited for.
    write_back: Option<WriteBack>,
    reader: Reader,
    limits: StopLimits,
    /// Devices whose hardware states are sent beside the state.
    apart: Vec<String>,
}

/// Memory and threads of a machine whose guest has been migrated; released when dropped.
pub struct Remains {
    _machine: Box<Machine>,
}

/// The guest has requested a reset or shutdown, and cannot be migrated as it is.
#[derive(Debug, thiserror::Error)]
#[error(
    "the guest is rebooting or shutting down; try again when it runs (a paused VM runs \
     after vm.resume)"
)]
pub struct GuestIsEnding;

impl LeavingMachine {
    /// Takes over the machine, for a migration whose last pages a page server may serve.
    ///
    /// # Errors
    /// The machine is returned with the reason.
    pub fn new(
        machine: Box<Machine>,
        page_server: Option<PageServerPlan>,
        limits: StopLimits,
    ) -> Result<Self, (Box<Machine>, MigratingRamError)> {
        match MigratingRam::as_mapped(Arc::clone(machine.ram())) {
            Ok(memory) => {
                let disk_writer = DiskWriter::start(machine.writable_disks());
                let (memory, reader) = (Arc::new(memory), Reader::Own(Formats::default()));
                let apart = Vec::new();
                Ok(Self { machine, memory, page_server, disk_writer, reader, limits, apart })
            }
            Err(error) => Err((machine, error)),
        }
    }

    /// Takes over the machine for a check: it is asked, and its writes are watched, and nothing is written back.
    ///
    /// # Errors
    /// The machine is returned with the reason.
    pub fn for_check(machine: Box<Machine>) -> Result<Self, (Box<Machine>, MigratingRamError)> {
        let memory = match MigratingRam::as_mapped(Arc::clone(machine.ram())) {
            Ok(memory) => Arc::new(memory),
            Err(error) => return Err((machine, error)),
        };
        let (downtime, is_cancelled) = (Box::new(|| Duration::ZERO), Box::new(|| false));
        let limits = StopLimits { downtime, until: None, is_cancelled };
        let (page_server, disk_writer, reader) = (None, None, Reader::Own(Formats::default()));
        Ok(Self { machine, memory, page_server, disk_writer, reader, limits, apart: Vec::new() })
    }

    /// Returns the machine.
    pub fn into_machine(self) -> Box<Machine> {
        self.machine
    }

    /// Waits, while the guest runs, until its devices finish their requests within the allowed downtime.
    fn prepare_devices(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), MachineError> {
        let latest = Instant::now() + DEVICES_TIME_MAX;
        let latest = self.limits.until.map_or(latest, |until| until.min(latest));
        loop {
            let within = self.limits.devices();
            let busy = match self.machine.try_devices(within, is_cancelled) {
                Err(busy @ MachineError::DeviceBusy { .. }) => busy,
                // The caller checks for cancellation itself.
                Ok(()) | Err(MachineError::PauseWithdrawn) => return Ok(()),
                Err(other) => return Err(other),
            };
            let next = Instant::now() + within * DEVICES_PACE;
            if next >= latest {
                return Err(busy);
            }
            log::warn!("{busy}; the migration waits for it");
            while Instant::now() < next {
                if is_cancelled() {
                    return Ok(());
                }
                std::thread::sleep(CANCEL_POLL_INTERVAL);
            }
        }
    }
}

impl PausedMachine {
    /// Returns the machine, still paused.
    pub fn into_machine(self) -> Box<Machine> {
        self.machine
    }

    /// Waits until the disks hold what the guest has written, as the destination reads them.
    fn await_write_back(&mut self) -> Result<(), WriteBackError> {
        if let Some(write_back) = &self.write_back {
            write_back.wait_within(WRITE_BACK_TIME_MAX)?;
            log::debug!("disks were written back in {} ms", write_back.elapsed().as_millis());
            self.write_back = None;
        }
        Ok(())
    }
}

/// Throttles the vCPUs until dropped.
struct VcpuThrottling(VcpuThrottle);

impl Throttle for VcpuThrottling {
    fn set(&mut self, percent: u8) {
        self.0.set(percent);
    }
}

impl SourceVm for LeavingMachine {
    type Memory = MigratingRam;
    type Log = MachineDirtyLog;
    type Paused = PausedMachine;

    fn config_json(&mut self) -> Result<Vec<u8>, VmError> {
        if let Reader::CloudHypervisor53(sent) = &self.reader {
            return Ok(sent.config_json().to_vec());
        }
        let document = MachineDocument {
            vm_config: self.machine.config().clone(),
            common_cpuid: self.machine.shown().to_vec(),
            feature_msrs: self.machine.feature_msrs().to_vec(),
        };
        Ok(document.to_json()?)
    }

    fn formats(&self) -> Formats {
        // Other parts of later versions are dropped by `MachineState::for_reader`.
        let state = if self.machine.config().platform_name() != PlatformName::default() {
            PLATFORMS_VERSION
        } else if self.machine.has_roms() {
            ROMS_VERSION
        } else if self.machine.has_segments() {
            PCI_SEGMENTS_VERSION
        } else if self.machine.has_integrated_endpoints() {
            INTEGRATED_ENDPOINTS_VERSION
        } else if self.machine.has_narrow_bars() {
            NARROW_BARS_VERSION
        } else if features::has_shadow_stacks(self.machine.shown()) {
            // The shadow stack pointer of a vCPU came with this version.
            2
        } else {
            1
        };
        Formats { config: CONFIG_VERSION, state }
    }

    fn meet(&mut self, newest: Formats) {
        self.reader = Reader::Own(newest);
    }

    fn meet_plain(&mut self) -> Result<PlainPeer, VmError> {
        // What is refused is refused before the configuration is sent.
        let sent = SentMachine::begin(&self.machine)?;
        log::warn!(
            "the destination speaks plain version 0 of the protocol and is taken for cloud-hypervisor v53, as its answers do not \
             tell; other versions are not supported"
        );
        let borders = sent.borders();
        self.reader = Reader::CloudHypervisor53(Box::new(sent));
        Ok(PlainPeer::Other(borders))
    }

    fn blobs(&mut self, apart: bool) -> Result<Vec<BlobInfo>, VmError> {
        if !apart {
            self.apart.clear();
            self.machine.check_state_len()?;
            return Ok(Vec::new());
        }
        let blobs = blobs::announce(&self.machine)?;
        self.apart = blobs.iter().map(|blob| blob.name.clone()).collect();
        Ok(blobs)
    }

    fn blob_bytes(&self) -> u64 {
        self.machine.hardware_state_len_bytes()
    }

    fn memory(&self) -> Arc<MigratingRam> {
        Arc::clone(&self.memory)
    }

    fn start_dirty_log(&mut self) -> Result<MachineDirtyLog, VmError> {
        let (vm, ram) = (self.machine.vm().clone(), Arc::clone(self.machine.ram()));
        let watch =
            || DeviceLogs { dma: self.machine.watch_dma(), served: self.machine.watch_back_ends() };
        Ok(MachineDirtyLog::start(vm, ram, watch)?)
    }

    fn throttle(&self) -> Option<Box<dyn Throttle>> {
        let throttle = self.machine.throttle()?;
        Some(Box::new(VcpuThrottling(throttle)))
    }

    fn may_give_hints(&self) -> bool {
        let hinting = |config: &BalloonConfig| config.free_page_hinting;
        !self.machine.is_paused() && self.machine.config().balloon.as_ref().is_some_and(hinting)
    }

    fn free_page_hints(&self) -> Option<Box<dyn FreePageHints>> {
        let hints = self.machine.balloon()?.ask_for_hints()?;
        Some(Box::new(MachineHints(hints)))
    }

    fn page_server(&mut self) -> Result<Option<Box<dyn PageServerHandle>>, VmError> {
        let Some(plan) = &self.page_server else { return Ok(None) };
        Ok(Some(Box::new(PageServerProcess::start(plan, &self.memory)?)))
    }

    fn switch_over_time(&self) -> Duration {
        let disks = self.disk_writer.as_ref().map_or(Duration::ZERO, DiskWriter::expected);
        SWITCH_OVER_BASE + SWITCH_OVER_VCPU * self.machine.config().cpus.boot_vcpus + disks
    }

    fn prepare_stop(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        // First, as a disk that answers no request does not write back either.
        self.prepare_devices(is_cancelled)?;
        // The guest's requests wait for free space, and the stop would wait for them.
        self.machine.check_room()?;
        if let Some(writer) = &self.disk_writer {
            writer.prepare_stop(is_cancelled)?;
        }
        // Last, as the guest may begin a command while its disks are written back.
        self.machine.prepare_save(is_cancelled);
        Ok(())
    }

    fn pause(self) -> Result<PausedMachine, (Self, VmError)> {
        let mut leaving = self;
        let ran_before = !leaving.machine.is_paused();
        let within = leaving.limits.devices();
        let is_cancelled = &*leaving.limits.is_cancelled;
        let paused = match leaving.reader {
            Reader::Own(_) => leaving.machine.pause(within, is_cancelled),
            // What it would find in the queues it would serve even if the guest goes on here.
            Reader::CloudHypervisor53(_) => leaving.machine.pause_when_served(within, is_cancelled),
        };
        if let Err(error) = paused {
            return Err((leaving, error.into()));
        }
        if leaving.machine.is_ending() {
            // The guest resets or ends here; a paused machine would hold that up.
            if ran_before && let Err(error) = leaving.machine.resume() {
                return Err((leaving, error.into()));
            }
            return Err((leaving, GuestIsEnding.into()));
        }
        if let Err(full) = leaving.machine.check_room() {
            // The waiting requests are in no state. The guest resumes, and the VMM thread pauses it for the
            // disk.
            if ran_before && let Err(error) = leaving.machine.resume() {
                return Err((leaving, error.into()));
            }
            return Err((leaving, full.into()));
        }
        let Self { machine, memory, reader, limits, apart, .. } = leaving;
        // Concurrently with the last pages and the state.
        let write_back = Some(machine.write_back());
        Ok(PausedMachine { machine, memory, ran_before, write_back, reader, limits, apart })
    }
}

impl PausedVm for PausedMachine {
    type Running = LeavingMachine;
    type Remains = Remains;

    fn ran_before(&self) -> bool {
        self.ran_before
    }

    fn open_blobs(&mut self) -> Result<Vec<Box<dyn BlobSource>>, VmError> {
        blobs::sources(&self.machine, &self.apart)
    }

    fn leave_blob(&mut self, number: usize) -> String {
        let id = self.apart.get(number).map_or("", String::as_str);
        self.machine.leave_device(id)
    }

    fn state_json(&mut self, blobs: &[u64]) -> Result<Vec<u8>, VmError> {
        let apart = blobs::lengths(&self.apart, blobs)?;
        let state = match &self.reader {
            Reader::Own(formats) => {
                let is_cancelled = &*self.limits.is_cancelled;
                let limits = CallLimits::default();
                let patience = Patience { limits, until: None, is_cancelled };
                let state = self.machine.save_beside(&apart, &patience)?;
                state.for_reader(formats.state)?.to_json()?
            }
            Reader::CloudHypervisor53(sent) => sent.state_json(&self.machine)?,
        };
        // Before the destination acknowledges: its acknowledgement has a time limit.
        self.await_write_back()?;
        Ok(state)
    }

    fn release_exclusive(&mut self) -> Result<(), VmError> {
        self.await_write_back()?;
        Ok(self.machine.release_exclusive()?)
    }

    fn resume(self) -> Result<LeavingMachine, (Self, VmError)> {
        let Self { mut machine, memory, ran_before, reader, limits, apart, .. } = self;
        let back = if ran_before { machine.resume() } else { machine.take_exclusive() };
        let (page_server, disk_writer, write_back) = (None, None, None);
        match back {
            Ok(()) => Ok(LeavingMachine {
                machine,
                memory,
                page_server,
                disk_writer,
                reader,
                limits,
                apart,
            }),
            Err(error) => {
                let still = Self { machine, memory, ran_before, write_back, reader, limits, apart };
                Err((still, error.into()))
            }
        }
    }

    fn handed_over(self) -> Remains {
        Remains { _machine: self.machine }
    }
}
