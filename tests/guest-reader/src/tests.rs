// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of what guest and reader share: pattern, layout, command line; and of pure reader code.
#![expect(clippy::unwrap_used, reason = "a test may fail that way")]
#![expect(clippy::cast_possible_truncation, reason = "indices of one page")]

use std::cell::RefCell;
use std::collections::HashMap;

use proptest::prelude::*;

use crate::abi::{self, after, param, verify, workload};
use crate::cmdline::{Amount, Settings};
use crate::histogram::Histogram;
use crate::layout::{Layout, Own, Span};
use crate::pattern::{Pattern, Random, WORDS};

const GIB: u64 = 1 << 30;

/// A page made by one fill and then every write up to `counter`, as the guest does it.
fn page_at(pattern: Pattern, page: u64, counter: u64) -> Vec<u64> {
    let words = RefCell::new(vec![0; WORDS as usize]);
    let store = |word: u64, value: u64| words.borrow_mut()[word as usize] = value;
    if counter > 0 {
        pattern.fill(page, store);
    }
    for next in 2..=counter {
        pattern.advance(page, next, store);
    }
    words.into_inner()
}

#[test]
fn every_version_of_a_page_passes_the_full_check() {
    let pattern = Pattern::new(7);
    for counter in 0..200 {
        let words = page_at(pattern, 42, counter);
        pattern.check_full(42, counter, |word| words[word as usize]).unwrap();
        pattern.check_light(42, counter, |word| words[word as usize]).unwrap();
    }
}

#[test]
fn line_counters_name_the_latest_write_of_each_line() {
    let mut latest = HashMap::new();
    for counter in 2..500 {
        latest.insert(Pattern::line_written(counter), counter);
        for line in 1..64 {
            let expected = latest.get(&line).copied().unwrap_or(1);
            assert_eq!(Pattern::line_counter(counter, line), expected, "{counter} {line}");
        }
    }
}

proptest! {
    #[test]
    fn any_other_version_fails_the_light_check(
        page in any::<u32>(), seed: u64, counter in 0u64..150, other in 0u64..150,
    ) {
        prop_assume!(counter != other);
        let pattern = Pattern::new(seed);
        let page = u64::from(page);
        let words = page_at(pattern, page, other);
        prop_assert!(pattern.check_light(page, counter, |word| words[word as usize]).is_err());
    }

    #[test]
    fn any_other_page_or_seed_fails_the_light_check(
        page in 1u64..1 << 40, other in 1u64..1 << 40, seed: u64, counter in 1u64..80,
    ) {
        prop_assume!(page != other);
        let words = page_at(Pattern::new(seed), other, counter);
        let load = |word: u64| words[word as usize];
        prop_assert!(Pattern::new(seed).check_light(page, counter, load).is_err());
        prop_assert!(Pattern::new(seed ^ 1).check_light(other, counter, load).is_err());
    }

    #[test]
    fn any_flipped_bit_fails_the_full_check(
        page in any::<u32>(), counter in 0u64..150, word in 0u64..512, bit in 0u32..64,
    ) {
        let pattern = Pattern::new(3);
        let mut words = page_at(pattern, u64::from(page), counter);
        words[word as usize] ^= 1 << bit;
        let found = pattern.check_full(u64::from(page), counter, |word| words[word as usize]);
        prop_assert_eq!(found.unwrap_err().word, word);
    }

    #[test]
    fn a_layout_numbers_every_page_once(
        low in 64u64..3072, high in 0u64..5000, vcpus in 1u64..9, hole in 0u64..4,
    ) {
        const MIB: u64 = 1 << 20;
        let mut ram = vec![Span { start: 0, end: 0x9_fc00 }];
        ram.push(Span { start: MIB, end: low * MIB - hole * 1000 });
        if high > 0 {
            ram.push(Span { start: 4 * GIB, end: 4 * GIB + high * MIB });
        }
        let layout = Layout::new(&ram, vcpus).unwrap();
        let mut next = 0;
        for range in layout.ranges.as_slice() {
            prop_assert_eq!(range.first, next);
            prop_assert_eq!(range.gpa % abi::PAGE_BYTES, 0);
            prop_assert!(range.gpa >= layout.shadow_gpa + layout.shadow_stride * vcpus);
            let end = range.gpa + range.pages * abi::PAGE_BYTES;
            prop_assert!(ram.iter().any(|s| s.start <= range.gpa && end <= s.end));
            prop_assert_eq!(layout.gpa(range.first), range.gpa);
            prop_assert_eq!(layout.gpa(range.first + range.pages - 1), end - abi::PAGE_BYTES);
            next += range.pages;
        }
        prop_assert_eq!(next, layout.pages);
        prop_assert_eq!(layout.gpa(next), 0);
        prop_assert!(layout.shadow_stride >= layout.pages.div_ceil(vcpus) * 4);
        prop_assert!(layout.shadow_gpa >= layout.tables_gpa + high.div_ceil(1024) * 4096);
    }

    #[test]
    fn own_pages_are_exactly_those_of_the_window(
        first in 0u64..100, pages in 0u64..100, vcpus in 1u64..9,
    ) {
        let mut found = Vec::new();
        for vcpu in 0..vcpus {
            let own = Own::new(first, pages, vcpu, vcpus);
            found.extend((own.first..own.first + own.count).map(|i| i * vcpus + vcpu));
        }
        found.sort_unstable();
        prop_assert_eq!(found, (first..first + pages).collect::<Vec<_>>());
    }

    #[test]
    fn any_command_line_is_survived(line in prop::collection::vec(any::<u8>(), 0..200)) {
        let settings = Settings::parse(&line);
        let fields = settings.fields(1000, 2);
        let field = |name| fields.iter().find(|(field, _)| *field == name).unwrap().1;
        prop_assert!(field(param::WINDOW_FIRST) + field(param::WINDOW_PAGES) <= 1000);
    }

    #[test]
    fn a_line_of_a_map_is_a_range_of_private_memory_or_nothing(
        (start, end) in any::<(u64, u64)>(),
        flags in "r[w-][x-][ps]",
        inode in 0_u64..3,
        name in "|/file|\\[heap\\]|\\[anon:x\\]",
        other in ".{0,80}",
    ) {
        let line = format!("{start:x}-{end:x} {flags} 00000000 00:00 {inode}   {name}");
        let is_meant = flags.starts_with("rw") && flags.ends_with('p') && inode == 0
            && (name.is_empty() || name.starts_with("[anon")) && start < end;
        prop_assert_eq!(crate::process::anonymous_line(&line), is_meant.then_some((start, end)));
        let found = crate::process::anonymous_line(&other);
        prop_assert!(found.is_none_or(|(start, end)| start < end && other.contains("rw")));
    }

    #[test]
    fn quantiles_are_in_order_and_count_everything(
        linear in prop::collection::vec(0u64..50, 4096), beyond in 0u64..100,
    ) {
        let mut log = vec![0; 64];
        for (us, count) in linear.iter().enumerate() {
            log[(us as u64 * 2000 + 1000).ilog2() as usize] += count;
        }
        log[24] += beyond;
        let mut histogram = Histogram::from_counts(2_000_000, 2000, linear, log);
        histogram.max_ns = u64::MAX;
        let total: u64 = histogram.buckets().iter().map(|(_, count)| count).sum();
        prop_assert_eq!(total, histogram.count());
        let edges: Vec<u64> = histogram.buckets().iter().map(|(edge, _)| *edge).collect();
        prop_assert!(edges.is_sorted());
        let summary = histogram.summary(40);
        prop_assert!(summary.p50_ns <= summary.p90_ns && summary.p90_ns <= summary.p99_ns);
        prop_assert!(summary.above_cut.p50_ns >= 40_000 || summary.above_cut.count == 0);
    }
}

#[test]
fn too_little_memory_has_no_layout() {
    let ram = [Span { start: 0, end: 0x9_fc00 }, Span { start: 1 << 20, end: 0x42_0000 }];
    assert_eq!(Layout::new(&ram, 2), None);
    assert_eq!(Layout::new(&[], 1), None);
}

#[test]
fn a_command_line_sets_what_it_names() {
    let line = b"workload=hot-write mem=256M..25% vcpus=4 pace_ns=1000 seed=0x10 verify=full \
        after=verify+repeat prefill=0 iterations=5 console=ttyS0 quiet tsc_khz=2000000";
    let settings = Settings::parse(line);
    let expected = Settings {
        workload: workload::HOT_WRITE,
        window: (Amount::Bytes(256 << 20), Amount::Percent(25)),
        vcpus: 4,
        pace_ns: 1000,
        seed: 16,
        verify: verify::FULL,
        after: after::VERIFY | after::REPEAT,
        prefill: 0,
        iterations: 5,
        tsc_khz: 2_000_000,
        refused: 2,
        ..Settings::new()
    };
    assert_eq!(settings, expected);
}

#[test]
fn malformed_words_are_refused_and_change_nothing() {
    for word in [
        "workload=",
        "workload=x",
        "seed=-1",
        "seed=99999999999999999999",
        "mem=1G..",
        "mem=x",
        "after=all",
        "=5",
        "iterations",
        "seed=0x",
        "mem=99999999999999999G",
    ] {
        let mut settings = Settings::new();
        assert_eq!(settings.apply(word.as_bytes()), None, "{word}");
        assert_eq!(settings, Settings::new(), "{word}");
    }
}

#[test]
fn settings_survive_the_parameter_page_except_what_happens_once() {
    let settings = Settings::parse(b"workload=verify mem=25%..50% iterations=9 reset=1 pace_ns=3");
    let fields: HashMap<u64, u64> = settings.fields(1000, 2).into_iter().collect();
    let back = Settings::from_fields(|field| fields[&field]);
    let again: HashMap<u64, u64> = back.fields(1000, 2).into_iter().collect();
    let differing: Vec<_> = fields.keys().filter(|key| fields[key] != again[key]).collect();
    assert_eq!(fields[&param::WINDOW_FIRST], 250);
    assert_eq!(differing.len(), 2);
    assert_eq!((again[&param::PREFILL], again[&param::RESET]), (0, 0));
}

#[test]
fn quantiles_of_known_counts() {
    let mut linear = vec![0; 4096];
    (linear[10], linear[50], linear[100]) = (90, 9, 1);
    let mut log = vec![0; 64];
    (log[14], log[16], log[17], log[23]) = (90, 9, 1, 1);
    let mut histogram = Histogram::from_counts(2_000_000, 2000, linear, log);
    histogram.max_ns = 5_000_000;
    assert_eq!(histogram.quantile_ns(0.5), 11_000);
    assert_eq!(histogram.quantile_ns(0.95), 51_000);
    assert_eq!(histogram.count_above(40), 11);
    assert_eq!(histogram.quantile_above_ns(40, 0.5), 51_000);
    // Longer than the linear buckets: the edge of the power of two, or the maximum if lower.
    assert_eq!(histogram.quantile_ns(1.0), 5_000_000);
    let nothing = histogram.since(&histogram.clone());
    assert_eq!((nothing.count(), nothing.quantile_ns(0.5)), (0, 0));
}

#[test]
fn map_lines_of_private_anonymous_memory_are_recognised() {
    let line = crate::process::anonymous_line;
    assert_eq!(line("7f00-7fff rw-p 00000000 00:00 0 "), Some((0x7f00, 0x7fff)));
    assert_eq!(line("7f00-7fff rw-p 0 00:00 0 [anon: pc.ram]"), Some((0x7f00, 0x7fff)));
    assert_eq!(line("7f00-7fff rw-s 0 00:01 5 /memfd:x (deleted)"), None);
    assert_eq!(line("7f00-7fff r--p 0 00:00 0"), None);
    assert_eq!(line("7f00-7fff rw-p 0 00:00 0 [heap]"), None);
    let image = crate::process::image_line;
    let of_snapshot = "7f00-7fff rw-p 0 08:01 5 /s/memory-ranges";
    assert_eq!((line(of_snapshot), image(of_snapshot)), (None, Some((0x7f00, 0x7fff))));
    assert_eq!(image("7f00-7fff rw-p 0 08:01 5 /usr/lib/libc.so.6"), None);
    assert_eq!(image("7f00-7fff r--p 0 08:01 5 /s/memory-ranges"), None);
    assert_eq!(image("7f00-7fff rw-p 00000000 00:00 0 "), None);
}

#[test]
fn mappings_without_a_gap_are_one_piece_of_memory() {
    let maps = "\
        10000000-11000000 rw-p 0 00:00 0\n\
        11000000-12000000 rw-p 0 00:00 0\n\
        12000000-12001000 ---p 0 00:00 0\n\
        12001000-12101000 rw-p 0 00:00 0\n\
        12101000-13001000 rw-p 0 00:00 0\n\
        20000000-20100000 rw-p 0 00:00 0\n";
    let found = crate::process::anonymous_ranges(maps);
    let first = [(0x1000_0000, 0x1200_0000), (0x1100_0000, 0x1200_0000)];
    let second = [(0x1200_1000, 0x1300_1000), (0x1210_1000, 0x1300_1000)];
    assert_eq!(found, [first, second].concat());
}

#[test]
fn random_numbers_stay_below_their_limit_and_reach_all_of_it() {
    let mut random = Random::new(1, 0);
    let mut seen = [false; 7];
    for _ in 0..1000 {
        seen[random.below(7) as usize] = true;
    }
    assert_eq!(seen, [true; 7]);
    assert_eq!(random.below(0), 0);
    assert_ne!(Random::new(1, 0).number(), Random::new(1, 1).number());
}
