// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Firmware: a guest that stays below 4 GiB finds its disks, and one that cannot run says so.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::harness::{Suite, VmmBuilder, image};

/// What is below the beginning of the 32-bit window is RAM, what is above its end the ECAM.
const WINDOW: std::ops::Range<u64> = 0xc000_0000..0xe800_0000;

pub fn add(suite: &mut Suite) {
    suite.add("firmware::reaches_its_disks", reaches_its_disks);
    suite.add("firmware::is_booted_by_the_api", booted_by_the_api);
    suite.add("firmware::a_kernel_is_the_same_with_a_command_line", as_a_kernel);
}

/// The test guest that stays in 32-bit mode without page tables.
fn early_guest() -> String {
    let path = Path::new(image()).with_file_name("early-guest");
    path.to_str().expect("a path in UTF-8").to_owned()
}

fn disk(folder: &Path, name: &str, sectors: u64) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).and_then(|file| file.set_len(sectors * 512)).expect("a file");
    path
}

/// The registers and the size of a disk, as the guest says them.
fn said_of_disks(said: &str) -> Vec<(u64, u64)> {
    let disks = said.lines().filter_map(|line| line.strip_prefix("disk [")?.strip_suffix(']'));
    let number = |text: &str| u64::from_str_radix(text, 16).expect("a number");
    disks
        .map(|text| {
            let (registers, sectors) =
                text.split_once(" sectors ").unwrap_or_else(|| panic!("{said}"));
            (number(registers), number(sectors))
        })
        .collect()
}

fn reaches_its_disks() {
    let folder = tempfile::tempdir().expect("a folder");
    let serial = folder.path().join("serial");
    let sizes = [2048_u64, 4096, 24];
    let mut arguments = vec!["--disk".to_owned()];
    for (name, sectors) in ["a", "b", "c"].iter().zip(sizes) {
        arguments.push(format!("path={}", disk(folder.path(), name, sectors).display()));
    }
    let serial_option = format!("file={}", serial.display());
    let (code, output) = VmmBuilder::new(&["--firmware", &early_guest(), "--console", "off"])
        .with(&["--memory", "size=64M", "--cmdline", "not for firmware"])
        .with(&["--serial", &serial_option])
        .with(&arguments)
        .run();
    let said = fs::read_to_string(&serial).expect("the serial port's file");
    assert_eq!(code, 0, "{output}\n{said}");
    assert!(said.starts_with("command line []\n") && said.ends_with("that is all\n"), "{said}");
    assert!(output.contains("payload.cmdline is left out"), "{output}");
    let disks = said_of_disks(&said);
    assert_eq!(disks.iter().map(|(_, sectors)| *sectors).collect::<Vec<_>>(), sizes, "{said}");
    assert!(disks.iter().all(|(registers, _)| WINDOW.contains(registers)), "{said}");
}

fn booted_by_the_api() {
    let folder = tempfile::tempdir().expect("a folder");
    let serial = folder.path().join("serial");
    let mut vmm = VmmBuilder::new::<&str>(&[]).start();
    let config = json!({
        "payload": {"firmware": early_guest()},
        "memory": {"size": 64 << 20},
        "disks": [{"path": disk(folder.path(), "a", 2048)}],
        "serial": {"mode": "File", "file": serial},
        "console": {"mode": "Off"},
    });
    let api = vmm.api();
    api.put("vm.create", &config.to_string()).ok();
    let kept = api.get("vm.info").ok().json();
    assert_eq!(kept["config"]["payload"]["firmware"], early_guest().as_str());
    api.put("vm.boot", "").ok();
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    let said = fs::read_to_string(&serial).expect("the serial port's file");
    assert_eq!(said_of_disks(&said).len(), 1, "{said}");
}

fn as_a_kernel() {
    let folder = tempfile::tempdir().expect("a folder");
    let serial = folder.path().join("serial");
    let serial_option = format!("file={}", serial.display());
    let (code, output) = VmmBuilder::new(&["--kernel", &early_guest(), "--console", "off"])
        .with(&["--memory", "size=64M", "--cmdline", "some words", "--serial", &serial_option])
        .run();
    let said = fs::read_to_string(&serial).expect("the serial port's file");
    assert_eq!((code, &*said), (0, "command line [some words]\nthat is all\n"), "{output}");
}
