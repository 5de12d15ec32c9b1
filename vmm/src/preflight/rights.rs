// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rights of this process, by which the kernel lets it use files and devices.
//!
//! Owns what counts as missing: where the kernel does not say, a process is not root and may do nothing. Must never fail.

use process_facts::Status;

/// Bits of capability sets.
pub const CAP_NET_ADMIN: u32 = 12;

/// What a process is allowed, from its `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Effective user.
    pub user: u32,
    /// Effective group, and the supplementary ones.
    pub groups: Vec<u32>,
    /// Effective capabilities.
    pub capabilities: u64,
}

impl Rights {
    /// Those in a `status` of `/proc`.
    pub fn of(status: &str) -> Self {
        let status = Status::of(status);
        let more = status.numbers("Groups").unwrap_or_default();
        Self {
            user: status.effective("Uid").unwrap_or(u32::MAX),
            groups: status.effective("Gid").into_iter().chain(more).collect(),
            capabilities: status.effective_capabilities().unwrap_or(0),
        }
    }

    /// Whether a capability is among the effective ones.
    pub fn has(&self, capability: u32) -> bool {
        self.capabilities.checked_shr(capability).is_some_and(|bits| bits & 1 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_the_effective_ones() {
        let status = "Name:\tx\nUid:\t1000\t1001\t1000\t1000\nGid:\t5\t6\t5\t5\nGroups:\t7 8 \n\
                      CapInh:\tffff\nCapEff:\t0000000000001000\n";
        let rights = Rights::of(status);
        assert_eq!((rights.user, rights.groups.clone()), (1001, vec![6, 7, 8]));
        assert!(rights.has(CAP_NET_ADMIN) && !rights.has(13) && !rights.has(64));
        assert!(!Rights::of("").has(CAP_NET_ADMIN));
        assert_eq!(Rights::of("").user, u32::MAX, "not root");
    }
}
