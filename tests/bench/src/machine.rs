// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Describes the machine on which figures were measured.

use std::fs;

/// Describes the machine: processor, number of CPUs, memory, kernel.
pub fn name() -> String {
    let field = |path: &str, name: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .find_map(|line| Some(line.strip_prefix(name)?.split_once(':')?.1.trim().to_owned()))
            .unwrap_or_else(|| "?".to_owned())
    };
    let cpus = process_facts::usable_processors();
    let kib: u64 = field("/proc/meminfo", "MemTotal")
        .split_ascii_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{}, {cpus} CPUs, {} GiB, Linux {}",
        field("/proc/cpuinfo", "model name"),
        kib.div_ceil(1 << 20),
        kernel.trim()
    )
}
