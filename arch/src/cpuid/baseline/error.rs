// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why hosts have no baseline, a baseline cannot be used, or a host does not have all of it.
//!
//! Owns the texts. Must never compare anything.

use std::fmt;

use crate::cpuid::compat::MissingFeature;

/// Two hosts have no baseline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("processors of different makers have no baseline: {first} and {second}")]
pub struct NoBaseline {
    /// Maker of one.
    pub first: String,
    /// Maker of the other.
    pub second: String,
}

/// A baseline has something that means nothing here, so that no guest could be limited to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say it")]
pub enum UnknownPart {
    #[error("this version does not know all that it has in CPUID leaf {function:#x}.{index:#x}")]
    Leaf { function: u32, index: u32 },
    #[error("it has CPUID leaf {function:#x}.{index:#x} twice")]
    LeafTwice { function: u32, index: u32 },
    #[error("this version does not know MSR {index:#x}")]
    Msr { index: u32 },
    #[error("it has MSR {index:#x} twice")]
    MsrTwice { index: u32 },
    #[error("it lacks {what}, without which no guest runs")]
    Missing { what: &'static str },
}

/// A host does not have all of a baseline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BelowBaseline {
    pub(super) features: Vec<MissingFeature>,
    pub(super) msrs: Vec<String>,
}

impl fmt::Display for BelowBaseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let features = self.features.iter().map(ToString::to_string);
        let all: Vec<String> = features.chain(self.msrs.iter().cloned()).collect();
        f.write_str(&all.join(", "))
    }
}

impl std::error::Error for BelowBaseline {}
