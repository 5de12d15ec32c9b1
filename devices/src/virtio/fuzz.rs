// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entry points for fuzzing that treat bytes as guest memory prepared by a hostile driver.
//!
//! The input is the content of guest memory, rings included. Each function serves the queues of
//! one device once, on the calling thread, and must return.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use memory::{GuestMemory, GuestMemoryHandle};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::RING_FEATURES;
use super::balloon;
use super::block::perform::{CacheMode, Engine};
use super::block::pool::QueueThreads;
use super::block::vhdx;
use super::block::worker::{BlockWorker, Shared};
use super::block::{Block, BlockConfig, BlockLimits, Disk, DiskFormat, DiskLock, OnFull};
use super::console::ConsoleResizer;
use super::console::worker::ConsoleWorker;
use super::device::{ActiveQueue, Kicks, VirtioInterrupt};
use super::iommu::worker::IommuWorker;
use super::iommu::{Iommu, IommuConfig, QueueDma};
use super::mem;
use super::net::worker::NetWorker;
use super::net::{ControlWorker, Link, MacAddress, NetCounters, Tap, TapConfig, TapSlot};
use super::pmem;
use super::pmem::worker::PmemWorker;
use super::queue::WorkQueue;
use super::rng::worker::RngWorker;
use super::rtc::worker::RtcWorker;
use super::vsock::VsockSocket;
use super::vsock::muxer::Muxer;
use super::vsock::worker::VsockWorker;
use super::watchdog::WatchdogHandle;
use super::watchdog::worker::WatchdogWorker;
use super::worker::{Watch, Work};
use crate::endpoint::ConsoleEndpoint;
use crate::syscalls;

/// Guest memory, in two regions, so that buffers can cross their border.
pub const MEMORY_BYTES: u64 = 0x1_0000;
const BORDER: u64 = MEMORY_BYTES / 2;
/// Distance between the rings of adjacent queues; offsets in it are below.
pub const QUEUE_STRIDE: u64 = 0x1000;
/// Available ring of queue 0.
pub const AVAILABLE_OFFSET: u64 = 0x400;
/// Used ring of queue 0.
pub const USED_OFFSET: u64 = 0x800;
/// Size of each queue.
pub const QUEUE_SIZE: u16 = 16;
const DISK_BYTES: u64 = 64 << 10;

struct NoInterrupt;

/// Eventfds that no driver signals.
pub(super) struct NoKicks;

impl Kicks for NoKicks {
    fn renew(&self, _queue_index: u16) -> std::io::Result<EventFd> {
        EventFd::new(EFD_NONBLOCK)
    }
}

impl VirtioInterrupt for NoInterrupt {
    fn queue_used(&self, _queue_index: u16) {}
    fn config_changed(&self) {}
    fn needs_reset(&self) {}
}

/// Fails if a host resource is missing; nothing is tested then.
type Setup<T> = Result<T, Box<dyn std::error::Error>>;

struct Guest {
    memory: GuestMemoryHandle,
    interrupt: Arc<dyn VirtioInterrupt>,
    features: u64,
}

impl Guest {
    fn new(data: &[u8], features: u64) -> Setup<Self> {
        let half = usize::try_from(BORDER)?;
        let memory =
            GuestMemory::from_ranges(&[(GuestAddress(0), half), (GuestAddress(BORDER), half)])?;
        let len_bytes = data.len().min(half * 2);
        memory.write_slice(data.get(..len_bytes).unwrap_or_default(), GuestAddress(0))?;
        Ok(Self::over(GuestMemoryHandle::new(memory), features))
    }

    fn over(memory: GuestMemoryHandle, features: u64) -> Self {
        Self { memory, interrupt: Arc::new(NoInterrupt), features }
    }

    fn queue(&self, index: u16) -> Setup<WorkQueue> {
        self.queue_behind(index, None)
    }

    fn queue_behind(&self, index: u16, dma: Option<QueueDma>) -> Setup<WorkQueue> {
        let base = QUEUE_STRIDE * u64::from(index);
        let mut queue = Queue::new(QUEUE_SIZE)?;
        queue.try_set_desc_table_address(GuestAddress(base))?;
        queue.try_set_avail_ring_address(GuestAddress(base + AVAILABLE_OFFSET))?;
        queue.try_set_used_ring_address(GuestAddress(base + USED_OFFSET))?;
        queue.set_ready(true);
        let kick = EventFd::new(EFD_NONBLOCK)?;
        let active = ActiveQueue { index, queue, kick, kicks: Arc::new(NoKicks), dma };
        Ok(WorkQueue::new(active, &self.memory, &self.interrupt, self.features))
    }
}

fn features_of(data: &[u8]) -> u64 {
    match data.last() {
        Some(last) if last & 1 == 1 => RING_FEATURES,
        _ => 0,
    }
}

fn run(work: impl Work) -> Setup<()> {
    run_with(work, Watch::new()?, 0);
    Ok(())
}

/// The same, and lets the device handle `rounds` times what is ready by itself, such as clients.
fn run_with(mut work: impl Work, mut watch: Watch, rounds: u32) {
    let mut result = work.start(&mut watch);
    for token in 0..5 {
        if result.is_ok() {
            result = work.ready(token, &mut watch);
        }
    }
    if result.is_ok() {
        result = work.settle(&mut watch);
    }
    for _ in 0..rounds {
        if result.is_ok() {
            result = watch.serve_ready(&mut work);
        }
    }
    // A violation is expected here.
    let _ = work.drain();
    let _ = work.queue_states();
}

fn report(result: Setup<()>) {
    if let Err(error) = result {
        // The fuzz targets find the warning, the tests of this crate would pass.
        #[cfg(test)]
        panic!("nothing was tested: {error}");
        #[cfg(not(test))]
        log::warn!("nothing was tested: {error}");
    }
}

/// A guest in that RAM, which starts with `data`.
fn guest_over(ram: &memory::GuestRam, data: &[u8]) -> Setup<Guest> {
    let memory = ram.guest_memory();
    let len_bytes = data.len().min(usize::try_from(MEMORY_BYTES)?);
    let front = data.get(..len_bytes).unwrap_or_default();
    memory.memory().write_slice(front, GuestAddress(0))?;
    Ok(Guest::over(memory, features_of(data)))
}

/// Fuzzes the queues of a balloon, with hints requested.
pub fn fuzz_balloon(data: &[u8]) {
    report(run_balloon(data));
}

fn run_balloon(data: &[u8]) -> Setup<()> {
    let zone = |id: &str| memory::ZoneSpec::new(id, BORDER);
    let config = memory::RamConfig { zones: vec![zone("low"), zone("high")] };
    let ram = Arc::new(memory::GuestRam::new(&config, memory::RamLayout::default())?);
    let guest = guest_over(&ram, data)?;
    let shared = Arc::new(balloon::Shared::new(ram)?);
    let queues = balloon::Queues {
        inflate: guest.queue(0)?,
        deflate: guest.queue(1)?,
        statistics: Some(guest.queue(2)?),
        hinting: Some(guest.queue(3)?),
        reporting: Some(guest.queue(4)?),
    };
    shared.want_hints();
    run(balloon::worker::BalloonWorker::new(queues, &shared, u64::MAX, None)?)
}

/// Fuzzes the queue of a block device.
pub fn fuzz_block(data: &[u8]) {
    report(run_block(data));
}

fn run_block(data: &[u8]) -> Setup<()> {
    use std::os::fd::AsRawFd;
    let choice = data.last().copied().unwrap_or(0);
    let file = syscalls::memory_file(DISK_BYTES)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let disk = Disk::open(Path::new(&path), choice & 2 != 0, false)?;
    let engine = Engine {
        disk: Arc::new(disk),
        serial: [b'x'; 20],
        cache: CacheMode {
            flush_negotiated: choice & 4 != 0,
            writeback: Arc::new(AtomicBool::new(true)),
        },
        sparse: choice & 8 != 0,
        on_full: OnFull::default(),
    };
    let sectors_max = if choice & 32 == 0 { 1 << 22 } else { u32::MAX };
    let limits = BlockLimits { discard_sectors_max: sectors_max, ..BlockLimits::GODWIT };
    let shared = Shared {
        engine,
        limits,
        threads: QueueThreads::default(),
        counters: Arc::default(),
        full: Arc::default(),
        log: Arc::default(),
    };
    let guest = Guest::new(data, features_of(data))?;
    run(BlockWorker::new(guest.queue(0)?, shared, choice & 16 != 0))
}

/// Opens a disk image, reads and writes it in several places, and opens it anew.
pub fn fuzz_disk_image(data: &[u8]) {
    report(run_disk_image(data));
}

fn run_disk_image(data: &[u8]) -> Setup<()> {
    use std::io::Write as _;
    use std::os::fd::AsRawFd;
    let Some((choice, image)) = data.split_last() else { return Ok(()) };
    let mut file = syscalls::memory_file(0)?;
    if choice & 4 == 0 {
        file.write_all(image)?;
    } else {
        write_vhdx(&file, image)?;
    }
    let config = BlockConfig {
        path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(),
        format: match choice & 5 {
            0 => DiskFormat::Qcow2,
            1 => DiskFormat::FixedVhd,
            _ => DiskFormat::Vhdx,
        },
        readonly: choice & 2 != 0,
        // A name in the image may lead to any file.
        backing_files: false,
        ..BlockConfig::default()
    };
    for _ in 0..2 {
        // What is refused or fails is no finding.
        let Ok(device) = Block::new(config.clone()) else { return Ok(()) };
        device.try_image();
    }
    Ok(())
}

/// A VHDX image of what is chosen in it: parts of the header, region table, metadata, its items, and the table of
/// blocks. Their checksums are right, which no input would be otherwise.
fn write_vhdx(file: &std::fs::File, image: &[u8]) -> Setup<()> {
    use std::os::unix::fs::FileExt as _;
    const PARTS: [(u64, usize, usize); 5] = [
        (64 << 10, 80, 4 << 10),
        (192 << 10, 80, 64 << 10),
        (3 << 20, 192, 64 << 10),
        ((3 << 20) + (64 << 10), 320, 320),
        (2 << 20, 4096, 4096),
    ];
    file.set_len(8 << 20)?;
    file.write_all_at(b"vhdxfile", 0)?;
    let mut rest = image;
    for (offset, len, whole) in PARTS {
        let (part, behind) = rest.split_at(len.min(rest.len()));
        let mut bytes = part.to_vec();
        bytes.resize(whole, 0);
        if matches!(bytes.first_chunk(), Some(b"head" | b"regi")) {
            vhdx::seal(&mut bytes);
        }
        file.write_all_at(&bytes, offset)?;
        rest = behind;
    }
    Ok(())
}

/// Fuzzes the queues of a console.
pub fn fuzz_console(data: &[u8]) {
    report(run_console(data));
}

fn run_console(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    let endpoint = Arc::new(ConsoleEndpoint::null()?);
    run(ConsoleWorker::new(guest.queue(0)?, guest.queue(1)?, ConsoleResizer::new(endpoint)))
}

/// Fuzzes the queue of a virtio-mem device. Its region starts at 4 GiB and has eight blocks of 2 MiB, of
/// which the guest may have six.
pub fn fuzz_mem(data: &[u8]) {
    report(run_mem(data));
}

fn run_mem(data: &[u8]) -> Setup<()> {
    const BLOCK_BYTES: u64 = 2 << 20;
    let later = memory::ZoneSpec {
        block_bytes: Some(BLOCK_BYTES),
        ..memory::ZoneSpec::new("later", 8 * BLOCK_BYTES)
    };
    let zones = vec![memory::ZoneSpec::new("now", MEMORY_BYTES), later];
    let config = memory::RamConfig { zones };
    let ram = Arc::new(memory::GuestRam::new(&config, memory::RamLayout::default())?);
    let guest = guest_over(&ram, data)?;
    let region = ram.regions().last().ok_or("no region")?;
    let shared =
        mem::Shared::new(Arc::clone(&ram), Arc::clone(region), None)?.ok_or("no blocks")?;
    shared.request(6 * BLOCK_BYTES);
    run(mem::worker::MemWorker::new(guest.queue(0)?, Arc::new(shared)))?;
    assert!(region.usable_bytes() <= 6 * BLOCK_BYTES, "more than it may have");
    Ok(())
}

/// Fuzzes the queue of an entropy device.
pub fn fuzz_rng(data: &[u8]) {
    report(run_rng(data));
}

/// Serves the queue of a real-time clock.
pub fn fuzz_rtc(data: &[u8]) {
    report(run_rtc(data));
}

fn run_rtc(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    run(RtcWorker::new(guest.queue(0)?))
}

/// Serves the queues of an IOMMU, whose requests may map what is behind it; then the queue of an entropy device behind
/// it, the third one, by what they have mapped.
pub fn fuzz_iommu(data: &[u8]) {
    report(run_iommu(data));
}

fn run_iommu(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    let config = IommuConfig { id: "iommu".to_owned(), address_bits: 64, memory_bytes: 0 };
    let handle = Iommu::new(config)?.handle();
    let endpoint = handle.endpoint();
    handle.add(8, &endpoint);
    run(IommuWorker::new(guest.queue(0)?, guest.queue(1)?, handle.clone()))?;
    let behind = guest.queue_behind(2, Some(endpoint.queue()))?;
    let source = Arc::new(std::fs::File::open("/dev/urandom")?);
    run(RngWorker::new(behind, source, Arc::default()))?;
    // With the faults of that.
    run(IommuWorker::new(guest.queue(0)?, guest.queue(1)?, handle))
}

fn run_rng(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    let source = Arc::new(std::fs::File::open("/dev/urandom")?);
    run(RngWorker::new(guest.queue(0)?, source, Arc::default()))
}

/// Fuzzes the queue of a persistent memory device.
pub fn fuzz_pmem(data: &[u8]) {
    report(run_pmem(data));
}

fn run_pmem(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    let file = Arc::new(syscalls::memory_file(DISK_BYTES)?);
    let lock = DiskLock::of(Path::new("memory"), file, false)?;
    run(PmemWorker::new(guest.queue(0)?, lock, Arc::default()))
}

/// Fuzzes the answers of a vhost-user back end.
pub fn fuzz_vhost_user(data: &[u8]) {
    report(super::vhost_user::fuzz::serve(data));
}

/// Fuzzes the answers of a vDPA device.
pub fn fuzz_vdpa(data: &[u8]) {
    report(super::vdpa::fuzz::serve(data));
}

fn link() -> Setup<(Arc<Link>, UnixDatagram)> {
    let (near, far) = UnixDatagram::pair()?;
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    let tap = Tap::from_file(std::os::fd::OwnedFd::from(near).into());
    let slot = Arc::new(TapSlot::with_taps(TapConfig::default(), vec![tap]));
    Ok((Arc::new(Link::new(slot, MacAddress([2; 6]), 1, None)), far))
}

/// Fuzzes a queue pair of a network device.
pub fn fuzz_net(data: &[u8]) {
    report(run_net(data));
}

fn run_net(data: &[u8]) -> Setup<()> {
    let choice = data.last().copied().unwrap_or(0);
    let guest = Guest::new(data, features_of(data))?;
    let (link, network) = link()?;
    // Frames of several lengths wait for the guest.
    for len_bytes in [20, 1526, 9000, 3] {
        network.send(&vec![0xa5; len_bytes])?;
    }
    let counters = Arc::new(NetCounters::default());
    let (receive, transmit) = (guest.queue(0)?, guest.queue(1)?);
    let features = u64::from(choice & 2 != 0)
        << virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF
        | u64::from(choice & 4 != 0) << virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_CSUM;
    run(NetWorker::new(receive, transmit, 0, link, counters, features))
}

/// Fuzzes the control queue of a network device.
pub fn fuzz_net_control(data: &[u8]) {
    report(run_net_control(data));
}

fn run_net_control(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    let (link, _network) = link()?;
    run(ControlWorker::new(guest.queue(0)?, link, u64::MAX))
}

/// Fuzzes the queues of a vsock device, with listeners on host ports 1 and 2.
#[doc(hidden)]
pub fn fuzz_vsock(data: &[u8]) {
    report(run_vsock(data));
}

fn run_vsock(data: &[u8]) -> Setup<()> {
    use std::io::Write as _;
    use std::os::unix::net::{UnixListener, UnixStream};
    let folder = std::env::temp_dir().join(format!("godwit-fuzz-vsock-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("s");
    let listen = |port: u32| {
        let path = folder.join(format!("s_{port}"));
        // Left by an earlier input, whose listener is gone.
        let _ = std::fs::remove_file(&path);
        UnixListener::bind(path)
    };
    let _listeners = [listen(1)?, listen(2)?];
    let guest = Guest::new(data, features_of(data))?;
    let socket = Arc::new(VsockSocket::new(path.clone()));
    socket.attach()?;
    let mut client = UnixStream::connect(&path)?;
    client.write_all(b"CONNECT 1024\ndata")?;
    let watch = Watch::new()?;
    let muxer = Muxer::new(3, socket, Arc::default(), Arc::default(), watch.epoll());
    let is_restored = data.last().is_some_and(|last| last & 2 != 0);
    let (receive, transmit, event) = (guest.queue(0)?, guest.queue(1)?, guest.queue(2)?);
    run_with(VsockWorker::new(receive, transmit, event, muxer, is_restored)?, watch, 2);
    Ok(())
}

/// Fuzzes the queue of a watchdog.
#[doc(hidden)]
pub fn fuzz_watchdog(data: &[u8]) {
    report(run_watchdog(data));
}

fn run_watchdog(data: &[u8]) -> Setup<()> {
    let guest = Guest::new(data, features_of(data))?;
    let timeout = std::time::Duration::from_hours(1);
    let handle = WatchdogHandle::new();
    run(WatchdogWorker::new(guest.queue(0)?, timeout, Arc::default(), handle, Arc::new(|| ()))?)
}

/// Fuzzes the saved state of every device.
pub fn fuzz_state(data: &[u8]) {
    report(run_state(data));
}

fn run_state(data: &[u8]) -> Setup<()> {
    use std::os::fd::AsRawFd;

    use super::VirtioDevice;
    let Ok(snapshot) = serde_json::from_slice(data) else { return Ok(()) };
    let mut console = super::console::Console::new(super::console::ConsoleConfig {
        id: String::new(),
        endpoint: Arc::new(ConsoleEndpoint::null()?),
    });
    let _ = console.restore(&snapshot);
    let mut rng = super::rng::Rng::new(super::rng::RngConfig::default())?;
    let _ = rng.restore(&snapshot);
    let mut rtc = super::rtc::Rtc::new(super::rtc::RtcConfig { id: "rtc".to_owned() });
    let _ = rtc.restore(&snapshot);
    let config = IommuConfig { id: "iommu".to_owned(), address_bits: 48, memory_bytes: 0 };
    let mut iommu = Iommu::new(config)?;
    iommu.handle().add(8, &iommu.handle().endpoint());
    let _ = iommu.restore(&snapshot);
    let mut net = super::net::Net::new(super::net::NetConfig {
        open_tap_later: true,
        ..super::net::NetConfig::default()
    })?;
    let _ = net.restore(&snapshot);
    let config = super::vsock::VsockConfig { id: String::new(), cid: 3, path: "/".into() };
    let _ = super::vsock::Vsock::new(config).restore(&snapshot);
    let config = super::watchdog::WatchdogConfig::new(String::new(), Arc::new(|| ()));
    let _ = super::watchdog::Watchdog::new(config).restore(&snapshot);
    let zone = memory::ZoneSpec::new("ram", MEMORY_BYTES);
    let config = memory::RamConfig { zones: vec![zone] };
    let ram = memory::GuestRam::new(&config, memory::RamLayout::default())?;
    let mut balloon = balloon::Balloon::new(balloon::BalloonConfig::default(), Arc::new(ram))?;
    let _ = balloon.restore(&snapshot);
    let later =
        memory::ZoneSpec { block_bytes: Some(2 << 20), ..memory::ZoneSpec::new("later", 8 << 20) };
    let config = memory::RamConfig { zones: vec![later] };
    let ram = Arc::new(memory::GuestRam::new(&config, memory::RamLayout::default())?);
    let config =
        mem::MemConfig { id: String::new(), zone: "later".into(), requested_bytes: 0, node: None };
    let _ = mem::Mem::new(&config, &ram)?.restore(&snapshot);
    let file = syscalls::memory_file(DISK_BYTES)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    let config = super::block::BlockConfig { path, ..Default::default() };
    let _ = super::block::Block::new(config)?.restore(&snapshot);
    let file = syscalls::memory_file(pmem::PMEM_ALIGN_BYTES as u64)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    let config = pmem::PmemConfig { path, ..pmem::PmemConfig::default() };
    let file = pmem::PmemFile::open(&config, None)?;
    let _ = pmem::Pmem::new(String::new(), &file, 1 << 32).restore(&snapshot);
    super::vhost_user::fuzz::restore(&snapshot);
    crate::tpm::fuzz_state(&snapshot);
    Ok(())
}
