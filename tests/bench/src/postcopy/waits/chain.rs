// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accesses that wait, followed from thread to thread through both processes.
//!
//! Owns the steps of a wait, and what must be certain for it to count. A wait that cannot be followed is counted, and
//! left out. Must never assume more of the program than which threads there are, that an answer goes out after its
//! request was read, and that one answers all that was read before.

use std::collections::{BTreeMap, BTreeSet};

use super::calls::{self, Call, Point, deliver};
use super::events::{Event, RECEIVES, SENDS, What};
use super::threads::{Threads, Without};
use crate::trace::KVM_RUN;

/// A message with fewer bytes brings no page.
const PAGE_BYTES: u64 = 4096;
/// A fault as the kernel tells it.
const FAULT_BYTES: u64 = 32;
/// A request is a header of this length, and as much for each page.
const REQUEST_BYTES: u64 = 16;

/// Who asks for a page, and reads the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A thread that reads faults asks, and one that receives puts the page in place.
    Threads,
    /// The vCPU itself.
    Own,
}

/// The steps of a wait.
const BY_THREADS: [&str; 10] = [
    "reader of faults wakes",
    "request made",
    "request sent",
    "source's thread wakes",
    "request read, answer made",
    "page sent",
    "receiver wakes",
    "page read",
    "page put in place",
    "vCPU wakes",
];
const BY_VCPU: [&str; 8] = [
    "request made",
    "request sent",
    "source's thread wakes",
    "request read, answer made",
    "page sent",
    "vCPU wakes",
    "page read",
    "page put in place, guest entered",
];

impl Way {
    pub const fn steps(self) -> &'static [&'static str] {
        match self {
            Self::Threads => &BY_THREADS,
            Self::Own => &BY_VCPU,
        }
    }
}

/// The threads that take part, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    pub vcpus: BTreeSet<u32>,
    /// At the destination: they read faults.
    pub readers: BTreeSet<u32>,
    /// At the destination: they receive pages that were asked for.
    pub receivers: BTreeSet<u32>,
    /// At the source: they answer requests, on one connection each.
    pub servers: BTreeSet<u32>,
    /// All threads of both processes.
    pub own: BTreeSet<u32>,
}

impl Roles {
    /// Those that take part in waits.
    pub fn parts(&self) -> impl Iterator<Item = u32> {
        let all = [&self.vcpus, &self.readers, &self.receivers, &self.servers];
        all.into_iter().flatten().copied()
    }

    fn is_at_destination(&self, thread: u32) -> bool {
        [&self.vcpus, &self.readers, &self.receivers].iter().any(|some| some.contains(&thread))
    }
}

/// A step of one wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub us: u64,
    /// The part of it in which the thread had no processor.
    pub without: Without,
}

impl Step {
    /// Both together.
    pub fn and(self, next: Self) -> Self {
        let without = self.without.and(next.without);
        Self { us: self.us + next.us, without }
    }
}

/// What a trace has of waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// The steps of each, in the order of their names.
    pub waits: Vec<Vec<Step>>,
    /// Waits that ended otherwise: the page came with the background, or another thread had asked for it.
    pub otherwise: usize,
    /// Waits that could not be followed.
    pub unclear: usize,
}

/// Why a wait does not count.
enum Left {
    Otherwise,
    Unclear,
}

/// A connection for requests.
struct Connection<'c> {
    server: u32,
    requests: Vec<Call>,
    /// By request: how it was read.
    read: Vec<Option<&'c Call>>,
    answers: Vec<Call>,
    /// By answer: how its last byte was read.
    got: Vec<Option<&'c Call>>,
    receives: Vec<&'c Call>,
}

/// A request of a vCPU.
struct Request {
    connection: u64,
    /// Place where it was sent from.
    sent: usize,
    vcpu: u32,
    /// The access.
    began: Point,
    /// Where the vCPU was woken, if another thread does that.
    woken: Option<usize>,
}

struct Trace<'c> {
    events: &'c [Event],
    threads: Threads,
    calls: &'c [Call],
    /// By thread.
    calls_of: BTreeMap<u32, Vec<&'c Call>>,
    roles: &'c Roles,
    connections: BTreeMap<u64, Connection<'c>>,
}

/// Follows all waits of a trace.
pub fn follow(events: &[Event], roles: &Roles, way: Way) -> Followed {
    let calls = calls::all(events);
    let connections = BTreeMap::new();
    let threads = Threads::of(events, &roles.own);
    let mut calls_of: BTreeMap<u32, Vec<&Call>> = BTreeMap::new();
    for call in &calls {
        calls_of.entry(call.thread).or_default().push(call);
    }
    let mut trace = Trace { events, threads, calls: &calls, calls_of, roles, connections };
    trace.connect();
    let mut followed = Followed::default();
    let requests = match way {
        Way::Threads => trace.requests_of_readers(&mut followed),
        Way::Own => trace.requests_of_vcpus(),
    };
    for request in requests {
        match trace.steps(&request) {
            Ok(steps) => followed.waits.push(steps),
            Err(Left::Otherwise) => followed.otherwise += 1,
            Err(Left::Unclear) => followed.unclear += 1,
        }
    }
    followed
}

impl<'c> Trace<'c> {
    /// The calls of a thread in their order.
    fn calls_of(&self, thread: u32) -> &[&'c Call] {
        self.calls_of.get(&thread).map(Vec::as_slice).unwrap_or_default()
    }

    /// Calls of these kinds that have moved something.
    fn moving(&self, kinds: [i64; 2]) -> impl Iterator<Item = &'c Call> {
        let moving = move |call: &&Call| kinds.contains(&call.kind) && call.bytes() > 0;
        self.calls.iter().filter(moving)
    }

    /// Where a call has woken a thread that was not receiving, and so was waiting for what may come.
    fn woke(&self, call: &Call, thread: u32) -> Option<usize> {
        let at = self.threads.wake_up(thread, call.enter.at, call.exit.at)?.at;
        let is_by_it = self.events.get(at)?.by == call.thread;
        let calls = self.calls_of(thread);
        let latest = calls.get(calls.partition_point(|one| one.enter.at < at).wrapping_sub(1));
        let busy = latest.is_some_and(|one| RECEIVES.contains(&one.kind) && one.spans(at));
        (is_by_it && !busy).then_some(at)
    }

    /// Finds the connections: what is sent there wakes the thread at the other end.
    fn connect(&mut self) {
        let mut found: BTreeMap<u64, BTreeMap<u32, usize>> = BTreeMap::new();
        let is_request = |call: &&Call| self.roles.is_at_destination(call.thread);
        for send in self.moving(SENDS).filter(is_request) {
            for server in self.roles.servers.iter().copied() {
                let wake_up = self.threads.wake_up(server, send.enter.at, send.exit.at);
                let by = wake_up.and_then(|one| self.events.get(one.at)).map(|event| event.by);
                if by == Some(send.thread) {
                    *found.entry(send.arguments[0]).or_default().entry(server).or_default() += 1;
                }
            }
        }
        for (descriptor, servers) in found {
            let Some((&server, _)) = servers.iter().max_by_key(|(_, count)| **count) else {
                continue;
            };
            let here = |call: &&Call| {
                call.arguments[0] == descriptor && self.roles.is_at_destination(call.thread)
            };
            let there = |call: &&Call| call.thread == server;
            let requests: Vec<Call> = self.moving(SENDS).filter(here).copied().collect();
            let answers: Vec<Call> = self.moving(SENDS).filter(there).copied().collect();
            let receives = by_end(self.moving(RECEIVES).filter(here));
            let reads = by_end(self.moving(RECEIVES).filter(there));
            let receivers: BTreeSet<u32> = receives.iter().map(|call| call.thread).collect();
            let read = deliver(&requests, &reads, |send| self.woke(send, server));
            let got = deliver(&answers, &receives, |send| {
                receivers.iter().find_map(|receiver| self.woke(send, *receiver))
            });
            let one = Connection { server, requests, read, answers, got, receives };
            self.connections.insert(descriptor, one);
        }
    }

    /// Each request of a vCPU, with the end of the guest's run before it.
    fn requests_of_vcpus(&self) -> Vec<Request> {
        let mut ran: BTreeMap<u32, Point> = BTreeMap::new();
        let mut requests = Vec::new();
        for call in self.calls.iter().filter(|call| self.roles.vcpus.contains(&call.thread)) {
            if runs_guest(call) {
                ran.insert(call.thread, call.exit);
            }
            let connection = call.arguments[0];
            let is_request = SENDS.contains(&call.kind) && call.bytes() > 0;
            if is_request
                && self.connections.contains_key(&connection)
                && let Some(began) = ran.remove(&call.thread)
            {
                let (vcpu, sent) = (call.thread, call.enter.at);
                requests.push(Request { connection, sent, vcpu, began, woken: None });
            }
        }
        requests
    }

    /// Each wait of a vCPU, with the request that the reader of its fault has sent.
    fn requests_of_readers(&self, followed: &mut Followed) -> Vec<Request> {
        let mut waits = self.waits_in_kernel();
        let mut requests = Vec::new();
        for reader in &self.roles.readers {
            let calls = self.calls_of(*reader);
            let is_read = |call: &Call| call.kind == libc::SYS_read && call.bytes() >= FAULT_BYTES;
            for (number, read) in calls.iter().enumerate().filter(|(_, call)| is_read(call)) {
                let faults = read.bytes() / FAULT_BYTES;
                let rest = calls.get(number + 1..).unwrap_or_default();
                let mut until_next = rest.iter().take_while(|call| !is_read(call));
                let sent =
                    until_next.find(|call| SENDS.contains(&call.kind) && call.bytes() > 0).copied();
                let mut asked = 0;
                for _ in 0..faults {
                    // The kernel tells the oldest first.
                    let waits_now = |wait: &&mut (Request, bool)| {
                        let (Request { began, woken, .. }, taken) = &**wait;
                        !taken && began.at < read.exit.at && *woken > Some(read.exit.at)
                    };
                    let Some((wait, taken)) = waits.iter_mut().find(waits_now) else { break };
                    *taken = true;
                    asked += 1;
                    let all = REQUEST_BYTES * (1 + faults);
                    match sent {
                        Some(send) if faults == 1 || send.bytes() >= all => {
                            requests.push(Request {
                                connection: send.arguments[0],
                                sent: send.enter.at,
                                ..*wait
                            });
                        }
                        Some(_) => followed.unclear += 1,
                        None => followed.otherwise += 1,
                    }
                }
                followed.unclear += usize::try_from(faults).unwrap_or(0).saturating_sub(asked);
            }
        }
        requests
    }

    /// Stretches in which vCPUs sleep in the kernel for a page, and whether a fault that was read is theirs: none yet.
    fn waits_in_kernel(&self) -> Vec<(Request, bool)> {
        let mut open: BTreeMap<u32, Point> = BTreeMap::new();
        let mut waits = Vec::new();
        for (at, event) in self.events.iter().enumerate() {
            let here = Point { at, us: event.us };
            match event.what {
                What::Waking(reader)
                    if self.roles.readers.contains(&reader)
                        && self.roles.vcpus.contains(&event.by) =>
                {
                    open.insert(event.by, here);
                }
                What::Waking(vcpu) if self.roles.vcpus.contains(&vcpu) => {
                    if let Some(began) = open.remove(&vcpu) {
                        let (connection, sent, woken) = (0, 0, Some(at));
                        waits.push((Request { connection, sent, vcpu, began, woken }, false));
                    }
                }
                What::Switch { from, sleeps: true, .. } if self.roles.vcpus.contains(&from) => {
                    open.entry(from).or_insert(here);
                }
                _ => {}
            }
        }
        waits.sort_by_key(|(wait, _)| wait.began.at);
        waits
    }

    fn steps(&self, request: &Request) -> Result<Vec<Step>, Left> {
        let connection = self.connections.get(&request.connection).ok_or(Left::Unclear)?;
        let Connection { server, requests, read, answers, got, receives } = connection;
        let number = requests.partition_point(|call| call.enter.at < request.sent);
        let asked = requests.get(number).ok_or(Left::Unclear)?;
        let read = read.get(number).copied().flatten().ok_or(Left::Unclear)?;
        let number = answers.partition_point(|call| call.enter.at < read.exit.at);
        let answer = answers.get(number).ok_or(Left::Unclear)?;
        if answer.bytes() < PAGE_BYTES {
            return Err(Left::Otherwise);
        }
        let got = got.get(number).copied().flatten().ok_or(Left::Unclear)?;
        let mut steps = Steps { threads: &self.threads, now: request.began.us, done: Vec::new() };
        let vcpu = request.vcpu;
        let Some(woken) = request.woken else {
            if got.thread != vcpu {
                return Err(Left::Otherwise);
            }
            let calls = self.calls_of(vcpu);
            let later = calls.get(calls.partition_point(|one| one.enter.at <= asked.enter.at)..);
            let entered = later.unwrap_or_default().iter().find(|one| runs_guest(one));
            let entered = entered.ok_or(Left::Unclear)?.enter;
            if entered.at < got.exit.at {
                return Err(Left::Otherwise);
            }
            steps.until(vcpu, asked.enter.us)?;
            steps.pass(asked, (*server, read))?;
            steps.until(*server, answer.enter.us)?;
            steps.pass(answer, (vcpu, got))?;
            steps.until(vcpu, got.exit.us)?;
            steps.until(vcpu, entered.us)?;
            return Ok(steps.done);
        };
        let waker = self.events.get(woken).ok_or(Left::Unclear)?;
        let last = |call: &&&Call| call.thread == waker.by && call.exit.at < woken;
        let last = receives.iter().rfind(last).ok_or(Left::Otherwise)?;
        if last.exit.at < answer.enter.at {
            return Err(Left::Otherwise);
        }
        let got = if got.exit.at < woken { got } else { last };
        let reader = asked.thread;
        let wake_up = self.threads.wake_up(reader, request.began.at, asked.enter.at);
        steps.until(reader, wake_up.map_or(request.began.us, |one| one.runs_us))?;
        steps.until(reader, asked.enter.us)?;
        steps.pass(asked, (*server, read))?;
        steps.until(*server, answer.enter.us)?;
        steps.pass(answer, (got.thread, got))?;
        steps.until(got.thread, got.exit.us)?;
        steps.until(waker.by, waker.us)?;
        let runs = self.threads.runs_from(vcpu, woken, waker.us).ok_or(Left::Unclear)?;
        steps.until(vcpu, runs)?;
        Ok(steps.done)
    }
}

/// The steps of a wait so far.
struct Steps<'t> {
    threads: &'t Threads,
    now: u64,
    done: Vec<Step>,
}

impl Steps<'_> {
    /// A step of a thread that ends then.
    fn until(&mut self, thread: u32, us: u64) -> Result<(), Left> {
        let took = us.checked_sub(self.now).ok_or(Left::Unclear)?;
        let without = self.threads.without(thread, self.now, us);
        self.done.push(Step { us: took, without });
        self.now = us;
        Ok(())
    }

    /// Two steps: a thread sends, and another one wakes to receive it.
    fn pass(&mut self, send: &Call, (receiver, receive): (u32, &Call)) -> Result<(), Left> {
        let wake_up = self.threads.wake_up(receiver, send.enter.at, receive.exit.at);
        // One that does not sleep finds it when it looks.
        let there = send.exit.us.min(receive.exit.us);
        let (woken, runs) = wake_up.map_or((there, there), |one| (one.woken_us, one.runs_us));
        self.until(send.thread, woken)?;
        self.until(receiver, runs)
    }
}

fn runs_guest(call: &Call) -> bool {
    call.kind == libc::SYS_ioctl && call.arguments[1] == u64::from(KVM_RUN)
}

fn by_end<'c>(calls: impl Iterator<Item = &'c Call>) -> Vec<&'c Call> {
    let mut calls: Vec<&Call> = calls.collect();
    calls.sort_by_key(|call| call.exit.at);
    calls
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
