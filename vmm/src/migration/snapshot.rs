// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving a machine to a snapshot directory, and restoring it.
//!
//! Owns the order in which a machine is restored: what can fail cheaply first, locks and taps
//! before memory is read, memory before state (setting state reads memory). Configuration and state
//! come from files of a user and are trusted no more than those of an unrelated peer.

use std::path::Path;
use std::sync::Arc;

use hypervisor::ClockPolicy;
use memory::{
    ImageError, ImageRange, InitialContents, Prefault, PrefaultError, PrefaultOptions, RamImage,
    RamSources,
};
use thiserror::Error;
use vm_migration::Cancel;
use vm_migration::layout::GpaRange;
use vm_migration::ram::GuestMemoryMap as _;
use vm_migration::snapshot::{
    Filling, MemoryPart, Opened, SaveReport, Saved, SnapshotError, copy_in, default_threads, save,
    save_ranges,
};

use super::adopted_snapshot::{self, AdoptedSnapshot, AdoptedSnapshotError, MemoryContents};
use super::destination::DmaToMissingPages;
use super::document::sparse_config;
use super::exported_machine::{ExportedMachineError, ExportedSnapshot};
use super::memory::{MigratingRam, MigratingRamError};
use super::source::GuestIsEnding;
use super::storage_thread::{CANCEL_POLL_INTERVAL, StorageError, write_on_thread};
use super::updates::{self, UpdateError};
use crate::adopt::{self, MemoryLayout};
use crate::config::{
    ConfigError, GuestClock, MemoryRestoreMode, RestoreConfig, SnapshotFormat, VmConfig,
};
use crate::machine::{
    CallLimits, ConsoleError, Consoles, EventSink, GenerationError, Host, Machine, MachineError,
    MachineState, MachineStateError, Patience, StateJsonError, WriteBackError, features,
};
use crate::sandbox::landlock::LandlockError;

/// Why a snapshot failed.
#[derive(Debug, Error)]
#[error("the VM cannot be saved to {directory}")]
pub struct TakeError {
    directory: String,
    #[source]
    source: TakeCause,
}

#[derive(Debug, Error)]
enum TakeCause {
    #[error(transparent)]
    Ending(#[from] GuestIsEnding),
    #[error(transparent)]
    Exported(#[from] ExportedMachineError),
    #[error("its state cannot be read")]
    Machine(#[from] MachineError),
    #[error(transparent)]
    WriteBack(#[from] WriteBackError),
    #[error(transparent)]
    Memory(#[from] MigratingRamError),
    #[error("its configuration cannot be written as JSON")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    State(#[from] StateJsonError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Why a restore failed.
#[derive(Debug, Error)]
#[error("the VM cannot be restored from {directory}")]
pub struct RestoreError {
    directory: String,
    #[source]
    source: RestoreCause,
}

#[derive(Debug, Error)]
enum RestoreCause {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Adopted(#[from] AdoptedSnapshotError),
    #[error("its memory can only be copied: memory_restore_mode=copy")]
    CopyOnly,
    #[error(
        "memory that is a mapping of the snapshot would be copied for passed-through devices, whole and before the \
         guest runs: memory_restore_mode=copy"
    )]
    MappedForDevices,
    #[error("config.json is not the configuration of a VM")]
    ConfigJson(#[source] serde_json::Error),
    #[error("the configuration in config.json cannot be used")]
    Config(#[from] ConfigError),
    #[error("the requested changes cannot be made")]
    Update(#[from] UpdateError),
    #[error("its memory cannot be mapped; memory_restore_mode=copy needs none of this")]
    Image(#[from] ImageError),
    #[error(transparent)]
    Generation(#[from] GenerationError),
    #[error(transparent)]
    MissingPages(#[from] DmaToMissingPages),
    #[error("state.json cannot be used")]
    StateJson(#[source] MachineStateError),
    #[error(transparent)]
    Landlock(#[from] LandlockError),
    #[error(transparent)]
    Console(#[from] ConsoleError),
    #[error("the machine of its configuration cannot be made")]
    Make(#[source] MachineError),
    #[error("its state does not fit")]
    State(#[source] MachineError),
    #[error(transparent)]
    Memory(#[from] MigratingRamError),
    #[error("guest memory cannot be populated, as prefault=on asks")]
    Prefault(#[from] PrefaultError),
}

/// A restored machine, paused.
pub struct Restored {
    // Drop order matters: the machine may wait for pages that are being read.
    /// The machine.
    pub machine: Box<Machine>,
    /// The transfer of its memory, if that is still in progress.
    pub filling: Option<Filling<MigratingRam>>,
}

/// Writes a paused machine to a directory. The machine stays paused.
///
/// # Errors
/// Names the file, or what the program of the format does not have. Nothing is left in the directory; if the storage hangs,
/// nothing is left once it responds.
pub fn take(
    machine: &Machine,
    directory: &Path,
    format: SnapshotFormat,
    cancel: &Cancel,
) -> Result<SaveReport, TakeError> {
    take_into(machine, directory, format, cancel)
        .map_err(|source| TakeError { directory: directory.display().to_string(), source })
}

fn take_into(
    machine: &Machine,
    directory: &Path,
    format: SnapshotFormat,
    cancel: &Cancel,
) -> Result<SaveReport, TakeCause> {
    if machine.is_ending() {
        return Err(GuestIsEnding.into());
    }
    // What the other program does not have is named before anything is written back.
    let exported = match format {
        SnapshotFormat::Godwit => None,
        SnapshotFormat::CloudHypervisor53 => Some(ExportedSnapshot::of(machine)?),
    };
    write_back(machine, cancel)?;
    let documents = match exported {
        None => Documents {
            config_json: serde_json::to_vec_pretty(&sparse_config(machine.config())?)?,
            state_json: machine.save(&patience(&|| cancel.is_cancelled()))?.to_json()?,
            ranges: None,
        },
        Some(ExportedSnapshot { config_json, state_json, ranges }) => {
            Documents { config_json, state_json, ranges: Some(ranges) }
        }
    };
    let memory = MigratingRam::as_mapped(Arc::clone(machine.ram()))?;
    write(directory, documents, memory, cancel)
}

/// How long each passed-through device may take.
fn patience(is_cancelled: &dyn Fn() -> bool) -> Patience<'_> {
    Patience { limits: CallLimits::default(), until: None, is_cancelled }
}

/// What is written besides memory.
struct Documents {
    config_json: Vec<u8>,
    state_json: Vec<u8>,
    /// The memory that is written; none if it is all, in the form of this program.
    ranges: Option<Vec<GpaRange>>,
}

/// Writes the snapshot on a thread that only needs the memory: storage that hangs blocks that thread and
/// not the machine.
fn write(
    directory: &Path,
    documents: Documents,
    memory: MigratingRam,
    cancel: &Cancel,
) -> Result<SaveReport, TakeCause> {
    let (directory, own_cancel) = (directory.to_owned(), cancel.clone());
    let result = write_on_thread(
        move || {
            let Documents { config_json, state_json, ranges } = documents;
            let saved = Saved { config_json: &config_json, state_json: &state_json };
            let (threads, cancel) = (default_threads(), &own_cancel);
            let result = match &ranges {
                None => save(&directory, saved, &memory, threads, cancel),
                Some(ranges) => save_ranges(&directory, saved, ranges, &memory, threads, cancel),
            };
            // Released before the machine's owner continues.
            drop(memory);
            result
        },
        cancel,
    )?;
    Ok(result?)
}

/// Writes the disks back, as they are copied alongside the snapshot; without a time limit, until cancelled.
fn write_back(machine: &Machine, cancel: &Cancel) -> Result<(), TakeCause> {
    let disks = machine.write_back();
    while !cancel.is_cancelled() {
        match disks.wait_within(CANCEL_POLL_INTERVAL) {
            Err(WriteBackError::Slow { .. }) => {}
            other => return Ok(other?),
        }
    }
    Err(SnapshotError::Cancelled.into())
}

/// Where the memory of a snapshot is.
enum Source {
    /// A snapshot of this program.
    Own(Box<Opened>),
    /// One of cloud-hypervisor, whose state has been converted.
    Adopted(MemoryContents, MemoryLayout),
}

impl Source {
    /// The state that is in the snapshot's file.
    fn state_json(&self) -> &[u8] {
        match self {
            Self::Own(snapshot) => snapshot.state_json(),
            Self::Adopted(..) => &[],
        }
    }
}

/// Confines the process to the paths of a VM, if it is to be.
pub type Confine<'a> = &'a dyn Fn(&VmConfig) -> Result<(), LandlockError>;

/// Creates a machine from a snapshot directory. Its disks are locked and its taps open.
///
/// # Errors
/// Names the file, device or resource; everything is released again.
pub fn restore(
    config: &RestoreConfig,
    host: &Host,
    sink: EventSink,
    cancel: &Cancel,
    confine: Confine<'_>,
) -> Result<Restored, RestoreError> {
    let at = |directory: String| move |source| RestoreError { directory, source };
    let directory = config.directory().map_err(|e| at(config.source_url.clone())(e.into()))?;
    let name = directory.display().to_string();
    restore_from(&directory, config, host, sink, cancel, confine).map_err(at(name))
}

fn restore_from(
    directory: &Path,
    request: &RestoreConfig,
    host: &Host,
    sink: EventSink,
    cancel: &Cancel,
    confine: Confine<'_>,
) -> Result<Restored, RestoreCause> {
    let is_on_demand = request.memory_restore_mode == MemoryRestoreMode::OnDemand;
    let is_mapped = request.memory_restore_mode == MemoryRestoreMode::Mapped;
    let mut taps = Vec::new();
    let (source, mut config, adopted) = if adopted_snapshot::is_in(directory) {
        if request.memory_restore_mode != MemoryRestoreMode::Copy {
            return Err(RestoreCause::CopyOnly);
        }
        let snapshot = AdoptedSnapshot::open(directory)?;
        let AdoptedSnapshot { config, state, memory, layout, without_tap } = snapshot;
        taps = without_tap;
        (Source::Adopted(memory, layout), config, Some(state))
    } else {
        let snapshot = Opened::open(directory)?;
        let config: VmConfig =
            serde_json::from_slice(snapshot.config_json()).map_err(RestoreCause::ConfigJson)?;
        (Source::Own(Box::new(snapshot)), config, None)
    };
    // Before any rename: descriptors use the original names.
    request.arriving_fds().place(&mut config)?;
    adopt::check_taps(&taps, &config).map_err(AdoptedSnapshotError::from)?;
    updates::change_config(&mut config, request)?;
    let mut config = config.complete_begun()?;
    confine(&config)?;
    let passes_through = config.devices.as_ref().is_some_and(|devices| !devices.is_empty());
    if is_on_demand && (passes_through || !config.vhost_user_devices().is_empty()) {
        return Err(DmaToMissingPages.into());
    }
    if is_mapped && passes_through {
        return Err(RestoreCause::MappedForDevices);
    }
    // First, as a state that cannot be parsed needs no machine.
    let mut state = match adopted {
        Some(state) => state,
        None => MachineState::from_json(source.state_json()).map_err(RestoreCause::StateJson)?,
    };
    updates::change_state(&mut state, request)?;
    let first = state.vcpus.first().map(|vcpu| features::describing(&vcpu.msrs));
    host.check_shown(&config, &state.shown, &first.unwrap_or_default())
        .map_err(RestoreCause::State)?;
    let consoles = Consoles::open(&mut config)?;
    let contents = match &source {
        Source::Own(_) => InitialContents::Nothing,
        // Others may use the files that the configuration names.
        Source::Adopted(..) => InitialContents::MustBeNew,
    };
    let image = match &source {
        Source::Own(snapshot) if is_mapped => Some(image(snapshot)?),
        _ => None,
    };
    let origin = RamSources { contents, image, ..RamSources::default() };
    let ram = Machine::arriving_ram(&config, host, origin).map_err(RestoreCause::Make)?;
    if let Source::Adopted(_, layout) = &source {
        adopt::check_made(layout, &config, &ram).map_err(AdoptedSnapshotError::from)?;
    }
    if request.prefault {
        // All of it is to be populated in the end, so check at once whether that is possible.
        memory::check_available(ram.regions()).map_err(PrefaultError::from)?;
    }
    let is_on_demand = matches!(
        (&source, request.memory_restore_mode),
        (Source::Own(_), MemoryRestoreMode::OnDemand)
    );
    let of = if is_on_demand { MigratingRam::with_aliases } else { MigratingRam::as_mapped };
    let memory = Arc::new(of(Arc::clone(&ram))?);
    if let (Source::Own(snapshot), true) = (&source, is_mapped) {
        snapshot.check_layout(memory.layout())?;
    }
    let machine =
        Machine::arriving(config, consoles, host, sink, ram).map_err(RestoreCause::Make)?;
    let mut restored = Restored { machine: Box::new(machine), filling: None };
    restored.machine.take_exclusive().map_err(RestoreCause::Make)?;
    restored.filling = load(source, request, &memory, &restored.machine, cancel)?;
    let clock = match request.clock {
        GuestClock::CatchUp => ClockPolicy::CatchUp,
        GuestClock::Continue => ClockPolicy::Continue,
    };
    let put = restored.machine.restore(state, clock, &patience(&|| cancel.is_cancelled()));
    let put = put.map_err(RestoreCause::State);
    if let Some(filling) = &restored.filling {
        // A page that could not be read may be the cause of the state's error.
        filling.commit()?;
    }
    put?;
    restored.machine.renew_generation()?;
    Ok(restored)
}

/// Brings the contents of memory in, or starts to.
fn load(
    source: Source,
    request: &RestoreConfig,
    memory: &Arc<MigratingRam>,
    machine: &Machine,
    cancel: &Cancel,
) -> Result<Option<Filling<MigratingRam>>, RestoreCause> {
    match (source, request.memory_restore_mode) {
        (Source::Own(snapshot), MemoryRestoreMode::Copy) => {
            let report = copy_in(&snapshot, &**memory, default_threads(), cancel)?;
            log::info!(
                "{} MiB of guest memory were read in {} ms",
                report.data_bytes >> 20,
                report.took.as_millis()
            );
            prefault(machine, request, cancel)?;
        }
        (Source::Own(_), MemoryRestoreMode::Mapped) => {
            prefault(machine, request, cancel)?;
        }
        (Source::Own(snapshot), MemoryRestoreMode::OnDemand) => {
            let stop = Cancel::new().map_err(SnapshotError::Resource)?;
            return Ok(Some(Filling::start(*snapshot, memory, stop)?));
        }
        (Source::Adopted(contents, _), _) => {
            let data_bytes = contents.copy_in(memory, cancel)?;
            log::info!("{} MiB of guest memory were read", data_bytes >> 20);
            prefault(machine, request, cancel)?;
        }
    }
    Ok(None)
}

/// The memory of a snapshot, to be mapped.
fn image(snapshot: &Opened) -> Result<RamImage, RestoreCause> {
    let range = |part: MemoryPart| {
        let MemoryPart { gpa, len_bytes, offset_bytes } = part;
        ImageRange { gpa, len_bytes, offset_bytes }
    };
    let file = Arc::new(snapshot.memory_file()?);
    Ok(RamImage::new(file, snapshot.memory_parts().map(range).collect())?)
}

/// Prefaults the memory for which the snapshot has no contents: all zones if the restore requests it, else
/// those configured for it.
///
/// # Errors
/// Names the zone and the limit.
pub fn prefault(
    machine: &Machine,
    request: &RestoreConfig,
    cancel: &Cancel,
) -> Result<(), PrefaultError> {
    prefault_ram(machine.ram(), request.prefault, cancel)
}

/// The same for guest RAM alone. Cancelling ends it early.
///
/// # Errors
/// Names the zone and the limit.
pub fn prefault_ram(
    ram: &memory::GuestRam,
    everything: bool,
    cancel: &Cancel,
) -> Result<(), PrefaultError> {
    let options = PrefaultOptions::default();
    let running = if everything {
        Prefault::start(ram.regions(), &options)?
    } else {
        ram.prefault(&options)?
    };
    running.wait_unless(&|| cancel.is_cancelled())
}
