// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How memory is populated beside changes of the process's address space.
//!
//! `MADV_POPULATE_WRITE` holds the lock of the address space (`mmap_lock`) while it allocates and clears pages. Whatever
//! changes the address space meanwhile, such as VFIO's accounting of each run of pages that it pins or the start of a
//! thread, waits for all threads that populate, and those that come later wait behind it. On newer kernels a page fault
//! takes the lock of one mapping instead, which nothing else wants, and collapsing takes `mmap_lock` for moments.
//!
//! A fault that finds no page within the limit of a cgroup is repeated by the kernel until there is one, where the advice
//! fails. The OOM killer acts first, but not where it may kill nothing in the cgroup: then a thread that populates
//! repeats its fault for as long as that holds.
//!
//! Owns which kernels and which kinds of memory have that. Must answer no when in doubt.

use std::sync::OnceLock;

use crate::host::Host;

/// Linux 6.7 is the first whose faults in shared memory take the lock of the mapping alone.
const FAULTS_SINCE: Release = (6, 7);
/// The same for hugetlb pages.
const HUGETLB_FAULTS_SINCE: Release = (6, 10);
/// Before Linux 6.6 collapsing shared memory takes `mmap_lock` for writing, block by block.
const COLLAPSE_SINCE: Release = (6, 6);

/// Version and patch level of a kernel.
type Release = (u32, u32);

/// What holds the lock of the address space for moments only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sparing {
    /// Page faults.
    Faults,
    /// Collapsing, which such memory needs in any case.
    Collapse,
    /// Nothing.
    None,
}

impl Sparing {
    /// For memory of this kind on this host.
    pub fn of(host: &Host, hugetlb: bool, collapse: bool) -> Self {
        Self::on(running_release(), hugetlb, collapse, || host.charges_hugetlb())
    }

    fn on(
        release: Option<Release>,
        hugetlb: bool,
        collapse: bool,
        charges_hugetlb: impl FnOnce() -> bool,
    ) -> Self {
        let is_since = |since| release.is_some_and(|release| release >= since);
        match (collapse, hugetlb) {
            (true, _) if is_since(COLLAPSE_SINCE) => Self::Collapse,
            (false, false) if is_since(FAULTS_SINCE) => Self::Faults,
            // The OOM killer does not act for them.
            (false, true) if is_since(HUGETLB_FAULTS_SINCE) && !charges_hugetlb() => Self::Faults,
            _ => Self::None,
        }
    }
}

impl Host {
    /// Whether hugetlb pages are charged to memory cgroups (`memory_hugetlb_accounting` of cgroup2).
    fn charges_hugetlb(&self) -> bool {
        let mounts = Self::read(&self.proc.join("self/mounts")).unwrap_or_default();
        let mut mounted = mounts.lines().filter(|line| line.split(' ').nth(2) == Some("cgroup2"));
        if let Some(line) = mounted.next() {
            return line.contains("memory_hugetlb_accounting");
        }
        // It may be mounted where this process does not see it.
        let groups = Self::read(&self.proc.join("self/cgroup"));
        groups.is_none_or(|groups| process_facts::Cgroups::of(&groups).unified().is_some())
    }
}

/// Version and patch level of the running kernel, if it says.
pub fn running_release() -> Option<Release> {
    static RELEASE: OnceLock<Option<Release>> = OnceLock::new();
    *RELEASE.get_or_init(|| {
        let mut names = std::mem::MaybeUninit::<libc::utsname>::uninit();
        // SAFETY: writes to the structure it is given, which lives during the call.
        if unsafe { libc::uname(names.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call that succeeded has filled it.
        let names = unsafe { names.assume_init() };
        let text: Vec<u8> = names.release.iter().map(|unit| unit.cast_unsigned()).collect();
        parse_release(&String::from_utf8_lossy(&text))
    })
}

/// The first two numbers of a kernel's name like `6.12.48+deb13-amd64`; `None` if they are not there.
pub fn parse_release(text: &str) -> Option<Release> {
    let mut numbers = text.split(|unit: char| !unit.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn what_spares_the_lock_on_which_kernel() {
        let of =
            |release, hugetlb, collapse| Sparing::on(Some(release), hugetlb, collapse, || false);
        assert_eq!(of((6, 6), false, false), Sparing::None);
        assert_eq!(of((6, 7), false, false), Sparing::Faults);
        assert_eq!(of((7, 0), false, false), Sparing::Faults);
        assert_eq!(of((6, 9), true, false), Sparing::None);
        assert_eq!(of((6, 10), true, false), Sparing::Faults);
        assert_eq!(of((6, 1), false, true), Sparing::None);
        assert_eq!(of((6, 6), false, true), Sparing::Collapse);
        assert_eq!(Sparing::on(None, false, false, || false), Sparing::None);
        assert_eq!(Sparing::on(Some((6, 12)), true, false, || true), Sparing::None);
        assert_eq!(Sparing::on(Some((6, 12)), false, false, || true), Sparing::Faults);
    }

    #[test]
    fn two_numbers_of_a_kernels_name() {
        assert_eq!(parse_release("6.12.48+deb13-amd64\0\0"), Some((6, 12)));
        assert_eq!(parse_release("6.7-rc1"), Some((6, 7)));
        assert_eq!(parse_release("7.0"), Some((7, 0)));
        for text in ["", "6", "x.y", "\0", "99999999999.1"] {
            assert_eq!(parse_release(text), None, "{text}");
        }
        assert!(running_release().is_some());
    }

    #[test]
    fn cgroups_that_are_charged_for_hugetlb_pages_are_found() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::pretended(root.path());
        assert!(host.charges_hugetlb(), "not known");
        let process = root.path().join("proc/self");
        std::fs::create_dir_all(&process).unwrap();
        std::fs::write(process.join("mounts"), "proc /proc proc rw 0 0\n").unwrap();
        std::fs::write(process.join("cgroup"), "0::/vms\n").unwrap();
        assert!(host.charges_hugetlb(), "mounted elsewhere");
        std::fs::write(process.join("cgroup"), "4:memory:/vms\n").unwrap();
        assert!(!host.charges_hugetlb(), "there is no cgroup2");
        let write = |options: &str| {
            let line = format!("cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid{options} 0 0\n");
            std::fs::write(process.join("mounts"), line).unwrap();
        };
        write(",nsdelegate,memory_recursiveprot");
        assert!(!host.charges_hugetlb());
        write(",nsdelegate,memory_hugetlb_accounting");
        assert!(host.charges_hugetlb());
    }
}
