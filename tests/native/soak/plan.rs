// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How one migration of a guest goes, and what happens meanwhile: all of it drawn.
//!
//! Owns which options go together, and the names of the kinds by which they are counted and left
//! out. Must never start anything.

use std::fmt::Write as _;

use super::dice::Dice;
use super::lives::{Life, Machine, Memory};
use crate::harness::{Mode, Transport};

/// A kind of migration that is not wanted: all of these names at once.
pub type Without = Vec<Vec<String>>;

/// Reads `a,b+c`: neither `a`, nor `b` together with `c`.
pub fn parse_without(text: &str) -> Without {
    let words = text.split(',').filter(|word| !word.is_empty());
    words.map(|word| word.split('+').map(str::to_owned).collect()).collect()
}

/// Whether none of what is left out is all there.
pub fn is_wanted(kinds: &[String], without: &Without) -> bool {
    !without.iter().any(|names| names.iter().all(|name| kinds.contains(name)))
}

/// Every name that `--without` takes.
pub const KINDS: &[&str] = &[
    "precopy",
    "postcopy",
    "auto",
    "local",
    "tcp",
    "unix",
    "tls",
    "small-pages",
    "thp",
    "private",
    "hugetlb",
    "file-fresh",
    "file-old",
    "zones",
    "balloon",
    "pool",
    "hotplug",
    "disk",
    "guest-iommu",
    "tap",
    "vsock",
    "rtc",
    "connections-1",
    "connections-2",
    "connections-4",
    "connections-64",
    "preempt-0",
    "compression",
    "clear-by-round",
    "throttle",
    "raise-downtime",
    "uffd",
    "sigbus",
    "bandwidth",
    "page-server",
    "delay",
    "cut",
    "cut-one",
    "outage",
    "cancel-source",
    "cancel-destination",
    "kill-destination",
    "kill-source",
    "kill-page-server",
    "stop-source",
    "stop-destination",
    "same-file",
    "reset-before",
    "reset-during",
    "paused",
    "snapshot",
    "several",
    "together",
];

/// A side may be silent for 10 s: what it is stopped for leaves the rest to a machine that is busy.
const STOP_MS_MAX: u64 = 4_000;

/// Something that happens while it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// All connections end, or one of them, once so many bytes have been sent; new ones cannot be
    /// made for a time.
    Cut { after_bytes: u64, is_one: bool, down_ms: u64 },
    /// A cancel at either side.
    Cancel { at_source: bool, after_ms: u64 },
    /// The destination is killed once so many bytes have been sent, if the guest is still here.
    Kill { after_bytes: u64 },
    /// The source is killed, wherever it is then.
    KillSource { after_ms: u64 },
    /// The page server is killed, so long after it has taken over.
    KillPageServer { after_ms: u64 },
    /// A side is stopped as a whole, for less time than any limit of the other.
    Stop { at_source: bool, after_ms: u64, for_ms: u64 },
    /// The guest crashes, which resets it.
    Reset { after_ms: u64 },
    /// The destination's zones are the very files of the source.
    SameFile,
}

/// One migration.
#[derive(Clone, Debug)]
pub struct Plan {
    /// When memory travels.
    pub mode: Mode,
    /// As descriptors.
    pub is_local: bool,
    /// What carries it.
    pub transport: Transport,
    /// Both sides have certificates.
    pub has_tls: bool,
    /// More of `send-migration`, which begins with a comma.
    pub sending: String,
    /// More of `receive-migration`, likewise.
    pub receiving: String,
    /// The source ends early.
    pub has_page_server: bool,
    /// One way, milliseconds, and what may come on top.
    pub delay_ms: Option<(u64, u64)>,
    /// What happens meanwhile.
    pub troubles: Vec<Trouble>,
    /// The guest is saved and restored before.
    pub snapshot: Option<&'static str>,
    /// It is reset before.
    pub is_reset: bool,
    /// It is paused before, and arrives so.
    pub is_paused: bool,
    /// The destination takes memory of a pool.
    pub has_pool: bool,
    /// A disk comes before, or is asked to go.
    pub has_hotplug: bool,
    kinds: Vec<String>,
}

/// Draws until something is wanted.
pub const TRIES: u32 = 2000;

impl Plan {
    /// Migration `number` of the guest with this seed; none when everything was excluded.
    pub fn draw(
        seed: u64,
        number: u64,
        life: &Life,
        without: &Without,
        machine: Machine,
    ) -> Option<Self> {
        let mut dice = Dice::new(seed, number);
        (0..TRIES).map(|_| Self::draw_any(&mut dice, life)).find(|plan| {
            let kinds = [life.kinds(), plan.kinds.clone()].concat();
            is_wanted(&kinds, without) && machine.can(&kinds)
        })
    }

    /// Names of what it is, without those of its guest.
    pub fn kinds(&self) -> &[String] {
        &self.kinds
    }

    fn draw_any(dice: &mut Dice, life: &Life) -> Self {
        let mut kinds: Vec<String> = Vec::new();
        let (mut sending, mut receiving) = (String::new(), String::new());
        let local = u64::from(life.memory.is_shared());
        let (mode, is_local) = dice.pick(&[
            (6, (Mode::Precopy, false)),
            (8, (Mode::Postcopy, false)),
            (5, (Mode::Auto, false)),
            (2 * local, (Mode::Precopy, true)),
        ]);
        kinds.push(if is_local { "local" } else { mode.name() }.to_owned());
        let unix = dice.percent(30) || is_local;
        let transport = if unix { Transport::Unix } else { Transport::Tcp };
        kinds.push(if unix { "unix" } else { "tcp" }.to_owned());
        if is_local {
            sending += ",local=on";
        } else {
            Self::draw_options(dice, mode, life, &mut kinds, &mut sending, &mut receiving);
        }
        let follows = mode != Mode::Precopy;
        let has_page_server = follows && life.memory.is_shared() && dice.percent(25);
        if has_page_server {
            sending += ",page_server=on";
            kinds.push("page-server".to_owned());
        }
        let delay_ms = (!is_local && dice.percent(35)).then(|| {
            kinds.push("delay".to_owned());
            (dice.between(1, 20), dice.between(0, 10))
        });
        let has_tls = !unix && dice.percent(25);
        kinds.extend(has_tls.then(|| "tls".to_owned()));
        let troubles = Self::draw_troubles(dice, is_local, has_page_server, life, &mut kinds);
        let calm = troubles.is_empty();
        let snapshot = dice.percent(8).then(|| dice.pick(&[(1, "copy"), (1, "ondemand")]));
        let is_reset = life.can_reset && dice.percent(6);
        // A reset or a cancel decides by itself what the guest is afterwards.
        let is_paused = calm && !is_reset && dice.percent(12);
        let pools = matches!(life.memory, Memory::Small | Memory::Thp | Memory::Private);
        let has_pool = pools && !is_local && dice.percent(30);
        let has_hotplug = dice.percent(12);
        let names = [
            (snapshot.is_some(), "snapshot"),
            (is_reset, "reset-before"),
            (is_paused, "paused"),
            (has_pool, "pool"),
            (has_hotplug, "hotplug"),
        ];
        kinds.extend(names.iter().filter(|(is, _)| *is).map(|(_, name)| (*name).to_owned()));
        Self {
            mode,
            is_local,
            transport,
            has_tls,
            sending,
            receiving,
            has_page_server,
            delay_ms,
            troubles,
            snapshot,
            is_reset,
            is_paused,
            has_pool,
            has_hotplug,
            kinds,
        }
    }

    fn draw_options(
        dice: &mut Dice,
        mode: Mode,
        life: &Life,
        kinds: &mut Vec<String>,
        sending: &mut String,
        receiving: &mut String,
    ) {
        let connections = dice.pick(&[(5, 1), (3, 2), (3, 4), (1, 64)]);
        let _ = write!(sending, ",connections={connections}");
        kinds.push(format!("connections-{connections}"));
        if mode != Mode::Postcopy {
            let downtime_ms = dice.pick(&[(1, 20), (3, 300)]);
            let _ =
                write!(sending, ",downtime_ms={downtime_ms},timeout_s=2,timeout_strategy=ignore");
            let more = dice.pick(&[
                (4, ("", "")),
                (1, (",convergence=throttle", "throttle")),
                (1, (",convergence=raise-downtime", "raise-downtime")),
                (1, (",dirty_clear=round", "clear-by-round")),
            ]);
            *sending += more.0;
            kinds.extend((!more.1.is_empty()).then(|| more.1.to_owned()));
        }
        if mode == Mode::Precopy {
            if dice.percent(25) {
                *sending += ",compression=zstd";
                kinds.push("compression".to_owned());
            }
            return;
        }
        if mode == Mode::Auto && dice.percent(60) {
            let _ = write!(sending, ",postcopy_after_s={}", dice.below(2));
        }
        if dice.percent(70) {
            let preempt = dice.below(9);
            let _ = write!(sending, ",preempt={preempt}");
            kinds.extend((preempt == 0).then(|| "preempt-0".to_owned()));
        }
        if dice.percent(40) {
            let _ = write!(sending, ",bandwidth={}M", dice.between(24, 160));
            kinds.push("bandwidth".to_owned());
        }
        let sigbus = life.memory.is_shared() && dice.percent(35);
        let source = if sigbus { "sigbus" } else { "uffd" };
        let _ = write!(receiving, ",fault_source={source}");
        kinds.push(source.to_owned());
    }

    fn draw_troubles(
        dice: &mut Dice,
        is_local: bool,
        has_page_server: bool,
        life: &Life,
        kinds: &mut Vec<String>,
    ) -> Vec<Trouble> {
        let files = u64::from(life.memory.has_files() && !is_local);
        // A relay cannot pass descriptors on.
        let relayed = u64::from(!is_local);
        let resets = u64::from(life.can_reset);
        let servers = u64::from(has_page_server);
        let mut troubles = Vec::new();
        for _ in 0..dice.pick(&[(11, 0), (8, 1), (1, 2)]) {
            let down_ms = dice.pick(&[(2, 0), (1, 50), (1, 600)]);
            let after_bytes = dice.magnitude(5, 25);
            let after_ms = dice.magnitude(0, 9);
            let (short_ms, long_ms) = (dice.between(5, 300), dice.between(300, STOP_MS_MAX));
            let for_ms = dice.pick(&[(2, short_ms), (1, long_ms)]);
            let stop = |at_source| Trouble::Stop { at_source, after_ms, for_ms };
            let cut = |is_one| Trouble::Cut { after_bytes, is_one, down_ms };
            troubles.push(dice.pick(&[
                (4 * relayed, cut(false)),
                (2 * relayed, cut(true)),
                (2, Trouble::Cancel { at_source: true, after_ms }),
                (2, Trouble::Cancel { at_source: false, after_ms }),
                (2 * relayed, Trouble::Kill { after_bytes }),
                (1, Trouble::KillSource { after_ms }),
                (2 * servers, Trouble::KillPageServer { after_ms }),
                (1, stop(true)),
                (1, stop(false)),
                (resets, Trouble::Reset { after_ms }),
                (files, Trouble::SameFile),
            ]));
        }
        for trouble in &troubles {
            kinds.push(trouble.name().to_owned());
            if matches!(trouble, Trouble::Cut { down_ms: 1.., .. }) {
                kinds.push("outage".to_owned());
            }
        }
        troubles
    }
}

impl Trouble {
    const fn name(self) -> &'static str {
        match self {
            Self::Cut { is_one: false, .. } => "cut",
            Self::Cut { is_one: true, .. } => "cut-one",
            Self::Cancel { at_source: true, .. } => "cancel-source",
            Self::Cancel { at_source: false, .. } => "cancel-destination",
            Self::Kill { .. } => "kill-destination",
            Self::KillSource { .. } => "kill-source",
            Self::KillPageServer { .. } => "kill-page-server",
            Self::Stop { at_source: true, .. } => "stop-source",
            Self::Stop { at_source: false, .. } => "stop-destination",
            Self::Reset { .. } => "reset-during",
            Self::SameFile => "same-file",
        }
    }
}
