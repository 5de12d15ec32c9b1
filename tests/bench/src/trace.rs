// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Observes through the kernel's tracing when a VMM first runs a vCPU and when its guest first
//! accesses an unassigned address. The same for every VMM, without a change to any of them.
//!
//! Owns instances of tracefs, removed when dropped. Of the marks only the two filtered events are enabled,
//! which occur a handful of times per boot. Must never be required: without tracefs its figures are
//! left out.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Instances are named so, and by the process.
const NAME: &str = "godwit-bench-";

/// Ioctl number of `KVM_RUN`.
pub const KVM_RUN: u32 = 0xae80;

/// Microseconds on the monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Marks {
    /// First `KVM_RUN`.
    pub first_run_us: Option<f64>,
    /// First access to the address.
    pub first_mmio_us: Option<f64>,
}

/// A trace of its own, with its own events and buffers.
pub struct Instance {
    folder: PathBuf,
    mounted: Option<PathBuf>,
}

impl Instance {
    /// An empty one with times of the monotonic clock.
    pub fn create() -> io::Result<Self> {
        let (root, mounted) = tracefs()?;
        remove_left(&root.join("instances"));
        let folder = root.join(format!("instances/{NAME}{}", std::process::id()));
        if let Err(error) = fs::create_dir(&folder) {
            unmount(mounted.as_deref());
            return Err(error);
        }
        let instance = Self { folder, mounted };
        instance.set("trace_clock", "mono")?;
        Ok(instance)
    }

    /// Writes one of its files.
    pub fn set(&self, name: &str, value: &str) -> io::Result<()> {
        fs::write(self.folder.join(name), value)
    }

    /// Reads one of its files.
    pub fn get(&self, name: &str) -> io::Result<String> {
        // A name of a thread can hold any bytes.
        Ok(String::from_utf8_lossy(&fs::read(self.folder.join(name))?).into_owned())
    }
}

/// Removes what benchmarks that were killed have left, one of this process's number among them: its events cost every
/// system call of the machine something.
fn remove_left(instances: &Path) {
    let left = |name: &std::ffi::OsStr| {
        let pid = name.to_str()?.strip_prefix(NAME)?.parse::<u32>().ok()?;
        let is_over =
            pid == std::process::id() || !Path::new("/proc").join(pid.to_string()).exists();
        is_over.then_some(())
    };
    for old in fs::read_dir(instances).into_iter().flatten().flatten() {
        if left(&old.file_name()).is_some() {
            let _ = fs::write(old.path().join("events/enable"), "0");
            let _ = fs::remove_dir(old.path());
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.set("events/enable", "0");
        let _ = fs::remove_dir(&self.folder);
        unmount(self.mounted.as_deref());
    }
}

/// A trace of the marks.
pub struct Trace(Instance);

impl Trace {
    /// Starts tracing; `mmio_gpa` is the address of interest.
    pub fn start(mmio_gpa: u64) -> io::Result<Self> {
        let trace = Instance::create()?;
        // Other VMs of this machine are ignored: only processes that this one starts count.
        trace.set("set_event_pid", &std::process::id().to_string())?;
        trace.set("options/event-fork", "1")?;
        trace.set("events/syscalls/sys_enter_ioctl/filter", &format!("cmd == {KVM_RUN:#x}"))?;
        trace.set("events/kvm/kvm_mmio/filter", &format!("gpa == {mmio_gpa:#x}"))?;
        trace.set("events/syscalls/sys_enter_ioctl/enable", "1")?;
        trace.set("events/kvm/kvm_mmio/enable", "1")?;
        Ok(Self(trace))
    }

    /// Clears the recorded trace.
    pub fn clear(&self) -> io::Result<()> {
        self.0.set("trace", "")
    }

    /// The times recorded since.
    pub fn marks(&self) -> io::Result<Marks> {
        Ok(parse(&self.0.get("trace")?))
    }
}

/// Path of tracefs, and the mount point if it had to be mounted for the benchmark.
fn tracefs() -> io::Result<(PathBuf, Option<PathBuf>)> {
    let usual = Path::new("/sys/kernel/tracing");
    if usual.join("instances").exists() {
        return Ok((usual.to_owned(), None));
    }
    let path = std::env::temp_dir().join(format!("godwit-tracefs-{}", std::process::id()));
    // Another user may have created that name: this fails then.
    fs::create_dir(&path)?;
    let done = Command::new("mount").args(["-t", "tracefs", "none"]).arg(&path).output()?;
    if done.status.success() {
        Ok((path.clone(), Some(path)))
    } else {
        let _ = fs::remove_dir(&path);
        Err(io::Error::other(String::from_utf8_lossy(&done.stderr).trim().to_owned()))
    }
}

/// The identifier of an event, by its folder.
pub fn event_id(name: &str) -> io::Result<u64> {
    let (root, mounted) = tracefs()?;
    let text = fs::read_to_string(root.join("events").join(name).join("id"));
    unmount(mounted.as_deref());
    text?.trim().parse().map_err(io::Error::other)
}

fn unmount(mounted: Option<&Path>) {
    if let Some(path) = mounted {
        let _ = Command::new("umount").arg(path).status();
        let _ = fs::remove_dir(path);
    }
}

/// Lines such as `vcpu0-123 [001] ..... 456.789012: kvm_mmio: mmio read len 4 gpa 0x… val 0x0`.
fn parse(text: &str) -> Marks {
    let mut marks = Marks::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let slot = if line.contains(" sys_ioctl(") || line.contains(" sys_enter_ioctl") {
            &mut marks.first_run_us
        } else if line.contains(" kvm_mmio:") {
            &mut marks.first_mmio_us
        } else {
            continue;
        };
        let seconds = line
            .split_ascii_whitespace()
            .filter_map(|word| word.strip_suffix(':'))
            .find_map(|word| word.contains('.').then(|| word.parse::<f64>().ok())?);
        if slot.is_none() {
            *slot = seconds.map(|seconds| seconds * 1e6);
        }
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_that_is_gone_has_left_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let mine = std::process::id().to_string();
        // The first process of all lives, and none has the last number.
        let (living, gone) = ("1", "4294967295");
        let numbers = [mine.as_str(), living, gone];
        let mut names: Vec<String> =
            numbers.iter().map(|number| format!("{NAME}{number}")).collect();
        names.push("other".to_owned());
        for name in names {
            fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        remove_left(folder.path());
        let there = |name: &str| folder.path().join(name).exists();
        assert!(there(&format!("{NAME}{living}")) && there("other"));
        assert!(!there(&format!("{NAME}{gone}")) && !there(&format!("{NAME}{mine}")));
    }

    #[test]
    fn lines_of_the_kernel() {
        let text = "# tracer: nop\n\
            \x20          vcpu0-901     [001] .....  1234.500100: sys_ioctl(fd: c, cmd: ae80, arg: 0)\n\
            \x20          vcpu0-901     [001] .....  1234.500900: kvm_mmio: mmio unsatisfied-read len 4 gpa 0xe0000000 val 0x0\n\
            \x20          vcpu0-901     [001] .....  1234.600000: sys_ioctl(fd: c, cmd: ae80, arg: 0)\n";
        let marks = parse(text);
        assert!((marks.first_run_us.unwrap_or(0.0) - 1_234_500_100.0).abs() < 0.5);
        assert!((marks.first_mmio_us.unwrap_or(0.0) - 1_234_500_900.0).abs() < 0.5);
        assert_eq!(parse(""), Marks::default());
    }
}
