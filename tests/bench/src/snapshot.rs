// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench snapshot`: how fast a guest's memory is written to the disk and read back, compared with the raw
//! disk in the same run with the same number of threads and size of transfers; and the time from exec of a
//! VMM that restores on demand, or maps the snapshot, to the guest's first instruction (the first `KVM_RUN`), which must not
//! depend on the size of the guest's memory.
//!
//! Owns a directory on the measured disk, which is removed at the end. The raw rate is that of O_DIRECT
//! transfers of 4 MiB in a file of the size of the data, written anew and synced each time.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_reader::{Guest, Patience};
use tempfile::TempDir;

use crate::boot::monotonic_us;
use crate::machine;
use crate::report::{Figure, Report, Target};

/// Data of each guest in MiB. The rest of its memory is never touched.
const DATA_MIB: u64 = 768;
/// Sizes of the guests in MiB.
const SIZES_MIB: [u64; 2] = [1024, 4096];
/// One transfer of the raw disk.
const TRANSFER_BYTES: usize = 4 << 20;
/// Time limit for a guest to fill its memory, or for all memory to arrive.
const LIMIT: Duration = Duration::from_mins(2);
/// Number of threads, as in the VMM.
const THREADS: usize = 4;

const ONDEMAND: &str = "ondemand: exec to first guest instruction";
const MAPPED: &str = "mapped: exec to first guest instruction";

/// A VMM process, which is ended when this is dropped.
pub struct Vmm {
    child: Child,
    remote: PathBuf,
    folder: TempDir,
    exec_us: f64,
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Vmm {
    /// Starts a VMM and waits until it answers.
    pub fn start(vmm: &Path, arguments: &[&str]) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let exec_us = monotonic_us();
        let event_path = format!("path={}", folder.path().join("events").display());
        let child = Command::new(vmm)
            .arg("--api-socket")
            .arg(folder.path().join("api"))
            .args(["--event-monitor", &event_path])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let vmm = Self { child, remote: vmm.with_file_name("ch-remote"), folder, exec_us };
        let start = Instant::now();
        while vmm.remote(&["ping"]).is_err() {
            if start.elapsed() > LIMIT {
                return Err("the VMM does not answer".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(vmm)
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives a command; returns what it printed.
    pub fn remote(&self, arguments: &[&str]) -> Result<String, Box<dyn Error>> {
        let socket = self.folder.path().join("api");
        let output =
            Command::new(&self.remote).arg("--api-socket").arg(socket).args(arguments).output()?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(format!("ch-remote {arguments:?}: {error}").into())
    }

    /// Milliseconds between two events, by the VMM's clock; waits for the second.
    pub fn between_events_ms(&self, first: &str, second: &str) -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(self.folder.path().join("events")).unwrap_or_default();
            let events: Vec<serde_json::Value> = serde_json::Deserializer::from_str(&text)
                .into_iter()
                .map_while(Result::ok)
                .collect();
            let at_ms = |name: &str| {
                let event = events.iter().find(|event| event["event"] == name)?;
                let time = &event["timestamp"];
                Some(time["secs"].as_f64()? * 1e3 + time["nanos"].as_f64()? / 1e6)
            };
            if let (Some(first), Some(second)) = (at_ms(first), at_ms(second)) {
                return Ok(second - first);
            }
            if start.elapsed() > LIMIT {
                return Err(format!("no event {second}: {text}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn megabytes_per_s(bytes: u64, seconds: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "bytes of a benchmark are below 2^52")]
    let bytes = bytes as f64;
    bytes / 1e6 / seconds
}

/// A page-aligned page, as O_DIRECT requires.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

fn with_transfers(
    file: &File,
    len_bytes: u64,
    transfer: impl Fn(&File, &mut [u8], u64) -> std::io::Result<()> + Sync,
) -> std::io::Result<()> {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let one = || {
            let mut pages = vec![Page([0x5a; 4096]); TRANSFER_BYTES / 4096];
            // SAFETY: pages are plain bytes without padding, initialised and exclusively borrowed.
            let buffer = unsafe {
                std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast::<u8>(), TRANSFER_BYTES)
            };
            loop {
                let at = next.fetch_add(TRANSFER_BYTES as u64, Ordering::Relaxed);
                if at >= len_bytes {
                    return Ok(());
                }
                transfer(file, buffer, at)?;
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(one)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("panic")))
        })
    })
}

/// Rates of writing and reading the raw disk, MB/s.
fn raw(folder: &Path, len_bytes: u64) -> Result<(f64, f64), Box<dyn Error>> {
    let path = folder.join("raw");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let start = Instant::now();
    file.set_len(len_bytes)?;
    with_transfers(&file, len_bytes, |file, buffer, at| file.write_all_at(buffer, at))?;
    file.sync_all()?;
    let write = megabytes_per_s(len_bytes, start.elapsed().as_secs_f64());
    let start = Instant::now();
    with_transfers(&file, len_bytes, File::read_exact_at)?;
    let read = megabytes_per_s(len_bytes, start.elapsed().as_secs_f64());
    fs::remove_file(path)?;
    Ok((write, read))
}

/// Bytes that the snapshot occupies on the disk.
fn data_bytes(snapshot: &Path) -> Result<u64, Box<dyn Error>> {
    use std::os::unix::fs::MetadataExt as _;
    Ok(snapshot.join("memory-ranges").metadata()?.blocks() * 512)
}

struct Saved {
    directory: PathBuf,
    bytes: u64,
    save_ms: f64,
}

/// Boots a guest, lets it fill its memory, and saves it. `sharing`: more of `--memory`.
fn save(
    vmm: &Path,
    guest: &Path,
    (mib, sharing): (u64, &str),
    directory: PathBuf,
) -> Result<Saved, Box<dyn Error>> {
    let guest = guest.to_str().ok_or("the guest's path is not UTF-8")?;
    let memory = format!("size={mib}M{sharing}");
    let cmdline = format!("workload=random-write mem={DATA_MIB}M");
    let source = Vmm::start(
        vmm,
        &[
            "--serial",
            "off",
            "--console",
            "off",
            "--kernel",
            guest,
            "--cpus",
            "boot=2",
            "--memory",
            &memory,
            "--cmdline",
            &cmdline,
        ],
    )?;
    let patience = Patience::millis(u64::try_from(LIMIT.as_millis())?);
    let running = Guest::attach_within(source.child.id(), patience)?;
    running.wait_until("the workload", patience, |status| {
        status.stage == "running"
            && status.complete()
            && status.known().all(|vcpu| vcpu.state != "prefill")
    })?;
    source.remote(&["pause"])?;
    fs::create_dir(&directory)?;
    source.remote(&["snapshot", &format!("file://{}", directory.display())])?;
    let save_ms = source.between_events_ms("snapshotting", "snapshotted")?;
    let bytes = data_bytes(&directory)?;
    Ok(Saved { directory, bytes, save_ms })
}

fn restore(vmm: &Path, saved: &Saved, mode: &str) -> Result<Vmm, Box<dyn Error>> {
    let url = format!("source_url=file://{}", saved.directory.display());
    Vmm::start(vmm, &["--restore", &format!("{url},memory_restore_mode={mode},resume=on")])
}

/// Time from exec to the first `KVM_RUN`, by the VMM's counter on the same clock. The request that the guest runs may be
/// answered before its vCPU does.
pub fn first_instruction_ms(vmm: &Vmm) -> Result<f64, Box<dyn Error>> {
    let asked = Instant::now();
    loop {
        let counters: serde_json::Value = serde_json::from_str(&vmm.remote(&["counters"])?)?;
        if let Some(first_us) = counters["__vmm"]["first_instruction_monotonic_us"].as_f64() {
            return Ok((first_us - vmm.exec_us) / 1e3);
        }
        if asked.elapsed() > LIMIT {
            return Err("the VMM does not say when its guest began".into());
        }
    }
}

#[derive(Default)]
struct Samples {
    raw_write: Vec<f64>,
    raw_read: Vec<f64>,
    save: Vec<f64>,
    copy: Vec<f64>,
    save_ratio: Vec<f64>,
    copy_ratio: Vec<f64>,
    first: [Vec<f64>; SIZES_MIB.len()],
    complete: [Vec<f64>; SIZES_MIB.len()],
    mapped: [Vec<f64>; SIZES_MIB.len()],
}

/// Runs the benchmark.
pub fn run(vmm: &Path, guest: &Path, runs: usize) -> Result<Report, Box<dyn Error>> {
    // In the directory of the binaries, because /tmp may be in memory.
    let near = vmm.parent().ok_or("the VMM has no directory")?;
    let folder = TempDir::with_prefix_in("bench-snapshot-", near)?;
    let mut samples = Samples::default();
    // One round more than counted: the first touches storage that the host has not allocated yet.
    for round in 0..=runs {
        let one = measure(vmm, guest, folder.path())?;
        if round > 0 {
            samples.add(one);
        }
    }
    Ok(report(samples))
}

impl Samples {
    fn add(&mut self, other: Self) {
        self.raw_write.extend(other.raw_write);
        self.raw_read.extend(other.raw_read);
        self.save.extend(other.save);
        self.copy.extend(other.copy);
        self.save_ratio.extend(other.save_ratio);
        self.copy_ratio.extend(other.copy_ratio);
        for (all, one) in self.first.iter_mut().zip(other.first) {
            all.extend(one);
        }
        for (all, one) in self.complete.iter_mut().zip(other.complete) {
            all.extend(one);
        }
        for (all, one) in self.mapped.iter_mut().zip(other.mapped) {
            all.extend(one);
        }
    }
}

fn measure(vmm: &Path, guest: &Path, folder: &Path) -> Result<Samples, Box<dyn Error>> {
    let mut samples = Samples::default();
    for (index, mib) in SIZES_MIB.into_iter().enumerate() {
        let saved = save(vmm, guest, (mib, ",shared=on"), folder.join(format!("snapshot-{mib}")))?;
        if index == 0 {
            let (write, read) = raw(folder, saved.bytes.next_multiple_of(TRANSFER_BYTES as u64))?;
            let saving = megabytes_per_s(saved.bytes, saved.save_ms / 1e3);
            let copied = restore(vmm, &saved, "copy")?;
            let copy_ms = copied.between_events_ms("restoring", "restored")?;
            let copying = megabytes_per_s(saved.bytes, copy_ms / 1e3);
            samples.raw_write.push(write);
            samples.raw_read.push(read);
            samples.save.push(saving);
            samples.copy.push(copying);
            samples.save_ratio.push(saving / write);
            samples.copy_ratio.push(copying / read);
        }
        let ondemand = restore(vmm, &saved, "ondemand")?;
        let (first, complete) = (samples.first.get_mut(index), samples.complete.get_mut(index));
        if let (Some(first), Some(complete)) = (first, complete) {
            first.push(first_instruction_ms(&ondemand)?);
            complete.push(ondemand.between_events_ms("restoring", "restore-memory-completed")?);
        }
        drop(ondemand);
        fs::remove_dir_all(&saved.directory)?;
        // A mapping is of private memory.
        let saved = save(vmm, guest, (mib, ""), folder.join(format!("template-{mib}")))?;
        let mapped = restore(vmm, &saved, "mapped")?;
        if let Some(first) = samples.mapped.get_mut(index) {
            first.push(first_instruction_ms(&mapped)?);
        }
        drop(mapped);
        fs::remove_dir_all(&saved.directory)?;
    }
    Ok(samples)
}

fn report(samples: Samples) -> Report {
    let mut figures = Vec::new();
    let mut put = |name: String, unit, values| {
        let figure = Figure::of(name, unit, values);
        let value = figure.as_ref().map(|figure| figure.value);
        figures.extend(figure);
        value
    };
    put("raw disk, write and sync".to_owned(), "MB/s", samples.raw_write);
    put("snapshot, data written".to_owned(), "MB/s", samples.save);
    let save = put("snapshot over raw write".to_owned(), "", samples.save_ratio);
    put("raw disk, read".to_owned(), "MB/s", samples.raw_read);
    put("restore copy, data read".to_owned(), "MB/s", samples.copy);
    let copy = put("restore copy over raw read".to_owned(), "", samples.copy_ratio);
    let mut first = Vec::new();
    for (mib, values) in SIZES_MIB.into_iter().zip(samples.first) {
        first.extend(put(format!("{mib} MiB, {ONDEMAND}"), "ms", values));
    }
    for (mib, values) in SIZES_MIB.into_iter().zip(samples.complete) {
        put(format!("{mib} MiB, ondemand: until all memory is here"), "ms", values);
    }
    let mut mapped = Vec::new();
    for (mib, values) in SIZES_MIB.into_iter().zip(samples.mapped) {
        mapped.extend(put(format!("{mib} MiB, {MAPPED}"), "ms", values));
    }
    let mut targets = Vec::new();
    if let &[_, large] = mapped.as_slice() {
        targets.push(Target::at_most(
            "mapped, first guest instruction, 4 GiB guest (ms)",
            large,
            50.0,
        ));
    }
    if let &[small, large] = first.as_slice() {
        targets.push(Target::at_most("first guest instruction, 4 GiB guest (ms)", large, 50.0));
        targets.push(Target::at_most(
            "first guest instruction, 4 GiB over 1 GiB",
            large / small,
            1.2,
        ));
    }
    let notes = [("snapshot", save), ("restore copy", copy)]
        .into_iter()
        .filter_map(|(what, ratio)| {
            Some(format!("{what} runs at {:.0} % of the raw disk's rate", ratio? * 100.0))
        })
        .collect();
    Report { name: "snapshot", machine: machine::name(), figures, targets, notes }
}
