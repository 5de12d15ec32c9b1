// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Throttling: keeps vCPUs out of the guest for a share of the time.
//!
//! Owns the timing thread and the duty cycle. How a vCPU leaves the
//! guest and is kept out is in `threads`. A throttled vCPU still counts as running: it can be
//! paused, stopped and resumed as usual, and none of that waits for its turn.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use stoppable_thread::StoppableThread;

/// Length of a duty cycle, unless that would leave the guest less than the minimum.
const PERIOD: Duration = Duration::from_millis(20);

/// Minimum time inside the guest: with less, entry and exit would dominate.
const INSIDE_MIN: Duration = Duration::from_millis(1);

/// Maximum share of the time outside the guest in percent.
pub const THROTTLE_PERCENT_MAX: u8 = 99;

/// A vCPU that can be kept out of the guest.
pub(crate) trait Throttled: Send + Sync {
    /// Keeps the vCPU out of the guest, or lets it enter again. Does not wait.
    fn hold(&self, on: bool);
}

/// A throttle on all vCPUs of a VM. Dropping it ends the throttling.
pub struct VcpuThrottle {
    shared: Arc<Shared>,
    _thread: StoppableThread,
}

struct Shared {
    order: Mutex<Order>,
    /// Notified on every change of `order`.
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Percent(u8),
    End,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Order> {
        self.order.lock()
    }

    fn set(&self, order: Order) {
        *self.lock() = order;
        self.changed.notify_all();
    }

    /// Waits for `time`, or until the order differs from `order`; returns the current order.
    fn wait(&self, order: Order, time: Option<Duration>) -> Order {
        let mut now = self.lock();
        let same = |now: &mut Order| *now == order;
        match time {
            None => self.changed.wait_while(&mut now, same),
            Some(time) => {
                self.changed.wait_while_for(&mut now, same, time);
            }
        }
        *now
    }
}

/// Times outside and inside the guest for a share of 1 to 99 percent outside.
fn duty_cycle(percent: u8) -> (Duration, Duration) {
    let outside = u32::from(percent.min(THROTTLE_PERCENT_MAX));
    let inside = (PERIOD * (100 - outside) / 100).max(INSIDE_MIN);
    (inside * outside / (100 - outside), inside)
}

impl VcpuThrottle {
    /// Starts with a share of 0.
    pub(crate) fn start(vcpus: Vec<Arc<dyn Throttled>>) -> io::Result<Self> {
        let shared =
            Arc::new(Shared { order: Mutex::new(Order::Percent(0)), changed: Condvar::new() });
        let body = {
            let shared = Arc::clone(&shared);
            move || run_duty_cycle(&shared, &vcpus)
        };
        // Managers find vCPU threads by the prefix `vcpu`, and fail if no number follows.
        let stop = {
            let shared = Arc::clone(&shared);
            move || shared.set(Order::End)
        };
        let thread = StoppableThread::spawn("throttle", stop, body)?;
        Ok(Self { shared, _thread: thread })
    }

    /// Sets the percentage of wall time outside the guest, up to [`THROTTLE_PERCENT_MAX`].
    pub fn set(&self, percent: u8) {
        self.shared.set(Order::Percent(percent.min(THROTTLE_PERCENT_MAX)));
    }
}

fn run_duty_cycle(shared: &Shared, vcpus: &[Arc<dyn Throttled>]) {
    let hold = |on| {
        for vcpu in vcpus {
            vcpu.hold(on);
        }
    };
    let mut order = *shared.lock();
    loop {
        order = match order {
            Order::End => return,
            Order::Percent(0) => shared.wait(order, None),
            Order::Percent(percent) => {
                let (outside, inside) = duty_cycle(percent);
                hold(true);
                let after = shared.wait(order, Some(outside));
                hold(false);
                if after == order { shared.wait(order, Some(inside)) } else { after }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[test]
    fn turns_have_the_share_and_leave_the_guest_alive() {
        for percent in 1..=THROTTLE_PERCENT_MAX {
            let (outside, inside) = duty_cycle(percent);
            let share = outside.as_secs_f64() / (outside + inside).as_secs_f64();
            assert!((share - f64::from(percent) / 100.0).abs() < 0.001, "{percent}: {share}");
            assert!(inside >= INSIDE_MIN && outside <= Duration::from_millis(100), "{percent}");
        }
    }

    #[derive(Default)]
    struct Fake {
        held: AtomicBool,
        times: AtomicU32,
    }

    impl Throttled for Fake {
        fn hold(&self, on: bool) {
            self.held.store(on, Ordering::SeqCst);
            self.times.fetch_add(u32::from(on), Ordering::SeqCst);
        }
    }

    #[test]
    fn no_vcpu_is_held_at_zero_nor_after_the_end() {
        let fake = Arc::new(Fake::default());
        let throttle = VcpuThrottle::start(vec![fake.clone()]).expect("a thread");
        assert_eq!(fake.times.load(Ordering::SeqCst), 0);
        throttle.set(99);
        while fake.times.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        drop(throttle);
        assert!(!fake.held.load(Ordering::SeqCst));
    }

    #[test]
    fn its_thread_is_not_taken_for_that_of_a_vcpu() {
        let fake = Arc::new(Fake::default());
        let throttle = VcpuThrottle::start(vec![fake.clone()]).expect("a thread");
        throttle.set(99);
        // The thread has its name before its first action.
        while fake.times.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
        for task in tasks {
            // A thread of another test may have ended.
            let comm = task.expect("a thread").path().join("comm");
            let Ok(name) = std::fs::read_to_string(comm) else { continue };
            if let Some(number) = name.strip_prefix("vcpu") {
                assert!(number.trim_end().parse::<u32>().is_ok(), "{name}");
            }
        }
    }
}
