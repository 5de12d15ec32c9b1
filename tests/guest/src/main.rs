// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A freestanding guest for testing migration, postcopy and boot: see `README.md`.
//!
//! `boot.rs` brings each vCPU to CPL 3, where everything else runs: memory is laid out from the
//! loader's memory map, the other vCPUs are started, and each works on pages of its own. There
//! are no interrupts, no IDT and no devices; the host learns all it needs from memory (`abi.rs`).
#![no_std]
#![no_main]

#[expect(dead_code, reason = "some of it is for the reader on the host")]
mod abi;
mod balloon;
mod boot;
mod clock;
#[expect(dead_code, reason = "some of it is for the reader on the host")]
mod cmdline;
mod disk;
mod hostile;
mod iommu;
mod layout;
mod master;
mod mem;
mod panic;
mod pattern;
mod peer;
mod pmem;
mod pvh;
mod reuse;
mod runtime;
mod smp;
mod user_device;
mod virtio;
mod wake;
mod watchdog;
mod worker;

use abi::{control, event, failure, param, stage};
use cmdline::Settings;
use layout::{Layout, Span};
use mem::Block;
use worker::Worker;

const CONTROL: Block = Block::at(abi::CONTROL_GPA);
const PARAM: Block = Block::at(abi::PARAM_GPA);
const GIB: u64 = 1 << 30;
const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Present, writable, user, accessed, dirty, large.
const LARGE_PAGE_FLAGS: u64 = 0xe7;
const TABLE_FLAGS: u64 = 7;

/// What the other vCPUs need; written before they start, never after.
static SHARED: runtime::Once<Shared> = runtime::Once::new();

struct Shared {
    vcpus: u64,
    layout: Layout,
    seed: u64,
    khz: u64,
}

/// First Rust code on vCPU 0, at CPL 3.
#[unsafe(no_mangle)]
extern "C" fn bsp_main(start_info: u64) -> ! {
    mem::load32(abi::MMIO_FIRST_GPA);
    let first_tsc = clock::now();
    let Some(info) = pvh::StartInfo::read(start_info) else { fail(failure::START_INFO) };
    let settings = Settings::parse(info.cmdline());
    let wanted = if settings.vcpus == 0 { info.processors } else { settings.vcpus };
    let vcpus = wanted.clamp(1, abi::MAX_VCPUS);

    mem::clear(abi::CONTROL_GPA, abi::PAGE_BYTES);
    CONTROL.set(control::VERSION, abi::VERSION);
    CONTROL.set(control::STAGE, stage::ENTERED);
    CONTROL.set(control::FIRST_TSC, first_tsc);
    note_cmdline(info.cmdline(), settings.refused);
    if settings.bus_master != 0 {
        master::enable(settings.ecam, settings.bus_master, CONTROL);
    }
    CONTROL.set(control::VCPUS, vcpus);

    let Some(mut layout) = Layout::new(info.ram.as_slice(), vcpus) else { fail(failure::MEMORY) };
    layout.reserve(settings.reserve);
    map_high_memory(info.ram.as_slice(), layout.tables_gpa);
    let (khz, source) = clock::frequency_khz(settings.tsc_khz);
    CONTROL.set(control::SEED, settings.seed);
    CONTROL.set(control::TSC_KHZ, khz);
    CONTROL.set(control::TSC_KHZ_SOURCE, source);
    publish(&layout);
    clear_remains(&layout, vcpus);
    write_parameters(&settings, &layout, vcpus);
    for index in 0..vcpus {
        mem::clear(abi::vcpu_gpa(index), abi::vcpu::STATISTICS_BYTES);
    }
    CONTROL.set(control::STAGE, stage::MAPPED);
    CONTROL.set(control::MAGIC, abi::MAGIC);

    let shared = SHARED.set(Shared { vcpus, layout, seed: settings.seed, khz });
    let online = smp::start_others(vcpus, khz, ap_main);
    CONTROL.set(control::VCPUS_ONLINE, online);
    if online < vcpus {
        CONTROL.set(control::FAILURE, failure::VCPU);
        mem::store32(abi::MMIO_EVENT_GPA, event::FAILED);
    }
    if settings.wake != 0 {
        CONTROL.set(control::WOKEN, wake::all(settings.ecam, shared.layout.reserved));
    }
    CONTROL.set(control::READY_TSC, clock::now());
    CONTROL.set(control::STAGE, stage::RUNNING);
    mem::store32(abi::MMIO_EVENT_GPA, event::READY);
    let mut worker = Worker::new(0, vcpus, &shared.layout, shared.seed, khz);
    if settings.watchdog != 0 {
        worker.start_watchdog(settings.ecam);
    }
    if settings.panic != 0 {
        worker.report_panic(settings.ecam, settings.panic.to_le_bytes()[0]);
    }
    worker.run()
}

/// Clears what a guest before a reboot has left where this one counts on zeros: test pages, their shadow, what
/// drivers keep. Fresh memory is not touched.
fn clear_remains(layout: &Layout, vcpus: u64) {
    let clear_if_used = |gpa: u64| {
        if (0..pattern::LINE_WORDS).any(|word| mem::load(gpa + word * 8) != 0) {
            mem::clear_page(gpa);
        }
    };
    if mem::load(abi::USED_GPA) == abi::MAGIC {
        mem::clear(abi::BALLOON_RINGS_GPA, abi::VCPU_GPA - abi::BALLOON_RINGS_GPA);
        mem::clear(layout.shadow_gpa, layout.shadow_stride * vcpus);
        for range in layout.ranges.as_slice() {
            (0..range.pages).for_each(|page| clear_if_used(range.gpa + page * abi::PAGE_BYTES));
        }
    }
    mem::store(abi::USED_GPA, abi::MAGIC);
}

/// First Rust code on the other vCPUs, at CPL 3.
extern "C" fn ap_main(vcpu: u64) -> ! {
    let Some(shared) = SHARED.get() else { fail(failure::PANIC) };
    let mut worker = Worker::new(vcpu, shared.vcpus, &shared.layout, shared.seed, shared.khz);
    while CONTROL.get(control::STAGE) < stage::RUNNING {
        worker.idle();
    }
    worker.run()
}

/// Leaves the reason where the host finds it and stays there.
fn fail(reason: u64) -> ! {
    CONTROL.set(control::FAILURE, reason);
    CONTROL.set(control::STAGE, stage::FAILED);
    CONTROL.set(control::VERSION, abi::VERSION);
    CONTROL.set(control::MAGIC, abi::MAGIC);
    mem::store32(abi::MMIO_EVENT_GPA, event::FAILED);
    loop {
        core::hint::spin_loop();
    }
}

fn note_cmdline(line: &[u8], refused: u64) {
    for (byte, offset) in line.iter().zip(control::CMDLINE..) {
        mem::store8(CONTROL.gpa_of(offset), *byte);
    }
    CONTROL.set(control::CMDLINE_BYTES, line.len() as u64);
    CONTROL.set(control::CMDLINE_REFUSED, refused);
}

/// Maps RAM above 4 GiB with 2 MiB pages. A directory is complete before it is linked: where the
/// hypervisor shadows page tables, a write to a linked one is expensive.
fn map_high_memory(ram: &[Span], tables_gpa: u64) {
    for entry in 4..512u64 {
        let start = entry * GIB;
        if !ram.iter().any(|span| span.start < start + GIB && start < span.end) {
            continue;
        }
        map_gib(entry, tables_gpa + (entry - 4) * abi::PAGE_BYTES);
    }
}

/// Maps a gibibyte of the first 512 by a directory that is written to this page.
fn map_gib(entry: u64, directory: u64) {
    for slot in 0..512 {
        let gpa = entry * GIB + slot * LARGE_PAGE_BYTES;
        mem::store(directory + slot * 8, gpa | LARGE_PAGE_FLAGS);
    }
    let pdpt = &raw const boot::pdpt as u64;
    mem::store(pdpt + entry * 8, directory | TABLE_FLAGS);
}

fn publish(layout: &Layout) {
    CONTROL.set(control::PAGES, layout.pages);
    CONTROL.set(control::TABLES_GPA, layout.tables_gpa);
    CONTROL.set(control::SHADOW_GPA, layout.shadow_gpa);
    CONTROL.set(control::SHADOW_STRIDE, layout.shadow_stride);
    CONTROL.set(control::RAM_BYTES, layout.ram_bytes);
    CONTROL.set(control::RAM_END, layout.ram_end);
    CONTROL.set(control::RANGE_COUNT, layout.ranges.as_slice().len() as u64);
    for (range, index) in layout.ranges.as_slice().iter().zip(0..) {
        let entry = control::RANGES + index * control::RANGE_BYTES;
        CONTROL.set(entry, range.gpa);
        CONTROL.set(entry + 8, range.first);
        CONTROL.set(entry + 16, range.pages);
    }
}

fn write_parameters(settings: &Settings, layout: &Layout, vcpus: u64) {
    mem::clear(abi::PARAM_GPA, abi::PAGE_BYTES);
    for (field, value) in settings.fields(layout.pages, vcpus) {
        PARAM.set(field, value);
    }
    PARAM.set(param::GENERATION, 1);
}
