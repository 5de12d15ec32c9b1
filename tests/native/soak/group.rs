// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that are alive at the same time, each on a thread of its own, which starts its VMMs and does with it
//! what it is told.
//!
//! Owns the threads. (A VMM of a test ends with the thread that has started it.) Must never choose who moves.

use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::dice::{Dice, Seed};
use super::life::Running;
use super::lives::Life;
use super::moving::{self, Place};
use super::plan::Plan;
use crate::harness::Vmm;

/// What a guest is told.
pub enum Order {
    /// To boot.
    Boot,
    /// To move, as planned under this number.
    Move(u64, Box<Plan>),
    /// To be looked at, after others have moved.
    Look,
    /// To end.
    End,
}

/// What came of it.
pub struct Told {
    /// Where a guest that was to move is, and how many milliseconds it took until that was clear; else the
    /// reason of the failure.
    pub outcome: Result<Option<(Place, u128)>, String>,
    /// All that was done.
    pub took: Duration,
}

/// A guest.
pub struct Member {
    /// Its seed.
    pub seed: u64,
    /// What it is like.
    pub life: Life,
    orders: Sender<Order>,
    told: Receiver<Told>,
    thread: JoinHandle<()>,
}

impl Member {
    /// One that waits for its first order.
    pub fn new(seed: u64, life: Life) -> Self {
        let (orders, of_guest) = channel();
        let (tell, told) = channel();
        let its = life.clone();
        let thread = std::thread::Builder::new()
            .name(format!("guest {seed}"))
            .spawn(move || {
                let mut guest = OneGuest { seed, life: its, running: None };
                for order in of_guest {
                    let begun = Instant::now();
                    let outcome = guest.obey(order);
                    if tell.send(Told { outcome, took: begun.elapsed() }).is_err() {
                        return;
                    }
                }
            })
            .expect("a thread");
        Self { seed, life, orders, told, thread }
    }

    /// Gives it an order, of which [`Self::told`] says what came.
    pub fn order(&self, order: Order) {
        // The answer is missing as well if it is gone.
        let _ = self.orders.send(order);
    }

    /// Waits for the end of its last order.
    pub fn told(&self) -> Told {
        self.told.recv().unwrap_or_else(|_| Told {
            outcome: Err("the guest's thread has ended".to_owned()),
            took: Duration::ZERO,
        })
    }

    /// Ends its thread, and with that whatever it may still have.
    pub fn join(self) {
        drop(self.orders);
        let _ = self.thread.join();
    }
}

/// The guest on its thread.
struct OneGuest {
    seed: u64,
    life: Life,
    /// None before it has booted, after it was lost, and after a failure.
    running: Option<Running>,
}

impl OneGuest {
    fn obey(&mut self, order: Order) -> Result<Option<(Place, u128)>, String> {
        match order {
            Order::Boot => self.boot().map(|()| None),
            Order::Move(number, plan) => self.migrate(number, &plan).map(Some),
            Order::Look => {
                let Some(running) = &self.running else { return Ok(None) };
                let looked = catch(|| running.look());
                looked.map(|()| None).inspect_err(|why| {
                    keep(running, None, &format!("{}.looked", self.seed), why);
                })
            }
            Order::End => {
                self.running.take().map_or(Ok(()), |running| catch(|| running.end())).map(|()| None)
            }
        }
    }

    fn boot(&mut self) -> Result<(), String> {
        let (life, seed) = (self.life.clone(), self.seed);
        self.running = Some(catch(|| Running::boot(life, seed))?);
        Ok(())
    }

    fn migrate(&mut self, number: u64, plan: &Plan) -> Result<(Place, u128), String> {
        if self.running.is_none() {
            // It was lost, and begins once more.
            self.boot()?;
        }
        let Some(running) = &mut self.running else { return Err("no guest".to_owned()) };
        let dice = Dice::new(self.seed, !number);
        let outcome = catch(|| {
            let (place, settled_ms) = moving::migrate(running, plan, dice);
            if place != Place::Lost {
                running.check(plan.is_paused && place == Place::Moved);
            }
            (place, settled_ms)
        });
        let name = Seed { guest: self.seed, only: Some(number) };
        match &outcome {
            Ok((Place::Lost, _)) => {
                if let Some(running) = self.running.take() {
                    catch(|| running.lost())?;
                }
            }
            Ok(_) => {}
            Err(why) => {
                keep(running, Some(plan), &name.to_string(), why);
                self.running = None;
            }
        }
        outcome
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
fn keep(running: &Running, plan: Option<&Plan>, name: &str, why: &str) {
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
