// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! No two VMs write one disk: the lock of an image, and how it moves with a migration.

use std::fs;

use tempfile::TempDir;

use crate::harness::migrate::{Reception, failure_of, migrate, send_option};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};

pub fn add(suite: &mut Suite) {
    suite.add("locks::second_writer_is_refused", second_writer);
    suite.add("locks::readers_share", readers);
    suite.add("locks::lock_ends_with_the_vm", ends_with_the_vm);
    suite.add("locks::lock_moves_with_precopy", || moves(Mode::Precopy));
    suite.add("locks::lock_moves_with_postcopy", || moves(Mode::Postcopy));
    suite.add("locks::stays_when_a_migration_fails", stays);
}

const GUEST: &str = "workload=random-write mem=16M";
const MEMORY: &str = "size=128M,shared=on";

struct Image {
    _folder: TempDir,
    option: String,
    path: String,
}

fn disk() -> Image {
    let folder = TempDir::with_prefix("godwit-disk-").expect("a folder");
    let path = folder.path().join("disk");
    fs::File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
    let path = path.to_str().expect("UTF-8").to_owned();
    Image { _folder: folder, option: format!("path={path}"), path }
}

fn with_disk(option: &str) -> VmmBuilder {
    VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", option])
}

#[track_caller]
fn assert_locked(image: &Image) {
    let (code, output) = with_disk(&image.option).bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains(&image.path), "{output}");
    assert!(output.to_lowercase().contains("lock") || output.contains("use"), "{output}");
}

fn second_writer() {
    let image = disk();
    let first = with_disk(&image.option).start();
    first.wait_for_heartbeat();
    assert_locked(&image);
    let reader = format!("{},readonly=on", image.option);
    let (code, output) = with_disk(&reader).bare().run();
    assert_eq!(code, 1, "a reader alongside a writer: {output}");
    first.wait_for_heartbeat();
    first.shut_down();
}

fn readers() {
    let image = disk();
    let reader = format!("{},readonly=on", image.option);
    let first = with_disk(&reader).start();
    let second = with_disk(&reader).start();
    second.wait_for_heartbeat();
    assert_locked(&image);
    first.shut_down();
    second.shut_down();
}

fn ends_with_the_vm() {
    let image = disk();
    let first = with_disk(&image.option).start();
    first.guest();
    first.api().put("vm.delete", "").ok();
    let second = with_disk(&image.option).start();
    second.wait_for_heartbeat();
    second.shut_down();
    first.shut_down();
}

fn moves(mode: Mode) {
    let image = disk();
    let source = with_disk(&image.option).start();
    source.wait_for_heartbeat();
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_heartbeat();
    assert_locked(&image);
    destination.verify();
    destination.shut_down();
    let next = with_disk(&image.option).start();
    next.wait_for_heartbeat();
    next.shut_down();
}

/// The destination cannot have the image, so the guest and the lock stay where they are.
fn stays() {
    let image = disk();
    let source = with_disk(&image.option).start();
    source.wait_for_heartbeat();
    let away = format!("{}-away", image.path);
    fs::rename(&image.path, &away).expect("the image can be renamed");
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    let reason = failure_of(&source);
    assert!(reason.contains(&image.path), "the source does not name the disk: {reason}");
    let output = reception.finish();
    assert!(!output.status.success(), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains(&image.path), "the destination does not name the disk: {told}");
    fs::rename(&away, &image.path).expect("the image can be renamed");
    source.wait_for_heartbeat();
    assert_locked(&image);
    source.verify();
    source.shut_down();
    destination.shut_down();
}
