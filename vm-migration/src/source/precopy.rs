// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Precopy: rounds over all memory while the guest runs.
//!
//! Owns the loop around the rounds: what is measured after each, the measures that the policy asks
//! for, and the condition for the stop: the policy allows it, and the destination's machine is built.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use page_bitmap::PageBitmap;

use super::convergence::{Decision, Expected, Forecast, Measure, Policy, StateCost};
use super::negotiate::{Links, ask_of_mapping};
use super::page_maps::{add_dirty, empty_maps, in_units, scan};
use super::peers::Peers;
use super::round::{Pass, RoundKind, clear_all, send_round};
use super::serve::Gate;
use super::switch::Switch;
use super::{Context, PhaseFailure, check_cancel};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::figures::rate;
use crate::layout::PAGE_BYTES;
use crate::options::{Convergence, DirtyClear, MemoryMode, TimeoutStrategy};
use crate::progress::Event;
use crate::protocol::blobs::BlobList;
use crate::protocol::message::Message;
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;
use crate::vm::{DirtyLog, FreePageHints, SourceVm, Throttle};

/// How long the first round waits for the guest to report more free pages. Linux reports some GiB in
/// a tenth of a second; later reports still count for memory that has not been sent by then.
const HINTS_PAUSE: Duration = Duration::from_secs(2);

/// The longest total wait. A guest that takes so long keeps allocating the pages again.
const HINTS_TIME_MAX: Duration = Duration::from_secs(20);

/// Most rounds in which outdated pages are reported to the destination before the guest stops.
const STALE_ROUNDS_MAX: u32 = 5;

/// This few units are discarded within a millisecond or two, so they can wait until the guest is
/// stopped.
const STALE_UNITS_MIN: u64 = 1024;

/// How often the cancel and new connections are polled.
const HINTS_LOOK: Duration = Duration::from_millis(50);

/// How often the end of precopy is postponed because preparing the stop took long and memory was
/// dirtied meanwhile. A guest whose disks are always that slow is moved nevertheless.
const PREPARES_MAX: u32 = 3;

/// A wait for the destination that is mentioned in the log.
const WORTH_A_LINE: Duration = Duration::from_secs(1);

/// The protocol is negotiated and the destination has mapped the memory; the guest runs at the
/// source.
pub(crate) struct Negotiated<V: SourceVm> {
    pub vm: V,
    pub memory: Arc<V::Memory>,
    pub control: Channel,
    pub links: Links,
    /// Where threads that wait for requests will find what they serve.
    pub gate: Gate<V::Memory>,
}

/// All steps that are possible while the guest runs are done.
pub(crate) struct Copied<V: SourceVm> {
    pub vm: V,
    pub memory: Arc<V::Memory>,
    pub control: Channel,
    pub links: Links,
    pub remaining: RemainingMemory<V::Log>,
    pub gate: Gate<V::Memory>,
}

/// How the rest of memory is sent.
pub(crate) enum RemainingMemory<L> {
    /// Dirty pages are sent while the guest is stopped. Until the stop its vCPUs stay throttled, or
    /// they would dirty the pages again.
    Rest(L, Option<Box<dyn Throttle>>),
    /// These pages (in postcopy all that were populated at the scan) are served after the handover,
    /// together with pages that were dirtied and not sent since then. The destination knows some of
    /// them already (the second maps, in its units).
    Later(L, Vec<PageBitmap>, Option<Vec<PageBitmap>>),
    /// Source and destination share the memory.
    Shared,
}

/// How the rounds ended.
enum Rounds {
    /// The rest may be sent while the guest is stopped.
    Enough(Option<Box<dyn Throttle>>),
    /// The rest, including these pages, is sent after the guest; the destination knows these units
    /// already.
    Switched(Vec<PageBitmap>, Option<Vec<PageBitmap>>),
}

impl<V: SourceVm> Negotiated<V> {
    /// Sends memory until the stop is expected to be short enough; in postcopy, only finds the
    /// populated pages.
    pub(crate) fn precopy(mut self, context: Context<'_>) -> Result<Copied<V>, PhaseFailure<V>> {
        let result = self.remaining(context);
        let Self { vm, memory, control, links, gate } = self;
        match result {
            Ok(remaining) => Ok(Copied { vm, memory, control, links, remaining, gate }),
            Err(failure) => {
                Err(PhaseFailure::Running(vm, Some(Peers::new(control, links)), failure))
            }
        }
    }

    fn remaining(&mut self, context: Context<'_>) -> Result<RemainingMemory<V::Log>, Failure> {
        if self.links.terms.local() {
            self.await_machine(Instant::now(), || (), context)?;
            self.prepare_stop(context)?;
            return Ok(RemainingMemory::Shared);
        }
        if !self.links.terms.early_memory() {
            // The machine is built.
            self.announce_blobs(context)?;
        }
        let log = self.start_log()?;
        match context.options.mode() {
            MemoryMode::Precopy | MemoryMode::Auto => match self.rounds(&log, context)? {
                Rounds::Enough(throttle) => Ok(RemainingMemory::Rest(log, throttle)),
                Rounds::Switched(pages, told) => Ok(RemainingMemory::Later(log, pages, told)),
            },
            MemoryMode::Postcopy => {
                self.prepare_stop(context)?;
                let pages = scan(&*self.memory, &log)?;
                Ok(RemainingMemory::Later(log, pages, None))
            }
        }
    }

    fn start_log(&mut self) -> Result<V::Log, Failure> {
        self.vm.start_dirty_log().map_err(Cause::Vm).step("starting the dirty log")
    }

    fn rounds(&mut self, log: &V::Log, context: Context<'_>) -> Result<Rounds, Failure> {
        let options = context.options;
        let switch = Switch::new(context);
        let mut controller = ConvergenceController::new(&self.vm, &self.links, context)?;
        let mut remaining_bytes = self.memory.layout().pages() * PAGE_BYTES;
        let mut machine_is_built = !self.links.terms.early_memory();
        let mut prepares = 0;
        log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
        let mut hints = self.ask_for_hints(log, context)?;
        for number in 1u32.. {
            check_cancel(context.cancel, "sending memory")?;
            context.progress.begin_round(number, remaining_bytes);
            let began = Instant::now();
            let kind = if number == 1 { RoundKind::First } else { RoundKind::Dirty };
            let (control, links) = (&mut self.control, &mut self.links);
            let memory = &*self.memory;
            // Where pages may have to be discarded again, huge pages would only get in the way.
            let announce =
                number == 1 && links.terms.coming() && options.mode() == MemoryMode::Precopy;
            let pass = Pass { kind, switch: &switch, hints: hints.as_deref(), announce };
            let sent = send_round(memory, log, pass, control, links, context)?;
            // The guest gets its free pages back once no thread reads them any more.
            hints = None;
            if switch.is_due() {
                controller.release();
                return self.switch(log, sent.unsent, machine_is_built, context);
            }
            let sent = sent.bytes;
            let took = began.elapsed();
            // What is dirty now determines the decision, and is what the next round sends.
            let scan = Instant::now();
            let dirty = log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
            remaining_bytes = dirty * PAGE_BYTES;
            controller.measured(sent, took, remaining_bytes, scan.elapsed());
            controller.round_trip(self.links.fastest_answer());
            if self.links.terms.zero_pages() {
                controller.round_trip(self.ping(options.limits.answer)?);
            }
            controller.forecast.switch_over = self.vm.switch_over_time();
            controller.forecast.state.bytes = self.vm.blob_bytes();
            // Hints are not asked for again when the guest has stopped.
            let free = context.progress.counters.free_pages.load(Ordering::Relaxed) * PAGE_BYTES;
            controller.unlogged(log.devices_without_log(), sent.saturating_add(free));
            match controller.decide(number, remaining_bytes) {
                Decision::Round => {}
                Decision::Stop => {
                    if !machine_is_built {
                        let began = controller.began;
                        let waited = self.await_machine(began, || controller.release(), context)?;
                        controller.throttle_again();
                        machine_is_built = true;
                        if !controller.may_stop_after(waited) {
                            // The next round sends what the guest has written meanwhile as well.
                            controller.begin_anew(waited);
                            let dirty = log.begin_round().map_err(Cause::Vm);
                            remaining_bytes = dirty.step("reading the dirty log")? * PAGE_BYTES;
                            continue;
                        }
                    }
                    let prepared = self.prepare_stop(context)?;
                    let counts = prepares < PREPARES_MAX;
                    prepares += 1;
                    if !counts || controller.may_stop_after(prepared) {
                        break;
                    }
                }
                Decision::Postcopy => {
                    // What the guest writes from now on does not delay the stop.
                    controller.release();
                    return self.switch(log, None, machine_is_built, context);
                }
                Decision::Abort => {
                    return Err(controller.not_converging(number, remaining_bytes))
                        .step("waiting for the guest to converge");
                }
            }
        }
        Ok(Rounds::Enough(controller.throttle))
    }

    /// Requests free page hints from the guest. All dirty bits are cleared first: a guest may use
    /// such a page again without notice, and the next round must then find it dirty.
    fn ask_for_hints(
        &self,
        log: &V::Log,
        context: Context<'_>,
    ) -> Result<Option<Box<dyn FreePageHints>>, Failure> {
        if !self.vm.may_give_hints() {
            return Ok(None);
        }
        clear_all(log, self.memory.layout())?;
        let Some(hints) = self.vm.free_page_hints() else { return Ok(None) };
        let began = Instant::now();
        let (mut named, mut since) = (hints.named(), began);
        while !hints.wait(HINTS_LOOK) {
            check_cancel(context.cancel, "waiting for the guest to report its free pages")?;
            if named != hints.named() {
                (named, since) = (hints.named(), Instant::now());
            }
            if since.elapsed() >= HINTS_PAUSE || began.elapsed() >= HINTS_TIME_MAX {
                log::info!("the guest is still reporting its free pages: the first round begins");
                return Ok(Some(hints));
            }
        }
        log::info!("the guest reported its free pages within {} ms", began.elapsed().as_millis());
        Ok(Some(hints))
    }

    /// Leaves the rest for postcopy: pages that no round has reached, and dirty ones.
    fn switch(
        &mut self,
        log: &V::Log,
        unsent: Option<Vec<PageBitmap>>,
        machine_is_built: bool,
        context: Context<'_>,
    ) -> Result<Rounds, Failure> {
        if let Some(lost) = self.links.lost_for_requests() {
            return Err(lost);
        }
        log::info!("precopy ends: the rest of memory is sent by postcopy");
        if !machine_is_built {
            self.await_machine(Instant::now(), || (), context)?;
        }
        self.prepare_stop(context)?;
        let maps = unsent.unwrap_or_else(|| empty_maps(self.memory.layout()));
        let told = if self.links.terms.stale() {
            Some(self.send_stale_pages(log, &maps, context)?)
        } else {
            None
        };
        Ok(Rounds::Switched(maps, told))
    }

    /// Names to the destination the pages whose contents are outdated and that postcopy will send, repeatedly as
    /// long as that greatly reduces the work after the stop. Dirty pages are added to `pages` and
    /// their bits cleared; pages that are dirty at the stop are sent in addition. Returns what the
    /// destination was told.
    fn send_stale_pages(
        &mut self,
        log: &V::Log,
        pages: &[PageBitmap],
        context: Context<'_>,
    ) -> Result<Vec<PageBitmap>, Failure> {
        const STEP: &str = "telling the destination which pages are outdated";
        let mut told = in_units(pages, &self.links);
        told.iter().for_each(PageBitmap::clear);
        let mut before = u64::MAX;
        for _ in 0..STALE_ROUNDS_MAX {
            check_cancel(context.cancel, STEP)?;
            log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
            add_dirty(&*self.memory, log, pages)?;
            let now = in_units(pages, &self.links);
            let more: Vec<PageBitmap> =
                now.iter().zip(&told).map(|(now, told)| now.without(told)).collect();
            let count = more.iter().map(PageBitmap::count).sum();
            if count == 0 {
                break;
            }
            let message = Message::Stale(runs::encode(&more));
            let mapping = self.links.terms.hears_of_mapping();
            ask_of_mapping(&mut self.control, &message, mapping, context).step(STEP)?;
            told = now;
            if count <= STALE_UNITS_MIN || count > before / 2 {
                break;
            }
            before = count;
        }
        Ok(told)
    }

    /// Has the machine do the work that would prolong the stop; returns how long that took.
    fn prepare_stop(&self, context: Context<'_>) -> Result<Duration, Failure> {
        const STEP: &str = "writing back disks before the stop";
        let began = Instant::now();
        self.vm.prepare_stop(&|| context.cancel.is_cancelled()).map_err(Cause::Vm).step(STEP)?;
        check_cancel(context.cancel, STEP)?;
        Ok(began.elapsed())
    }

    /// Measures a round trip.
    fn ping(&mut self, limit: Duration) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.control
            .ask(&Message::ZeroPages(Vec::new()), limit)
            .step("measuring the round trip")?;
        Ok(began.elapsed())
    }

    /// Waits, while the guest runs, until the destination has built its machine and could take the state;
    /// returns how long that took. A destination that says that it still prepares is waited for until the
    /// migration, which began at `began`, is cancelled by its timeout; any other for a fixed time. Whenever it says
    /// so, `takes_long` is called.
    fn await_machine(
        &mut self,
        began: Instant,
        mut takes_long: impl FnMut(),
        context: Context<'_>,
    ) -> Result<Duration, Failure> {
        const STEP: &str = "waiting for the destination to prepare the machine";
        let options = context.options;
        let asked = Instant::now();
        self.control.tell(&Message::AwaitMachine).step(STEP)?;
        if self.links.terms.hears_of_preparing() {
            let least = options.limits.prepare;
            let ends = options.timeout_strategy == TimeoutStrategy::Cancel;
            let may_wait = || {
                takes_long();
                let waited = asked.elapsed();
                if ends && waited >= least && began.elapsed() >= options.timeout {
                    return Err(Cause::SlowPreparation { waited_s: waited.as_secs() });
                }
                Ok(())
            };
            self.control.answer_of_busy_while(options.limits.answer, may_wait).step(STEP)?;
        } else {
            self.control.answer(context.silent_preparation()).step(STEP)?;
        }
        self.announce_blobs(context)?;
        let waited = asked.elapsed();
        if waited >= WORTH_A_LINE {
            log::info!("the destination was ready after another {} s", waited.as_secs());
        }
        Ok(waited)
    }

    /// Has the destination, whose machine is built, prepare for the parts of the state that come beside it, so that what
    /// it lacks for them is known before the guest stops.
    fn announce_blobs(&mut self, context: Context<'_>) -> Result<(), Failure> {
        const STEP: &str = "waiting for the destination to prepare for the state of devices";
        let blobs = self.links.blobs.clone();
        if !blobs.is_empty() {
            let list = Message::Blobs(BlobList { blobs }.to_json());
            ask_of_mapping(&mut self.control, &list, true, context).step(STEP)?;
        }
        Ok(())
    }
}

/// Decides after each round, and carries the decision out.
struct ConvergenceController<'a> {
    policy: Policy,
    forecast: Forecast,
    throttle: Option<Box<dyn Throttle>>,
    began: Instant,
    /// Wait for the destination, which does not count as time for the guest to converge.
    waited: Duration,
    /// Devices whose writes are not logged.
    unlogged: Vec<String>,
    /// Bytes of all memory, as the first round has found them.
    whole_bytes: Option<u64>,
    context: Context<'a>,
}

impl<'a> ConvergenceController<'a> {
    fn new<V: SourceVm>(vm: &V, links: &Links, context: Context<'a>) -> Result<Self, Failure> {
        let options = context.options;
        let throttle = match options.convergence {
            Convergence::Throttle => {
                let what = "this machine has no means to slow down its vCPUs".to_string();
                let remedy = "use another value of convergence";
                let missing = Cause::Unsupported { what, remedy };
                Some(vm.throttle().ok_or(missing).step("preparing to throttle the vCPUs")?)
            }
            _ => None,
        };
        context.progress.set_convergence(options.convergence);
        let policy = Policy::new(options);
        let forecast = Forecast {
            switch_over: vm.switch_over_time(),
            round_trip: links.round_trip,
            state: StateCost { bytes: vm.blob_bytes(), is_apart: !links.blobs.is_empty() },
            ..Forecast::default()
        };
        let (began, waited) = (Instant::now(), Duration::ZERO);
        let (unlogged, whole_bytes) = (Vec::new(), None);
        let controller =
            Self { policy, forecast, throttle, began, waited, unlogged, whole_bytes, context };
        let allowed = &context.progress.counters.allowed_downtime_us;
        allowed.set(micros(controller.policy.allowed()));
        Ok(controller)
    }

    /// Forgets how the rounds went before a wait for the destination, in which the guest went on writing.
    fn begin_anew(&mut self, waited: Duration) {
        self.waited += waited;
        self.policy.begin_anew();
    }

    /// Lets the guest run freely: it is to wait for something else than its own writes.
    fn release(&mut self) {
        self.set_throttle(0);
    }

    /// Slows the guest down as before [`Self::release`].
    fn throttle_again(&mut self) {
        self.set_throttle(self.policy.throttle_percent());
    }

    fn set_throttle(&mut self, percent: u8) {
        let shown = &self.context.progress.counters.throttle_percent;
        if shown.swap(percent.into(), Ordering::Relaxed) != u32::from(percent)
            && let Some(throttle) = &mut self.throttle
        {
            throttle.set(percent);
        }
    }

    /// Takes the devices whose writes are not logged; after the first round, that is all of memory.
    fn unlogged(&mut self, devices: Vec<String>, memory_bytes: u64) {
        self.unlogged = devices;
        self.whole_bytes.get_or_insert(memory_bytes);
    }

    fn expected(&self, remaining_bytes: u64) -> Expected {
        let unlogged_bytes = self.whole_bytes.filter(|_| !self.unlogged.is_empty());
        self.forecast.downtime(remaining_bytes, unlogged_bytes)
    }

    /// Takes the measurements of a round.
    fn measured(&mut self, sent: u64, took: Duration, remaining_bytes: u64, scan: Duration) {
        self.forecast.measured(sent, took);
        self.forecast.scan = scan;
        // Where bits are cleared slice by slice, a page was watched for half of the round on average.
        let watched = match self.context.options.dirty_clear {
            DirtyClear::Slice => took / 2,
            DirtyClear::Round => took,
        };
        let counters = &self.context.progress.counters;
        counters.link_bytes_per_s.set(self.forecast.link_rate);
        counters.dirty_bytes_per_s.set(rate(remaining_bytes, watched));
    }

    /// Takes the duration of an answer for which the peer had no work to do: the shortest counts, as
    /// others include a wait for a processor.
    fn round_trip(&mut self, took: Duration) {
        self.forecast.round_trip = self.forecast.round_trip.min(took);
    }

    fn decide(&mut self, round: u32, remaining_bytes: u64) -> Decision {
        let expected = self.expected(remaining_bytes);
        let elapsed = self.began.elapsed().saturating_sub(self.waited);
        let (decision, measure) = self.policy.decide(remaining_bytes, expected, elapsed);
        let progress = self.context.progress;
        let counters = &progress.counters;
        let expected_us = micros(expected.total());
        counters.expected_downtime_us.set(expected_us);
        counters.stalled_rounds.store(self.policy.stalled_rounds(), Ordering::Relaxed);
        let is_beyond = expected.total() > self.policy.allowed();
        if decision == Decision::Stop && !expected.unlogged.is_zero() && is_beyond {
            log::warn!(
                "the downtime will be about {} ms: nothing logs what {} write to guest memory, and all of it is \
                 sent again",
                expected.total().as_millis(),
                self.unlogged.join(", ")
            );
        } else if decision == Decision::Stop && expected.fixed > self.policy.allowed() {
            log::warn!(
                "the downtime will be about {} ms: {} ms of state, round trips and start \
                 alone exceed the {} ms that are allowed",
                expected.total().as_millis(),
                expected.fixed.as_millis(),
                self.policy.allowed().as_millis()
            );
        }
        if self.policy.stalled_rounds() > 0 && decision != Decision::Stop {
            let allowed_us = micros(self.policy.allowed());
            progress.tell(Event::Stalled { round, expected_us, allowed_us });
        }
        match measure {
            None => {}
            Some(Measure::Throttle(percent)) => {
                self.set_throttle(percent);
                progress.tell(Event::Throttled { percent });
            }
            Some(Measure::AllowDowntime(allowed)) => {
                let allowed_us = micros(allowed);
                counters.allowed_downtime_us.set(allowed_us);
                progress.tell(Event::DowntimeAllowed { allowed_us });
            }
        }
        decision
    }

    /// False when the decision is too old, because the guest has written for too long since then.
    fn may_stop_after(&self, waited: Duration) -> bool {
        waited <= self.forecast.round_trip * 2 + self.policy.allowed() / 10
    }

    fn not_converging(&self, rounds: u32, remaining_bytes: u64) -> Cause {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let expected = self.expected(remaining_bytes);
        let (expected_ms, downtime_ms) = (ms(expected.total()), ms(self.policy.allowed()));
        if !expected.unlogged.is_zero() {
            let devices = self.unlogged.join(", ");
            return Cause::Unlogged { devices, expected_ms, downtime_ms };
        }
        Cause::NotConverging {
            rounds,
            elapsed_s: self.began.elapsed().as_secs(),
            expected_ms,
            fixed_ms: ms(expected.fixed),
            downtime_ms,
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::cancel::Cancel;
    use crate::options::SendOptions;
    use crate::phase::Side;
    use crate::progress::Progress;
    use crate::source::serve::tests::{awaited, loss};
    use crate::testing::{FakeMemory, FakeVm, Guest};
    use crate::transport::{Connection, TransportError};

    #[test]
    fn nothing_is_done_for_a_postcopy_whose_requests_have_lost_their_connection() {
        let cancel = Cancel::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limit = Duration::from_mins(1);
        let [ours, theirs] =
            [ours, theirs].map(|end| Connection::over(end, &cancel, limit).unwrap());
        let memory =
            FakeMemory::new(&[(0, 16)], crate::layout::Backing::Shared, PAGE_BYTES).unwrap();
        let guest = Guest::new(&memory, 1);
        let (links, gate, requests) = awaited();
        drop(requests);
        loss(&links);
        let vm = FakeVm::new(&memory, &guest);
        let calls = vm.calls();
        let control = Channel::new(ours);
        let mut negotiated = Negotiated { vm, memory, control, links, gate };
        let log = negotiated.start_log().unwrap();
        let options = SendOptions::new("unix:nowhere".parse().unwrap());
        let progress = Arc::new(Progress::new(Side::Source));
        let context = Context { options: &options, progress: &progress, cancel: &cancel };
        let failure = negotiated.switch(&log, None, true, context).err().unwrap();
        assert!(matches!(failure.cause, Cause::Transport(TransportError::Closed)), "{failure:?}");
        assert!(!calls.lock().contains(&"prepare_stop"), "{calls:?}");
        assert!(!theirs.has_data_now().unwrap(), "the destination is asked for nothing");
    }
}
