// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of the limits of disks and network devices.
//!
//! Owns the groups of a machine, whose buckets their disks share, also those plugged later. Buckets belong to a machine:
//! a reset of a device does not refill them, and a machine that is built anew begins with full ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use devices::virtio::{BucketConfig, RateLimiter};

use crate::config::rate_limiter::{RateLimiterConfig, TokenBucket};
use crate::config::{DiskConfig, VmConfig};

fn bucket(config: Option<&TokenBucket>) -> BucketConfig {
    config.map_or_else(BucketConfig::default, |bucket| BucketConfig {
        size: bucket.size,
        burst: bucket.one_time_burst.unwrap_or(0),
        refill_ms: bucket.refill_time,
    })
}

/// The buckets for bytes and for operations of a limit.
pub(super) fn buckets(config: Option<&RateLimiterConfig>) -> (BucketConfig, BucketConfig) {
    let bandwidth = config.and_then(|config| config.bandwidth.as_ref());
    let ops = config.and_then(|config| config.ops.as_ref());
    (bucket(bandwidth), bucket(ops))
}

fn limiter(config: &RateLimiterConfig) -> Option<Arc<RateLimiter>> {
    let (bandwidth, ops) = buckets(Some(config));
    RateLimiter::new(bandwidth, ops)
}

/// The groups of a machine that limit anything, by name.
#[derive(Clone, Debug, Default)]
pub struct RateGroups(BTreeMap<String, Arc<RateLimiter>>);

impl RateGroups {
    /// The groups of a configuration, with full buckets.
    pub fn new(config: &VmConfig) -> Self {
        let groups = config.rate_limit_groups.iter().flatten();
        let named = groups.filter_map(|group| {
            limiter(&group.rate_limiter_config).map(|limiter| (group.id.clone(), limiter))
        });
        Self(named.collect())
    }

    /// The limit of a disk: that of its group, or its own.
    pub fn limiter(&self, disk: &DiskConfig) -> Option<Arc<RateLimiter>> {
        match &disk.rate_limit_group {
            Some(group) => self.0.get(group).cloned(),
            None => disk.rate_limiter_config.as_ref().and_then(limiter),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;

    #[test]
    fn disks_of_a_group_have_one_limit_and_others_their_own() {
        let bucket = json!({"bandwidth": {"size": 1, "refill_time": 1}});
        let json = json!({
            "payload": {"kernel": "/k"},
            "rate_limit_groups": [
                {"id": "g", "rate_limiter_config": bucket},
                {"id": "free", "rate_limiter_config": {"ops": {"size": 0, "refill_time": 9}}},
            ],
            "disks": [
                {"path": "/a", "rate_limit_group": "g"},
                {"path": "/b", "rate_limit_group": "g"},
                {"path": "/c", "rate_limiter_config": bucket},
                {"path": "/d", "rate_limiter_config": bucket},
                {"path": "/e", "rate_limit_group": "free"},
                {"path": "/f"},
            ],
        });
        let config = serde_json::from_value::<VmConfig>(json).unwrap().complete().unwrap();
        let groups = RateGroups::new(&config);
        let limits: Vec<_> =
            config.disks.iter().flatten().map(|disk| groups.limiter(disk)).collect();
        let [Some(a), Some(b), Some(c), Some(d), None, None] = limits.as_slice() else {
            panic!("{limits:?}");
        };
        assert!(Arc::ptr_eq(a, b));
        assert!(!Arc::ptr_eq(a, c) && !Arc::ptr_eq(c, d));
    }
}
