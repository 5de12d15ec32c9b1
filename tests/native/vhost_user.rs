// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disks that another process serves over vhost-user: their contents, and what a VM does when that process fails.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};

use guest_reader::abi::{self, disk::BLOCKS, param};
use serde_json::json;
use tempfile::TempDir;

use crate::disks::{DISK_BYTES, MEMORY, holds, write_more, written};
use crate::harness::{Suite, Vmm, VmmBuilder};

pub fn add(suite: &mut Suite) {
    suite.add("vhost_user::a_disk_has_what_the_guest_wrote", contents);
    suite.add("vhost_user::a_disk_comes_and_goes", hotplug);
    suite.add("vhost_user::a_vm_outlives_its_back_end", killed);
    suite.add("vhost_user::a_back_end_that_hangs_is_left_behind", hung);
    suite.add("vhost_user::what_cannot_be_is_refused_by_name", refusals);
    suite.add("vhost_user::a_back_end_that_is_silent_ends_the_start", silent);
}

const GUEST: &str = "workload=disk-write mem=16M";
/// The first argument of this program as a back end.
const SERVE: &str = "serve-vhost-user-disk";

/// This program as a back end: it serves an image to one VMM after the other.
pub fn serve_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != SERVE {
        return None;
    }
    let (socket, image) = (PathBuf::from(arguments.next()?), PathBuf::from(arguments.next()?));
    loop {
        if let Err(error) = vhost_user_disk::serve(&socket, &image, 2) {
            eprintln!("the back end ends: {error}");
            return Some(ExitCode::FAILURE);
        }
    }
}

/// A back end, which is killed in the end.
pub struct BackEnd {
    arguments: Vec<OsString>,
    process: Child,
    folder: TempDir,
}

impl BackEnd {
    /// One that serves a disk.
    pub fn start() -> Self {
        let folder = TempDir::with_prefix("godwit-vhost-user-").expect("a folder");
        let image = folder.path().join("image");
        File::create(&image).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
        let socket = folder.path().join("socket");
        Self::serve(folder, vec![SERVE.into(), socket.into(), image.into()])
    }

    /// This program with these arguments, in a folder that has the socket.
    pub fn serve(folder: TempDir, arguments: Vec<OsString>) -> Self {
        let process = spawn(&arguments);
        Self { arguments, process, folder }
    }

    /// Another one in its place, which was killed.
    pub fn again(&mut self) {
        self.process = spawn(&self.arguments);
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn option(&self) -> String {
        disk_at(&self.socket())
    }

    pub fn signal(&self, signal: i32) {
        let process = i32::try_from(self.process.id()).expect("a process ID");
        // SAFETY: plain values, and the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(process, signal) }, 0);
    }

    pub fn kill(&mut self) {
        self.process.kill().and_then(|()| self.process.wait()).expect("it ends");
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // It may have been killed by the test.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(arguments: &[OsString]) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program).args(arguments).spawn().expect("a process")
}

fn disk_at(socket: &Path) -> String {
    format!("vhost_user=on,socket={},id=data", socket.display())
}

fn guest(option: &str) -> VmmBuilder {
    VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", option])
}

fn contents() {
    let back_end = BackEnd::start();
    let vmm = guest(&back_end.option()).start();
    write_more(&vmm, 2 * BLOCKS);
    let api = vmm.api();
    for _ in 0..3 {
        api.put("vm.pause", "").ok();
        // Nothing is in flight.
        let acknowledged = written(&vmm);
        holds(&back_end.image(), acknowledged);
        api.put("vm.resume", "").ok();
        write_more(&vmm, BLOCKS);
    }
    let counters = api.get("vm.counters").ok().json();
    assert!(counters["data"]["interrupts"].as_u64() > Some(0), "{counters}");
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 2 * BLOCKS);
    api.put("vm.pause", "").ok();
    let acknowledged = written(&vmm);
    vmm.shut_down();
    holds(&back_end.image(), acknowledged);
}

fn hotplug() {
    let back_end = BackEnd::start();
    // The second vCPU is what the guest lets go with.
    let vmm = Vmm::boot(2, MEMORY, "workload=idle mem=16M vcpus=1");
    let api = vmm.api();
    let disk = json!({"vhost_user": true, "vhost_socket": back_end.socket(), "id": "data", "pci_device_id": 9});
    api.put("vm.add-disk", &disk.to_string()).ok();
    vmm.guest().set("workload=disk-write").expect("it listens");
    write_more(&vmm, 2 * BLOCKS);
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    vmm.wait_for_event("device-removing");
    let guest = vmm.guest();
    guest.memory().set_word(abi::PARAM_GPA + param::EJECT, 1 << 9).expect("the parameter page");
    vmm.wait_for_event("device-removed");
    // The guest has stopped writing before it let go.
    holds(&back_end.image(), written(&vmm));
    let info = api.get("vm.info").ok().json();
    assert!(info["config"]["disks"].is_null(), "{info}");
    // The back end is free for the next.
    api.put("vm.add-disk", &disk.to_string()).ok();
    vmm.shut_down();
}

fn killed() {
    let mut back_end = BackEnd::start();
    let vmm = guest(&back_end.option()).start();
    write_more(&vmm, 1);
    back_end.kill();
    let event = vmm.wait_for_event("back-end-lost");
    assert_eq!(event["properties"]["id"], "data", "{event}");
    let api = vmm.api();
    api.put("vm.pause", "").ok();
    api.put("vm.resume", "").ok();
    // With another back end at the same place the next guest has a disk again.
    back_end.again();
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 2 * BLOCKS);
    vmm.shut_down();
}

/// The inodes of the files that are guest memory.
pub fn memory_of(vmm: &Vmm) -> Vec<u64> {
    let folder = format!("/proc/{}/fd", vmm.pid());
    let files = std::fs::read_dir(folder).expect("its descriptors").flatten().map(|it| it.path());
    let is_memory = |file: &PathBuf| {
        let target = std::fs::read_link(file).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:ram-")
    };
    let inode = |file: PathBuf| std::fs::metadata(file).expect("a memfd").ino();
    let mut inodes: Vec<_> = files.filter(is_memory).map(inode).collect();
    inodes.sort_unstable();
    inodes
}

fn hung() {
    let back_end = BackEnd::start();
    let vmm = guest(&back_end.option()).start();
    let api = vmm.api();
    let memory = memory_of(&vmm);
    assert!(!memory.is_empty());
    write_more(&vmm, 1);
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 1);
    assert_eq!(memory_of(&vmm), memory, "a reboot keeps the memory");
    back_end.signal(libc::SIGSTOP);
    // The driver's requests are in the back end, which has the memory mapped and is not told any more to stop.
    api.put("vm.pause", "").ok();
    let event = vmm.wait_for_event("back-end-lost");
    assert_eq!(event["properties"]["id"], "data", "{event}");
    let why = event["properties"]["error"].to_string();
    assert!(why.contains("has not answered"), "{event}");
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    api.put("vm.reboot", "").ok();
    let after = memory_of(&vmm);
    assert!(!after.iter().any(|inode| memory.contains(inode)), "{after:?} of {memory:?}");
    back_end.signal(libc::SIGCONT);
    vmm.shut_down();
}

fn refusals() {
    let back_end = BackEnd::start();
    let option = back_end.option();
    let private = VmmBuilder::guest(1, "size=128M", GUEST).with(&["--disk", &option]);
    let (code, output) = private.bare().run();
    assert!(code != 0 && output.contains("shared=on"), "{code}: {output}");
    let (code, output) = guest(&format!("{option},path=/dev/null")).bare().run();
    assert!(code != 0 && output.contains("exclude each other"), "{code}: {output}");
    let more =
        VmmBuilder::guest(4, MEMORY, GUEST).with(&["--disk", &format!("{option},num_queues=4")]);
    let (code, output) = more.bare().run();
    assert!(code != 0 && output.contains("serves 2 queues at most"), "{code}: {output}");

    let vmm = guest(&option).start();
    write_more(&vmm, 1);
    let api = vmm.api();
    let url = format!("file://{}", back_end.folder.path().join("snapshot").display());
    for (request, body) in [
        ("vm.send-migration", json!({"destination_url": "unix:/nowhere"})),
        ("vm.snapshot", json!({"destination_url": url})),
    ] {
        api.put("vm.pause", "").ok();
        let answer = api.put(request, &body.to_string());
        assert!(answer.status >= 400 && answer.body.contains("'data'"), "{request}: {answer:?}");
        assert!(answer.body.contains("vhost-user"), "{request}: {answer:?}");
        api.put("vm.resume", "").ok();
    }
    write_more(&vmm, 1);
    vmm.shut_down();
}

fn silent() {
    let folder = TempDir::with_prefix("godwit-vhost-user-").expect("a folder");
    let socket = folder.path().join("socket");
    // The kernel takes the connection, and nothing answers.
    let _listener = UnixListener::bind(&socket).expect("a listener");
    let (code, output) = guest(&disk_at(&socket)).bare().run();
    assert!(code != 0 && output.contains("has not answered GET_FEATURES"), "{code}: {output}");
    assert!(output.contains("'data'"), "{output}");
}
