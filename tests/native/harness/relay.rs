// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The network between two hosts: passes a migration on message by message, and stops at one.
//!
//! Owns the rows, which are made from the protocol's own list of messages: [`rows`] does not
//! compile until a new message has its own. Reads with the protocol's own reader, so that it stops
//! where a message begins. Must never change a byte.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vm_migration::layout::GpaRange;
use vm_migration::protocol::capabilities::TOKEN_BYTES;
use vm_migration::protocol::message::{Answer, Command, Message, Role};
use vm_migration::ram::GuestSlice;
use vm_migration::transport::ByteSource;
use vm_migration::transport::TransportError;

use super::Mode;

/// Which connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The first one.
    Control,
    /// An extra one for memory.
    Bulk,
    /// An extra one for requested pages.
    Urgent,
}

/// Before what the relay stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before the message is passed on.
    Message,
    /// Before its answer is.
    Answer,
}

/// What the migration must be like for the message to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Nothing special.
    Usual,
    /// The guest is paused.
    Paused,
    /// Several connections.
    Connections,
    /// The guest has read pages that were not written.
    ZeroPages,
    /// Memory is compressed where that pays.
    Compressed,
    /// Bulk memory is held up, so that the guest asks for pages that are under way.
    BulkHeld,
}

/// A step of the protocol at which something can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub mode: Mode,
    pub link: Link,
    pub command: Command,
    pub point: Point,
    pub setting: Setting,
}

/// All steps at which a message travels in this mode.
pub fn rows(mode: Mode) -> Vec<Row> {
    Command::ALL.into_iter().flat_map(|command| rows_of(mode, command)).collect()
}

/// The steps of one message. A new one does not compile until it has a line here.
fn rows_of(mode: Mode, command: Command) -> Vec<Row> {
    use Link::{Bulk, Control, Urgent};
    use Mode::{Auto, Postcopy, Precopy};
    use Point::{Answer, Message};
    let asked = |link, setting| {
        [Message, Answer].map(|point| Row { mode, link, command, point, setting }).to_vec()
    };
    let told = |link, setting| vec![Row { mode, link, command, point: Message, setting }];
    if mode == Auto {
        // Its rounds are those of precopy, what follows is that of postcopy.
        return Vec::new();
    }
    match command {
        Command::Start
        | Command::Capabilities
        | Command::Config
        | Command::State
        | Command::Complete
        | Command::Confirm => asked(Control, Setting::Usual),
        Command::CompletePaused => asked(Control, Setting::Paused),
        Command::Memory => match mode {
            Precopy | Auto => {
                [asked(Control, Setting::Usual), asked(Bulk, Setting::Connections)].concat()
            }
            Postcopy => [told(Bulk, Setting::Usual), told(Urgent, Setting::Usual)].concat(),
        },
        Command::ZeroPages => match mode {
            Precopy | Auto => asked(Control, Setting::ZeroPages),
            Postcopy => told(Bulk, Setting::ZeroPages),
        },
        Command::MemoryZstd => match mode {
            Precopy | Auto => asked(Control, Setting::Compressed),
            Postcopy => Vec::new(),
        },
        Command::AwaitMachine => match mode {
            Precopy | Auto => asked(Control, Setting::Usual),
            Postcopy => Vec::new(),
        },
        Command::Pending | Command::PostcopyDone => match mode {
            Precopy | Auto => Vec::new(),
            Postcopy => asked(Control, Setting::Usual),
        },
        Command::PageFault => match mode {
            Precopy | Auto => Vec::new(),
            Postcopy => told(Urgent, Setting::Usual),
        },
        Command::Elsewhere => match mode {
            Precopy | Auto => Vec::new(),
            Postcopy => told(Urgent, Setting::BulkHeld),
        },
        // Sent after something else has failed; a peer that misses it learns the same from the end
        // of the connection, which is what the other rows do. And of local migrations, which have
        // no network.
        // `Coming` depends on the host, `Stale` on what the guest writes; the crate's own tests have
        // them.
        // The others come after a loss or when it takes long: `postcopy`, `in_doubt` and the crate's
        // own tests have these.
        Command::Abandon
        | Command::MemoryFd
        | Command::Coming
        | Command::Stale
        | Command::Recover
        | Command::Ahead
        | Command::Alive
        | Command::Renew
        | Command::Verdict
        // Of devices of the host, which no guest has here.
        | Command::Blobs
        | Command::BlobChunk
        | Command::BlobsWritten
        // Of checks, which are no migrations; the crate's own tests have them.
        | Command::Check
        | Command::CheckBytes => Vec::new(),
    }
}

/// Bytes that follow a message and are not part of it.
fn contents_bytes(message: &Message) -> u64 {
    match message {
        Message::Memory(ranges) => ranges.iter().map(|range: &GpaRange| range.len_bytes).sum(),
        Message::MemoryZstd { frame_bytes, .. } => u64::from(*frame_bytes),
        Message::Start { .. }
        | Message::AwaitMachine
        | Message::Recover(_)
        | Message::Ahead(_)
        | Message::Alive
        | Message::Renew
        | Message::Verdict { .. }
        | Message::Config(_)
        | Message::State(_)
        | Message::Complete
        | Message::Abandon(_)
        | Message::MemoryFd { .. }
        | Message::CompletePaused
        | Message::PageFault(_)
        | Message::Capabilities(_)
        | Message::ZeroPages(_)
        | Message::Pending(_)
        | Message::Confirm(_)
        | Message::Elsewhere(_)
        | Message::Coming(_)
        | Message::Stale(_)
        | Message::Blobs(_)
        | Message::BlobChunk(_)
        | Message::BlobsWritten(_)
        | Message::Check
        | Message::CheckBytes(_)
        | Message::PostcopyDone(_) => 0,
    }
}

/// Reads from a connection and keeps what was read.
pub struct Tee<'a> {
    from: &'a TcpStream,
    bytes: Vec<u8>,
}

impl<'a> Tee<'a> {
    /// From here.
    pub fn new(from: &'a TcpStream) -> Self {
        Self { from, bytes: Vec::new() }
    }
}

impl ByteSource for Tee<'_> {
    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), TransportError> {
        let mut from = self.from;
        Read::read_exact(&mut from, buf).map_err(|_| TransportError::Closed)?;
        self.bytes.extend_from_slice(buf);
        Ok(())
    }

    fn read_guest(&mut self, _: &[GuestSlice<'_>]) -> Result<(), TransportError> {
        // Contents are passed on without a look.
        Err(TransportError::Closed)
    }
}

/// What the relay does at its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// Waits for the row.
    Armed,
    /// Holds the message.
    Holding,
    /// Passes everything on.
    Open,
    /// Everything is cut.
    Cut,
    /// Everything was cut, and connections that are made now are not looked at.
    Healed,
}

/// What all threads of a relay share.
struct Shared {
    row: Option<Row>,
    gate: Mutex<Gate>,
    changed: Condvar,
    /// All connections, to be cut.
    streams: Mutex<Vec<TcpStream>>,
    seen: Mutex<Vec<Command>>,
    reached: Mutex<Sender<()>>,
    control: Mutex<Control>,
}

/// Whose turn it is on the first connection.
#[derive(Default)]
struct Control {
    due: VecDeque<Command>,
    /// Confirm was sent: the next that the source says is an answer.
    confirm_sent: bool,
    /// And answered: the next that the destination says is a message.
    confirmed: bool,
}

impl Shared {
    fn cut(&self) {
        *self.gate.lock() = Gate::Cut;
        self.changed.notify_all();
        // Closed as well as shut down: a peer with unread bytes here would wait for a window.
        for stream in self.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Stops here, if this is the row.
    fn pass(&self, link: Link, command: Command, point: Point) -> io::Result<()> {
        let here = self.row.is_some_and(|row| {
            (row.link, row.command, row.point) == (link, command, point)
                // Pages that putting state in needs travel before the handover; the rows are after.
                && (link != Link::Urgent || self.control.lock().confirmed)
        });
        let mut gate = self.gate.lock();
        if here && *gate == Gate::Armed {
            *gate = Gate::Holding;
            let _ = self.reached.lock().send(());
            while *gate == Gate::Holding {
                self.changed.wait(&mut gate);
            }
        }
        // Bulk memory waits until the guest has asked for what is in it.
        while link == Link::Bulk && self.holds_bulk() && *gate == Gate::Armed {
            self.changed.wait(&mut gate);
        }
        if matches!(*gate, Gate::Cut | Gate::Healed) {
            Err(io::ErrorKind::ConnectionAborted.into())
        } else {
            Ok(())
        }
    }

    fn holds_bulk(&self) -> bool {
        self.row.is_some_and(|row| row.setting == Setting::BulkHeld)
    }

    /// Passes one message on.
    fn message(&self, link: Link, from: &TcpStream, mut to: &TcpStream) -> io::Result<Command> {
        let mut tee = Tee::new(from);
        let message = Message::read(&mut tee).map_err(io::Error::other)?;
        let command = message.command();
        self.seen.lock().push(command);
        if link == Link::Control && !matches!(command, Command::Abandon | Command::PostcopyDone) {
            // Before it is passed on: the answer may overtake what follows here.
            self.control.lock().due.push_back(command);
        }
        self.pass(link, command, Point::Message)?;
        to.write_all(&tee.bytes)?;
        let mut contents = from.take(contents_bytes(&message));
        io::copy(&mut contents, &mut to)?;
        Ok(command)
    }

    /// Passes one answer on.
    fn answer(
        &self,
        link: Link,
        of: impl FnOnce() -> Option<Command>,
        from: &TcpStream,
        mut to: &TcpStream,
    ) -> io::Result<()> {
        let mut tee = Tee::new(from);
        Answer::read(&mut tee).map_err(io::Error::other)?;
        let command = of();
        if let Some(command) = command {
            self.pass(link, command, Point::Answer)?;
        }
        if command == Some(Command::Confirm) {
            self.control.lock().confirmed = true;
        }
        to.write_all(&tee.bytes)
    }

    /// The first connection, source to destination.
    fn control_out(&self, source: &TcpStream, destination: &TcpStream) -> io::Result<()> {
        loop {
            if self.control.lock().confirm_sent {
                self.answer(Link::Control, || Some(Command::PostcopyDone), source, destination)?;
            } else if self.message(Link::Control, source, destination)? == Command::Confirm {
                self.control.lock().confirm_sent = true;
            }
        }
    }

    /// And back.
    fn control_back(&self, source: &TcpStream, destination: &TcpStream) -> io::Result<()> {
        loop {
            if self.control.lock().confirmed {
                self.message(Link::Control, destination, source)?;
            } else {
                let due = || self.control.lock().due.pop_front();
                self.answer(Link::Control, due, destination, source)?;
            }
        }
    }

    /// An extra connection: what it is for, that it may be, and its messages.
    fn extra(
        self: &Arc<Self>,
        mode: Mode,
        source: &TcpStream,
        destination: &TcpStream,
    ) -> io::Result<()> {
        let mut tee = Tee::new(source);
        let role = Role::read(&mut tee).map_err(io::Error::other)?;
        tee.read_exact(&mut [0; TOKEN_BYTES]).map_err(io::Error::other)?;
        let mut to = destination;
        to.write_all(&tee.bytes)?;
        let link = match role {
            Role::Memory => Link::Bulk,
            Role::Fault => Link::Urgent,
        };
        self.answer(link, || None, destination, source)?;
        let due = Arc::new(Mutex::new(VecDeque::new()));
        let streams = (source.try_clone()?, destination.try_clone()?);
        let (shared, back) = (Arc::clone(self), Arc::clone(&due));
        std::thread::spawn(move || {
            let (source, destination) = &streams;
            let run = || -> io::Result<()> {
                loop {
                    match (mode, link) {
                        (Mode::Precopy | Mode::Auto, _) => {
                            let due = || back.lock().pop_front();
                            shared.answer(link, due, destination, source)?;
                        }
                        (Mode::Postcopy, _) => drop(shared.message(link, destination, source)?),
                    }
                }
            };
            let _ = run();
            let _ = (source.shutdown(Shutdown::Both), destination.shutdown(Shutdown::Both));
        });
        loop {
            let command = self.message(link, source, destination)?;
            due.lock().push_back(command);
        }
    }
}

/// A relay that runs until it is dropped.
pub struct Relay {
    /// Where the source has to connect.
    pub url: String,
    shared: Arc<Shared>,
    reached: Receiver<()>,
}

impl Relay {
    /// Passes on to `to`, and stops at `row`.
    pub fn start(to: &str, mode: Mode, row: Option<Row>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("tcp:{}", listener.local_addr().expect("an address"));
        let to = to.trim_start_matches("tcp:").to_owned();
        let (reached_at, reached) = channel();
        let shared = Arc::new(Shared {
            row,
            gate: Mutex::new(if row.is_some() { Gate::Armed } else { Gate::Open }),
            changed: Condvar::new(),
            streams: Mutex::default(),
            seen: Mutex::default(),
            reached: Mutex::new(reached_at),
            control: Mutex::default(),
        });
        let all = Arc::clone(&shared);
        std::thread::spawn(move || {
            let mut is_first = true;
            while let Ok((source, _)) = listener.accept() {
                let Ok(destination) = TcpStream::connect(&to) else { return };
                start_link(&all, mode, std::mem::take(&mut is_first), source, destination);
            }
        });
        Self { url, shared, reached }
    }

    /// Waits until the row is reached. False when it is not within the time.
    pub fn wait(&self, time: Duration) -> bool {
        self.reached.recv_timeout(time).is_ok()
    }

    /// Goes on.
    pub fn release(&self) {
        *self.shared.gate.lock() = Gate::Open;
        self.shared.changed.notify_all();
    }

    /// Ends all connections; those that are made from now on are passed on as they are.
    pub fn cut_and_heal(&self) {
        self.shared.cut();
        *self.shared.gate.lock() = Gate::Healed;
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.shared.cut();
    }

    /// The messages that have come by.
    pub fn seen(&self) -> Vec<Command> {
        self.shared.seen.lock().clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
    }
}

fn start_link(
    shared: &Arc<Shared>,
    mode: Mode,
    is_first: bool,
    source: TcpStream,
    destination: TcpStream,
) {
    for stream in [&source, &destination] {
        let _ = stream.set_nodelay(true);
        shared.streams.lock().extend(stream.try_clone());
    }
    if *shared.gate.lock() == Gate::Cut {
        shared.cut();
        return;
    }
    let is_healed = *shared.gate.lock() == Gate::Healed;
    let close = |source: &TcpStream, destination: &TcpStream| {
        let _ = (source.shutdown(Shutdown::Both), destination.shutdown(Shutdown::Both));
    };
    let (Ok(source2), Ok(destination2)) = (source.try_clone(), destination.try_clone()) else {
        return;
    };
    if is_healed {
        for (from, to) in [(source, destination2), (source2, destination)] {
            std::thread::spawn(move || {
                let _ = io::copy(&mut &from, &mut &to);
                close(&from, &to);
            });
        }
        return;
    }
    let out = Arc::clone(shared);
    if is_first {
        std::thread::spawn(move || {
            let _ = out.control_out(&source, &destination);
            close(&source, &destination);
        });
        let back = Arc::clone(shared);
        std::thread::spawn(move || {
            let _ = back.control_back(&source2, &destination2);
            close(&source2, &destination2);
        });
    } else {
        std::thread::spawn(move || {
            let _ = out.extra(mode, &source, &destination);
            close(&source, &destination);
        });
    }
}
