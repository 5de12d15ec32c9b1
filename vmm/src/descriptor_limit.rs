// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The limit on open files.
//!
//! Owns that a process uses all that it may. The soft limit is low on most hosts for programs that use select(2), and
//! postcopy alone may have a connection for each vCPU. It must never change the hard limit, nor keep a process from starting.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard one, on the process's only thread. A limit that stays is no failure: what needs more
/// says so.
pub fn raise() {
    let Some(limit) = raised(getrlimit(Resource::Nofile)) else { return };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        // The log is not open yet.
        eprintln!("warning: the limit on open files (RLIMIT_NOFILE) cannot be raised: {error}");
    }
}

/// The limit that is to be set, if it is another one.
fn raised(Rlimit { current, maximum }: Rlimit) -> Option<Rlimit> {
    (current != maximum).then_some(Rlimit { current: maximum, maximum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_used_that_may_be() {
        let limit = |current, maximum| Rlimit { current, maximum };
        assert!(raised(limit(Some(1024), Some(1024))).is_none());
        assert!(raised(limit(None, None)).is_none());
        for maximum in [Some(4096), None] {
            let set = raised(limit(Some(1024), maximum));
            assert!(set.is_some_and(|set| (set.current, set.maximum) == (maximum, maximum)));
        }
        raise();
        let now = getrlimit(Resource::Nofile);
        assert_eq!(now.current, now.maximum);
    }
}
