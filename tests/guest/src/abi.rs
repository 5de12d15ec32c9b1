// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory that guest and host share: where it is and what each word means.
//!
//! Compiled into the guest and, by path, into the host's reader, so that the two cannot disagree.
//! Owns every address, offset and code number. Must never touch memory or know how it is read.
//! All fields are 64-bit little-endian words unless a comment says otherwise; times are TSC ticks.

/// First word of the control page: "GWTGUEST" in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"GWTGUEST");
/// Version of everything in this file.
pub const VERSION: u64 = 1;

/// Size of a page, bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Most vCPUs; the ids of the xAPIC end here.
pub const MAX_VCPUS: u64 = 254;

/// Where the real-mode trampoline is copied.
pub const TRAMPOLINE_GPA: u64 = TRAMPOLINE_PAGE as u64 * PAGE_BYTES;
/// The same as a page number, which is what a startup message carries.
pub const TRAMPOLINE_PAGE: u32 = 8;
/// The control page.
pub const CONTROL_GPA: u64 = 0x40_0000;
/// The parameter page, which the host may write.
pub const PARAM_GPA: u64 = 0x40_1000;
/// Rings of the balloon or disk driver, a page for each queue; only while such a workload runs.
pub const BALLOON_RINGS_GPA: u64 = 0x40_2000;
/// What the balloon driver sends: page numbers, and behind them what the device says of them. The disk
/// driver has its data here, and header and status in the next page.
pub const BALLOON_REQUEST_GPA: u64 = 0x40_6000;
/// A bit for each of the first test pages that the device said comes back zeroed.
pub const BALLOON_TOLD_GPA: u64 = 0x40_8000;
/// Test pages that have such a bit.
pub const BALLOON_TOLD_PAGES: u64 = (USED_GPA - BALLOON_TOLD_GPA) * 8;
/// `MAGIC`, once a guest has run in this memory, which a reboot does not clear.
pub const USED_GPA: u64 = VCPU_GPA - 8;
/// The first vCPU's block; the others follow at `VCPU_BLOCK_BYTES`.
pub const VCPU_GPA: u64 = 0x41_0000;
/// Distance of two vCPUs' blocks: status page, linear histogram, stack.
pub const VCPU_BLOCK_BYTES: u64 = 0x1_0000;

/// Unassigned address that vCPU 0 reads as the very first thing at CPL 3.
pub const MMIO_FIRST_GPA: u64 = 0xe000_0000;
/// Unassigned address that events are written to (32 bits: code, vCPU << 8).
pub const MMIO_EVENT_GPA: u64 = 0xe000_0f00;

/// Events on `MMIO_EVENT_GPA`.
pub mod event {
    /// All vCPUs are up, the workload starts.
    pub const READY: u32 = 1;
    /// A vCPU has done all it was told to.
    pub const DONE: u32 = 2;
    /// A vCPU found its first error.
    pub const ERROR: u32 = 3;
    /// The guest cannot continue; the control page says why.
    pub const FAILED: u32 = 4;
}

/// The control page's fields (byte offsets). Written by the guest only.
pub mod control {
    /// `MAGIC`, written last, once the layout below is valid.
    pub const MAGIC: u64 = 0x00;
    /// `VERSION`.
    pub const VERSION: u64 = 0x08;
    /// One of `stage`.
    pub const STAGE: u64 = 0x10;
    /// One of `failure`.
    pub const FAILURE: u64 = 0x18;
    /// vCPUs asked for.
    pub const VCPUS: u64 = 0x20;
    /// vCPUs that came up.
    pub const VCPUS_ONLINE: u64 = 0x28;
    /// TSC at the first instruction at CPL 3.
    pub const FIRST_TSC: u64 = 0x30;
    /// TSC when the workload started.
    pub const READY_TSC: u64 = 0x38;
    /// Seed of the page pattern.
    pub const SEED: u64 = 0x40;
    /// TSC frequency the guest works with, kHz.
    pub const TSC_KHZ: u64 = 0x48;
    /// 0 assumed, 1 from CPUID, 2 given.
    pub const TSC_KHZ_SOURCE: u64 = 0x50;
    /// Test pages in all ranges.
    pub const PAGES: u64 = 0x58;
    /// The shadow table: a u32 per test page.
    pub const SHADOW_GPA: u64 = 0x60;
    /// Distance of two vCPUs' parts of the shadow table, bytes.
    pub const SHADOW_STRIDE: u64 = 0x68;
    /// RAM in the memory map, bytes.
    pub const RAM_BYTES: u64 = 0x70;
    /// End of the highest RAM range, gpa.
    pub const RAM_END: u64 = 0x78;
    /// Entries in `RANGES`.
    pub const RANGE_COUNT: u64 = 0x80;
    /// Line of the source that panicked.
    pub const PANIC_LINE: u64 = 0x88;
    /// Bytes in `CMDLINE`.
    pub const CMDLINE_BYTES: u64 = 0x90;
    /// Words of the command line that were not understood.
    pub const CMDLINE_REFUSED: u64 = 0x98;
    /// Page directories built at run time, gpa of the first.
    pub const TABLES_GPA: u64 = 0xa0;
    /// TSC before Bus Master Enable was written to the device that the command line names, and after.
    pub const MASTER_ASKED_TSC: u64 = 0xa8;
    /// See there.
    pub const MASTER_GRANTED_TSC: u64 = 0xb0;
    /// What the device's command and status registers said then.
    pub const MASTER_COMMAND: u64 = 0xb8;
    /// Virtio devices that were started where they lie, a bit for each device number.
    pub const WOKEN: u64 = 0xc0;
    /// Ranges of test pages: gpa, number of the first page, pages, 0.
    pub const RANGES: u64 = 0x100;
    /// Distance of two ranges.
    pub const RANGE_BYTES: u64 = 32;
    /// Most ranges.
    pub const MAX_RANGES: usize = 16;
    /// The command line as found.
    pub const CMDLINE: u64 = 0x400;
    /// Most bytes kept of it.
    pub const CMDLINE_MAX: usize = 0x800;
}

/// How far the guest has come (`control::STAGE`).
pub mod stage {
    /// vCPU 0 is at CPL 3.
    pub const ENTERED: u64 = 1;
    /// Memory is laid out and mapped.
    pub const MAPPED: u64 = 2;
    /// All vCPUs run the workload.
    pub const RUNNING: u64 = 3;
    /// See `control::FAILURE`.
    pub const FAILED: u64 = 4;
}

/// Why it cannot continue (`control::FAILURE`).
pub mod failure {
    /// No start-of-day structure, or one without a memory map.
    pub const START_INFO: u64 = 1;
    /// Too little RAM at the addresses that are needed.
    pub const MEMORY: u64 = 2;
    /// A vCPU did not come up; the others continue.
    pub const VCPU: u64 = 3;
    /// A bug in the guest.
    pub const PANIC: u64 = 4;
}

/// The parameter page's fields. Filled by the guest from its command line before the workload
/// starts; after that it is the host's. Write the fields, then add one to `GENERATION`.
pub mod param {
    /// vCPUs take up new parameters when this changes.
    pub const GENERATION: u64 = 0x00;
    /// One of `command`; takes effect without a new generation.
    pub const COMMAND: u64 = 0x08;
    /// One of `workload`.
    pub const WORKLOAD: u64 = 0x10;
    /// Iterations of each vCPU, 0 for endless.
    pub const ITERATIONS: u64 = 0x18;
    /// Least time from one iteration to the next, ns; 0 for as fast as possible.
    pub const PACE_NS: u64 = 0x20;
    /// One of `verify`.
    pub const VERIFY: u64 = 0x28;
    /// Not 0: fill every page of the window before the workload.
    pub const PREFILL: u64 = 0x30;
    /// Bits of `after`.
    pub const AFTER: u64 = 0x38;
    /// Share of writes in the random and hot workloads, percent.
    pub const WRITE_PERCENT: u64 = 0x40;
    /// Size of the hot set, thousandths of the window.
    pub const HOT_PERMILLE: u64 = 0x48;
    /// Share of accesses that go to the hot set, percent.
    pub const HOT_PERCENT: u64 = 0x50;
    /// First page of the window that the workload uses.
    pub const WINDOW_FIRST: u64 = 0x58;
    /// Pages of the window.
    pub const WINDOW_PAGES: u64 = 0x60;
    /// TSC frequency, kHz; 0 keeps what is known.
    pub const TSC_KHZ: u64 = 0x68;
    /// A gap between two clock readings above this counts as a stall, ns.
    pub const STALL_NS: u64 = 0x70;
    /// A gap above this is noted in the gap ring, ns.
    pub const GAP_NOTE_NS: u64 = 0x78;
    /// vCPUs 0 to this less one work, the others idle.
    pub const ACTIVE_VCPUS: u64 = 0x80;
    /// Not 0: clear statistics and histograms when these parameters are taken up.
    pub const RESET: u64 = 0x88;
    /// Not 0: a page never written must read as zero.
    pub const CHECK_ZERO: u64 = 0x90;
    /// Feature bits that the balloon driver accepts, of those that it knows.
    pub const BALLOON_FEATURES: u64 = 0x98;
    /// The value that the balloon driver says that it fills free pages with.
    pub const BALLOON_POISON: u64 = 0xa0;
    /// PCI configuration space, where the balloon driver looks for its device.
    pub const ECAM_GPA: u64 = 0xa8;
    /// Not 0: the disk driver writes no more, and releases the devices of these bits. The high half is
    /// their PCI segment, which it selects unless that is 0. It clears the field when it has. It needs a vCPU more
    /// than were started.
    pub const EJECT: u64 = 0xb0;
    /// Kinds of attack of the hostile workload, a bit for each; 0: all.
    pub const ATTACKS: u64 = 0xb8;
    /// Type of the virtio devices that it attacks; 0: all functions.
    pub const ATTACKED: u64 = 0xc0;
    /// 0: the watchdog is not set back. Without effect where it was not asked for at boot.
    pub const WATCHDOG: u64 = 0xc8;
}

/// `param::COMMAND`.
pub mod command {
    /// Work.
    pub const RUN: u64 = 0;
    /// Hold still between two iterations (state `PAUSED`), no page in flight.
    pub const PAUSE: u64 = 1;
}

/// `param::WORKLOAD`.
pub mod workload {
    /// Watch the clock only.
    pub const IDLE: u64 = 0;
    /// Write every page in full, once.
    pub const FILL: u64 = 1;
    /// Check every page, in order, over and over.
    pub const VERIFY: u64 = 2;
    /// Write pages at random.
    pub const RANDOM_WRITE: u64 = 3;
    /// Write pages in order, over and over.
    pub const SEQUENTIAL_WRITE: u64 = 4;
    /// Read and check pages at random.
    pub const READ_ONLY: u64 = 5;
    /// As random write, most of it to a small hot set.
    pub const HOT_WRITE: u64 = 6;
    /// Report all pages to the balloon as free, take them again, and fill them; in each iteration.
    pub const BALLOON_REPORT: u64 = 7;
    /// The same by putting them into the balloon and taking them out.
    pub const BALLOON_INFLATE: u64 = 8;
    /// Write numbered blocks to the first disk, over and over, and read each before it is overwritten.
    pub const DISK_WRITE: u64 = 9;
    /// vCPU 0 attacks all devices at random, see `hostile.rs`; the others write at random.
    pub const HOSTILE: u64 = 10;
    /// vCPU 0 reads blocks of the first disk in order, one at a time.
    pub const DISK_READ: u64 = 11;
    /// Read a word of PCI configuration space over and over: each read leaves the guest for user space.
    pub const CONFIG_READ: u64 = 12;
    /// vCPU 0 asks the first file system for its root, one request at a time, which are counted as blocks of a disk are.
    pub const FS_ASK: u64 = 13;
    /// vCPU 0 sends frames through the first network device, one at a time, and waits until each comes back.
    pub const NET_ECHO: u64 = 14;
    /// vCPU 0 writes numbered pages to the first persistent memory, flushes each, and reads it before it is overwritten.
    pub const PMEM_WRITE: u64 = 15;
    /// vCPU 0 reads the first real-time clock, over and over, which never goes back.
    pub const RTC_READ: u64 = 16;
    /// As `DISK_WRITE`, by addresses that the IOMMU translates, whose mappings change with each request.
    pub const IOMMU_DISK: u64 = 17;
    /// vCPU 0 has the first device of a vfio-user server copy memory, one request at a time, and look into a mapped BAR.
    pub const USER_DEVICE: u64 = 18;
    /// Names, by number.
    pub const NAMES: [&str; 19] = [
        "idle",
        "fill",
        "verify",
        "random-write",
        "sequential-write",
        "read-only",
        "hot-write",
        "balloon-report",
        "balloon-inflate",
        "disk-write",
        "hostile",
        "disk-read",
        "config-read",
        "fs-ask",
        "net-echo",
        "pmem-write",
        "rtc-read",
        "iommu-disk",
        "user-device",
    ];
}

/// `param::VERIFY`: what is checked before a page is written or when it is read.
pub mod verify {
    /// Nothing.
    pub const NONE: u64 = 0;
    /// The header line, the line written last and one more.
    pub const LIGHT: u64 = 1;
    /// Every word.
    pub const FULL: u64 = 2;
}

/// Bits of `param::AFTER`: what follows the given number of iterations.
pub mod after {
    /// Check every page of the window in full.
    pub const VERIFY: u64 = 1;
    /// Start again (without the fill).
    pub const REPEAT: u64 = 2;
}

/// A vCPU's block (byte offsets). Written by its vCPU only.
pub mod vcpu {
    /// Increases whenever the vCPU runs, idle and paused included.
    pub const HEARTBEAT: u64 = 0x00;
    /// One of `state`.
    pub const STATE: u64 = 0x08;
    /// Generation of the parameters in use.
    pub const GENERATION: u64 = 0x10;
    /// Page visits of any kind since boot or reset.
    pub const ITERATIONS: u64 = 0x18;
    /// Pages written.
    pub const WRITES: u64 = 0x20;
    /// Pages read.
    pub const READS: u64 = 0x28;
    /// Pages checked.
    pub const VERIFIED: u64 = 0x30;
    /// Pages found wrong.
    pub const ERRORS: u64 = 0x38;
    /// Complete passes of fill, verify or sequential write.
    pub const PASSES: u64 = 0x40;
    /// 1 + number of the page being written, 0 when none.
    pub const IN_FLIGHT: u64 = 0x48;
    /// Sum of all counters in this vCPU's shadow table; survives a reset.
    pub const COUNTER_SUM: u64 = 0x50;
    /// Latest reading of the clock.
    pub const LAST_TSC: u64 = 0x58;
    /// When the present statistics began.
    pub const START_TSC: u64 = 0x60;
    /// Longest gap between two readings of the clock, ticks.
    pub const GAP_MAX: u64 = 0x68;
    /// When it began.
    pub const GAP_MAX_TSC: u64 = 0x70;
    /// `ITERATIONS` then.
    pub const GAP_MAX_ITERATION: u64 = 0x78;
    /// Sum of the gaps above `param::STALL_NS`, ticks.
    pub const STALL_TOTAL: u64 = 0x80;
    /// Their number.
    pub const STALLS: u64 = 0x88;
    /// Timed accesses.
    pub const ACCESSES: u64 = 0x90;
    /// Sum of their times, ticks.
    pub const ACCESS_TOTAL: u64 = 0x98;
    /// Longest of them, ticks.
    pub const ACCESS_MAX: u64 = 0xa0;
    /// When that one began.
    pub const ACCESS_MAX_TSC: u64 = 0xa8;
    /// Its page.
    pub const ACCESS_MAX_PAGE: u64 = 0xb0;
    /// Readings of the clock that were earlier than the one before.
    pub const TSC_BACKWARDS: u64 = 0xb8;
    /// Gaps noted in `GAPS` since boot or reset; the next goes to this modulo `MAX_GAPS`.
    pub const GAPS_NOTED: u64 = 0xc0;
    /// Width of a bucket of `LINEAR`, ticks.
    pub const LINEAR_TICKS: u64 = 0xc8;
    /// Page after which a sequential workload continues, own index.
    pub const CURSOR: u64 = 0xd0;
    /// Iterations left of the present phase, 0 for endless.
    pub const LEFT: u64 = 0xd8;
    /// Pages that were reported or put into the balloon.
    pub const BALLOON_GIVEN: u64 = 0xe0;
    /// Of them, those that the device said come back zeroed.
    pub const BALLOON_TOLD: u64 = 0xe8;
    /// Time that giving them took, ticks.
    pub const BALLOON_GIVE_TICKS: u64 = 0xf0;
    /// Time that taking them out of the balloon took, ticks.
    pub const BALLOON_BACK_TICKS: u64 = 0xf8;
    /// Time that it took until all were there and zero again, ticks.
    pub const BALLOON_TAKE_TICKS: u64 = 0x100;
    /// Features that the balloon driver and its device agreed on.
    pub const BALLOON_FEATURES: u64 = 0x108;
    /// One of `balloon_failure`, 0 when there is none.
    pub const BALLOON_FAILURE: u64 = 0x110;

    /// Blocks that the disk has acknowledged, or answers of a file system or network: the next one has this number, see `disk`.
    pub const DISK_WRITES: u64 = 0x118;
    /// One of `balloon_failure` or `disk_failure`, 0 when there is none.
    pub const DISK_FAILURE: u64 = 0x120;

    /// Attacks of each kind, `ATTACK_KINDS` counters; the kinds are those of `hostile`.
    pub const ATTACKS: u64 = 0x130;
    /// Kinds of attack.
    pub const ATTACK_KINDS: u64 = 14;
    /// Not 0 when there is nothing to attack.
    pub const HOSTILE_FAILURE: u64 = 0x1a0;

    /// Error records of `ERROR_BYTES`; see `error`.
    pub const ERROR_RECORDS: u64 = 0x400;
    /// Size of an error record.
    pub const ERROR_BYTES: u64 = 64;
    /// Most error records; the first ones are kept.
    pub const MAX_ERRORS: u64 = 16;
    /// Ring of long gaps: start TSC, ticks.
    pub const GAPS: u64 = 0x800;
    /// Size of an entry.
    pub const GAP_BYTES: u64 = 16;
    /// Entries of the ring.
    pub const MAX_GAPS: u64 = 64;
    /// Accesses by the position of the highest set bit of their ticks.
    pub const LOG_ACCESS: u64 = 0xc00;
    /// The same for gaps above `param::STALL_NS`.
    pub const LOG_GAP: u64 = 0xe00;
    /// Buckets in each of these two.
    pub const LOG_BUCKETS: u64 = 64;
    /// Accesses in u32 buckets of one microsecond; longer ones are in `LOG_ACCESS` only.
    pub const LINEAR: u64 = 0x1000;
    /// Buckets of it.
    pub const LINEAR_BUCKETS: u64 = 4096;
    /// Bytes of the block that hold statistics.
    pub const STATISTICS_BYTES: u64 = LINEAR + LINEAR_BUCKETS * 4;
}

/// What the disk workload writes: block `n % BLOCKS` of the disk gets 512 times the word `n + 1`, one
/// block after another.
pub mod disk {
    /// Blocks of `PAGE_BYTES` that are written, from the disk's first byte.
    pub const BLOCKS: u64 = 256;
    /// I/O port of cloud-hypervisor where a guest says which devices it has released, a bit for each
    /// device number.
    pub const EJECT_PORT: u16 = 0x618;
    /// I/O port where a guest selects the PCI segment of those devices.
    pub const SELECT_PORT: u16 = 0x61c;
}

/// Why the disk workload ended early (`vcpu::DISK_FAILURE`).
pub mod disk_failure {
    /// A request failed.
    pub const REQUEST: u64 = 16;
    /// A block did not hold what was written to it last.
    pub const CONTENT: u64 = 17;
}

/// Why a balloon workload ended early (`vcpu::BALLOON_FAILURE`).
pub mod balloon_failure {
    /// There is no balloon on the bus.
    pub const DEVICE: u64 = 1;
    /// It is not one of virtio 1.
    pub const LEGACY: u64 = 2;
    /// It does not take the features that it offered.
    pub const FEATURES: u64 = 3;
    /// It lacks a queue.
    pub const QUEUE: u64 = 4;
    /// The workload is for one vCPU.
    pub const VCPUS: u64 = 5;
}

/// Fields of an error record.
pub mod error {
    /// Page number.
    pub const PAGE: u64 = 0x00;
    /// Its gpa.
    pub const GPA: u64 = 0x08;
    /// Counter that the shadow table has.
    pub const COUNTER: u64 = 0x10;
    /// Counter in the page's header.
    pub const FOUND_COUNTER: u64 = 0x18;
    /// First wrong word of the page, 0 to 511.
    pub const WORD: u64 = 0x20;
    /// What it should be.
    pub const EXPECTED: u64 = 0x28;
    /// What it is.
    pub const FOUND: u64 = 0x30;
    /// When it was found.
    pub const TSC: u64 = 0x38;
}

/// `vcpu::STATE`.
pub mod state {
    /// Not started.
    pub const OFF: u64 = 0;
    /// Filling before the workload.
    pub const PREFILL: u64 = 1;
    /// In the workload.
    pub const WORK: u64 = 2;
    /// Checking after the workload.
    pub const VERIFY: u64 = 3;
    /// All done, or idle; watches the clock.
    pub const DONE: u64 = 4;
    /// Held by `command::PAUSE`.
    pub const PAUSED: u64 = 5;
    /// Names, by number.
    pub const NAMES: [&str; 6] = ["off", "prefill", "work", "verify", "done", "paused"];
}

/// Gpa of a vCPU's block.
pub const fn vcpu_gpa(index: u64) -> u64 {
    VCPU_GPA + index * VCPU_BLOCK_BYTES
}

/// Initial stack pointer of a vCPU at CPL 3, as after a call (the entry is an ordinary function).
pub const fn stack_top(index: u64) -> u64 {
    vcpu_gpa(index + 1) - 8
}
