// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line: blank-separated `name=value` words.
//!
//! Pure: bytes in, settings out; a word that is not understood is counted and otherwise ignored,
//! because a boot loader may add words of its own. Must never touch memory.

use crate::abi::{PAGE_BYTES, after, command, param, verify, workload};

/// Where cloud-hypervisor has PCI configuration space.
const ECAM_GPA: u64 = 0xe800_0000;

/// A size or position: bytes, or a share of all test memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Bytes(u64),
    /// So many hundredths of all test pages.
    Percent(u64),
}

impl Amount {
    /// In pages, when there are `pages` in all. Never more than `pages`.
    pub fn pages(self, pages: u64) -> u64 {
        let wanted = match self {
            Self::Bytes(bytes) => bytes / PAGE_BYTES,
            Self::Percent(percent) => {
                let share = u128::from(pages) * u128::from(percent) / 100;
                u64::try_from(share).unwrap_or(u64::MAX)
            }
        };
        if wanted < pages { wanted } else { pages }
    }
}

/// What the command line asks for; the defaults are those of `Settings::new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `workload=`: one of `abi::workload`.
    pub workload: u64,
    /// `mem=LENGTH` or `mem=START..LENGTH`.
    pub window: (Amount, Amount),
    /// `vcpus=`; 0: as many as the ACPI tables name.
    pub vcpus: u64,
    /// `active=`: vCPUs that work; 0: all.
    pub active: u64,
    /// `iterations=`.
    pub iterations: u64,
    /// `pace_ns=`.
    pub pace_ns: u64,
    /// `seed=`.
    pub seed: u64,
    /// `verify=none|light|full`.
    pub verify: u64,
    /// `prefill=0|1`.
    pub prefill: u64,
    /// `after=verify|repeat|verify+repeat|none`.
    pub after: u64,
    /// `write_percent=`.
    pub write_percent: u64,
    /// `hot_permille=`.
    pub hot_permille: u64,
    /// `hot_percent=`.
    pub hot_percent: u64,
    /// `tsc_khz=`.
    pub tsc_khz: u64,
    /// `stall_ns=`.
    pub stall_ns: u64,
    /// `gap_note_ns=`.
    pub gap_note_ns: u64,
    /// `check_zero=0|1`.
    pub check_zero: u64,
    /// `reset=0|1`: clear the statistics when taken up.
    pub reset: u64,
    /// `balloon_features=`: bits that the balloon driver may accept.
    pub balloon_features: u64,
    /// `balloon_poison=`.
    pub balloon_poison: u64,
    /// `ecam=`: where PCI configuration space is.
    pub ecam: u64,
    /// `bus_master=`: a device on the first bus that may have DMA before anything else is done; 0: none.
    pub bus_master: u64,
    /// `watchdog=0|1`: vCPU 0 uses the watchdog, for as long as this is so.
    pub watchdog: u64,
    /// `panic=`: events that vCPU 0 reports to the panic device; 0: none.
    pub panic: u64,
    /// `wake=0|1`: vCPU 0 starts every virtio device of the first bus where it lies.
    pub wake: u64,
    /// `attacks=`: kinds of attack, a bit for each; 0: all.
    pub attacks: u64,
    /// `attacked=`: type of the virtio devices that are attacked; 0: all functions.
    pub attacked: u64,
    /// `reserve=`: bytes at the end of RAM without test pages.
    pub reserve: u64,
    /// Words that were not understood.
    pub refused: u64,
}

impl Settings {
    /// The defaults: random write with light checks over all memory, filled first.
    pub const fn new() -> Self {
        Self {
            workload: workload::RANDOM_WRITE,
            window: (Amount::Bytes(0), Amount::Percent(100)),
            vcpus: 0,
            active: 0,
            iterations: 0,
            pace_ns: 0,
            seed: 1,
            verify: verify::LIGHT,
            prefill: 1,
            after: 0,
            write_percent: 100,
            hot_permille: 10,
            hot_percent: 90,
            tsc_khz: 0,
            stall_ns: 40_000,
            gap_note_ns: 1_000_000,
            check_zero: 1,
            reset: 0,
            balloon_features: u64::MAX,
            balloon_poison: 0,
            ecam: ECAM_GPA,
            bus_master: 0,
            watchdog: 0,
            panic: 0,
            wake: 0,
            attacks: 0,
            attacked: 0,
            reserve: 0,
            refused: 0,
        }
    }

    /// The defaults, altered by `line`.
    pub fn parse(line: &[u8]) -> Self {
        let mut settings = Self::new();
        for word in line.split(|byte| *byte <= b' ') {
            if !word.is_empty() && settings.apply(word).is_none() {
                settings.refused += 1;
            }
        }
        settings
    }

    /// Takes one `name=value` word; none, and nothing changed, when it is not understood.
    pub fn apply(&mut self, word: &[u8]) -> Option<()> {
        let equals = word.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (word.get(..equals)?, word.get(equals + 1..)?);
        match name {
            b"workload" => self.workload = named(&workload::NAMES, value)?,
            b"mem" => self.window = window(value)?,
            b"verify" => self.verify = named(&["none", "light", "full"], value)?,
            b"after" => self.after = after_bits(value)?,
            b"reserve" => match amount(value)? {
                Amount::Bytes(bytes) => self.reserve = bytes,
                Amount::Percent(_) => return None,
            },
            _ => *self.numeric(name)? = number(value)?,
        }
        Some(())
    }

    /// These settings as fields of the parameter page, all but the generation, for a guest with
    /// so many test pages and vCPUs.
    pub fn fields(&self, pages: u64, vcpus: u64) -> [(u64, u64); 24] {
        let first = self.window.0.pages(pages);
        let window = self.window.1.pages(pages).min(pages - first);
        let active = if self.active == 0 { vcpus } else { self.active };
        [
            (param::COMMAND, command::RUN),
            (param::WORKLOAD, self.workload),
            (param::ITERATIONS, self.iterations),
            (param::PACE_NS, self.pace_ns),
            (param::VERIFY, self.verify),
            (param::PREFILL, self.prefill),
            (param::AFTER, self.after),
            (param::WRITE_PERCENT, self.write_percent),
            (param::HOT_PERMILLE, self.hot_permille),
            (param::HOT_PERCENT, self.hot_percent),
            (param::WINDOW_FIRST, first),
            (param::WINDOW_PAGES, window),
            (param::TSC_KHZ, self.tsc_khz),
            (param::STALL_NS, self.stall_ns),
            (param::GAP_NOTE_NS, self.gap_note_ns),
            (param::ACTIVE_VCPUS, active),
            (param::CHECK_ZERO, self.check_zero),
            (param::RESET, self.reset),
            (param::BALLOON_FEATURES, self.balloon_features),
            (param::BALLOON_POISON, self.balloon_poison),
            (param::ECAM_GPA, self.ecam),
            (param::ATTACKS, self.attacks),
            (param::ATTACKED, self.attacked),
            (param::WATCHDOG, self.watchdog),
        ]
    }

    /// The settings that a parameter page holds. Filling and clearing statistics are things to be
    /// asked for each time, so these two are off.
    pub fn from_fields(get: impl Fn(u64) -> u64) -> Self {
        let bytes = |field| Amount::Bytes(get(field).saturating_mul(PAGE_BYTES));
        Self {
            workload: get(param::WORKLOAD),
            window: (bytes(param::WINDOW_FIRST), bytes(param::WINDOW_PAGES)),
            vcpus: 0,
            active: get(param::ACTIVE_VCPUS),
            iterations: get(param::ITERATIONS),
            pace_ns: get(param::PACE_NS),
            seed: 0,
            verify: get(param::VERIFY),
            prefill: 0,
            after: get(param::AFTER),
            write_percent: get(param::WRITE_PERCENT),
            hot_permille: get(param::HOT_PERMILLE),
            hot_percent: get(param::HOT_PERCENT),
            tsc_khz: get(param::TSC_KHZ),
            stall_ns: get(param::STALL_NS),
            gap_note_ns: get(param::GAP_NOTE_NS),
            check_zero: get(param::CHECK_ZERO),
            reset: 0,
            balloon_features: get(param::BALLOON_FEATURES),
            balloon_poison: get(param::BALLOON_POISON),
            ecam: get(param::ECAM_GPA),
            bus_master: 0,
            watchdog: get(param::WATCHDOG),
            panic: 0,
            wake: 0,
            attacks: get(param::ATTACKS),
            attacked: get(param::ATTACKED),
            reserve: 0,
            refused: 0,
        }
    }

    fn numeric(&mut self, name: &[u8]) -> Option<&mut u64> {
        Some(match name {
            b"vcpus" => &mut self.vcpus,
            b"active" => &mut self.active,
            b"iterations" => &mut self.iterations,
            b"pace_ns" => &mut self.pace_ns,
            b"seed" => &mut self.seed,
            b"prefill" => &mut self.prefill,
            b"write_percent" => &mut self.write_percent,
            b"hot_permille" => &mut self.hot_permille,
            b"hot_percent" => &mut self.hot_percent,
            b"tsc_khz" => &mut self.tsc_khz,
            b"stall_ns" => &mut self.stall_ns,
            b"gap_note_ns" => &mut self.gap_note_ns,
            b"check_zero" => &mut self.check_zero,
            b"reset" => &mut self.reset,
            b"balloon_features" => &mut self.balloon_features,
            b"balloon_poison" => &mut self.balloon_poison,
            b"ecam" => &mut self.ecam,
            b"bus_master" => &mut self.bus_master,
            b"watchdog" => &mut self.watchdog,
            b"panic" => &mut self.panic,
            b"wake" => &mut self.wake,
            b"attacks" => &mut self.attacks,
            b"attacked" => &mut self.attacked,
            _ => return None,
        })
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new()
    }
}

fn named(names: &[&str], value: &[u8]) -> Option<u64> {
    let index = names.iter().position(|name| name.as_bytes() == value)?;
    u64::try_from(index).ok()
}

fn after_bits(value: &[u8]) -> Option<u64> {
    match value {
        b"none" => Some(0),
        b"verify" => Some(after::VERIFY),
        b"repeat" => Some(after::REPEAT),
        b"verify+repeat" => Some(after::VERIFY | after::REPEAT),
        _ => None,
    }
}

fn window(value: &[u8]) -> Option<(Amount, Amount)> {
    match value.windows(2).position(|pair| pair == b"..") {
        Some(dots) => Some((amount(value.get(..dots)?)?, amount(value.get(dots + 2..)?)?)),
        None => Some((Amount::Bytes(0), amount(value)?)),
    }
}

fn amount(value: &[u8]) -> Option<Amount> {
    let (last, digits) = value.split_last()?;
    let shift = match last {
        b'%' => return Some(Amount::Percent(number(digits)?)),
        b'K' | b'k' => 10,
        b'M' | b'm' => 20,
        b'G' | b'g' => 30,
        _ => return Some(Amount::Bytes(number(value)?)),
    };
    Some(Amount::Bytes(number(digits)?.checked_mul(1 << shift)?))
}

fn number(value: &[u8]) -> Option<u64> {
    let (digits, radix) = match value {
        [b'0', b'x', rest @ ..] => (rest, 16),
        _ => (value, 10),
    };
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, byte| {
        let digit = char::from(*byte).to_digit(radix)?;
        sum.checked_mul(u64::from(radix))?.checked_add(u64::from(digit))
    })
}
