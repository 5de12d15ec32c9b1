// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The workload of one vCPU: which page next, what is done with it, and what comes after.
//!
//! Owns this vCPU's test pages and its part of the shadow table. Page `p` belongs to vCPU
//! `p mod n`, so no other vCPU ever touches them and there is nothing to lock.

use crate::abi::{
    self, after, balloon_failure, command, event, param, state, vcpu, verify, workload,
};
use crate::balloon::Balloon;
use crate::clock::{self, Clock};
use crate::disk::{self, Disk};
use crate::hostile::{Attacker, Orders};
use crate::layout::{Layout, Own};
use crate::mem::{self, Block};
use crate::pattern::{Mismatch, Pattern, Random};
use crate::peer::Peer;
use crate::reuse::Reuse;
use crate::{panic, watchdog::Watchdog};

const PARAM: Block = Block::at(abi::PARAM_GPA);

/// The parameters of one generation.
#[derive(Clone, Copy)]
struct Parameters {
    generation: u64,
    workload: u64,
    iterations: u64,
    pace_ticks: u64,
    verify: u64,
    prefill: bool,
    after: u64,
    write_percent: u64,
    hot_count: u64,
    hot_percent: u64,
    check_zero: bool,
    own: Own,
}

/// One vCPU at work.
pub struct Worker {
    vcpu: u64,
    vcpus: u64,
    layout: &'static Layout,
    pattern: Pattern,
    random: Random,
    khz: u64,
    block: Block,
    clock: Clock,
    now: Parameters,
    /// Position in `now.own` of the next page of a sequential phase.
    cursor: u64,
    /// Iterations left of the present phase (0 when it has no end of its own).
    left: u64,
    deadline: u64,
    state: u64,
    /// From the first iteration of a balloon workload on.
    balloon: Option<Balloon>,
    /// From the first iteration of the disk workload on.
    disk: Option<Disk>,
    /// The same of the workloads of file systems and networks.
    peer: Option<Peer>,
    /// From the first attack on.
    attacker: Option<Attacker>,
    /// Of vCPU 0, if it is asked for.
    watchdog: Option<Watchdog>,
}

impl Worker {
    /// The worker of `vcpu` of `vcpus`.
    pub fn new(vcpu: u64, vcpus: u64, layout: &'static Layout, seed: u64, khz: u64) -> Self {
        let block = Block::at(abi::vcpu_gpa(vcpu));
        let mut worker = Self {
            vcpu,
            vcpus,
            layout,
            pattern: Pattern::new(seed),
            random: Random::new(seed, vcpu),
            khz,
            block,
            clock: Clock::new(block),
            now: Parameters {
                generation: 0,
                workload: workload::IDLE,
                iterations: 0,
                pace_ticks: 0,
                verify: verify::NONE,
                prefill: false,
                after: 0,
                write_percent: 0,
                hot_count: 0,
                hot_percent: 0,
                check_zero: false,
                own: Own::default(),
            },
            cursor: 0,
            left: 0,
            deadline: 0,
            state: state::OFF,
            balloon: None,
            disk: None,
            peer: None,
            attacker: None,
            watchdog: None,
        };
        worker.clock.reset();
        worker.clock.tick();
        worker
    }

    /// Shows a sign of life without working.
    pub fn idle(&mut self) {
        self.clock.tick();
        core::hint::spin_loop();
    }

    /// From now on it uses the watchdog, and says so where there is none by an error.
    pub fn start_watchdog(&mut self, ecam: u64) {
        match Watchdog::start(ecam, self.khz) {
            Ok(watchdog) => self.watchdog = Some(watchdog),
            Err(_) => self.block.add(vcpu::ERRORS, 1),
        }
    }

    /// Reports `events` to the panic device, and counts an error where there is none.
    pub fn report_panic(&mut self, ecam: u64, events: u8) {
        if panic::report(ecam, events).is_err() {
            self.block.add(vcpu::ERRORS, 1);
        }
    }

    /// Works forever.
    pub fn run(&mut self) -> ! {
        loop {
            let now = self.clock.tick();
            if let Some(watchdog) = &mut self.watchdog
                && PARAM.get(param::WATCHDOG) != 0
            {
                let clock = &mut self.clock;
                watchdog.set_back(now, || _ = clock.tick());
            }
            if PARAM.get(param::GENERATION) != self.now.generation {
                self.take_parameters();
            }
            if PARAM.get(param::COMMAND) == command::PAUSE {
                self.hold();
                continue;
            }
            match self.state {
                state::PREFILL => self.step_fill(state::WORK),
                state::WORK => self.step_work(),
                state::VERIFY => self.step_verify_after(),
                _ => core::hint::spin_loop(),
            }
        }
    }

    fn take_parameters(&mut self) {
        let generation = PARAM.get(param::GENERATION);
        if PARAM.get(param::TSC_KHZ) != 0 {
            self.khz = PARAM.get(param::TSC_KHZ);
        }
        let first = PARAM.get(param::WINDOW_FIRST).min(self.layout.pages);
        let pages = PARAM.get(param::WINDOW_PAGES).min(self.layout.pages - first);
        let own = Own::new(first, pages, self.vcpu, self.vcpus);
        let active = self.vcpu < PARAM.get(param::ACTIVE_VCPUS) && own.count > 0;
        let hot = u128::from(own.count) * u128::from(PARAM.get(param::HOT_PERMILLE)) / 1000;
        let workload = match PARAM.get(param::WORKLOAD) {
            _ if !active => workload::IDLE,
            workload::HOSTILE if self.vcpu != 0 => workload::RANDOM_WRITE,
            workload => workload,
        };
        self.now = Parameters {
            generation,
            workload,
            iterations: PARAM.get(param::ITERATIONS),
            pace_ticks: clock::ticks(PARAM.get(param::PACE_NS), self.khz),
            verify: PARAM.get(param::VERIFY),
            prefill: PARAM.get(param::PREFILL) != 0,
            after: PARAM.get(param::AFTER),
            write_percent: PARAM.get(param::WRITE_PERCENT),
            hot_count: u64::try_from(hot).unwrap_or(u64::MAX).clamp(1, own.count.max(1)),
            hot_percent: PARAM.get(param::HOT_PERCENT),
            check_zero: PARAM.get(param::CHECK_ZERO) != 0,
            own,
        };
        self.clock.configure(self.khz, PARAM.get(param::STALL_NS), PARAM.get(param::GAP_NOTE_NS));
        if PARAM.get(param::RESET) != 0 {
            self.reset_statistics();
        }
        let fills = self.now.prefill || self.now.workload == workload::FILL;
        match self.now.workload {
            workload::IDLE => self.enter(state::DONE, 0),
            workload::HOSTILE => self.enter(state::WORK, self.now.iterations),
            _ if fills => self.enter(state::PREFILL, 0),
            _ => self.enter(state::WORK, self.now.iterations),
        }
        self.block.set(vcpu::GENERATION, generation);
    }

    fn reset_statistics(&mut self) {
        let kept = [vcpu::HEARTBEAT, vcpu::COUNTER_SUM, vcpu::STATE, vcpu::GENERATION]
            .map(|field| (field, self.block.get(field)));
        mem::clear(self.block.gpa_of(0), vcpu::STATISTICS_BYTES);
        for (field, value) in kept {
            self.block.set(field, value);
        }
        self.clock.reset();
    }

    fn enter(&mut self, state: u64, iterations: u64) {
        self.state = state;
        self.cursor = 0;
        self.left = iterations;
        self.deadline = 0;
        self.block.set(vcpu::STATE, state);
        self.block.set(vcpu::LEFT, iterations);
        if state == state::DONE {
            self.ring(event::DONE);
        }
    }

    fn hold(&mut self) {
        self.block.set(vcpu::STATE, state::PAUSED);
        while PARAM.get(param::COMMAND) == command::PAUSE {
            self.idle();
        }
        self.block.set(vcpu::STATE, self.state);
    }

    fn ring(&self, code: u32) {
        mem::store32(abi::MMIO_EVENT_GPA, code | low_half(self.vcpu) << 8);
    }

    /// Waits out the pace; false when something else is due meanwhile.
    fn paced(&mut self) -> bool {
        if self.now.pace_ticks == 0 {
            return true;
        }
        let mut at = self.clock.tick();
        if at > self.deadline.saturating_add(self.now.pace_ticks) {
            self.deadline = at;
        }
        while at < self.deadline {
            if PARAM.get(param::GENERATION) != self.now.generation
                || PARAM.get(param::COMMAND) == command::PAUSE
            {
                return false;
            }
            core::hint::spin_loop();
            at = self.clock.tick();
        }
        self.deadline += self.now.pace_ticks;
        true
    }

    /// The next own index in order; at the end of a pass the cursor is back at 0.
    fn next_in_order(&mut self) -> u64 {
        let index = self.now.own.first + self.cursor;
        self.cursor += 1;
        if self.cursor >= self.now.own.count {
            self.cursor = 0;
            self.block.add(vcpu::PASSES, 1);
        }
        self.block.set(vcpu::CURSOR, self.cursor);
        index
    }

    fn step_fill(&mut self, next: u64) {
        let index = self.next_in_order();
        self.write(index, verify::NONE, true);
        if self.cursor == 0 {
            let next = if self.now.workload == workload::FILL { state::DONE } else { next };
            self.finish_phase(next);
        }
    }

    fn finish_phase(&mut self, next: u64) {
        match next {
            state::DONE if self.state != state::VERIFY && self.now.after & after::VERIFY != 0 => {
                self.enter(state::VERIFY, 0);
            }
            state::DONE if self.now.after & after::REPEAT != 0 => {
                self.enter(state::WORK, self.now.iterations);
            }
            state::WORK => self.enter(state::WORK, self.now.iterations),
            _ => self.enter(next, 0),
        }
    }

    fn step_verify_after(&mut self) {
        let index = self.next_in_order();
        self.read(index, verify::FULL);
        if self.cursor == 0 {
            self.finish_phase(state::DONE);
        }
    }

    fn step_work(&mut self) {
        if !self.paced() {
            return;
        }
        let check = self.now.verify;
        match self.now.workload {
            workload::VERIFY => {
                let index = self.next_in_order();
                self.read(index, check);
            }
            workload::SEQUENTIAL_WRITE => {
                let index = self.next_in_order();
                self.write(index, check, false);
            }
            workload::READ_ONLY => {
                let index = self.now.own.first + self.random.below(self.now.own.count);
                self.read(index, check);
            }
            workload::RANDOM_WRITE => self.random_access(self.now.own.count),
            workload::HOT_WRITE => {
                let hot = self.random.below(100) < self.now.hot_percent;
                self.random_access(if hot { self.now.hot_count } else { self.now.own.count });
            }
            workload::FILL => self.step_fill(state::WORK),
            workload::BALLOON_REPORT | workload::BALLOON_INFLATE => {
                if let Err(why) = self.inflate_and_deflate() {
                    self.block.set(vcpu::BALLOON_FAILURE, why);
                    self.enter(state::DONE, 0);
                    return;
                }
            }
            workload::DISK_READ => {
                if let Err(why) = self.read_from_disk() {
                    self.disk_failed(why);
                    return;
                }
            }
            workload::CONFIG_READ => {
                mem::load32(PARAM.get(param::ECAM_GPA));
                self.block.add(vcpu::ITERATIONS, 1);
            }
            workload::DISK_WRITE
            | workload::FS_ASK
            | workload::NET_ECHO
            | workload::PMEM_WRITE
            | workload::RTC_READ
            | workload::IOMMU_DISK
            | workload::USER_DEVICE => {
                if self.vcpu == 0 && PARAM.get(param::EJECT) != 0 {
                    (self.disk, self.peer) = (None, None);
                    if disk::eject(PARAM.get(param::EJECT), self.vcpus, self.khz) {
                        PARAM.set(param::EJECT, 0);
                    }
                    self.enter(state::DONE, 0);
                    return;
                }
                if let Err(why) = self.exchange() {
                    self.disk_failed(why);
                    return;
                }
            }
            workload::HOSTILE => self.attack(),
            _ => core::hint::spin_loop(),
        }
        if self.left > 0 {
            self.left -= 1;
            self.block.set(vcpu::LEFT, self.left);
            if self.left == 0 {
                self.finish_phase(state::DONE);
            }
        }
    }

    /// Attacks once.
    fn attack(&mut self) {
        if self.attacker.is_none() {
            let Layout { reserved, ram_end, .. } = *self.layout;
            self.attacker = Attacker::start(Orders {
                ecam: PARAM.get(param::ECAM_GPA),
                seed: self.random.number(),
                arena: reserved,
                ram_end,
                kinds: PARAM.get(param::ATTACKS),
                device_type: low_half(PARAM.get(param::ATTACKED)),
                idle_vcpu: self.vcpus,
                khz: self.khz,
            });
        }
        let Some(attacker) = &mut self.attacker else {
            self.block.set(vcpu::HOSTILE_FAILURE, 1);
            self.enter(state::DONE, 0);
            return;
        };
        if let Some(kind) = attacker.step() {
            self.block.add(vcpu::ATTACKS + kind.min(vcpu::ATTACK_KINDS - 1) * 8, 1);
        }
        self.block.add(vcpu::ITERATIONS, 1);
    }

    fn disk_failed(&mut self, why: u64) {
        self.block.set(vcpu::DISK_FAILURE, why);
        self.block.add(vcpu::ERRORS, 1);
        self.enter(state::DONE, 0);
    }

    /// Starts the disk's driver, if it has not been started.
    fn start_disk(&mut self) -> Result<(), u64> {
        if self.disk.is_none() {
            self.disk = Some(Disk::start(PARAM.get(param::ECAM_GPA))?);
        }
        Ok(())
    }

    /// Reads the next block of the disk; vCPU 0 alone does so.
    fn read_from_disk(&mut self) -> Result<(), u64> {
        if self.vcpu != 0 {
            return Ok(());
        }
        self.start_disk()?;
        let Some(disk) = &mut self.disk else { return Err(balloon_failure::DEVICE) };
        let number = self.block.get(vcpu::ITERATIONS);
        let clock = &mut self.clock;
        disk.read(number, || _ = clock.tick())?;
        self.block.set(vcpu::ITERATIONS, number + 1);
        Ok(())
    }

    /// Writes one block to the disk, or has one request of another device answered; vCPU 0 alone does so.
    fn exchange(&mut self) -> Result<(), u64> {
        if self.vcpu != 0 {
            return Ok(());
        }
        let number = self.block.get(vcpu::DISK_WRITES);
        if self.now.workload == workload::DISK_WRITE {
            self.start_disk()?;
            let Some(disk) = &mut self.disk else { return Err(balloon_failure::DEVICE) };
            let clock = &mut self.clock;
            disk.write(number, || _ = clock.tick())?;
        } else {
            if self.peer.is_none() {
                self.peer = Some(Peer::start(PARAM.get(param::ECAM_GPA), self.now.workload)?);
            }
            let Some(peer) = &mut self.peer else { return Err(balloon_failure::DEVICE) };
            let clock = &mut self.clock;
            peer.ask(number, || _ = clock.tick())?;
        }
        self.block.set(vcpu::DISK_WRITES, number + 1);
        self.block.add(vcpu::ITERATIONS, 1);
        Ok(())
    }

    /// Gives all pages up, takes them again, and fills them.
    fn inflate_and_deflate(&mut self) -> Result<(), u64> {
        if self.vcpus != 1 {
            return Err(balloon_failure::VCPUS);
        }
        if self.balloon.is_none() {
            let get = |field| PARAM.get(field);
            let accepted = get(param::BALLOON_FEATURES);
            let poison = get(param::BALLOON_POISON);
            self.balloon = Some(Balloon::start(get(param::ECAM_GPA), accepted, poison)?);
        }
        let Some(balloon) = &mut self.balloon else { return Err(balloon_failure::DEVICE) };
        self.block.set(vcpu::BALLOON_FEATURES, balloon.features);
        if self.now.workload == workload::BALLOON_REPORT && !balloon.reports() {
            return Err(balloon_failure::FEATURES);
        }
        let Parameters { own, workload, .. } = self.now;
        Reuse { layout: self.layout, own, block: self.block }.round(
            workload,
            balloon,
            &mut self.clock,
        );
        for index in own.first..own.first + own.count {
            let (page, gpa, _) = self.locate(index);
            // Zero, whichever side made it so.
            self.check(page, gpa, 0, verify::FULL);
            self.write(index, verify::NONE, true);
        }
        self.block.add(vcpu::PASSES, 1);
        Ok(())
    }

    fn random_access(&mut self, among: u64) {
        let index = self.now.own.first + self.random.below(among);
        if self.random.below(100) < self.now.write_percent {
            self.write(index, self.now.verify, false);
        } else {
            self.read(index, self.now.verify);
        }
    }

    fn locate(&self, index: u64) -> (u64, u64, u64) {
        let page = index * self.vcpus + self.vcpu;
        (page, self.layout.gpa(page), self.layout.counter_gpa(self.vcpu, index))
    }

    fn read(&mut self, index: u64, check: u64) {
        let (page, gpa, counter_gpa) = self.locate(index);
        let counter = u64::from(mem::load32(counter_gpa));
        let start = self.clock.tick();
        mem::load(gpa);
        self.clock.access(page, start);
        self.check(page, gpa, counter, check);
        self.block.add(vcpu::READS, 1);
        self.block.add(vcpu::ITERATIONS, 1);
    }

    /// Writes a page: the next version of it, or all of it when it never was written or `fill`.
    fn write(&mut self, index: u64, check: u64, fill: bool) {
        let (page, gpa, counter_gpa) = self.locate(index);
        let counter = u64::from(mem::load32(counter_gpa));
        let whole = fill || counter == 0 || counter == u64::from(u32::MAX);
        let next = if whole { 1 } else { counter + 1 };

        let start = self.clock.tick();
        if check == verify::NONE {
            // From here on the page is neither the old version nor the new one.
            self.block.set(vcpu::IN_FLIGHT, page + 1);
            mem::store(gpa, page);
            self.clock.access(page, start);
        } else {
            mem::load(gpa);
            self.clock.access(page, start);
            self.check(page, gpa, counter, check);
            self.block.set(vcpu::IN_FLIGHT, page + 1);
        }
        let store = |word: u64, value: u64| mem::store(gpa + word * 8, value);
        if whole {
            self.pattern.fill(page, store);
        } else {
            self.pattern.advance(page, next, store);
        }
        mem::store32(counter_gpa, low_half(next));
        self.block.add(vcpu::COUNTER_SUM, next.wrapping_sub(counter));
        self.block.set(vcpu::IN_FLIGHT, 0);
        self.block.add(vcpu::WRITES, 1);
        self.block.add(vcpu::ITERATIONS, 1);
    }

    fn check(&mut self, page: u64, gpa: u64, counter: u64, how: u64) {
        if how == verify::NONE || (counter == 0 && !self.now.check_zero) {
            return;
        }
        let load = |word: u64| mem::load(gpa + word * 8);
        let outcome = if how == verify::FULL {
            self.pattern.check_full(page, counter, load)
        } else {
            self.pattern.check_light(page, counter, load)
        };
        self.block.add(vcpu::VERIFIED, 1);
        if let Err(mismatch) = outcome {
            self.report(page, gpa, counter, mismatch);
        }
    }

    #[cold]
    #[inline(never)]
    fn report(&mut self, page: u64, gpa: u64, counter: u64, mismatch: Mismatch) {
        let errors = self.block.get(vcpu::ERRORS);
        if errors < vcpu::MAX_ERRORS {
            let offset = vcpu::ERROR_RECORDS + errors * vcpu::ERROR_BYTES;
            let record = Block::at(self.block.gpa_of(offset));
            record.set(abi::error::PAGE, page);
            record.set(abi::error::GPA, gpa);
            record.set(abi::error::COUNTER, counter);
            record.set(abi::error::FOUND_COUNTER, mem::load(gpa + 8));
            record.set(abi::error::WORD, mismatch.word);
            record.set(abi::error::EXPECTED, mismatch.expected);
            record.set(abi::error::FOUND, mismatch.found);
            record.set(abi::error::TSC, clock::now());
        }
        self.block.set(vcpu::ERRORS, errors + 1);
        if errors == 0 {
            self.ring(event::ERROR);
        }
    }
}

/// A number that is known to fit 32 bits.
#[expect(clippy::cast_possible_truncation, reason = "counters and vCPU indices fit")]
fn low_half(number: u64) -> u32 {
    number as u32
}
