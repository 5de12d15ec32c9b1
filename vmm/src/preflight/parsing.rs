// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What texts of `/proc` and `/sys` say.
//!
//! Owns their forms. It must never fail: a text of another form says nothing, and no text leads to more than that.

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
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim()
        };
        // Real, effective, saved, of files.
        let effective = |name| field(name).split_whitespace().nth(1)?.parse().ok();
        let more = field("Groups").split_whitespace().filter_map(|group| group.parse().ok());
        Self {
            user: effective("Uid").unwrap_or(u32::MAX),
            groups: effective("Gid").into_iter().chain(more).collect(),
            capabilities: u64::from_str_radix(field("CapEff"), 16).unwrap_or(0),
        }
    }

    /// Whether a capability is among the effective ones.
    pub fn has(&self, capability: u32) -> bool {
        self.capabilities.checked_shr(capability).is_some_and(|bits| bits & 1 != 0)
    }
}

/// The cgroups of a process from its `cgroup`: that of version 2, and those of version 1 by their controllers.
pub fn cgroups(text: &str) -> (Option<String>, Vec<(String, String)>) {
    let (mut unified, mut others) = (None, Vec::new());
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        // A path leads out of the hierarchy for a process outside of the cgroup namespace.
        if !path.starts_with('/') || path.split('/').any(|part| part == "..") {
            continue;
        }
        if controllers.is_empty() {
            unified = Some(path.to_owned());
        } else {
            let named = controllers.split(',').map(|name| (name.to_owned(), path.to_owned()));
            others.extend(named);
        }
    }
    (unified, others)
}

/// CPUs that a `cpu.max` allows, in thousandths; `None` without a limit.
pub fn cpu_max_milli(text: &str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let quota_us: u64 = words.next()?.parse().ok()?;
    let period_us: u64 = words.next()?.parse().ok()?;
    quota_us.checked_mul(1000)?.checked_div(period_us)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    #[test]
    fn cgroups_have_one_hierarchy_or_several() {
        let (unified, others) = cgroups("0::/user.slice/a.scope\n");
        assert_eq!((unified.as_deref(), others.len()), (Some("/user.slice/a.scope"), 0));
        let (unified, others) = cgroups("4:cpu,cpuacct:/x\n1:name=systemd:/\n0::/../y\nrubbish");
        assert_eq!(unified, None);
        assert!(others.contains(&("cpuacct".to_owned(), "/x".to_owned())), "{others:?}");
    }

    #[test]
    fn quotas_are_shares_of_a_period() {
        assert_eq!(cpu_max_milli("150000 100000\n"), Some(1500));
        assert_eq!(cpu_max_milli("max 100000"), None);
        assert_eq!(cpu_max_milli("1 0"), None);
        assert_eq!(cpu_max_milli("18446744073709551615 1"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_harmless(text in "[ -~\n\t]{0,200}") {
            let rights = Rights::of(&text);
            prop_assert!(rights.groups.len() <= 200);
            let _ = (memory::parse_release(&text), cpu_max_milli(&text));
            let (unified, others) = cgroups(&text);
            let paths = unified.into_iter().chain(others.into_iter().map(|(_, path)| path));
            for path in paths {
                prop_assert!(path.starts_with('/') && !path.split('/').any(|part| part == ".."));
            }
        }
    }
}
