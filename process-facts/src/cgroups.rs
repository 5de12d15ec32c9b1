// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control groups of a process.
//!
//! Owns the form of `/proc/PID/cgroup`, and which folders limit a process whose group has a path: that of the group and of
//! all above. Must never look whether such a folder is there.

use std::iter::successors;
use std::path::{Path, PathBuf};

/// Where control groups are.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The control groups of a process, by the text of its `cgroup` in `/proc`.
#[derive(Clone, Copy, Debug)]
pub struct Cgroups<'a>(&'a str);

/// A line of that text.
struct Hierarchy<'a> {
    number: &'a str,
    controllers: &'a str,
    path: &'a str,
}

impl<'a> Cgroups<'a> {
    /// Those in such a text.
    pub fn of(text: &'a str) -> Self {
        Self(text)
    }

    fn hierarchies(self) -> impl Iterator<Item = Hierarchy<'a>> {
        self.0.lines().filter_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            Some(Hierarchy { number, controllers, path })
        })
    }

    /// The path of the group in each hierarchy.
    pub fn paths(self) -> impl Iterator<Item = &'a str> {
        self.hierarchies().map(|hierarchy| hierarchy.path)
    }

    /// The path in the hierarchy of version 2, as the kernel writes it: one that begins with `/..` is outside of this
    /// process's namespace.
    pub fn unified(self) -> Option<&'a str> {
        let is_unified =
            |hierarchy: &Hierarchy<'_>| (hierarchy.number, hierarchy.controllers) == ("0", "");
        self.hierarchies().find(is_unified).map(|hierarchy| hierarchy.path)
    }

    /// The path in the hierarchy of version 1 that has a controller, after the names of all of its controllers.
    pub fn with_controller(self, name: &str) -> Option<(&'a str, &'a str)> {
        let has = |hierarchy: &Hierarchy<'_>| hierarchy.controllers.split(',').any(|it| it == name);
        self.hierarchies().find(has).map(|hierarchy| (hierarchy.controllers, hierarchy.path))
    }
}

/// The folder of the group with this path in the hierarchy at `root`, and those of all above: each counts what those below
/// use. None if the path leads out of the hierarchy.
pub fn groups_in(root: &Path, path: &str) -> impl Iterator<Item = PathBuf> {
    let is_inside = path.starts_with('/') && !path.split('/').any(|part| part == "..");
    let own = is_inside.then(|| path.trim_matches('/'));
    successors(own, above).map(|path| match path {
        "" => root.to_owned(),
        path => root.join(path),
    })
}

/// The path of the group above, of which the topmost is empty.
fn above<'a>(path: &&'a str) -> Option<&'a str> {
    match path.rsplit_once('/') {
        Some((above, _)) => Some(above.trim_end_matches('/')),
        None => (!path.is_empty()).then_some(""),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_process_has_a_group_in_one_hierarchy_or_several() {
        let groups = Cgroups::of("0::/user.slice/a.scope\n");
        assert_eq!(groups.unified(), Some("/user.slice/a.scope"));
        assert_eq!(groups.with_controller("cpu"), None);
        assert_eq!(groups.with_controller(""), Some(("", "/user.slice/a.scope")), "no controllers");
        let groups = Cgroups::of("rubbish\n4:cpu,cpuacct:/x:y\n1:name=systemd:/z\n0::/../w\n");
        assert_eq!(groups.unified(), Some("/../w"));
        for name in ["cpu", "cpuacct"] {
            assert_eq!(groups.with_controller(name), Some(("cpu,cpuacct", "/x:y")), "{name}");
        }
        for name in ["c", "cpu,cpuacct", "systemd"] {
            assert_eq!(groups.with_controller(name), None, "{name}");
        }
        assert_eq!(groups.paths().collect::<Vec<_>>(), ["/x:y", "/z", "/../w"]);
        assert_eq!(Cgroups::of("3:cpu:/a\n10::/b\n").unified(), None);
        assert_eq!(Cgroups::of("").unified(), None);
    }

    #[test]
    fn a_group_is_limited_by_all_above() {
        let of = |path: &str| groups_in(Path::new("/r"), path).collect::<Vec<_>>();
        let folders = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(
            of("/a/b.service/c"),
            folders(&["/r/a/b.service/c", "/r/a/b.service", "/r/a", "/r"])
        );
        assert_eq!(of("/a..b"), folders(&["/r/a..b", "/r"]));
        assert_eq!(of("/"), folders(&["/r"]));
        for outside in ["", "a", "/..", "/../a", "/a/../../b"] {
            assert_eq!(of(outside), folders(&[]), "{outside}");
        }
    }

    proptest! {
        #[test]
        fn no_text_leads_out_of_a_hierarchy(text in "[0-2:,a./\n]{0,80}") {
            let root = Path::new("/r");
            let groups = Cgroups::of(&text);
            for path in groups.paths().chain(groups.unified()) {
                let all: Vec<_> = groups_in(root, path).collect();
                for folder in &all {
                    let below = folder.strip_prefix(root).map(Path::to_path_buf);
                    let leads_out = |below: &Path| below.components().any(|part| part.as_os_str() == "..");
                    prop_assert!(below.is_ok_and(|below| !leads_out(&below)), "{path}: {folder:?}");
                }
                prop_assert!(all.last().is_none_or(|last| last == root), "{path}: {all:?}");
            }
        }
    }
}
