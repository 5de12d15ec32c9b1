// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events of the kernel's scheduler and of system calls, from the text of a trace.
//!
//! Owns the format of a line, and the system calls that are followed. Times have the resolution of the text, which is
//! a microsecond; the order of the lines is exact. Must never know what threads are for.

/// An event. Its order among others is that of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub us: u64,
    pub processor: u32,
    /// The thread that ran there, which may have been interrupted.
    pub by: u32,
    pub what: What,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A thread was made runnable.
    Waking(u32),
    /// A processor has changed from one thread, which sleeps now or is still runnable, to another.
    Switch { from: u32, sleeps: bool, to: u32 },
    /// A system call has begun, with its first two arguments.
    Enter { call: i64, arguments: [u64; 2] },
    /// It has ended.
    Exit { call: i64, result: i64 },
}

/// The thread of a processor that has nothing to do.
pub const IDLE: u32 = 0;

/// Calls that send on a connection.
pub const SENDS: [i64; 2] = [libc::SYS_sendto, libc::SYS_sendmsg];
/// Calls that receive on one.
pub const RECEIVES: [i64; 2] = [libc::SYS_recvfrom, libc::SYS_recvmsg];

/// A filter by which the kernel records these calls only.
pub fn filter() -> String {
    let followed = SENDS.iter().chain(&RECEIVES).chain(&[libc::SYS_read, libc::SYS_ioctl]);
    followed.map(|call| format!("id == {call}")).collect::<Vec<_>>().join(" || ")
}

/// All events of a trace; lines of other events are left out.
pub fn parse(text: &str) -> Vec<Event> {
    text.lines().filter_map(line).collect()
}

/// A line such as `vcpu0-123   [001] d..2. 456.789012: sched_waking: comm=a pid=7 prio=120 target_cpu=000`.
fn line(line: &str) -> Option<Event> {
    let (thread, rest) = line.split_once(" [").filter(|_| !line.starts_with('#'))?;
    let by = thread.trim_end().rsplit_once('-')?.1.parse().ok()?;
    let (processor, rest) = rest.split_once(']')?;
    let processor = processor.parse().ok()?;
    let (time, rest) = rest.split_once(": ")?;
    let (seconds, fraction) = time.rsplit_once(' ')?.1.split_once('.')?;
    let us = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?;
    let us = us.checked_add(fraction.parse().ok().filter(|_| fraction.len() == 6)?)?;
    let (name, said) = rest.split_once(": ")?;
    let what = match name {
        "sched_waking" => What::Waking(field(said, " pid=")?),
        "sched_switch" => {
            let state = said.split_once(" prev_state=")?.1;
            // `R+` is a thread that was preempted, whatever it was about to do.
            let sleeps = !state.starts_with('R') && !state.split_once(' ')?.0.ends_with('+');
            What::Switch {
                from: field(said, " prev_pid=")?,
                sleeps,
                to: field(said, " next_pid=")?,
            }
        }
        "sys_enter" => {
            let (call, list) = said.strip_prefix("NR ")?.split_once(" (")?;
            let mut list = list.trim_end_matches(')').split(", ");
            let mut argument = || u64::from_str_radix(list.next()?, 16).ok();
            What::Enter { call: call.parse().ok()?, arguments: [argument()?, argument()?] }
        }
        "sys_exit" => {
            let (call, result) = said.strip_prefix("NR ")?.split_once(" = ")?;
            What::Exit { call: call.parse().ok()?, result: result.trim_end().parse().ok()? }
        }
        _ => return None,
    };
    Some(Event { us, processor, by, what })
}

/// The number behind the last such word: names of threads, which may hold anything, come before it.
fn field(said: &str, word: &str) -> Option<u32> {
    said.rsplit_once(word)?.1.split(' ').next()?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let text = "# tracer: nop\n\
            \x20          vcpu1-32556   [001] d..3. 30429.891543: sched_waking: comm=mig-faults pid=32546 prio=98 target_cpu=000\n\
            \x20lto cgu.3.rcgu.-31512   [000] d..2. 30416.724021: sched_switch: prev_comm=lto cgu.3 prev_pid=31512 prev_prio=120 prev_state=R ==> next_comm=a next_pid=7 b next_pid=31255 next_prio=120\n\
            \x20         <idle>-0       [000] d..2. 30416.724022: sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=vcpu1 next_pid=31255 next_prio=120\n\
            \x20     mig-urgent-32549   [001] d..2. 30429.000001: sched_switch: prev_comm=mig-urgent prev_pid=32549 prev_prio=98 prev_state=D ==> next_comm=mig-pages next_pid=32548 next_prio=120\n\
            \x20          vcpu0-32555   [000] d..2. 30429.891707: sched_switch: prev_comm=vcpu0 prev_pid=32555 prev_prio=120 prev_state=R+ ==> next_comm=mig-urgent next_pid=32549 next_prio=98\n\
            \x20     mig-faults-32546   [000] ..... 30429.891680: sys_enter: NR 46 (2d, 7f29ea4a0270, 4040, cbe67f77c7c6d30f, 0, 7f29ea4a0380)\n\
            \x20     mig-faults-32546   [000] ..... 30429.891686: sys_exit: NR 46 = 32\n\
            \x20     mig-faults-32546   [000] ..... 30429.891686: sys_exit: NR 0 = -11\n\
            \x20     mig-faults-32546   [000] ..... 30429.891686: kvm_exit: reason 3\n";
        let event = |us, processor, by, what| Event { us, processor, by, what };
        let switch = |from, sleeps, to| What::Switch { from, sleeps, to };
        let expected = [
            event(30_429_891_543, 1, 32556, What::Waking(32546)),
            event(30_416_724_021, 0, 31512, switch(31512, false, 31255)),
            event(30_416_724_022, 0, IDLE, switch(IDLE, false, 31255)),
            event(30_429_000_001, 1, 32549, switch(32549, true, 32548)),
            event(30_429_891_707, 0, 32555, switch(32555, false, 32549)),
            event(
                30_429_891_680,
                0,
                32546,
                What::Enter { call: 46, arguments: [0x2d, 0x7f29_ea4a_0270] },
            ),
            event(30_429_891_686, 0, 32546, What::Exit { call: 46, result: 32 }),
            event(30_429_891_686, 0, 32546, What::Exit { call: 0, result: -11 }),
        ];
        assert_eq!(parse(text), expected);
    }

    #[test]
    fn what_is_no_event_is_left_out() {
        for text in
            ["", "#  [000] x 1.000000: sys_exit: NR 0 = 1", "a-1 [000] . 1.5: sys_exit: NR 0 = 1"]
        {
            assert_eq!(parse(text), []);
        }
    }
}
