// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest is like: its memory, its devices and its work, all of it drawn.
//!
//! Owns what goes together in a guest, and what of it this machine can do. Must never start anything.

use std::fmt::Write as _;

use super::dice::Dice;
use super::plan::{TRIES, Without, is_wanted};

/// What the guest's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A memfd of small pages.
    Small,
    /// A memfd with transparent huge pages.
    Thp,
    /// Private anonymous memory.
    Private,
    /// hugetlb pages of 2 MiB.
    Huge,
    /// A file that was not there.
    FileFresh,
    /// A file at each host that another guest has used; a guest that comes back finds its own.
    FileOld,
    /// A file, a memfd and another memfd.
    Zones,
}

impl Memory {
    const fn name(self) -> &'static str {
        match self {
            Self::Small => "small-pages",
            Self::Thp => "thp",
            Self::Private => "private",
            Self::Huge => "hugetlb",
            Self::FileFresh => "file-fresh",
            Self::FileOld => "file-old",
            Self::Zones => "zones",
        }
    }

    /// Files that hold it, by zone.
    pub const fn has_files(self) -> bool {
        matches!(self, Self::FileFresh | Self::FileOld | Self::Zones)
    }

    /// Other processes can map it.
    pub const fn is_shared(self) -> bool {
        !matches!(self, Self::Private)
    }
}

/// Devices that it has from the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Devices {
    /// An image on storage that both hosts have.
    pub has_disk: bool,
    /// The disk is behind an IOMMU of the guest's.
    pub has_iommu: bool,
    /// A tap that the VMM makes.
    pub has_tap: bool,
    /// A vsock device.
    pub has_vsock: bool,
    /// The real-time clock.
    pub has_rtc: bool,
}

impl Devices {
    fn draw(dice: &mut Dice) -> Self {
        let has_disk = dice.percent(45);
        Self {
            has_disk,
            has_iommu: has_disk && dice.percent(25),
            has_tap: dice.percent(40),
            has_vsock: dice.percent(25),
            has_rtc: dice.percent(20),
        }
    }

    fn names(self) -> impl Iterator<Item = String> {
        let all = [
            (self.has_disk, "disk"),
            (self.has_iommu, "guest-iommu"),
            (self.has_tap, "tap"),
            (self.has_vsock, "vsock"),
            (self.has_rtc, "rtc"),
        ];
        all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.to_owned())
    }
}

/// What this machine can do.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// userfaultfd may be used.
    pub has_uffd: bool,
    /// BPF may be used.
    pub has_bpf: bool,
    /// There are free pages of 2 MiB.
    pub has_huge_pages: bool,
    /// Taps can be made.
    pub has_taps: bool,
}

impl Machine {
    /// Whether it can do all of these.
    pub fn can(self, kinds: &[String]) -> bool {
        let has = |name: &str| kinds.iter().any(|kind| kind == name);
        (self.has_uffd || !(has("postcopy") || has("auto")))
            && (self.has_bpf || !has("sigbus"))
            && (self.has_huge_pages || !has("hugetlb"))
            && (self.has_taps || !has("tap"))
    }

    /// What it cannot do, with the reason.
    pub fn lacks(self) -> Vec<&'static str> {
        let mut list = Vec::new();
        if !self.has_uffd {
            list.push("postcopy, auto: userfaultfd may not be used here");
        }
        if !self.has_bpf {
            list.push("sigbus: it needs CAP_BPF and CAP_PERFMON");
        }
        if !self.has_huge_pages {
            list.push("hugetlb: there are no pages of 2 MiB, or other tests need them");
        }
        if !self.has_taps {
            list.push("tap: it needs root and /dev/net/tun");
        }
        list
    }
}

/// A guest.
#[derive(Clone, Debug)]
pub struct Life {
    /// What its memory is.
    pub memory: Memory,
    /// All of it.
    pub mib: u64,
    /// How many vCPUs.
    pub vcpus: u32,
    /// What it does.
    pub cmdline: String,
    /// It can be reset: it fills its pages first, and its table does not outlive a reset in a file.
    pub can_reset: bool,
    /// It releases pages and takes them again, over and over.
    pub has_balloon: bool,
    /// What else it has.
    pub devices: Devices,
}

impl Life {
    /// A guest that is wanted; none when everything was excluded.
    pub fn draw(seed: u64, without: &Without, machine: Machine) -> Option<Self> {
        let mut dice = Dice::new(seed, 0);
        (0..TRIES).map(|_| Self::draw_any(&mut dice)).find(|life| {
            let kinds = life.kinds();
            is_wanted(&kinds, without) && machine.can(&kinds)
        })
    }

    fn draw_any(dice: &mut Dice) -> Self {
        let memory = dice.pick(&[
            (3, Memory::Small),
            (2, Memory::Thp),
            (2, Memory::Private),
            (2, Memory::Huge),
            (2, Memory::FileFresh),
            (2, Memory::FileOld),
            (2, Memory::Zones),
        ]);
        let has_balloon = dice.percent(15);
        let mib = dice.pick(&[(4, 64), (3, 96), (2, 128), (1, 192), (1, 256)]);
        let vcpus = if has_balloon { 1 } else { dice.pick(&[(3, 1), (3, 2), (1, 3)]) };
        let used_mib = dice.between(mib / 4, mib / 2);
        let is_filled = has_balloon || dice.percent(60);
        let mut cmdline = format!(
            "mem={used_mib}M seed={} prefill={}",
            1 + dice.below(1000),
            u8::from(is_filled)
        );
        let workload = dice.pick(&[(5, "random-write"), (2, "hot-write"), (1, "sequential-write")]);
        let balloon = dice.pick(&[(1, "balloon-report"), (1, "balloon-inflate")]);
        let pace_ns = dice.pick(&[(1, 0), (3, 5_000), (2, 50_000)]);
        let write_percent = dice.pick(&[(2, 100), (1, 50)]);
        let _ = if has_balloon {
            let rounds = super::life::BALLOON_ROUNDS;
            write!(cmdline, " workload={balloon} iterations={rounds}")
        } else {
            let words = format_args!("pace_ns={pace_ns} write_percent={write_percent}");
            write!(cmdline, " workload={workload} {words}")
        };
        let can_reset = is_filled && !has_balloon && !memory.has_files();
        let devices = Devices::draw(dice);
        Self { memory, mib, vcpus, cmdline, can_reset, has_balloon, devices }
    }

    /// Names of what it is.
    pub fn kinds(&self) -> Vec<String> {
        let mut kinds = vec![self.memory.name().to_owned()];
        if self.has_balloon {
            kinds.push("balloon".to_owned());
        }
        kinds.extend(self.devices.names());
        kinds
    }
}
