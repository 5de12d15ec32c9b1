// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The serial port (16550A).
//!
//! Owns the port's registers and a thread that moves input from the endpoint into the port when
//! there is room. Output goes to the endpoint from the vCPU's thread and never waits.

use std::io::{self, Write};
use std::sync::Arc;

use log::warn;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use stoppable_thread::StoppableThread;
use thiserror::Error;
use vm_superio::serial::{NoEvents, SerialState as PortState};
use vm_superio::{Serial as Port, Trigger};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bus::BusDevice;
use crate::endpoint::ConsoleEndpoint;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};
use crate::{LogLimit, Snapshot, log_limited};

/// First port of the first serial port.
pub const SERIAL_COM1_PORT: u16 = 0x3f8;
/// Interrupt line of the first serial port.
pub const SERIAL_COM1_IRQ: u32 = 4;
/// Number of ports of a serial port.
pub const SERIAL_LEN_BYTES: u64 = 8;

/// Size of the receive FIFO in bytes, and maximum read from the endpoint at a time.
const FIFO_BYTES: usize = 64;
const ENDPOINT_TOKEN: u64 = 0;
const STOP_TOKEN: u64 = 1;

/// Why a serial port cannot be created.
#[derive(Debug, Error)]
pub enum SerialError {
    /// Its input thread cannot be set up.
    #[error("cannot start the input thread of the serial port")]
    Thread(#[source] io::Error),
}

struct InterruptLine(EventFd);

impl Trigger for InterruptLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The port's output.
struct Output(Arc<ConsoleEndpoint>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Registers = Port<InterruptLine, NoEvents, Output>;

struct Shared {
    endpoint: Arc<ConsoleEndpoint>,
    interrupt: EventFd,
    /// Held for one register access or one batch of input.
    port: Mutex<PortInner>,
    log: LogLimit,
}

struct PortInner {
    registers: Registers,
    paused: bool,
}

impl Shared {
    fn with<T>(&self, work: impl FnOnce(&mut PortInner) -> T) -> T {
        let mut port = self.port.lock();
        let result = work(&mut port);
        // Under the lock, so that it always matches the registers.
        self.endpoint.want_input(!port.paused && port.registers.fifo_capacity() > 0);
        result
    }

    /// Moves input from the endpoint to the port.
    fn pump(&self) {
        self.with(|port| {
            let mut buffer = [0; FIFO_BYTES];
            let room = if port.paused { 0 } else { port.registers.fifo_capacity() };
            let room = room.min(buffer.len());
            let len_bytes = self.endpoint.service(&mut buffer[..room]);
            let input = buffer.get(..len_bytes).unwrap_or_default();
            if let Err(error) = port.registers.enqueue_raw_bytes(input) {
                log_limited!(self.log, Debug, "serial input lost: {error}");
            }
        });
    }
}

/// A serial port connected to an endpoint.
pub struct Serial {
    shared: Arc<Shared>,
    _input: StoppableThread,
}

impl Serial {
    /// Creates a port with the interrupt line `interrupt`, and starts its input thread.
    pub fn new(endpoint: Arc<ConsoleEndpoint>, interrupt: EventFd) -> Result<Self, SerialError> {
        Self::try_new(endpoint, interrupt).map_err(SerialError::Thread)
    }

    fn try_new(endpoint: Arc<ConsoleEndpoint>, interrupt: EventFd) -> io::Result<Self> {
        let registers =
            Port::new(InterruptLine(interrupt.try_clone()?), Output(Arc::clone(&endpoint)));
        let port = Mutex::new(PortInner { registers, paused: false });
        let shared = Arc::new(Shared { endpoint, interrupt, port, log: LogLimit::default() });
        shared.with(|_| ());

        let epoll = Epoll::new()?;
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let add =
            |fd, token| epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token));
        add(shared.endpoint.poll_fd(), ENDPOINT_TOKEN)?;
        add(std::os::fd::AsRawFd::as_raw_fd(&stop), STOP_TOKEN)?;
        let for_thread = Arc::clone(&shared);
        // A saturated counter wakes the thread as well.
        let stop = move || drop(stop.write(1));
        let input = StoppableThread::spawn("serial", stop, move || serve(&for_thread, &epoll))?;
        Ok(Self { shared, _input: input })
    }

    /// Stops taking input until [`Self::resume`].
    pub fn pause(&self) {
        self.shared.with(|port| port.paused = true);
    }

    /// Resumes taking input.
    pub fn resume(&self) {
        self.shared.with(|port| port.paused = false);
    }
}

fn serve(shared: &Shared, epoll: &Epoll) {
    let mut events = [EpollEvent::default(); 2];
    loop {
        let count = match epoll.wait(-1, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                warn!("serial input stops: {error}");
                return;
            }
        };
        for event in events.iter().take(count) {
            match event.data() {
                ENDPOINT_TOKEN => shared.pump(),
                _ => return,
            }
        }
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let ([byte], Ok(register)) = (data, u8::try_from(offset)) {
            *byte = self.shared.with(|port| port.registers.read(register));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let ([byte], Ok(register)) = (data, u8::try_from(offset))
            && let Err(error) = self.shared.with(|port| port.registers.write(register, *byte))
        {
            log_limited!(self.shared.log, Debug, "write to the serial port failed: {error}");
        }
    }
}

const SERIAL_STATE: StateFormat = StateFormat { kind: "serial-16550", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SerialState {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

impl Snapshot for Serial {
    fn save(&self) -> DeviceSnapshot {
        let port = self.shared.with(|port| port.registers.state());
        SERIAL_STATE.encode(&SerialState {
            baud_divisor_low: port.baud_divisor_low,
            baud_divisor_high: port.baud_divisor_high,
            interrupt_enable: port.interrupt_enable,
            interrupt_identification: port.interrupt_identification,
            line_control: port.line_control,
            line_status: port.line_status,
            modem_control: port.modem_control,
            modem_status: port.modem_status,
            scratch: port.scratch,
            in_buffer: port.in_buffer,
        })
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let state: SerialState = SERIAL_STATE.decode(state)?;
        let port_state = PortState {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.in_buffer,
        };
        let line = self.shared.interrupt.try_clone().map_err(|error| {
            SERIAL_STATE.invalid(format!("its interrupt line cannot be used: {error}"))
        })?;
        let output = Output(Arc::clone(&self.shared.endpoint));
        let registers = Port::from_state(&port_state, InterruptLine(line), NoEvents, output)
            .map_err(|error| SERIAL_STATE.invalid(error.to_string()))?;
        self.shared.with(|port| port.registers = registers);
        Ok(())
    }
}
