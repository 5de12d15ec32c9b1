// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Migrations drawn at random, one after the other: a guest boots once and moves many times, while
//! connections are cut, either side cancels, the destination is killed, and the guest resets. After
//! each there is one guest, every page of it is right, it continues, and nothing is left behind.
//!
//! `scripts/soak` runs it for as long as wanted; without it a few dozen are made. Each prints its
//! seed, by which it is repeated.
//!
//! Owns the campaign and its summary. Must never know how a migration goes: `moving` does.

mod dice;
mod life;
mod link;
mod moving;
mod plan;

use std::any::Any;
use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::dice::{Dice, Seed};
use self::life::{Running, SHARED_MEMORY};
use self::moving::Place;
use self::plan::{KINDS, Life, Machine, Plan, Without};
use crate::harness::{HugePages, Suite, Vmm, is_root, skip};

/// Migrations of the short form, and the seed that it begins with: the same each time.
const SHORT: u64 = 30;
const SHORT_SEED: u64 = 1;
/// Beyond the time that a campaign was given: the last migration, with all that may go wrong in it.
const MORE_TIME: Duration = Duration::from_mins(6);
/// Without a time of its own, a campaign has this for each migration.
const LIMIT_EACH_S: u64 = 6;
/// Migrations of one guest.
const MOVES_MAX: u64 = 12;
/// In the short form: more kinds of memory rather than longer lives.
const MOVES_MAX_SHORT: u64 = 3;
/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(4);
/// For threads, descriptors and processes to go after what they were for is over.
const LEFTOVERS_TIME: Duration = Duration::from_secs(15);

/// Set by `scripts/soak`.
fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(format!("GODWIT_SOAK_{name}")).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("GODWIT_SOAK_{name}={text} is not understood")))
}

pub fn add(suite: &mut Suite) {
    let (minutes, migrations) = (variable::<u64>("MINUTES"), variable::<u64>("MIGRATIONS"));
    let by_number = LIMIT_EACH_S.saturating_mul(migrations.unwrap_or(SHORT));
    let limit = minutes.map_or(Duration::from_secs(by_number), Duration::from_mins) + MORE_TIME;
    suite.add_long("soak::random_migrations", limit, campaign);
}

struct Campaign {
    migrations: u64,
    end: Option<Instant>,
    without: Without,
    keeps_going: bool,
    moves_max: u64,
    machine: Machine,
    made: u64,
    stayed: u64,
    /// Passed and failed, by kind.
    kinds: BTreeMap<String, (u64, u64)>,
    failures: Vec<String>,
    longest: (Duration, String),
}

fn campaign() {
    let minutes: Option<u64> = variable("MINUTES");
    let seed = variable::<Seed>("SEED").unwrap_or(Seed { guest: SHORT_SEED, only: None });
    let without = plan::parse_without(&variable::<String>("WITHOUT").unwrap_or_default());
    for name in without.iter().flatten() {
        assert!(KINDS.contains(&name.as_str()), "no kind '{name}'; there are {}", KINDS.join(", "));
    }
    let migrations = variable("MIGRATIONS");
    let is_short = migrations.is_none() && minutes.is_none();
    let mut campaign = Campaign {
        migrations: migrations.unwrap_or(if minutes.is_some() { u64::MAX } else { SHORT }),
        end: minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
        without,
        keeps_going: variable::<u64>("KEEP_GOING").is_some(),
        moves_max: if is_short { MOVES_MAX_SHORT } else { MOVES_MAX },
        machine: machine(),
        made: 0,
        stayed: 0,
        kinds: BTreeMap::new(),
        failures: Vec::new(),
        longest: (Duration::ZERO, String::new()),
    };
    println!("     seed {seed}");
    for line in campaign.machine.lacks() {
        println!("     left out: {line}");
    }
    let start = Instant::now();
    campaign.run(seed);
    campaign.report(start.elapsed());
}

fn machine() -> Machine {
    if !Path::new(SHARED_MEMORY).is_dir() {
        skip(format!("files for zones need {SHARED_MEMORY}"));
    }
    Machine {
        has_uffd: is_root() || Path::new("/dev/userfaultfd").exists(),
        has_bpf: is_root(),
        has_huge_pages: HugePages::try_borrow(512).is_some(),
    }
}

impl Campaign {
    fn goes_on(&self) -> bool {
        self.made < self.migrations
            && self.end.is_none_or(|end| Instant::now() < end)
            && (self.keeps_going || self.failures.is_empty())
    }

    fn run(&mut self, seed: Seed) {
        if seed.only.is_some() {
            self.guest(seed);
            return;
        }
        let mut guest = seed.guest;
        while self.goes_on() {
            self.guest(Seed { guest, only: None });
            guest = guest.wrapping_add(1);
        }
    }

    /// One guest, until it has moved often enough or something is wrong.
    fn guest(&mut self, seed: Seed) {
        let Some(life) = Life::draw(seed.guest, &self.without, self.machine) else {
            panic!("--without leaves no guest")
        };
        println!(
            "     guest {}: {} MiB, {} vCPUs, {:?}, {}",
            seed.guest, life.mib, life.vcpus, life.memory, life.cmdline
        );
        let mut running = match catch(|| Running::boot(life.clone())) {
            Ok(running) => running,
            Err(why) => {
                self.count(&life.kinds(), Some(&why), &format!("{}", seed.guest));
                return;
            }
        };
        let numbers = seed.only.map_or(1..=self.moves_max, |only| only..=only);
        for number in numbers {
            if seed.only.is_none() && !self.goes_on() {
                break;
            }
            let name = Seed { guest: seed.guest, only: Some(number) };
            let Some(plan) = Plan::draw(seed.guest, number, &life, &self.without, self.machine)
            else {
                break;
            };
            let start = Instant::now();
            let outcome = catch(|| {
                let (place, settled_ms) =
                    moving::migrate(&mut running, &plan, Dice::new(seed.guest, !number));
                running.check(plan.is_paused && place == Place::Moved);
                (place, settled_ms)
            });
            let took = start.elapsed();
            let kinds = [life.kinds(), plan.kinds().to_vec()].concat();
            let said = match &outcome {
                Ok((Place::Moved, settled_ms)) => format!("moved in {settled_ms} ms"),
                Ok((Place::Stayed, settled_ms)) => {
                    self.stayed += 1;
                    format!("stayed after {settled_ms} ms")
                }
                Err(why) => format!("FAILED: {why}"),
            };
            println!("     {name} {said}, {:.1} s in all: {}", took.as_secs_f64(), kinds.join(" "));
            if took > self.longest.0 {
                self.longest = (took, name.to_string());
            }
            self.count(&kinds, outcome.as_ref().err(), &name.to_string());
            if let Err(why) = outcome {
                keep(&running, &plan, &name.to_string(), &why);
                return;
            }
        }
        if let Err(why) = catch(|| running.end()) {
            self.count(&life.kinds(), Some(&why), &format!("{} at its end", seed.guest));
        }
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

    fn report(&self, took: Duration) {
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
            "     {:.2} s a migration, the longest {:.1} s ({}); {} stayed where they were, as they had to",
            (took / made).as_secs_f64(),
            self.longest.0.as_secs_f64(),
            self.longest.1,
            self.stayed
        );
        println!("     soak: {} passed, {failed} failed", self.made - failed);
        assert!(failed == 0, "{failed} of {} migrations failed", self.made);
        assert!(self.made > 0, "no migration was made");
    }
}

/// Runs it; what a panic said is an answer. (The panic itself is printed where it happens.)
fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload: Box<dyn Any + Send>| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        text.unwrap_or_else(|| "it ended without a word".to_owned())
    })
}

/// Keeps logs, events and progress documents of both sides.
fn keep(running: &Running, plan: &Plan, name: &str, why: &str) {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("soak").join(name);
    let _ = fs::remove_dir_all(&folder);
    let sides = [("source", &running.here), ("destination", &running.there)];
    for (side, vmm) in sides {
        if let Some(vmm) = vmm {
            keep_side(&folder.join(side), vmm);
        }
    }
    let text = format!("{why}\n\n{:#?}\n\n{plan:#?}\n", running.life);
    let _ = fs::create_dir_all(&folder).and_then(|()| fs::write(folder.join("failure"), text));
    println!("     kept in {}", folder.display());
}

fn keep_side(folder: &Path, vmm: &Vmm) {
    let _ = fs::create_dir_all(folder);
    for name in ["events", "log", "stdout", "stderr"] {
        let _ = fs::copy(vmm.path(name), folder.join(name));
    }
    for name in ["vm.migration-progress", "vm.info"] {
        if let Ok(answer) = vmm.api().request("GET", name, None) {
            let _ = fs::write(folder.join(name), answer.body);
        }
    }
}
