// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a watchdog: its queue and its timer.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtio_queue::QueueState;
use vmm_sys_util::timerfd::TimerFd;

use super::device::Expired;
use super::handle::WatchdogHandle;
use crate::virtio::queue::{Broken, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const QUEUE_TOKEN: u64 = 0;
const TIMER_TOKEN: u64 = 1;
/// Maximum number of buffers handled before the clock is checked.
const BUDGET: u32 = 64;
/// Contents of a returned buffer.
const SEEN: [u8; 1] = [1];

/// Serves the queue of a watchdog.
pub(crate) struct WatchdogWorker {
    queue: WorkQueue,
    timeout: Duration,
    timer: TimerFd,
    /// When the guest last reset the watchdog, or started to run here.
    set_back: Instant,
    is_ticking: bool,
    is_armed: Arc<AtomicBool>,
    handle: WatchdogHandle,
    expired: Expired,
}

impl WatchdogWorker {
    /// `expired` is called after `timeout` without a buffer while the clock runs.
    pub(crate) fn new(
        queue: WorkQueue,
        timeout: Duration,
        is_armed: Arc<AtomicBool>,
        handle: WatchdogHandle,
        expired: Expired,
    ) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(io::Error::from)?;
        Ok(Self {
            queue,
            timeout,
            timer,
            set_back: Instant::now(),
            is_ticking: false,
            is_armed,
            handle,
            expired,
        })
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let mut was_seen = false;
        let served = self.queue.serve(BUDGET, |memory, chain| {
            match chain.writable.copy_in(memory, &SEEN) {
                Ok(0) => return Err("has no room for an answer"),
                Ok(_) => {}
                Err(_) => return Err(NOT_RAM),
            }
            was_seen = true;
            Ok(1)
        });
        if was_seen {
            self.is_armed.store(true, Ordering::Release);
            self.begin_anew()?;
        }
        served
    }

    fn begin_anew(&mut self) -> Result<(), Broken> {
        self.set_back = Instant::now();
        self.look_in(self.timeout)
    }

    /// Sets the timer to a check after this non-zero time.
    fn look_in(&mut self, time: Duration) -> Result<(), Broken> {
        self.is_ticking = true;
        self.timer.reset(time, None).map_err(|error| {
            log::error!("cannot set the clock of a watchdog: {error}");
            Broken::Device("the host refused to set a timer")
        })
    }

    fn stop_clock(&mut self) {
        self.is_ticking = false;
        // Cannot fail for an existing timer.
        let _ = self.timer.clear();
    }

    fn look_at_clock(&mut self) -> Result<(), Broken> {
        if let Some(left) = self.handle.left(self.timeout, self.set_back) {
            return self.look_in(left);
        }
        // Reported once, as the machine is about to be replaced.
        self.stop_clock();
        self.is_armed.store(false, Ordering::Release);
        (self.expired)();
        Ok(())
    }
}

impl Work for WatchdogWorker {
    fn kind(&self) -> &'static str {
        "device-watchdog"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(QUEUE_TOKEN, self.queue.kick().as_raw_fd())?;
        watch.on(TIMER_TOKEN, self.timer.as_raw_fd())?;
        if self.is_armed.load(Ordering::Acquire) {
            self.begin_anew()?;
        }
        self.serve()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        if token == QUEUE_TOKEN {
            self.queue.take_kick();
            return self.serve();
        }
        // A buffer that is available was added in time, however late this thread runs.
        self.serve()?;
        self.look_at_clock()
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.stop_clock();
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.queue.state()]
    }

    fn report_broken(&self) {
        self.queue.interrupt().needs_reset();
    }

    /// The clock goes on: a guest that hangs may have spoilt its queue before.
    fn start_broken(&mut self, watch: &mut Watch) {
        watch.on_if_possible(TIMER_TOKEN, self.timer.as_raw_fd());
        if !self.is_ticking && self.is_armed.load(Ordering::Acquire) {
            // The log has a line.
            let _ = self.begin_anew();
        }
    }

    fn ready_broken(&mut self, token: u64, _watch: &mut Watch) {
        // A token of the queue may have been taken from epoll before the queue broke.
        if token == TIMER_TOKEN && self.is_ticking {
            // The log has a line.
            let _ = self.look_at_clock();
        }
    }
}
