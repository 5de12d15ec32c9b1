// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the client with a device server that does as it should, and with some that do not.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod commands;
mod later_guests;

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
use pci::PciDevice as _;
use pci::fakes::FakeMsiSource;
use vfio_user_device::device::{self, register};
use vfio_user_device::{Act, Device, Message, Reply, Tamper, command, serve_one};

use super::{UserError, UserFunction, Watch};
use crate::device::{VfioPciDevice, VfioWiring};
use crate::fakes::FakeSlots;
use crate::gate::DmaGate;
use crate::host::{HostFunction, InterruptKind};

/// Longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time that a server is given which is to use it up.
const SHORT: Duration = Duration::from_millis(100);
const MIB: u64 = 1 << 20;

fn layout(shared: bool) -> (RamConfig, RamLayout) {
    let layout =
        RamLayout { hole_start: 2 * MIB, hole_end: 4 * MIB, end: 1 << 40, ..RamLayout::default() };
    let zones = vec![ZoneSpec { shared, ..ZoneSpec::new("mem0", 4 * MIB) }];
    (RamConfig { zones }, layout)
}

fn ram(shared: bool) -> Arc<GuestRam> {
    let (config, layout) = layout(shared);
    Arc::new(GuestRam::new(&config, layout).unwrap())
}

struct Server {
    device: Arc<Mutex<Device>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// A server, and the connection to it.
    fn start(mut tamper: Tamper) -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let device = Arc::new(Mutex::new(Device::new().unwrap()));
        let served = Arc::clone(&device);
        let thread = std::thread::spawn(move || {
            // What a client says after it has been treated badly is no matter.
            let _ = serve_one(&theirs, &served, &mut tamper);
        });
        (Self { device, thread: Some(thread) }, ours)
    }

    /// Waits until it has seen that its client is gone.
    fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    fn commands(&self) -> Vec<u16> {
        self.device.lock().unwrap().commands.clone()
    }
}

fn honest() -> Tamper {
    Box::new(|_: &Message, _: &mut Reply, _: &UnixStream| Act::Send)
}

/// Changes the answer to the `nth` command of this number.
fn once(
    number: u16,
    nth: usize,
    change: impl Fn(&mut Reply, &UnixStream) -> Act + Send + 'static,
) -> Tamper {
    let mut seen = 0;
    Box::new(move |message: &Message, reply: &mut Reply, stream: &UnixStream| {
        if message.command != number {
            return Act::Send;
        }
        seen += 1;
        if seen == nth { change(reply, stream) } else { Act::Send }
    })
}

fn open(tamper: Tamper, limit: Duration) -> (Result<UserFunction, UserError>, Server) {
    let (server, stream) = Server::start(tamper);
    (UserFunction::over("dev", stream, &ram(true), limit), server)
}

fn opened(tamper: Tamper) -> (Arc<UserFunction>, Server) {
    let (function, server) = open(tamper, PATIENCE);
    (Arc::new(function.unwrap()), server)
}

fn refused(tamper: Tamper) -> String {
    let (function, mut server) = open(tamper, PATIENCE);
    let error = error_text::chain(&function.err().unwrap());
    server.join();
    error
}

/// Puts a double word into an answer.
fn put(reply: &mut Reply, at: usize, word: u32) {
    reply.bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
}

fn word(function: &UserFunction, at: u64) -> u64 {
    let mut data = [0; 8];
    function.read_bar(0, at, &mut data);
    u64::from_le_bytes(data)
}

#[test]
fn a_function_is_what_the_server_says() {
    let (function, server) = opened(honest());
    assert_eq!(function.config_len_bytes(), 256);
    let bar = |index| function.bar(index).map(|bar| (bar.len_bytes, bar.mappable));
    assert_eq!(bar(0), Some((0x1000, vec![])));
    assert_eq!(bar(1), Some((0x2000, std::iter::once(0..0x1000).collect())));
    assert_eq!((bar(3), bar(6)), (None, None));
    let kinds = [InterruptKind::Intx, InterruptKind::Msi, InterruptKind::Msix];
    assert_eq!(kinds.map(|kind| function.interrupts_count(kind)), [1, 0, 4]);
    let mut id = [0; 4];
    function.read_config(0, &mut id);
    assert_eq!(id, device::ID);
    function.write_bar(0, register::SOURCE, &7_u64.to_le_bytes());
    assert_eq!(word(&function, register::SOURCE), 7);
    // More than the server takes at once, and what is not inside.
    let mut all = vec![0; 0x1000];
    function.read_bar(0, 0, &mut all);
    assert_eq!(all[..8], 7_u64.to_le_bytes());
    function.write_bar(0, 0, &vec![3; 0x1000]);
    function.read_bar(0, 0xffc, &mut id);
    assert_eq!(id, [3; 4]);
    let before = server.commands().len();
    function.read_bar(0, 0xffd, &mut id);
    assert_eq!(id, [0xff; 4]);
    function.write_bar(0, u64::MAX, &[1]);
    assert_eq!(server.commands().len(), before, "the server is not asked");
    // Reset and memory once, in this order.
    let of = [command::RESET, command::DMA_MAP];
    let steps: Vec<_> = server.commands().into_iter().filter(|it| of.contains(it)).collect();
    assert_eq!(steps, [command::RESET, command::DMA_MAP, command::DMA_MAP]);
}

#[test]
fn memory_is_handed_over_and_taken_back() {
    let (mut server, stream) = Server::start(honest());
    let ram = ram(true);
    let function = UserFunction::over("dev", stream, &ram, PATIENCE).unwrap();
    let parts: Vec<_> = {
        let device = server.device.lock().unwrap();
        device.parts.iter().map(|part| (part.gpa, part.len_bytes, part.file_offset)).collect()
    };
    assert_eq!(parts, [(0, 2 * MIB, 0), (4 * MIB, 2 * MIB, 2 * MIB)]);
    // It is the guest's memory that the server has.
    ram.regions()[1].file().unwrap().write_all_at(b"guest", 2 * MIB + 0x1000).unwrap();
    function.write_config(4, &[4, 0]);
    let copy =
        [(register::SOURCE, 4 * MIB + 0x1000), (register::TARGET, 0x2000), (register::LEN, 5)];
    for (at, value) in copy.into_iter().chain([(register::ORDER, device::order::COPY)]) {
        function.write_bar(0, at, &value.to_le_bytes());
    }
    assert_eq!(word(&function, register::DONE), 1);
    let mut copied = [0; 5];
    ram.regions()[0].file().unwrap().read_exact_at(&mut copied, 0x2000).unwrap();
    assert_eq!(&copied, b"guest");
    function.take_memory_back().unwrap();
    function.take_memory_back().unwrap();
    server.join();
    let unmaps = server.device.lock().unwrap().commands.clone();
    assert_eq!(unmaps.iter().filter(|it| **it == command::DMA_UNMAP).count(), 2);
}

#[test]
fn memory_that_stays_with_the_server_is_noticed() {
    let tamper = once(command::DMA_UNMAP, 2, |reply, _| {
        put(reply, 8, vfio_user_device::REFUSAL);
        put(reply, 4, 16);
        reply.bytes.truncate(16);
        Act::Send
    });
    let (function, _server) = opened(tamper);
    let error = function.take_memory_back().unwrap_err();
    assert!(matches!(error, UserError::Refused { command: "DMA_UNMAP", .. }), "{error}");
    assert!(function.lost().is_some());
}

#[test]
fn private_memory_is_refused_before_anything_is_said() {
    let (server, stream) = Server::start(honest());
    let error = UserFunction::over("dev", stream, &ram(false), PATIENCE).err().unwrap();
    assert!(error.to_string().contains("shared=on"), "{error}");
    assert_eq!(server.commands(), Vec::<u16>::new());
}

#[test]
fn interrupts_are_connected_in_batches() {
    let (function, server) = opened(honest());
    let events: Vec<File> = (0..4)
        .map(|_| {
            let flags = rustix::event::EventfdFlags::CLOEXEC;
            File::from(rustix::event::eventfd(0, flags).unwrap())
        })
        .collect();
    let fds: Vec<_> = events.iter().map(|event| event.as_fd()).collect();
    function.connect(InterruptKind::Msix, &fds).unwrap();
    assert_eq!(server.device.lock().unwrap().interrupts[2].len(), 4);
    assert_eq!(server.commands().iter().filter(|it| **it == command::SET_IRQS).count(), 2);
    function.write_bar(0, register::ORDER, &device::order::INTERRUPT.to_le_bytes());
    let mut count = [0; 8];
    (&events[0]).read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    function.disconnect(InterruptKind::Msix).unwrap();
    assert!(server.device.lock().unwrap().interrupts[2].is_empty());
    function.unmask_pin().unwrap();
    assert_eq!(server.device.lock().unwrap().unmasked, 1);
    assert!(!function.connect_resample(fds[0]).unwrap());
}

#[test]
fn half_of_the_interrupts_is_none() {
    let tamper = once(command::SET_IRQS, 2, |reply, _| {
        put(reply, 8, vfio_user_device::REFUSAL);
        put(reply, 12, 28);
        Act::Send
    });
    let (function, server) = opened(tamper);
    let file = File::open("/dev/null").unwrap();
    let error = function.connect(InterruptKind::Msix, &[file.as_fd(); 4]).unwrap_err();
    let error = error_text::chain(&error);
    assert!(error.contains("refuses DEVICE_SET_IRQS") && error.contains("No space"), "{error}");
    assert!(server.device.lock().unwrap().interrupts[2].is_empty());
    assert_eq!(function.lost(), None, "a refusal ends nothing");
    assert_eq!(word(&function, register::RESETS), 1);
}

/// What may be wrong in an answer while a function is opened: the command, a change, and what is said of it.
type Fault = (u16, usize, fn(&mut Reply), &'static str);

const FAULTS: &[Fault] = &[
    (command::VERSION, 1, |reply| put(reply, 0, 9 | 1 << 16), "is to command 1, message 9"),
    (command::VERSION, 1, |reply| reply.bytes[2] = 4, "is to command 4"),
    (command::VERSION, 1, |reply| put(reply, 4, 15), "no message has the header"),
    (command::VERSION, 1, |reply| put(reply, 4, u32::MAX), "are the most"),
    (command::VERSION, 1, |reply| put(reply, 8, 3), "no message has the header"),
    (command::VERSION, 1, |reply| put(reply, 8, 0x101), "no message has the header"),
    (command::VERSION, 1, |reply| put(reply, 16, 1), "version 1.0"),
    (command::VERSION, 1, |reply| put(reply, 16, 2 << 16), "version 0.2"),
    (command::VERSION, 1, |reply| cut(reply, 3), "too short"),
    (command::VERSION, 1, |reply| cut(reply, 8), "do not end with a zero"),
    (command::VERSION, 1, |reply| reply.bytes[20] = b'}', "no such JSON"),
    (
        command::VERSION,
        1,
        |reply| text(reply, r#"{"capabilities":{"max_msg_fds":0}}"#),
        "max_msg_fds",
    ),
    (
        command::VERSION,
        1,
        |reply| text(reply, r#"{"capabilities":{"max_data_xfer_size":7}}"#),
        "of 7 bytes",
    ),
    (
        command::VERSION,
        1,
        |reply| text(reply, r#"{"capabilities":{"max_msg_fds":-1}}"#),
        "no such JSON",
    ),
    (command::GET_INFO, 1, |reply| put(reply, 20, 1), "not a PCI device"),
    (command::GET_INFO, 1, |reply| put(reply, 24, 7), "7 regions"),
    (command::GET_INFO, 1, |reply| cut(reply, 12), "too short"),
    (command::GET_INFO, 1, |reply| longer(reply, 4), "it has 20 bytes"),
    (command::GET_REGION_INFO, 1, |reply| put(reply, 24, 1), "about region 1, not 0"),
    (command::GET_REGION_INFO, 1, |reply| put(reply, 16, 31), "argsz is 31"),
    (command::GET_REGION_INFO, 1, |reply| put(reply, 36, u32::MAX), "has 0xffffffff00001000 bytes"),
    (command::GET_REGION_INFO, 1, |reply| cut(reply, 31), "too short"),
    (command::GET_REGION_INFO, 1, more_fds, "more descriptors"),
    (command::GET_REGION_INFO, 2, more_fds, "more descriptors"),
    // The region with an area.
    (command::GET_REGION_INFO, 2, |reply| put(reply, 28, 16), "capability at 16"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 28, 60), "capability at 60"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 28, u32::MAX), "capability at 4294967295"),
    (command::GET_REGION_INFO, 2, circle, "does not end"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 56, 2), "too short"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 56, u32::MAX), "4294967295 areas"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 72, 0x2001), "is not in the region"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 68, u32::MAX), "is not in the region"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 40, 0x2001), "its file of 0x3000 bytes"),
    (command::GET_REGION_INFO, 2, |reply| put(reply, 44, u32::MAX), "its file of 0x3000 bytes"),
    (command::GET_REGION_INFO, 7, |reply| put(reply, 32, 64), "configuration space has 64 bytes"),
    (command::GET_REGION_INFO, 7, |reply| put(reply, 32, 0), "configuration space has 0 bytes"),
    (command::GET_IRQ_INFO, 1, |reply| put(reply, 24, 2), "about interrupts 2, not 0"),
    (command::GET_IRQ_INFO, 1, |reply| put(reply, 28, 2), "2 interrupts of kind 0"),
    (command::GET_IRQ_INFO, 3, |reply| put(reply, 28, 2049), "2049 interrupts"),
    (command::GET_IRQ_INFO, 3, |reply| cut(reply, 15), "too short"),
    (command::RESET, 1, |reply| longer(reply, 1), "it has 1 bytes"),
    (command::DMA_MAP, 1, |reply| longer(reply, 1), "it has 1 bytes"),
    (command::DMA_MAP, 2, |reply| put(reply, 8, vfio_user_device::REFUSAL), "refuses DMA_MAP"),
];

/// The payload has this length.
fn cut(reply: &mut Reply, len: usize) {
    reply.bytes.truncate(16 + len);
    let len = u32::try_from(reply.bytes.len()).unwrap();
    put(reply, 4, len);
}

/// The payload is longer.
fn longer(reply: &mut Reply, len: usize) {
    let len = reply.bytes.len() + len;
    reply.bytes.resize(len, 0);
    put(reply, 4, u32::try_from(len).unwrap());
}

/// The capabilities of a greeting.
fn text(reply: &mut Reply, text: &str) {
    reply.bytes.truncate(20);
    reply.bytes.extend(text.bytes().chain([0]));
    let len = u32::try_from(reply.bytes.len()).unwrap();
    put(reply, 4, len);
}

fn more_fds(reply: &mut Reply) {
    let file = || OwnedFd::from(File::open("/dev/null").unwrap());
    reply.fds.extend([file(), file()]);
}

/// A capability of another kind that comes again and again.
fn circle(reply: &mut Reply) {
    put(reply, 48, 9);
    put(reply, 52, 32);
}

#[test]
fn every_violation_is_found() {
    for (number, nth, change, why) in FAULTS {
        let change = *change;
        let error = refused(once(*number, *nth, move |reply, _| {
            change(reply);
            Act::Send
        }));
        assert!(error.contains(why), "{number}, {nth}: {error} instead of {why}");
    }
}

#[test]
fn a_server_may_go_or_be_silent_at_each_step() {
    let steps = [
        (command::VERSION, "VERSION"),
        (command::GET_INFO, "DEVICE_GET_INFO"),
        (command::GET_REGION_INFO, "DEVICE_GET_REGION_INFO"),
        (command::GET_IRQ_INFO, "DEVICE_GET_IRQ_INFO"),
        (command::RESET, "DEVICE_RESET"),
        (command::DMA_MAP, "DMA_MAP"),
    ];
    for (number, name) in steps {
        let error = refused(once(number, 1, |_, _| Act::HangUp));
        assert!(error.contains("closed the connection"), "{name}: {error}");
        let begun = Instant::now();
        let (function, mut server) = open(once(number, 1, |_, _| Act::Keep), SHORT);
        let error = error_text::chain(&function.err().unwrap());
        assert!(error.contains(&format!("has not answered {name} within 100 ms")), "{error}");
        assert!(begun.elapsed() < PATIENCE);
        server.join();
    }
}

#[test]
fn an_answer_that_trickles_in_is_late() {
    // A part of the header; the rest would come after the time is over.
    let (function, mut server) = open(
        once(command::GET_INFO, 1, |reply, stream| {
            vfio_user_device::send(stream, &reply.bytes[..10], &[]).unwrap();
            Act::Keep
        }),
        SHORT,
    );
    let error = function.err().unwrap();
    assert!(matches!(error, UserError::Late { command: "DEVICE_GET_INFO", .. }), "{error}");
    server.join();
}

fn plugged(function: &Arc<UserFunction>) -> (Arc<VfioPciDevice>, Arc<FakeSlots>) {
    let slots = Arc::new(FakeSlots::default());
    let gate = Arc::new(DmaGate::default());
    gate.open();
    let wiring = VfioWiring {
        msi_source: &FakeMsiSource::new(64),
        slots: slots.clone(),
        gate,
        intx: None,
        trapped_bars: Vec::new(),
        gpudirect_clique: None,
        has_ports: true,
        peers: None,
    };
    let host: Arc<dyn HostFunction> = Arc::<UserFunction>::clone(function);
    (Arc::new(VfioPciDevice::new("dev".to_owned(), host, wiring).unwrap()), slots)
}

/// Watches a function whose device goes when its server is lost; the reason comes out.
fn watched(
    function: &UserFunction,
    device: &Arc<VfioPciDevice>,
) -> (Watch, mpsc::Receiver<String>) {
    let (told, heard) = mpsc::channel();
    let device = Arc::downgrade(device);
    let watch = function.watch(Box::new(move |why: &str| {
        if let Some(device) = device.upgrade() {
            device.lose();
        }
        told.send(why.to_owned()).unwrap();
    }));
    (watch.unwrap(), heard)
}

#[test]
fn a_lost_server_leaves_ones_behind() {
    for act in [Act::HangUp, Act::Keep] {
        let (mut server, stream) = Server::start(once(command::REGION_WRITE, 2, move |_, _| act));
        let function = UserFunction::over("dev", stream, &ram(true), SHORT).unwrap();
        let function = Arc::new(function);
        let (device, slots) = plugged(&function);
        let (_watch, heard) = watched(&function, &device);
        device.bar_moved(1, Some(0x1000_0000));
        let mapped: Vec<_> = std::iter::once(0x1000_0000..0x1000_1000).collect();
        assert_eq!(slots.shown(), mapped);
        // The first write was that of the command register.
        device.write_bar(0, register::SOURCE, &[1; 8]);
        let why = heard.recv_timeout(PATIENCE).unwrap();
        let expected = if act == Act::HangUp { "closed the connection" } else { "REGION_WRITE" };
        assert!(why.contains(expected), "{why}");
        let mut data = [0; 4];
        device.read_config(0, &mut data);
        assert_eq!(data, [0xff; 4]);
        device.read_bar(0, 0, &mut data);
        assert_eq!(data, [0xff; 4]);
        device.write_config(4, &[7, 0]);
        assert_eq!(slots.shown(), []);
        server.join();
        let after = server.commands().len();
        device.disarm();
        assert!(function.take_memory_back().is_err(), "the server has it still");
        assert_eq!(server.commands().len(), after);
    }
}

#[test]
fn a_server_that_goes_while_nothing_is_asked_is_noticed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let served = Mutex::new(Device::new().unwrap());
    let ending = theirs.try_clone().unwrap();
    let thread = std::thread::spawn(move || {
        let _ = serve_one(&theirs, &served, &mut honest());
    });
    let function = Arc::new(UserFunction::over("dev", ours, &ram(true), PATIENCE).unwrap());
    let (device, _slots) = plugged(&function);
    let (watch, heard) = watched(&function, &device);
    assert!(heard.try_recv().is_err());
    ending.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(heard.recv_timeout(PATIENCE).unwrap().contains("closed the connection"));
    assert!(device.is_lost());
    thread.join().unwrap();
    drop(watch);
}

/// Sends a command as a server does that has no memory of the guest.
fn ask_for_memory(stream: &UnixStream, payload: usize) {
    let len = vfio_user_device::HEADER + payload;
    let head = vfio_user_device::header(77, command::DMA_READ, len, 0, 0);
    vfio_user_device::send(stream, &[head, vec![0; payload]].concat(), &[]).unwrap();
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn commands_of_the_server_are_refused() {
    // While an answer is waited for.
    let tamper = once(command::REGION_READ, 2, |_, stream| {
        (0..3).for_each(|_| ask_for_memory(stream, 24));
        Act::Send
    });
    let (function, server) = opened(tamper);
    let (mut id, unsupported) = ([0; 4], 95);
    function.read_config(0, &mut id);
    function.read_config(0, &mut id);
    assert_eq!(id, device::ID);
    let refusals = |server: &Server| server.device.lock().unwrap().refusals.clone();
    until("they are refused", || refusals(&server) == [unsupported; 3]);
    // And while nothing is asked.
    let tamper = once(command::REGION_READ, 2, |reply, stream| {
        vfio_user_device::send(stream, &reply.bytes, &[]).unwrap();
        ask_for_memory(stream, 0);
        ask_for_memory(stream, 1 << 20);
        Act::Keep
    });
    let (function, server) = opened(tamper);
    let (device, _slots) = plugged(&function);
    let (_watch, heard) = watched(&function, &device);
    device.read_config(0, &mut id);
    until("they are refused", || refusals(&server) == [unsupported; 2]);
    assert!(heard.try_recv().is_err());
    device.read_config(0, &mut id);
    assert_eq!(id, device::ID);
}

#[test]
fn an_answer_to_nothing_ends_it() {
    let tamper = once(command::REGION_READ, 2, |reply, stream| {
        vfio_user_device::send(stream, &reply.bytes, &[]).unwrap();
        Act::Send
    });
    let (function, _server) = opened(tamper);
    let (device, _slots) = plugged(&function);
    let (_watch, heard) = watched(&function, &device);
    device.read_config(0, &mut [0; 4]);
    let why = heard.recv_timeout(PATIENCE).unwrap();
    assert!(why.contains("an answer to nothing"), "{why}");
}

#[test]
fn reads_and_writes_that_are_answered_wrongly_end_it() {
    type Change = fn(&mut Reply);
    let changes: [(u16, Change, &str); 5] = [
        (command::REGION_READ, |reply| put(reply, 16, 4), "at 0x4"),
        (command::REGION_READ, |reply| put(reply, 24, 1), "of region 1"),
        (command::REGION_READ, |reply| put(reply, 28, 2), "about 2 bytes"),
        (command::REGION_READ, |reply| cut(reply, 18), "it brings 2 bytes, not 4"),
        (command::REGION_WRITE, |reply| put(reply, 28, 2), "about 2 bytes"),
    ];
    for (number, change, why) in changes {
        let (function, _server) = opened(once(number, 1, move |reply, _| {
            change(reply);
            Act::Send
        }));
        let mut data = [0; 4];
        function.read_config(0, &mut data);
        function.write_config(4, &[0; 4]);
        let lost = function.lost().unwrap();
        assert!(lost.contains(why), "{lost}");
        function.read_config(0, &mut data);
        assert_eq!(data, [0xff; 4]);
    }
}

#[test]
fn a_part_of_a_bar_is_mapped_until_it_may_not_be() {
    let (function, _server) = opened(honest());
    let (device, slots) = plugged(&function);
    device.bar_moved(1, Some(0x1000_0000));
    assert_eq!(slots.shown().len(), 1);
    assert!(device.stop_mapping());
    assert_eq!(slots.shown(), []);
    assert!(!device.stop_mapping(), "there is nothing to try again");
    device.bar_moved(1, Some(0x2000_0000));
    assert_eq!(slots.shown(), []);
    // It is there all the same, by messages.
    device.write_bar(1, 8, &[5; 4]);
    let mut data = [0; 4];
    device.read_bar(1, 8, &mut data);
    assert_eq!(data, [5; 4]);
    assert_eq!(slots.violations(), Vec::<String>::new());
}

#[test]
fn a_file_that_may_keep_a_processor_waiting_is_not_mapped() {
    let on_disk = |reply: &mut Reply| {
        reply.fds = vec![OwnedFd::from(tempfile_on_disk())];
    };
    let (function, _server) = opened(once(command::GET_REGION_INFO, 2, move |reply, _| {
        on_disk(reply);
        Act::Send
    }));
    assert_eq!(function.bar(1).map(|bar| (bar.len_bytes, bar.mappable)), Some((0x2000, vec![])));
}

/// A file on no file system in memory; a device is as good, and there is always one.
fn tempfile_on_disk() -> File {
    File::options().read(true).write(true).open("/dev/null").unwrap()
}
