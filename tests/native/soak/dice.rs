// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random numbers that can be had again, and the seeds by which a campaign is repeated.
//!
//! Owns the numbering: a guest has a seed, and each of its migrations a number behind that. Must
//! never take a number from anywhere but a seed.

use std::fmt;
use std::str::FromStr;

/// Numbers that follow from a seed alone.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Seeds that follow each other give numbers that have nothing in common.
    pub fn new(seed: u64, number: u64) -> Self {
        let mut dice = Self(seed);
        dice.0 = dice.next() ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        dice.next();
        dice
    }

    /// Splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// From `least` to `most`.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most.saturating_sub(least) + 1)
    }

    /// True in so many cases of a hundred.
    pub fn percent(&mut self, share: u64) -> bool {
        self.below(100) < share
    }

    /// One of several, each as likely as its weight says.
    pub fn pick<T: Copy>(&mut self, choices: &[(u64, T)]) -> T {
        let total = choices.iter().map(|(weight, _)| weight).sum();
        let mut at = self.below(total);
        for (weight, choice) in choices {
            if at < *weight {
                return *choice;
            }
            at -= weight;
        }
        choices.first().expect("a choice").1
    }

    /// Of every order of magnitude as often: from `2^least` to below `2^(most + 1)`.
    pub fn magnitude(&mut self, least: u64, most: u64) -> u64 {
        let power = 1 << self.between(least, most);
        power + self.below(power)
    }
}

/// What a run begins with: a guest, or one migration of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed {
    /// Of the guest.
    pub guest: u64,
    /// The only migration to be made.
    pub only: Option<u64>,
}

impl FromStr for Seed {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (guest, only) = match text.split_once('.') {
            Some((guest, only)) => (guest, Some(only.parse()?)),
            None => (text, None),
        };
        Ok(Self { guest: guest.parse()?, only })
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.guest)?;
        self.only.map_or(Ok(()), |only| write!(out, ".{only}"))
    }
}
