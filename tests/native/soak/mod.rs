// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Migrations drawn at random: one to three guests boot and move many times, in turn and two at a time,
//! while connections are cut, either side cancels, is stopped or killed, and guests reset. After each
//! there is one guest, every page of it is right, it continues, and nothing is left behind.
//!
//! `scripts/soak` runs it for as long as wanted; without it two minutes are made, beside other tests. Each
//! migration prints its seed, by which it is repeated.
//!
//! Owns the campaign, whose turn it is, and the summary. Must never know how a migration goes: `moving` does.

mod counts;
mod dice;
mod group;
mod life;
mod link;
mod lives;
mod moving;
mod plan;
mod troubles;

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use self::counts::shared_memory_mib;
use self::dice::{Dice, Seed};
use self::group::{Member, Order, Told};
use self::life::SHARED_MEMORY;
use self::lives::{Life, Machine, Memory};
use self::moving::Place;
use self::plan::{KINDS, Plan, Without, is_wanted};
use crate::harness::taps::Tap;
use crate::harness::{HugePages, Suite, beside, is_root, skip};

/// Minutes of the short form, which begins with a seed of the commit.
const SHORT_MINUTES: u64 = 2;
/// The seed where there is no commit.
const SHORT_SEED: u64 = 1;
/// Beyond the time that a campaign was given: the last migrations, with all that may go wrong in them.
const MORE_TIME: Duration = Duration::from_mins(6);
/// Without a time of its own, a campaign has this for each migration.
const LIMIT_EACH_S: u64 = 6;
/// Migrations of one guest.
const MOVES_MAX: u64 = 12;
/// In the short form: more kinds of memory rather than longer lives.
const MOVES_MAX_SHORT: u64 = 4;
/// The short form leaves the processors to tests that are timed.
const NICE_SHORT: i32 = 5;
/// Numbers of dice for a group, beyond those of any migration.
const OF_GROUP: u64 = 1 << 32;
/// Pages of 2 MiB that the largest group needs: for its VMs, and for those that arrive.
const HUGE_PAGES_MAX: u64 = 3 * 256 + 8;
/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(4);
/// For threads, descriptors and processes to go after what they were for is over.
const LEFTOVERS_TIME: Duration = Duration::from_secs(30);
/// By how much the host's shared memory may grow during a campaign that has the host for itself. A guest's memory
/// in one of ten migrations is more.
const SHARED_MIB_MAX: u64 = 1 << 10;

/// Set by `scripts/soak`.
fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(format!("GODWIT_SOAK_{name}")).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("GODWIT_SOAK_{name}={text} is not understood")))
}

/// None when so many migrations are to be made.
fn minutes() -> Option<u64> {
    let minutes = variable("MINUTES");
    minutes.or_else(|| variable::<u64>("MIGRATIONS").is_none().then_some(SHORT_MINUTES))
}

pub fn add(suite: &mut Suite) {
    let by_number = LIMIT_EACH_S.saturating_mul(variable("MIGRATIONS").unwrap_or(0));
    let limit = minutes().map_or(Duration::from_secs(by_number), Duration::from_mins) + MORE_TIME;
    suite.add_long("soak::random_migrations", limit, campaign);
}

struct Campaign {
    migrations: u64,
    end: Option<Instant>,
    without: Without,
    keeps_going: bool,
    /// Other tests run at the same time.
    is_beside: bool,
    machine: Machine,
    made: u64,
    stayed: u64,
    lost: u64,
    looked: u64,
    /// Passed and failed, by kind.
    kinds: BTreeMap<String, (u64, u64)>,
    failures: Vec<String>,
    longest: (Duration, String),
}

fn campaign() {
    let is_beside = beside::is_it();
    if is_beside {
        be_nice();
    }
    let seed = variable("SEED").unwrap_or_else(|| Seed { guest: seed_of_commit(), only: None });
    let without = plan::parse_without(&variable::<String>("WITHOUT").unwrap_or_default());
    for name in without.iter().flatten() {
        assert!(KINDS.contains(&name.as_str()), "no kind '{name}'; there are {}", KINDS.join(", "));
    }
    let mut campaign = Campaign {
        migrations: variable("MIGRATIONS").unwrap_or(u64::MAX),
        end: minutes().map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
        without,
        keeps_going: variable::<u64>("KEEP_GOING").is_some(),
        is_beside,
        machine: machine(is_beside),
        made: 0,
        stayed: 0,
        lost: 0,
        looked: 0,
        kinds: BTreeMap::new(),
        failures: Vec::new(),
        longest: (Duration::ZERO, String::new()),
    };
    println!("     seed {seed}");
    for line in campaign.machine.lacks() {
        println!("     left out: {line}");
    }
    let (start, shared_mib) = (Instant::now(), shared_memory_mib());
    campaign.run(seed);
    campaign.report(start.elapsed(), shared_mib);
}

/// Another one for each commit.
fn seed_of_commit() -> u64 {
    let git = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success());
    let hash = git.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let seed = hash.and_then(|hash| u64::from_str_radix(hash.get(..8)?, 16).ok());
    seed.unwrap_or(SHORT_SEED)
}

/// This thread, and all that it starts.
fn be_nice() {
    // SAFETY: takes numbers only; of a process that is 0 it changes the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE_SHORT) };
}

fn machine(is_beside: bool) -> Machine {
    if !Path::new(SHARED_MEMORY).is_dir() {
        skip(format!("files for zones need {SHARED_MEMORY}"));
    }
    Machine {
        has_uffd: is_root() || Path::new("/dev/userfaultfd").exists(),
        has_bpf: is_root(),
        // Others wait for them for a minute, and then do without.
        has_huge_pages: !is_beside && HugePages::try_borrow(HUGE_PAGES_MAX).is_some(),
        has_taps: catch_unwind(Tap::open).is_ok(),
    }
}

impl Campaign {
    fn goes_on(&self) -> bool {
        self.made < self.migrations
            && self.end.is_none_or(|end| Instant::now() < end)
            && (self.keeps_going || self.failures.is_empty())
    }

    fn run(&mut self, seed: Seed) {
        if let Some(only) = seed.only {
            self.group(seed.guest, 1, only..=only);
            return;
        }
        let moves_max = if self.is_beside { MOVES_MAX_SHORT } else { MOVES_MAX };
        let mut leader = seed.guest;
        while self.goes_on() {
            let mut size = Dice::new(leader, OF_GROUP).pick(&[(1, 1), (3, 2), (1, 3)]);
            if !self.wants("several") {
                size = 1;
            }
            self.group(leader, size, 1..=moves_max);
            leader = leader.wrapping_add(size);
        }
    }

    fn wants(&self, kind: &str) -> bool {
        is_wanted(&[kind.to_owned()], &self.without)
    }

    /// Guests with seeds that follow each other, until they have moved often enough or something is wrong.
    fn group(&mut self, leader: u64, size: u64, numbers: std::ops::RangeInclusive<u64>) {
        println!("     guests that are alive at the same time: {size}, from --seed {leader}");
        let mut members = Vec::new();
        for seed in (0..size).map(|at| leader.wrapping_add(at)) {
            let Some(life) = Life::draw(seed, &self.without, self.machine) else {
                panic!("--without leaves no guest")
            };
            println!(
                "     guest {seed}: {} MiB, {} vCPUs, {}, {}",
                life.mib,
                life.vcpus,
                life.kinds().join(" "),
                life.cmdline
            );
            members.push(Member::new(seed, life));
        }
        // For VMs that are left, those that arrive, and what the kernel has not got back yet.
        let huge = members.iter().filter(|member| member.life.memory == Memory::Huge);
        let huge_mib: u64 = huge.map(|member| member.life.mib).sum();
        let huge_pages = match (huge_mib > 0).then(|| HugePages::try_borrow(huge_mib + 8)) {
            Some(None) => {
                let why = format!("the host gives no {} pages of 2 MiB any more", huge_mib + 8);
                return self.count(&[], Some(&why), &leader.to_string());
            }
            borrowed => borrowed.flatten(),
        };
        for member in &members {
            member.order(Order::Boot);
        }
        members.retain(|member| {
            let told = member.told();
            if let Err(why) = &told.outcome {
                self.count(&member.life.kinds(), Some(why), &member.seed.to_string());
            }
            told.outcome.is_ok()
        });
        for number in numbers {
            if !self.goes_on() {
                break;
            }
            self.round(leader, number, &mut members);
        }
        for member in &members {
            member.order(Order::End);
        }
        for member in members {
            if let Err(why) = member.told().outcome {
                self.count(
                    &member.life.kinds(),
                    Some(&why),
                    &format!("{} at its end", member.seed),
                );
            }
            member.join();
        }
        if let Some(pages) = huge_pages {
            let taken = pages.taken();
            if taken != 0 {
                let why = format!("{taken} pages of 2 MiB are taken after the guests have ended");
                self.count(&[], Some(&why), &leader.to_string());
            }
        }
    }

    /// Each guest moves once, two of them at the same time now and then.
    fn round(&mut self, leader: u64, number: u64, members: &mut Vec<Member>) {
        let mut dice = Dice::new(leader, OF_GROUP + number);
        if let Some(first) = u64::try_from(members.len()).ok().filter(|count| *count > 1) {
            members.rotate_left(usize::try_from(dice.below(first)).unwrap_or(0));
        }
        let is_together = members.len() > 1 && dice.percent(40) && self.wants("together");
        let mut seeds: Vec<u64> = members.iter().map(|member| member.seed).collect();
        let mut first = if is_together { 2 } else { 1 };
        while !seeds.is_empty() && self.goes_on() {
            let now: Vec<u64> = seeds.drain(..first.min(seeds.len())).collect();
            first = 1;
            let failed = self.turn(number, &now, members);
            members.retain(|member| !failed.contains(&member.seed));
            seeds.retain(|seed| !failed.contains(seed));
        }
    }

    /// These move, and the others are looked at afterwards. Those that have failed.
    fn turn(&mut self, number: u64, seeds: &[u64], members: &[Member]) -> Vec<u64> {
        let mut failed = Vec::new();
        let (moving, others): (Vec<_>, Vec<_>) =
            members.iter().partition(|member| seeds.contains(&member.seed));
        let mut under_way = Vec::new();
        for member in moving {
            let drawn = Plan::draw(member.seed, number, &member.life, &self.without, self.machine);
            let Some(plan) = drawn else { continue };
            let mut kinds = [member.life.kinds(), plan.kinds().to_vec()].concat();
            let more = [(members.len() > 1, "several"), (seeds.len() > 1, "together")];
            kinds.extend(more.iter().filter(|(is, _)| *is).map(|(_, name)| (*name).to_owned()));
            member.order(Order::Move(number, Box::new(plan)));
            under_way.push((member, kinds));
        }
        for (member, kinds) in under_way {
            let told = member.told();
            if told.outcome.is_err() {
                failed.push(member.seed);
            }
            self.moved(Seed { guest: member.seed, only: Some(number) }, &kinds, &told);
        }
        for member in &others {
            member.order(Order::Look);
        }
        for member in others {
            self.looked += 1;
            if let Err(why) = member.told().outcome {
                failed.push(member.seed);
                let name = format!("{} while {seeds:?} moved, number {number}", member.seed);
                self.count(&member.life.kinds(), Some(&why), &name);
            }
        }
        failed
    }

    fn moved(&mut self, seed: Seed, kinds: &[String], told: &Told) {
        let said = match &told.outcome {
            Ok(None) => return,
            Ok(Some((Place::Moved, settled_ms))) => format!("moved in {settled_ms} ms"),
            Ok(Some((Place::Stayed, settled_ms))) => {
                self.stayed += 1;
                format!("stayed after {settled_ms} ms")
            }
            Ok(Some((Place::Lost, settled_ms))) => {
                self.lost += 1;
                format!("lost with what was killed, after {settled_ms} ms")
            }
            Err(why) => format!("FAILED: {why}"),
        };
        println!(
            "     {seed} {said}, {:.1} s in all: {}",
            told.took.as_secs_f64(),
            kinds.join(" ")
        );
        if told.took > self.longest.0 {
            self.longest = (told.took, seed.to_string());
        }
        self.count(kinds, told.outcome.as_ref().err(), &seed.to_string());
    }

    fn count(&mut self, kinds: &[String], failure: Option<&String>, name: &str) {
        self.made += 1;
        for kind in kinds {
            let entry = self.kinds.entry(kind.clone()).or_default();
            if failure.is_some() { entry.1 += 1 } else { entry.0 += 1 }
        }
        if let Some(why) = failure {
            let why = why.lines().next().unwrap_or_default();
            self.failures.push(format!("{name}: {why}"));
        }
    }

    fn report(&self, took: Duration, shared_before_mib: u64) {
        println!("     kind                passed failed");
        for (kind, (passed, failed)) in &self.kinds {
            println!("     {kind:<20}{passed:>6}{failed:>7}");
        }
        let failed = u64::try_from(self.failures.len()).unwrap_or(u64::MAX);
        for failure in &self.failures {
            println!("     failed {failure}");
        }
        let made = u32::try_from(self.made.max(1)).unwrap_or(u32::MAX);
        println!(
            "     {:.2} s a migration, the longest {:.1} s ({}); {} stayed where they were, and {} were lost, as they \
             had to; {} looks at guests while others moved",
            (took / made).as_secs_f64(),
            self.longest.0.as_secs_f64(),
            self.longest.1,
            self.stayed,
            self.lost,
            self.looked
        );
        let more_mib = shared_memory_mib().saturating_sub(shared_before_mib);
        println!(
            "     a VMM's own memory was at most {} KiB; the host's shared memory has grown by {more_mib} MiB",
            counts::largest_kib()
        );
        let is_bounded = self.is_beside || more_mib < SHARED_MIB_MAX;
        assert!(is_bounded, "{more_mib} MiB of shared memory are left");
        println!("     soak: {} passed, {failed} failed", self.made - failed);
        assert!(failed == 0, "{failed} of {} migrations failed", self.made);
        assert!(self.made > 0, "no migration was made");
    }
}
