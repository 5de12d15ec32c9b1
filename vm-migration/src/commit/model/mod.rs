// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Model of the commit that explores every interleaving: both sides' own phase types, a link that is cut in either
//! direction at any message, requests and signals at any moment, timeouts, a start that fails, a page
//! server that takes over, lost answers, one host that dies.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the exploration, what must hold, and that it is noticed when it does not |
//! | `world` | one state of the model |
//! | `sides` | its successors: the two sides and their first connection |
//! | `calls` | connections that are made again, and pages |
//! | `operator` | requests, signals, operators, deaths |
//!
//! What must hold in each reachable state:
//!
//! - The guest is never on both sides: while the source could run it, the destination does not own it.
//! - It is never on neither side, unless a host has died or the operator has forced that; and while pages
//!   are missing, some process has them.
//! - From each state a settled one can be reached by steps that happen by themselves and by what
//!   the documentation tells operators to do; without an operator, while source and destination live and
//!   their time limits have not expired.

mod calls;
mod operator;
mod sides;
mod world;

use std::collections::HashMap;

use world::{Destination, End, Kind, Rules, Setup, World};

/// A rule that a state breaks, and the steps that lead to it.
#[derive(Debug)]
struct Violation {
    what: &'static str,
    trace: Vec<(&'static str, String)>,
}

/// All reachable states, with the step that first led to each.
struct Explored {
    worlds: Vec<World>,
    from: Vec<Option<(usize, &'static str)>>,
    /// Steps that lead to a state: the state before, and the kind of step.
    into: Vec<Vec<(usize, Kind)>>,
}

fn explore(setup: &Setup) -> Explored {
    let start = World::new(setup);
    let mut numbers = HashMap::from([(start.clone(), 0)]);
    let mut all = Explored { worlds: vec![start], from: vec![None], into: vec![Vec::new()] };
    let mut next = 0;
    // The search is breadth-first and stops at the first violation, which has the shortest trace.
    while next < all.worlds.len() && all.worlds.last().and_then(look).is_none() {
        for (kind, name, world) in all.worlds[next].next(setup) {
            if all.worlds.last().and_then(look).is_some() {
                break;
            }
            let number = *numbers.entry(world).or_insert_with_key(|world| {
                all.worlds.push(world.clone());
                all.from.push(Some((next, name)));
                all.into.push(Vec::new());
                all.worlds.len() - 1
            });
            all.into[number].push((next, kind));
        }
        next += 1;
    }
    all
}

/// The rule that a state breaks by itself, if any.
fn look(world: &World) -> Option<&'static str> {
    let is_excused = world.died || world.insisted;
    if world.source_has() && world.destination_owns() {
        return Some("two guests");
    }
    if !world.source_has() && !world.destination_has() && !is_excused {
        return Some("no guest");
    }
    if world.destination_owns() && world.missing && !world.has_pages() && !is_excused {
        return Some("a guest whose pages are nowhere");
    }
    None
}

impl Explored {
    fn trace(&self, mut number: usize) -> Vec<(&'static str, String)> {
        let mut trace = Vec::new();
        while let Some((from, name)) = self.from[number] {
            let World { source, destination, server, .. } = &self.worlds[number];
            trace.push((name, format!("{source:?} {destination:?} {server:?}")));
            number = from;
        }
        trace.reverse();
        trace
    }

    /// The states from which a settled one can be reached by steps of these kinds.
    fn can_settle(&self, kinds: &[Kind], is_settled: impl Fn(&World) -> bool) -> Vec<bool> {
        let mut can: Vec<bool> = self.worlds.iter().map(is_settled).collect();
        let mut todo: Vec<usize> = (0..can.len()).filter(|number| can[*number]).collect();
        while let Some(number) = todo.pop() {
            for (from, kind) in &self.into[number] {
                if kinds.contains(kind) && !can[*from] {
                    can[*from] = true;
                    todo.push(*from);
                }
            }
        }
        can
    }

    fn check(&self) -> Result<(), Violation> {
        let violation = |what, number| Violation { what, trace: self.trace(number) };
        if let Some(what) = self.worlds.last().and_then(look) {
            return Err(violation(what, self.worlds.len() - 1));
        }
        let alone = self.can_settle(&[Kind::Step], |world| {
            // A machine that did not start waits for the operator once everything else is done.
            world.is_settled()
                || (matches!(world.destination, Destination::NotStarted(_))
                    && world.end == End::Over)
                || (matches!(world.destination, Destination::NotStarted(_)) && !world.missing)
        });
        let helped = self.can_settle(&[Kind::Step, Kind::Operator], World::is_settled);
        for (number, world) in self.worlds.iter().enumerate() {
            if world.died || world.insisted {
                continue;
            }
            if !helped[number] && !world.time_over {
                return Err(violation("no way on, whatever the operator does", number));
            }
            if !alone[number] && !world.time_over {
                return Err(violation("no way on without an operator", number));
            }
        }
        Ok(())
    }
}

const PRECOPY: Setup = Setup {
    postcopy: false,
    page_server: false,
    verdicts: true,
    faults_max: 3,
    broken: Rules {
        cancel_ends_doubt: false,
        doubt_times_out: false,
        age_is_not_asked: false,
        unstartable_is_dropped: false,
        last_message_once: false,
    },
};
const POSTCOPY: Setup = Setup { postcopy: true, ..PRECOPY };
const PAGE_SERVER: Setup = Setup { page_server: true, ..POSTCOPY };

fn holds(setup: &Setup) {
    let explored = explore(setup);
    println!("{setup:?}: {} states", explored.worlds.len());
    if let Err(Violation { what, trace }) = explored.check() {
        for (step, after) in trace {
            println!("  {step}: {after}");
        }
        panic!("{what}");
    }
}

#[test]
fn precopy_has_one_guest() {
    holds(&PRECOPY);
}

#[test]
fn postcopy_has_one_guest() {
    holds(&POSTCOPY);
}

#[test]
fn postcopy_with_a_page_server_has_one_guest() {
    holds(&Setup { faults_max: 2, ..PAGE_SERVER });
}

/// The violation that is found with one rule as it was before.
fn finds(setup: Setup, change: impl Fn(&mut Rules)) -> &'static str {
    let mut broken = Rules::default();
    change(&mut broken);
    let found = explore(&Setup { broken, ..setup }).check();
    let Err(Violation { what, trace }) = found else { panic!("{broken:?} is not noticed") };
    println!("{broken:?}: {what} after");
    for (step, _) in &trace {
        println!("  {step}");
    }
    what
}

#[test]
fn a_cancel_that_ends_the_doubt_is_noticed() {
    for setup in [PRECOPY, POSTCOPY, PAGE_SERVER] {
        let setup = Setup { faults_max: 2, ..setup };
        assert_eq!(finds(setup, |rules| rules.cancel_ends_doubt = true), "no guest");
    }
}

#[test]
fn a_doubt_that_times_out_is_noticed() {
    for setup in [PRECOPY, POSTCOPY, PAGE_SERVER] {
        let setup = Setup { faults_max: 2, ..setup };
        assert_eq!(finds(setup, |rules| rules.doubt_times_out = true), "no guest");
    }
}

#[test]
fn an_acknowledgement_that_is_used_however_old_is_noticed() {
    for setup in [PRECOPY, POSTCOPY] {
        let setup = Setup { faults_max: 2, ..setup };
        assert_eq!(finds(setup, |rules| rules.age_is_not_asked = true), "no guest");
    }
}

#[test]
fn a_machine_that_is_dropped_because_it_does_not_start_is_noticed() {
    for setup in [POSTCOPY, PAGE_SERVER] {
        let setup = Setup { faults_max: 2, ..setup };
        assert_eq!(finds(setup, |rules| rules.unstartable_is_dropped = true), "no guest");
    }
}

#[test]
fn a_last_message_that_is_said_once_is_noticed() {
    for setup in [POSTCOPY, PAGE_SERVER] {
        let setup = Setup { faults_max: 2, ..setup };
        let what = finds(setup, |rules| rules.last_message_once = true);
        assert!(what.contains("no way on"), "{what}");
    }
}

/// With a peer of an older version there is still one guest; the operator has more to decide.
#[test]
fn without_verdicts_there_is_one_guest_too() {
    for setup in [PRECOPY, POSTCOPY] {
        let explored = explore(&Setup { verdicts: false, faults_max: 2, ..setup });
        let wrong = explored.worlds.last().and_then(look);
        assert_eq!(wrong, None);
        let helped = explored.can_settle(&[Kind::Step, Kind::Operator], World::is_settled);
        for (world, helped) in explored.worlds.iter().zip(helped) {
            assert!(helped || world.died || world.insisted || world.time_over, "{world:#?}");
        }
    }
}
