// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate limiters: token buckets in JSON, six keys each in the option strings of disks and nets,
//! and `--rate-limit-group`.
//!
//! Owns the families and the six-key text form. Must never limit anything by itself: see `devices::virtio::limiter`.

use super::codec::{Codec, Id, Int, JsonOnly, One, ValueCodec};
use super::family::option_family;
use super::option_string::{KeySyntax, OptionError, Options, Printer};

option_family! {
    /// A token bucket: it holds `size` tokens, starts with `one_time_burst` more, and refills at
    /// `size` tokens per `refill_time`. No limit if one of the two is 0.
    TokenBucket "token-bucket" {
        /// Capacity of the bucket in tokens.
        size: u64 = 0, "" as JsonOnly, required_json();
        /// Additional tokens at the start, not refilled.
        one_time_burst: Option<u64> = None, "" as JsonOnly;
        /// Milliseconds in which an empty bucket is refilled.
        refill_time: u64 = 0, "" as JsonOnly, required_json();
    }
}

option_family! {
    /// Limits on bandwidth and operations.
    RateLimiterConfig "rate-limiter" {
        /// Limit on bytes.
        bandwidth: Option<TokenBucket> = None, "" as JsonOnly;
        /// Limit on operations.
        ops: Option<TokenBucket> = None, "" as JsonOnly;
    }
}

option_family! {
    /// A rate limiter shared by several disks.
    RateLimitGroupConfig "rate-limit-group" {
        /// Name of the group.
        id: String = String::new(), "id" as One<Id>, required();
        /// The limits.
        rate_limiter_config: RateLimiterConfig = RateLimiterConfig::default(),
            "" as GroupKeys, required_json();
    }
}

/// The six keys of an optional rate limiter.
#[derive(Debug)]
pub struct RateLimiterKeys;

/// The six keys of a required rate limiter.
#[derive(Debug)]
pub struct GroupKeys;

const SIX: [KeySyntax; 6] = [
    KeySyntax { key: "bw_size", value: Some("<bytes>") },
    KeySyntax { key: "bw_one_time_burst", value: Some("<bytes>") },
    KeySyntax { key: "bw_refill_time", value: Some("<ms>") },
    KeySyntax { key: "ops_size", value: Some("<io_ops>") },
    KeySyntax { key: "ops_one_time_burst", value: Some("<io_ops>") },
    KeySyntax { key: "ops_refill_time", value: Some("<ms>") },
];

fn bucket(options: &Options<'_>, keys: [&str; 3]) -> Result<Option<TokenBucket>, OptionError> {
    let number = |key: &str| -> Result<Option<u64>, OptionError> {
        let Some(raw) = options.raw(key) else { return Ok(None) };
        <Int as ValueCodec<u64>>::parse(raw)
            .map(Some)
            .map_err(|reason| options.bad_value(key, reason))
    };
    let [size, burst, refill] = keys;
    let (size_tokens, burst_tokens, refill_ms) = (number(size)?, number(burst)?, number(refill)?);
    match (size_tokens, refill_ms) {
        (Some(size), Some(refill_time)) => {
            Ok(Some(TokenBucket { size, one_time_burst: burst_tokens, refill_time }))
        }
        (None, None) if burst_tokens.is_none() => Ok(None),
        _ => Err(OptionError::Missing {
            family: options.family(),
            what: format!("'{size}=' and '{refill}=' together"),
        }),
    }
}

fn take(options: &Options<'_>) -> Result<Option<RateLimiterConfig>, OptionError> {
    let bandwidth = bucket(options, ["bw_size", "bw_one_time_burst", "bw_refill_time"])?;
    let ops = bucket(options, ["ops_size", "ops_one_time_burst", "ops_refill_time"])?;
    if bandwidth.is_none() && ops.is_none() {
        return Ok(None);
    }
    Ok(Some(RateLimiterConfig { bandwidth, ops }))
}

fn put(value: &RateLimiterConfig, out: &mut Printer) {
    for (prefix, bucket) in [("bw", &value.bandwidth), ("ops", &value.ops)] {
        let Some(bucket) = bucket else { continue };
        out.pair(&format!("{prefix}_size"), &bucket.size.to_string());
        if let Some(burst) = bucket.one_time_burst {
            out.pair(&format!("{prefix}_one_time_burst"), &burst.to_string());
        }
        out.pair(&format!("{prefix}_refill_time"), &bucket.refill_time.to_string());
    }
}

impl Codec<Option<RateLimiterConfig>> for RateLimiterKeys {
    fn keys(_key: &'static str) -> Vec<KeySyntax> {
        SIX.to_vec()
    }

    fn take(
        _key: &'static str,
        options: &Options<'_>,
    ) -> Result<Option<Option<RateLimiterConfig>>, OptionError> {
        Ok(take(options)?.map(Some))
    }

    fn put(_key: &'static str, value: &Option<RateLimiterConfig>, out: &mut Printer) {
        if let Some(value) = value {
            put(value, out);
        }
    }
}

impl Codec<RateLimiterConfig> for GroupKeys {
    fn keys(_key: &'static str) -> Vec<KeySyntax> {
        SIX.to_vec()
    }

    fn take(
        _key: &'static str,
        options: &Options<'_>,
    ) -> Result<Option<RateLimiterConfig>, OptionError> {
        take(options)
    }

    fn put(_key: &'static str, value: &RateLimiterConfig, out: &mut Printer) {
        put(value, out);
    }
}
