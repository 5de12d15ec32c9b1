// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Forecasts of memory that is not there: what a host with terabytes would report.

use memory::PageKind;
use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;
const MS: Duration = Duration::from_millis(1);

fn kind(page_bytes: u64) -> PageKind {
    PageKind { page_bytes, is_hugetlb: page_bytes == GIB, is_shared: true, is_there: false }
}

/// So many GiB of a lane, in chunks of one, each of which takes a thread so long.
fn lane(
    node: u32,
    page_bytes: u64,
    (done, total): (u64, u64),
    chunk: Duration,
    threads: usize,
) -> LaneProgress {
    LaneProgress {
        node: Some(node),
        kind: kind(page_bytes),
        total_bytes: total * GIB,
        done_bytes: done * GIB,
        done_chunks: done,
        busy: chunk * u32::try_from(done).unwrap_or(u32::MAX),
        threads,
    }
}

fn work(took: Duration, lanes: &[LaneProgress]) -> PinWork {
    PinWork { took, lanes: lanes.to_vec(), ..PinWork::default() }
}

fn left(work: &PinWork) -> Option<Duration> {
    work.left(&PinWork::default())
}

#[test]
fn each_kind_of_page_takes_its_own_time() {
    // After a sixteenth of each: 1 GiB pages are hardly work, those of 4 KiB a second each.
    let lanes = [lane(0, GIB, (64, 1024), 10 * MS, 80), lane(0, 4096, (4, 64), 1000 * MS, 80)];
    let now = work(58 * MS, &lanes);
    assert_eq!(left(&now), Some(9600 * MS / 80 + 60_000 * MS / 80));
    // One rate for both would say that a zone of small pages which comes last is done in no time.
    let behind = [lane(0, GIB, (512, 1024), 10 * MS, 80), lane(0, 4096, (1, 512), 1000 * MS, 80)];
    assert_eq!(left(&work(77 * MS, &behind)), Some(5120 * MS / 80 + 511_000 * MS / 80));
}

#[test]
fn the_node_that_takes_longest_counts() {
    let idle = lane(0, 2 << 20, (100, 1000), 100 * MS, 50);
    let busy = lane(1, 2 << 20, (10, 1000), 1000 * MS, 50);
    assert_eq!(left(&work(200 * MS, &[idle, busy])), Some(990 * 20 * MS));
    assert_eq!(left(&work(200 * MS, &[busy, idle])), Some(990 * 20 * MS));
    let few = lane(1, 2 << 20, (10, 1000), 1000 * MS, 10);
    assert_eq!(left(&work(1000 * MS, &[idle, few])), Some(990 * 100 * MS), "by its own threads");
    let done = lane(1, 2 << 20, (1000, 1000), 1000 * MS, 50);
    assert_eq!(left(&work(MS, &[done])), Some(Duration::ZERO));
}

#[test]
fn what_has_not_begun_takes_as_long_as_on_another_node_or_is_not_known() {
    let known = lane(0, 4096, (10, 100), 100 * MS, 10);
    let same = lane(1, 4096, (0, 1000), MS, 10);
    assert_eq!(left(&work(100 * MS, &[known, same])), Some(10_000 * MS));
    assert_eq!(left(&work(1000 * MS, &[known, same])), None, "it should have begun");
    let other = lane(1, GIB, (0, 1000), MS, 10);
    assert_eq!(left(&work(100 * MS, &[known, other])), None);
    assert_eq!(left(&work(100 * MS, &[lane(0, 4096, (0, 1), MS, 1)])), None);
}

#[test]
fn chunks_that_do_not_end_count_as_time_goes_on() {
    let stuck = |took| left(&work(took, &[lane(0, 4096, (10, 1000), 10 * MS, 10)]));
    assert_eq!(stuck(20 * MS), Some(990 * MS), "all threads are in their next chunk");
    assert_eq!(stuck(1010 * MS), Some(99 * 1000 * MS));
}

#[test]
fn nothing_is_known_before_threads_have_started() {
    assert_eq!(left(&work(60 * MS, &[])), None);
    let over = PinWork { is_over: true, ..work(60 * MS, &[]) };
    assert_eq!(left(&over), Some(Duration::ZERO));
}

#[test]
fn the_last_moments_count_and_not_the_beginning() {
    let fast = lane(0, 4096, (1000, 4000), 10 * MS, 10);
    let before = work(1000 * MS, &[fast]);
    let slower = LaneProgress {
        done_bytes: 1100 * GIB,
        done_chunks: 1100,
        busy: fast.busy + 100 * 100 * MS,
        ..fast
    };
    let now = work(2000 * MS, &[slower]);
    assert_eq!(now.left(&before), Some(2900 * 10 * MS));
    assert!(left(&now).is_some_and(|left| left < 6000 * MS), "the beginning was faster");
    let nothing = work(2000 * MS, &[fast]);
    assert_eq!(nothing.left(&before), left(&nothing), "then all that was");
}

#[test]
fn memory_that_is_mapped_last_is_still_to_be_mapped() {
    let lanes = [lane(0, GIB, (512, 512), 10 * MS, 64)];
    let last =
        |last: &[LastProgress]| left(&PinWork { last: last.to_vec(), ..work(100 * MS, &lanes) });
    let huge = LastProgress { left_bytes: 512 * GIB, sample: Some((GIB, 20 * MS)) };
    let slow = LastProgress { left_bytes: 2 * GIB, sample: Some((GIB / 2, 100 * MS)) };
    assert_eq!(last(&[]), Some(Duration::ZERO));
    assert_eq!(last(&[huge]), Some(10_240 * MS));
    assert_eq!(last(&[huge, slow]), Some(10_640 * MS), "one after the other, each at its own rate");
    let begun = LastProgress { sample: None, ..huge };
    assert_eq!(last(&[slow, begun]), None);
    assert_eq!(last(&[LastProgress { left_bytes: 0, ..begun }]), Some(Duration::ZERO));
    let over = PinWork { last: vec![begun], is_over: true, ..work(MS, &lanes) };
    assert_eq!(left(&over), Some(Duration::ZERO));
}

/// States in which so many of 4096 chunks are done, after so many milliseconds; ten threads.
fn reviewed(bars: Duration, states: &[(u64, u64)]) -> Vec<bool> {
    let mut review = Review::new(bars);
    let mut looked = |(ms, done): &(u64, u64)| {
        let took = Duration::from_millis(*ms);
        let lane = lane(0, 4096, (*done, 4096), MS, 10);
        let busy = if *done > 0 { took * 10 } else { Duration::ZERO };
        let lane = LaneProgress { busy, ..lane };
        review.look(&work(took, &[lane])).is_some()
    };
    states.iter().map(&mut looked).collect()
}

#[test]
fn a_forecast_that_turns_out_too_low_is_corrected() {
    // 1024 a second at first, then a tenth of that.
    let states: Vec<_> = (1..=10).map(|at| (at * 100, at * 102)).collect();
    assert!(reviewed(Duration::ZERO, &states).iter().all(|is_long| !is_long));
    let slower: Vec<_> = (1..=25).map(|at| (1000 + at * 100, 1020 + at * 10)).collect();
    let all = [states.clone(), slower].concat();
    let long = reviewed(Duration::ZERO, &all);
    assert_eq!(long.iter().position(|is_long| *is_long).map(|at| all[at].0 > 1000), Some(true));
    // All but an eighth is done at once, which hides what follows from the average.
    let quick = (1..=35).map(|at| (at * 100, at * 100));
    let late: Vec<_> = quick.chain((1..=30).map(|at| (3500 + at * 100, 3500 + at))).collect();
    let long = reviewed(Duration::ZERO, &late);
    assert_eq!(long.iter().position(|is_long| *is_long).map(|at| late[at].0 > 3500), Some(true));
    let bars = reviewed(3 * Duration::from_secs(1), &states);
    assert!(bars[0], "four seconds, and three for BARs");
}

#[test]
fn what_ends_altogether_is_too_long() {
    let mut states: Vec<_> = (1..=30).map(|at| (at * 100, at * 130)).collect();
    let (ms, done) = states[29];
    states.extend((1..=60).map(|at| (ms + at * 100, done)));
    let long = reviewed(Duration::ZERO, &states);
    let first = long.iter().position(|is_long| *is_long).map(|at| states[at].0);
    assert!(first.is_some_and(|first| (ms + 2500..ms + 4500).contains(&first)), "{first:?}");
    assert!(reviewed(Duration::ZERO, &[(100, 0), (2000, 0)]).iter().all(|is_long| !is_long));
    assert_eq!(reviewed(Duration::ZERO, &[(100, 0), (2600, 0)]), [false, true]);
}

#[test]
fn a_forecast_is_repeated_now_and_then() {
    let mut review = Review::new(Duration::ZERO);
    assert!(!review.is_due(Duration::ZERO) && review.is_due(REVIEW_INTERVAL));
    assert_eq!(review.look(&work(REVIEW_INTERVAL, &[])), None);
    assert!(!review.is_due(REVIEW_INTERVAL * 3 / 2) && review.is_due(2 * REVIEW_INTERVAL));
    let over = PinWork { is_over: true, ..work(Duration::from_secs(9), &[]) };
    let mut with_bars = Review::new(Duration::from_mins(1));
    assert_eq!(with_bars.look(&over), None, "there is nothing to withhold any more");
    assert_eq!(with_bars.look(&work(Duration::from_secs(9), &[])), Some(Duration::from_mins(1)));
}

#[test]
fn no_number_is_too_large() {
    let huge = LaneProgress {
        node: None,
        kind: kind(4096),
        total_bytes: u64::MAX,
        done_bytes: 1,
        done_chunks: u64::MAX,
        busy: Duration::MAX,
        threads: usize::MAX,
    };
    let now = PinWork {
        last: vec![LastProgress { left_bytes: u64::MAX, sample: Some((1, Duration::MAX)) }; 2],
        ..work(Duration::MAX, &[huge, huge])
    };
    let longest = Duration::from_nanos(u64::MAX);
    assert!(left(&now).is_some_and(|left| left > 2 * longest), "populated, and mapped then");
    for bars in [Duration::ZERO, Duration::MAX] {
        assert!(Review::new(bars).look(&now).is_some_and(|left| left > 2 * longest));
    }
}

#[derive(Clone, Debug)]
struct Node {
    threads: usize,
    /// Page size, chunks of each thread, and microseconds that one takes it.
    lanes: Vec<(u64, u64, u64)>,
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let lane = (prop::sample::select(vec![4096, 2 << 20, GIB]), 32..128_u64, 100..1_000_000_u64);
    let lanes = prop::collection::vec(lane, 1..4);
    let node = (1..161_usize, lanes).prop_map(|(threads, lanes)| Node { threads, lanes });
    prop::collection::vec(node, 1..5)
}

proptest! {
    /// Of hosts with any nodes, threads, kinds of pages and rates, of which all nodes have done as much as they can in
    /// the same time: what is left takes as long as was said.
    #[test]
    fn a_host_takes_as_long_as_was_forecast(nodes in nodes(), part in 10..75_u64) {
        // In microseconds.
        let whole = |node: &Node| {
            node.lanes.iter().map(|(_, chunks, us)| chunks * us).sum::<u64>()
        };
        let longest = nodes.iter().map(whole).max().unwrap_or(0);
        let took = longest * part / 100;
        let mut lanes = Vec::new();
        for (number, node) in (0..).zip(&nodes) {
            for (page, chunks, us) in &node.lanes {
                let chunks = &(chunks * node.threads as u64);
                let done = (chunks * took / whole(node).max(1)).min(*chunks);
                let chunk = Duration::from_micros(*us);
                lanes.push(lane(number, *page, (done, *chunks), chunk, node.threads));
            }
        }
        let forecast = left(&work(Duration::from_micros(took), &lanes));
        let forecast = forecast.ok_or_else(|| TestCaseError::fail("some is done of all"))?;
        let left = Duration::from_micros(longest - took);
        // Chunks are whole: of each lane one may be missing in what is done. As a thread has many, that is less than what is
        // left in any case.
        let chunk = nodes.iter().flat_map(|node| &node.lanes).map(|(_, _, us)| *us).max();
        let slack = Duration::from_micros(3 * chunk.unwrap_or(0) + longest / 10);
        prop_assert!(slack < left);
        prop_assert!(forecast.abs_diff(left) <= slack, "{forecast:?} and not {left:?}, within {slack:?}");
    }
}
