// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine whose devices are attacked.
//!
//! Owns its disks, and which devices it has. The guest leaves the last of its vCPUs idle, for what the first one cannot
//! do itself.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::harness::{Vmm, VmmBuilder, image, is_root, qcow2};

const DISK_BYTES: u64 = 16 << 20;

/// Files that several VMMs open in turn.
pub struct Disks {
    folder: TempDir,
}

impl Disks {
    pub fn new() -> Self {
        let disks = Self { folder: TempDir::with_prefix("godwit-hostile-").expect("a folder") };
        for name in ["a", "b", "pmem"] {
            disks.add(name);
        }
        fs::write(disks.path("qcow2"), qcow2::empty(DISK_BYTES)).expect("a disk");
        disks
    }

    /// Another disk.
    pub fn add(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES)).expect("a disk");
        path
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// An option with the path of a file.
    pub fn option(&self, name: &str, more: &str) -> String {
        format!("path={},{more}", self.path(name).display())
    }
}

/// A VM to be started.
pub struct Attackable<'a> {
    disks: &'a Disks,
    seed: u64,
    cpus: &'static str,
    memory: &'static str,
    orders: String,
    options: Vec<String>,
}

impl<'a> Attackable<'a> {
    /// One without devices.
    pub fn bare(disks: &'a Disks, seed: u64) -> Self {
        Self {
            disks,
            seed,
            cpus: "boot=3",
            memory: "size=256M,shared=on,hotplug_method=virtio-mem,hotplug_size=256M",
            orders: String::new(),
            options: Vec::new(),
        }
    }

    /// One with a device of each kind that moves, and needs nothing of the host but a tap.
    pub fn new(disks: &'a Disks, seed: u64) -> Self {
        let mut machine = Self::bare(disks, seed);
        let balloon =
            "size=16M,free_page_reporting=on,free_page_hinting=on,statistics_interval_s=1";
        let first = disks.option("a", "image_type=raw,queue_size=256");
        let second = disks.option("b", "image_type=raw,queue_size=256,readonly=on,num_queues=2");
        machine.add(&["--balloon", balloon, "--disk", &first, &second, "--rtc", "id=clock"]);
        machine.add_net("mac=02:00:00:00:00:01");
        machine.add_vsock("");
        machine.add(&["--watchdog", "--pmem", &format!("file={}", disks.path("pmem").display())]);
        machine
    }

    pub fn add(&mut self, options: &[&str]) {
        self.options.extend(options.iter().map(|option| (*option).to_owned()));
    }

    pub fn add_net(&mut self, option: &str) {
        if is_root() && Path::new("/dev/net/tun").exists() {
            self.add(&["--net", option]);
        }
    }

    /// A vsock, with a host program that answers a few bytes and hangs up.
    pub fn add_vsock(&mut self, more: &str) {
        let listener = UnixListener::bind(self.disks.path("vsock_1024")).expect("a listener");
        // It ends with the whole program.
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut some = [0; 512];
                // The guest may have said nothing, or have hung up.
                let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
                let len_bytes = stream.read(&mut some).unwrap_or(0);
                let _ = stream.write_all(&some[..len_bytes]);
            }
        });
        let option = format!("cid=3,socket={}{more}", self.disks.path("vsock").display());
        self.add(&["--vsock", &option]);
    }

    /// Has it attacked by these kinds alone, a bit for each, and virtio devices of this type alone, if it is not 0.
    pub fn attack(&mut self, kinds: u64, device_type: u64) {
        self.orders = format!("attacks={kinds} attacked={device_type}");
    }

    /// vCPUs and memory that can become more.
    pub fn can_grow(&mut self) {
        self.cpus = "boot=3,max=6";
        self.memory = "size=256M,shared=on,hotplug_method=acpi,hotplug_size=1G";
    }

    /// What starts it.
    pub fn builder(&self) -> VmmBuilder {
        let Self { seed, orders, .. } = self;
        let cmdline = format!(
            "workload=hostile vcpus=2 mem=64M reserve=24M verify=full seed={seed} {orders}"
        );
        println!("the guest attacks with seed {seed} {orders}");
        VmmBuilder::new(&["--serial", "null", "--console", "null", "--kernel", image()])
            .with(&["--cpus", self.cpus, "--memory", self.memory, "--cmdline", &cmdline])
            .with(&self.options)
    }

    /// Starts it.
    pub fn start(&self) -> Vmm {
        let vmm = self.builder().start();
        vmm.guest();
        vmm
    }
}
