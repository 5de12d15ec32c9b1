// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Access times, as the guest counted them: microsecond buckets, and powers of two beyond.
//!
//! Pure arithmetic on counts. A quantile is the upper edge of the bucket that holds it: in the
//! microsecond buckets from 1 us to 4 ms, in the powers of two below and above. Two readings can
//! be subtracted, which gives the time between them.

use serde::Serialize;

use crate::abi::vcpu;
use crate::memory::Words;
use crate::tsc;

/// Access times of one or several vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    khz: u64,
    linear_ticks: u64,
    linear: Vec<u64>,
    log: Vec<u64>,
    /// Longest access since the guest's statistics began, ns.
    pub max_ns: u64,
    /// Sum of all, ns.
    pub total_ns: u64,
}

/// The usual figures of a histogram, ns.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Summary {
    /// Accesses.
    pub count: u64,
    /// Their mean.
    pub mean_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90 % are no longer.
    pub p90_ns: u64,
    /// 99 % are no longer.
    pub p99_ns: u64,
    /// 99.9 % are no longer.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// Only those that took at least `cut_us`, which leaves out faults that were resolved locally.
    pub above_cut: AboveCut,
}

/// Figures of the accesses above a cut.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct AboveCut {
    /// The cut.
    pub cut_us: u64,
    /// Accesses above it.
    pub count: u64,
    /// Their median.
    pub p50_ns: u64,
    /// 90 % of them are no longer.
    pub p90_ns: u64,
    /// 99 % of them are no longer.
    pub p99_ns: u64,
}

impl Histogram {
    pub(crate) fn new(block: &Words, khz: u64) -> Self {
        let linear = (0..vcpu::LINEAR_BUCKETS)
            .map(|index| u64::from(block.at32(vcpu::LINEAR + index * 4)))
            .collect();
        let log = (0..vcpu::LOG_BUCKETS).map(|i| block.at(vcpu::LOG_ACCESS + i * 8)).collect();
        Self::from_counts(khz, block.at(vcpu::LINEAR_TICKS), linear, log).with_sums(
            tsc::nanoseconds(block.at(vcpu::ACCESS_MAX), khz),
            tsc::nanoseconds(block.at(vcpu::ACCESS_TOTAL), khz),
        )
    }

    /// A histogram of these counts, with buckets of `linear_ticks` at `khz`.
    #[doc(hidden)]
    pub fn from_counts(khz: u64, linear_ticks: u64, linear: Vec<u64>, log: Vec<u64>) -> Self {
        let linear_ticks = linear_ticks.max(1);
        Self { khz, linear_ticks, linear, log, max_ns: 0, total_ns: 0 }
    }

    fn with_sums(mut self, max_ns: u64, total_ns: u64) -> Self {
        self.max_ns = max_ns;
        self.total_ns = total_ns;
        self
    }

    /// Accesses.
    pub fn count(&self) -> u64 {
        self.log.iter().sum()
    }

    /// Adds another vCPU's counts.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.linear.iter_mut().zip(&other.linear) {
            *mine += theirs;
        }
        for (mine, theirs) in self.log.iter_mut().zip(&other.log) {
            *mine += theirs;
        }
        self.max_ns = self.max_ns.max(other.max_ns);
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
    }

    /// What was counted since `earlier`, an older reading of the same statistics. The maximum
    /// stays that of the whole time.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let minus = |now: &[u64], then: &[u64]| {
            now.iter().zip(then).map(|(a, b)| a.saturating_sub(*b)).collect()
        };
        Self {
            khz: self.khz,
            linear_ticks: self.linear_ticks,
            linear: minus(&self.linear, &earlier.linear),
            log: minus(&self.log, &earlier.log),
            max_ns: self.max_ns,
            total_ns: self.total_ns.saturating_sub(earlier.total_ns),
        }
    }

    /// Accesses of at least `cut_us`.
    pub fn count_above(&self, cut_us: u64) -> u64 {
        let short: u64 = self.linear.iter().take(self.cut_bucket(cut_us)).sum();
        self.count().saturating_sub(short)
    }

    /// The time that `share` (0.0 to 1.0) of all accesses do not exceed, ns.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        self.rank_ns(rank(self.count(), share))
    }

    /// The same among the accesses of at least `cut_us`.
    pub fn quantile_above_ns(&self, cut_us: u64, share: f64) -> u64 {
        let above = self.count_above(cut_us);
        if above == 0 {
            return 0;
        }
        self.rank_ns(self.count().saturating_sub(above) + rank(above, share))
    }

    /// The usual figures, with the faults above `cut_us` apart.
    pub fn summary(&self, cut_us: u64) -> Summary {
        let count = self.count();
        Summary {
            count,
            mean_ns: self.total_ns / count.max(1),
            p50_ns: self.quantile_ns(0.5),
            p90_ns: self.quantile_ns(0.9),
            p99_ns: self.quantile_ns(0.99),
            p999_ns: self.quantile_ns(0.999),
            max_ns: self.max_ns,
            above_cut: AboveCut {
                cut_us,
                count: self.count_above(cut_us),
                p50_ns: self.quantile_above_ns(cut_us, 0.5),
                p90_ns: self.quantile_above_ns(cut_us, 0.9),
                p99_ns: self.quantile_above_ns(cut_us, 0.99),
            },
        }
    }

    /// Non-empty buckets as (upper edge in ns, count), shortest first: powers of two below a
    /// microsecond bucket and beyond the last one.
    pub fn buckets(&self) -> Vec<(u64, u64)> {
        let mut list = Vec::new();
        let first = self.linear.first().copied().unwrap_or(0);
        let mut left = first;
        for (ticks, count) in self.log_edges().filter(|(ticks, _)| *ticks < self.linear_ticks) {
            list.push((ticks, count.min(left)));
            left -= count.min(left);
        }
        list.push((self.linear_ticks, left));
        for (index, count) in (2..).zip(self.linear.iter().skip(1)) {
            list.push((self.linear_ticks.saturating_mul(index), *count));
        }
        let inside: u64 = self.linear.iter().sum();
        let mut beyond = self.count().saturating_sub(inside);
        let mut long: Vec<_> = self.log_edges().collect();
        let mut tail = Vec::new();
        while let Some((ticks, count)) = long.pop() {
            tail.push((ticks, count.min(beyond)));
            beyond -= count.min(beyond);
        }
        list.extend(tail.into_iter().rev());
        list.retain(|(_, count)| *count > 0);
        list.into_iter().map(|(ticks, n)| (tsc::nanoseconds(ticks, self.khz), n)).collect()
    }

    fn log_edges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        (1..).zip(&self.log).map(|(bit, count)| (1u64.checked_shl(bit).unwrap_or(u64::MAX), *count))
    }

    fn cut_bucket(&self, cut_us: u64) -> usize {
        let ticks = u128::from(cut_us) * u128::from(self.khz) / 1000;
        usize::try_from(ticks / u128::from(self.linear_ticks)).unwrap_or(usize::MAX)
    }

    fn rank_ns(&self, rank: u64) -> u64 {
        let mut seen = 0;
        for (edge, count) in self.buckets() {
            seen += count;
            if seen >= rank.max(1) {
                return edge.min(self.max_ns.max(1));
            }
        }
        0
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a rank among counts that are far below 2^52, and a share of it"
)]
fn rank(count: u64, share: f64) -> u64 {
    ((count as f64 * share).ceil() as u64).min(count)
}
