// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Detection of guests that reset by a triple fault, once or in a loop.
//!
//! Owns the count and the messages. A triple fault is a PC's last-resort reset, also on this machine; but a
//! payload that cannot run on it resets so at once and forever, and shows nothing on its console.
//! Must never end or stop a guest.

use std::time::{Duration, Instant};

/// A guest payload that has run for so long counts as started.
const START: Duration = Duration::from_secs(10);
/// This many consecutive starts that end in a triple fault count as a loop.
const LOOP_STARTS: u64 = 3;
/// Interval at which the log reports a loop.
const SAID_EVERY: Duration = Duration::from_mins(1);

/// Triple faults of a VM's guests.
#[derive(Debug, Default)]
pub struct TripleFaults {
    /// Number of the machine that had the last one.
    machine_number: u64,
    /// Consecutive starts that ended in one.
    in_a_row: u64,
    /// When the log last reported a loop.
    said_at: Option<Instant>,
}

/// A triple fault.
#[derive(Debug, PartialEq, Eq)]
pub struct TripleFault {
    /// Consecutive starts that ended in one; 0 if the guest had started.
    pub in_a_row: u64,
    /// Text for the log, if one is due.
    pub text: Option<String>,
}

impl TripleFaults {
    /// Records a triple fault on machine `number`, `ran` after the guest's first instruction (`None`: the
    /// guest was started elsewhere). Machines are numbered consecutively, so a gap means that one ended in
    /// another way.
    pub fn note(
        &mut self,
        number: u64,
        vcpu: u32,
        ran: Option<Duration>,
        now: Instant,
    ) -> TripleFault {
        let Some(ran) = ran.filter(|ran| *ran < START) else {
            *self = Self { machine_number: number, ..Self::default() };
            let text = format!("a triple fault of vCPU {vcpu} resets the guest");
            return TripleFault { in_a_row: 0, text: Some(text) };
        };
        if self.machine_number.checked_add(1) != Some(number) {
            *self = Self::default();
        }
        self.machine_number = number;
        self.in_a_row = self.in_a_row.saturating_add(1);
        let in_a_row = self.in_a_row;
        let ran_ms = ran.as_millis();
        if in_a_row < LOOP_STARTS {
            let text = format!(
                "a triple fault of vCPU {vcpu} resets the guest, {ran_ms} ms after it was started"
            );
            return TripleFault { in_a_row, text: Some(text) };
        }
        let is_time = self.said_at.is_none_or(|at| now.saturating_duration_since(at) >= SAID_EVERY);
        if is_time {
            self.said_at = Some(now);
        }
        let text = is_time.then(|| {
            format!(
                "the payload resets in a loop: its last {in_a_row} starts ended in a triple fault, this \
                 one after {ran_ms} ms (vCPU {vcpu}). It may be no kernel or firmware for this machine, \
                 have too little memory, or expect a processor feature or device that is not there; what \
                 it says on its serial port may tell more (--serial, earlyprintk), and vm.shutdown ends it"
            )
        });
        TripleFault { in_a_row, text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(30);

    fn texts(faults: &mut TripleFaults, machines: &[(u64, Duration)]) -> Vec<(u64, bool)> {
        let now = Instant::now();
        let note = |&(number, ran): &(u64, Duration)| {
            let noted = faults.note(number, 0, Some(ran), now);
            (noted.in_a_row, noted.text.is_some_and(|text| text.contains("in a loop")))
        };
        machines.iter().map(note).collect()
    }

    #[test]
    fn a_loop_is_called_one_and_named_once_a_minute() {
        let (mut faults, begin) = (TripleFaults::default(), Instant::now());
        let mut said = Vec::new();
        for number in 1..=1000 {
            // Ten per second.
            let now = begin + Duration::from_millis(100) * u32::try_from(number).unwrap_or(0);
            let noted = faults.note(number, 1, Some(SOON), now);
            assert_eq!(noted.in_a_row, number);
            said.extend(noted.text.map(|text| (number, text)));
        }
        let numbers: Vec<_> = said.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [1, 2, 3, 603]);
        assert!(said[1].1.contains("30 ms after"), "{said:?}");
        assert!(said[2].1.contains("in a loop: its last 3 starts"), "{said:?}");
        assert!(said[3].1.contains("its last 603 starts"), "{said:?}");
    }

    #[test]
    fn a_guest_that_had_started_is_in_no_loop() {
        let mut faults = TripleFaults::default();
        let row = [(1, SOON), (2, SOON), (3, START), (4, SOON), (5, SOON), (6, START)];
        let expected = [1, 2, 0, 1, 2, 0].map(|count| (count, false));
        assert_eq!(texts(&mut faults, &row), expected);
    }

    #[test]
    fn a_guest_from_elsewhere_had_started() {
        let (mut faults, now) = (TripleFaults::default(), Instant::now());
        let noted = faults.note(1, 0, None, now);
        let text = noted.text.unwrap_or_default();
        assert!(noted.in_a_row == 0 && !text.contains("after it was started"), "{text}");
        assert_eq!(faults.note(2, 0, Some(SOON), now).in_a_row, 1);
    }

    #[test]
    fn a_start_that_ended_otherwise_breaks_the_row() {
        let mut faults = TripleFaults::default();
        // Machine 3 was ended by a request, or by an ordinary reset.
        let row = [(1, SOON), (2, SOON), (4, SOON), (5, SOON), (6, SOON)];
        let expected = [(1, false), (2, false), (1, false), (2, false), (3, true)];
        assert_eq!(texts(&mut faults, &row), expected);
    }
}
