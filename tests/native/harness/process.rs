// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a process holds, from `/proc`: descriptors, mappings, memory.
//!
//! Owns the reading of those files. Must never wait for anything.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

/// What its descriptors point to, sorted, with numbers of inodes taken out.
pub fn descriptors(pid: u32) -> Vec<String> {
    descriptors_if(pid, |_| true)
}

/// Those of them that stand for a path alone (`O_PATH`).
pub fn paths(pid: u32) -> Vec<String> {
    let is_path = |number: &str| {
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
        flags.is_some_and(|flags| flags & libc::O_PATH != 0)
    };
    descriptors_if(pid, is_path)
}

fn descriptors_if(pid: u32, is_meant: impl Fn(&str) -> bool) -> Vec<String> {
    let mut targets: Vec<String> = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("the process is there")
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_str().is_some_and(&is_meant))
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|path| path.to_string_lossy().split('[').next().unwrap_or_default().to_owned())
        .collect();
    targets.sort();
    targets
}

/// Threads that it has.
pub fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there").count()
}

/// Their names, sorted.
pub fn thread_names(pid: u32) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(format!("/proc/{pid}/task"))
        .expect("the process is there")
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .collect();
    names.sort();
    names
}

/// The names of its threads and what each does, as `/proc` has it: 'R' runs or waits for a processor, 'S' sleeps, 'D' waits
/// in the kernel for what no signal interrupts.
pub fn thread_states(pid: u32) -> Vec<(String, char)> {
    let of = |stat: String| {
        // The name may hold anything, parentheses too.
        let (start, rest) = stat.rsplit_once(") ")?;
        let (_, name) = start.split_once('(')?;
        Some((name.to_owned(), rest.chars().next()?))
    };
    fs::read_dir(format!("/proc/{pid}/task"))
        .expect("the process is there")
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("stat")).ok())
        .filter_map(of)
        .collect()
}

/// Whether one of its threads waits in the kernel for what no signal interrupts.
pub fn waits_in_the_kernel(pid: u32) -> bool {
    thread_states(pid).iter().any(|(_, state)| *state == 'D')
}

/// A field of `/proc/PID/status` in KiB.
pub fn status_kib(pid: u32, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|value| value.split_ascii_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {field} in the status of {pid}"))
}

/// Memory of files without a name that a process has open.
pub fn memfds_kib(pid: u32) -> u64 {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let mut files: Vec<(u64, u64)> = entries
        .flatten()
        .filter(|entry| {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            target.to_string_lossy().starts_with("/memfd:")
        })
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .map(|file| (file.ino(), file.blocks() / 2))
        .collect();
    files.sort_unstable();
    files.dedup_by_key(|(inode, _)| *inode);
    files.iter().map(|(_, kib)| kib).sum()
}
