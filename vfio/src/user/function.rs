// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A function of a device server, as the rest of this crate sees functions of the host.
//!
//! Owns what the server has said of it. All accesses are messages but those of parts of BARs that the server has in a
//! file in memory: such a part is mapped for the guest. A server that shortens its file takes pages from under the
//! guest's processors, for which [`crate::VfioPciDevice::stop_mapping`] is there; a file of any other kind of file system
//! could keep them waiting, and is not mapped.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use devices::{LogLimit, log_limited};
use memory::GuestRam;
use pci::BARS_COUNT;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX,
};

use super::answers::{self, Irq, Region};
use super::connection::Deadline;
use super::memory::{self as handed, Handed};
use super::protocol::{self, Command, IrqAction};
use super::session::{OPERATION_LIMIT, Question, Session};
use super::watch::{OnUserLost, Watch};
use crate::error::VfioError;
use crate::host::{DeviceEvent, HostBar, HostFunction, InterruptKind};
use crate::mapping::BarMapping;
use crate::migration::{DeviceState, MigrationPort, MigrationSupport};
use crate::user_error::UserError;

/// Kinds of interrupts, each with the number of them that PCI allows.
const IRQS: [(u32, u32); 3] =
    [(VFIO_PCI_INTX_IRQ_INDEX, 1), (VFIO_PCI_MSI_IRQ_INDEX, 32), (VFIO_PCI_MSIX_IRQ_INDEX, 2048)];
/// A function that another process emulates.
pub struct UserFunction {
    id: String,
    session: Arc<Session>,
    config: Region,
    bars: [Region; BARS_COUNT as usize],
    irqs: [Irq; IRQS.len()],
    has_reset: bool,
    handed: Handed,
    log_limit: LogLimit,
}

/// Longest BAR of which parts are mapped, so that a server cannot use up the addresses of the VMM.
const MAPPED_BAR_BYTES_MAX: u64 = 1 << 40;

fn index_of(kind: InterruptKind) -> u32 {
    match kind {
        InterruptKind::Intx => VFIO_PCI_INTX_IRQ_INDEX,
        InterruptKind::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        InterruptKind::Msix => VFIO_PCI_MSIX_IRQ_INDEX,
    }
}

impl UserFunction {
    /// Connects to the device server at `path`, resets the function, and hands guest memory over. `id` is for messages.
    ///
    /// # Errors
    /// There is no server in time, it says what is wrong or late, or memory is private.
    pub fn open(
        id: &str,
        path: &Path,
        ram: &Arc<GuestRam>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, UserError> {
        // Before the server hears anything.
        handed::check(ram)?;
        Self::of(id, Session::open(path, OPERATION_LIMIT)?, ram, is_cancelled)
    }

    /// The same over a connection, with a time limit for each operation.
    #[cfg(any(test, feature = "testing"))]
    pub fn over(
        id: &str,
        stream: std::os::unix::net::UnixStream,
        ram: &Arc<GuestRam>,
        limit: std::time::Duration,
    ) -> Result<Self, UserError> {
        handed::check(ram)?;
        Self::of(id, Session::over(stream, limit)?, ram, &|| false)
    }

    fn of(
        id: &str,
        session: Session,
        ram: &Arc<GuestRam>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, UserError> {
        let deadline = session.deadline();
        let payload = protocol::device_get_info();
        let room = answers::INFO_LEN_BYTES;
        let device = session.ask(
            &Question::new(Command::DeviceGetInfo, &payload, room),
            &deadline,
            |answer| answers::device(&answer.payload),
        )?;
        let mut bars = std::array::from_fn(|_| Region::default());
        for (index, bar) in (0_u32..).zip(&mut bars) {
            *bar = ask_region(id, &session, index, &deadline)?;
        }
        let config = ask_region(id, &session, VFIO_PCI_CONFIG_REGION_INDEX, &deadline)?;
        let mut irqs = [Irq::default(); IRQS.len()];
        for (irq, (index, most)) in irqs.iter_mut().zip(IRQS) {
            if index < device.irqs {
                let payload = protocol::device_get_irq_info(index);
                let command = Command::DeviceGetIrqInfo;
                *irq =
                    session.ask(&Question::new(command, &payload, room), &deadline, |answer| {
                        answers::irq(index, most, &answer.payload)
                    })?;
            }
        }
        let function = Self {
            id: id.to_owned(),
            session: Arc::new(session),
            config,
            bars,
            irqs,
            has_reset: device.has_reset,
            handed: Handed::default(),
            log_limit: LogLimit::default(),
        };
        // It may still be set to do what an earlier guest has asked of it, at addresses of that guest.
        function.ask_reset(&deadline)?;
        function.handed.map_all(&function.session, ram, &deadline, is_cancelled)?;
        Ok(function)
    }

    /// Hears of the server from now on; `on_lost` is called when it is lost, on a thread of its own.
    ///
    /// # Errors
    /// The host gives no descriptor or no thread.
    pub fn watch(&self, on_lost: OnUserLost) -> io::Result<Watch> {
        Watch::start(Arc::clone(&self.session), on_lost)
    }

    /// Why the server is lost, if it is.
    pub fn lost(&self) -> Option<Arc<str>> {
        self.session.lost().cloned()
    }

    /// Takes guest memory back from the server, and ends the session. The function is to be at rest.
    ///
    /// # Errors
    /// It does not say that it has unmapped the memory: it may still write to it.
    pub fn take_memory_back(&self) -> Result<(), UserError> {
        let taken = if self.handed.is_empty() {
            Ok(())
        } else {
            self.handed.unmap_all(&self.session, &self.session.deadline())
        };
        self.session.end("the session is over");
        taken
    }

    fn ask_reset(&self, deadline: &Deadline) -> Result<(), UserError> {
        if !self.has_reset {
            log::warn!("the server of device {} cannot reset it: it is used as it is", self.id);
            return Ok(());
        }
        self.session.ask(&Question::new(Command::DeviceReset, &[], 0), deadline, |answer| {
            answers::nothing(&answer.payload)
        })
    }

    fn region(&self, index: u32) -> Option<&Region> {
        if index == VFIO_PCI_CONFIG_REGION_INDEX {
            return Some(&self.config);
        }
        self.bars.get(usize::try_from(index).ok()?)
    }

    /// The region, if the range lies in it.
    fn inside(&self, index: u32, offset: u64, len: usize) -> Option<&Region> {
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        self.region(index).filter(|region| end <= region.len_bytes)
    }

    /// The longest piece of an access.
    fn piece(&self) -> usize {
        usize::try_from(self.session.limits().transfer_len_bytes).unwrap_or(usize::MAX)
    }

    fn read(&self, index: u32, offset: u64, data: &mut [u8]) {
        let region = self.inside(index, offset, data.len());
        if !region.is_some_and(|region| region.is_readable) {
            return data.fill(0xff);
        }
        let deadline = self.session.deadline();
        let mut at = offset;
        for piece in data.chunks_mut(self.piece()) {
            let len_bytes = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let payload = protocol::region_access(index, at, len_bytes);
            let room = answers::access_len_bytes(piece.len());
            let read = self.session.ask(
                &Question::new(Command::RegionRead, &payload, room),
                &deadline,
                |answer| answers::access((index, at, len_bytes), &answer.payload, Some(piece)),
            );
            if let Err(error) = read {
                data.fill(0xff);
                return self.complain("read", index, offset, &error);
            }
            at = at.saturating_add(len_bytes.into());
        }
    }

    fn write(&self, index: u32, offset: u64, data: &[u8]) {
        let region = self.inside(index, offset, data.len());
        if !region.is_some_and(|region| region.is_writable) {
            return;
        }
        let deadline = self.session.deadline();
        let mut at = offset;
        for piece in data.chunks(self.piece()) {
            let len_bytes = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let payload = [&protocol::region_access(index, at, len_bytes), piece].concat();
            let room = answers::access_len_bytes(0);
            let written = self.session.ask(
                &Question::new(Command::RegionWrite, &payload, room),
                &deadline,
                |answer| answers::access((index, at, len_bytes), &answer.payload, None),
            );
            if let Err(error) = written {
                return self.complain("write", index, offset, &error);
            }
            at = at.saturating_add(len_bytes.into());
        }
    }

    fn set_irqs(
        &self,
        kind: InterruptKind,
        action: IrqAction,
        (start, count): (u32, u32),
        fds: &[BorrowedFd<'_>],
        deadline: &Deadline,
    ) -> Result<(), UserError> {
        let payload = protocol::device_set_irqs(index_of(kind), action, start, count);
        self.session.ask(
            &Question::new(Command::DeviceSetIrqs, &payload, 0).with(fds),
            deadline,
            |answer| answers::nothing(&answer.payload),
        )
    }

    fn complain(&self, what: &str, region: u32, offset: u64, error: &UserError) {
        // The loss itself is reported once.
        if matches!(error, UserError::Lost(_)) {
            return;
        }
        let error = error_text::chain(error);
        log_limited!(
            self.log_limit,
            Warn,
            "device {}: cannot {what} region {region} at {offset:#x}: {error}",
            self.id
        );
    }
}

fn ask_region(
    id: &str,
    session: &Session,
    index: u32,
    deadline: &Deadline,
) -> Result<Region, UserError> {
    let room_bytes = answers::REGION_LEN_BYTES_MAX;
    let payload = protocol::device_get_region_info(index, room_bytes);
    let room = usize::try_from(room_bytes).unwrap_or(0);
    let command = Command::DeviceGetRegionInfo;
    let question = Question::new(command, &payload, room).taking_fds();
    let region = session.ask(&question, deadline, |answer| answers::region(index, answer))?;
    if region.has_other_file {
        log::warn!(
            "device {id}: the file of BAR {index} is not in memory (a memfd, or on a tmpfs): the guest's accesses go \
             to the device server, which is slow"
        );
    }
    Ok(region)
}

impl Drop for UserFunction {
    fn drop(&mut self) {
        self.session.end("the device is gone");
    }
}

impl HostFunction for UserFunction {
    fn config_len_bytes(&self) -> u16 {
        u16::try_from(self.config.len_bytes.min(4096)).unwrap_or(0)
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.read(VFIO_PCI_CONFIG_REGION_INDEX, offset.into(), data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.write(VFIO_PCI_CONFIG_REGION_INDEX, offset.into(), data);
    }

    fn bar(&self, index: u8) -> Option<HostBar> {
        let region = self.bars.get(usize::from(index)).filter(|region| region.len_bytes > 0)?;
        let mappable =
            if region.len_bytes <= MAPPED_BAR_BYTES_MAX { &*region.mappable } else { &[] };
        Some(HostBar { len_bytes: region.len_bytes, mappable: mappable.to_vec() })
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        self.read(index.into(), offset, data);
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        self.write(index.into(), offset, data);
    }

    /// Its server is not asked for one.
    fn rom_len_bytes(&self) -> u64 {
        0
    }

    fn read_rom(&self) -> io::Result<Vec<u8>> {
        Err(none())
    }

    fn map_bar(&self, index: u8, range: &Range<u64>) -> io::Result<Arc<BarMapping>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| invalid())?;
        let region = self.inside(index.into(), range.start, len).ok_or_else(invalid)?;
        let (file, offset) = region.file.as_ref().ok_or_else(invalid)?;
        let at = offset.checked_add(range.start).ok_or_else(invalid)?;
        BarMapping::new(file.as_fd(), at, region.len_bytes, range).map(Arc::new)
    }

    fn interrupts_count(&self, kind: InterruptKind) -> u32 {
        let place = IRQS.iter().position(|(index, _)| *index == index_of(kind));
        place.and_then(|at| self.irqs.get(at)).map_or(0, |irq| irq.count)
    }

    fn connect(&self, kind: InterruptKind, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        let deadline = self.session.deadline();
        let batch = usize::try_from(self.session.limits().fds).unwrap_or(1);
        let mut start = 0_u32;
        for batch in events.chunks(batch) {
            let count = u32::try_from(batch.len()).unwrap_or(u32::MAX);
            let action = IrqAction::Connect;
            if let Err(error) = self.set_irqs(kind, action, (start, count), batch, &deadline) {
                // Not some of them.
                let _ = self.set_irqs(kind, IrqAction::Disconnect, (0, 0), &[], &deadline);
                return Err(error.into());
            }
            start = start.saturating_add(count);
        }
        Ok(())
    }

    fn connect_resample(&self, _event: BorrowedFd<'_>) -> Result<bool, VfioError> {
        // Servers take the eventfd for it without looking at it.
        Ok(false)
    }

    fn unmask_pin(&self) -> Result<(), VfioError> {
        if !self.irqs.first().is_some_and(|irq| irq.is_automasked) {
            return Ok(());
        }
        let deadline = self.session.deadline();
        let (pin, action) = (InterruptKind::Intx, IrqAction::Unmask);
        Ok(self.set_irqs(pin, action, (0, 1), &[], &deadline)?)
    }

    fn connect_device_event(
        &self,
        _notice: DeviceEvent,
        _event: BorrowedFd<'_>,
    ) -> Result<bool, VfioError> {
        Ok(false)
    }

    fn disconnect(&self, kind: InterruptKind) -> Result<(), VfioError> {
        if self.session.lost().is_some() {
            // The VMM's eventfds are what still could interrupt the guest, which are closed with the device.
            return Ok(());
        }
        let deadline = self.session.deadline();
        Ok(self.set_irqs(kind, IrqAction::Disconnect, (0, 0), &[], &deadline)?)
    }

    fn reset(&self) -> Result<(), VfioError> {
        if self.session.lost().is_some() {
            return Ok(());
        }
        Ok(self.ask_reset(&self.session.deadline())?)
    }
}

fn none() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

/// The protocol has it, and this client does not.
impl MigrationPort for UserFunction {
    fn migration_support(&self) -> io::Result<Option<MigrationSupport>> {
        Ok(None)
    }

    fn set_device_state(&self, _state: DeviceState) -> io::Result<()> {
        Err(none())
    }

    fn device_state(&self) -> io::Result<u32> {
        Err(none())
    }

    fn state_len_bytes(&self) -> io::Result<u64> {
        Err(none())
    }

    fn read_state(&self, _buffer: &mut [u8]) -> io::Result<usize> {
        Err(none())
    }

    fn write_state(&self, _data: &[u8]) -> io::Result<()> {
        Err(none())
    }

    fn start_dma_log(&self, _ranges: &[Range<u64>]) -> io::Result<()> {
        Err(none())
    }

    fn take_dma_log(&self, _range: &Range<u64>) -> io::Result<Vec<u64>> {
        Err(none())
    }

    fn stop_dma_log(&self) -> io::Result<()> {
        Err(none())
    }
}
