// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What users get wrong, as a table: arguments, the exit code, a piece of the message.
//!
//! Each row is a test: the process ends by itself, with a code and not a signal, and says what is
//! wrong with which thing.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::vmm::write_file;
use crate::harness::{Suite, Vmm, VmmBuilder, image, is_root, skip};

/// The VM could not be made or started.
const FAILED: i32 = 1;
/// The arguments are wrong.
const USAGE: i32 = 2;

/// What a row starts from; `{}` in its arguments is the folder that has these files.
struct Row {
    name: &'static str,
    arguments: &'static [&'static str],
    code: i32,
    text: &'static str,
}

const ROWS: &[Row] = &[
    Row {
        name: "kernel_missing",
        arguments: &["--kernel", "{}/none"],
        code: FAILED,
        text: "{}/none",
    },
    Row { name: "kernel_is_a_folder", arguments: &["--kernel", "{}"], code: FAILED, text: "{}" },
    Row {
        name: "kernel_is_text",
        arguments: &["--kernel", "{}/text"],
        code: FAILED,
        text: "{}/text",
    },
    Row {
        name: "kernel_is_empty",
        arguments: &["--kernel", "{}/empty"],
        code: FAILED,
        text: "{}/empty",
    },
    Row {
        name: "kernel_is_cut_off",
        arguments: &["--kernel", "{}/short-elf"],
        code: FAILED,
        text: "{}/short-elf",
    },
    Row {
        name: "kernel_is_no_pvh",
        arguments: &["--kernel", "{}/plain-elf"],
        code: FAILED,
        text: "PVH",
    },
    Row { name: "no_kernel", arguments: &["--cpus", "boot=1"], code: USAGE, text: "kernel" },
    Row {
        name: "initramfs_missing",
        arguments: &["--kernel", "{}/guest", "--initramfs", "{}/none"],
        code: FAILED,
        text: "{}/none",
    },
    Row {
        name: "initramfs_too_large",
        arguments: &["--kernel", "{}/guest", "--memory", "size=64M", "--initramfs", "{}/large"],
        code: FAILED,
        text: "{}/large",
    },
    Row {
        name: "disk_missing",
        arguments: &["--kernel", "{}/guest", "--disk", "path={}/none"],
        code: FAILED,
        text: "{}/none",
    },
    Row {
        name: "disk_is_a_folder",
        arguments: &["--kernel", "{}/guest", "--disk", "path={}"],
        code: FAILED,
        text: "{}",
    },
    Row {
        name: "disk_without_path",
        arguments: &["--kernel", "{}/guest", "--disk", "readonly=on"],
        code: USAGE,
        text: "path",
    },
    Row {
        name: "reserve_beyond_the_host",
        arguments: &["--kernel", "{}/guest", "--memory", "size=32T,reserve=on"],
        code: FAILED,
        text: "memory",
    },
    Row {
        name: "memory_of_odd_size",
        arguments: &["--kernel", "{}/guest", "--memory", "size=134217729"],
        code: USAGE,
        text: "multiple",
    },
    Row {
        name: "memory_of_no_size",
        arguments: &["--kernel", "{}/guest", "--memory", "size=0"],
        code: USAGE,
        text: "size",
    },
    Row {
        name: "memory_too_small",
        arguments: &["--kernel", "{}/guest", "--memory", "size=4K"],
        code: FAILED,
        text: "memory",
    },
    Row {
        name: "memory_beyond_addresses",
        arguments: &["--kernel", "{}/guest", "--memory", "size=17179869184G"],
        code: USAGE,
        text: "size",
    },
    Row {
        name: "hugepage_of_odd_size",
        arguments: &["--kernel", "{}/guest", "--memory", "size=128M,hugepages=on,hugepage_size=3M"],
        code: USAGE,
        text: "hugepage_size",
    },
    Row {
        name: "zones_with_one_name",
        arguments: &[
            "--kernel",
            "{}/guest",
            "--memory",
            "size=0",
            "--memory-zone",
            "id=a,size=64M",
            "id=a,size=64M",
        ],
        code: USAGE,
        text: "a",
    },
    Row {
        name: "zones_and_a_size",
        arguments: &[
            "--kernel",
            "{}/guest",
            "--memory",
            "size=64M",
            "--memory-zone",
            "id=a,size=64M",
        ],
        code: USAGE,
        text: "zone",
    },
    Row {
        name: "zone_file_missing",
        arguments: &[
            "--kernel",
            "{}/guest",
            "--memory",
            "size=0",
            "--memory-zone",
            "id=a,size=64M,file={}/none/file",
        ],
        code: FAILED,
        text: "{}/none/file",
    },
    Row {
        name: "ids_twice",
        arguments: &["--kernel", "{}/guest", "--disk", "path={}/disk,id=a", "path={}/large,id=a"],
        code: USAGE,
        text: "'a' is used twice",
    },
    Row {
        name: "slots_twice",
        arguments: &[
            "--kernel",
            "{}/guest",
            "--disk",
            "path={}/disk,pci_device_id=5",
            "path={}/large,pci_device_id=5",
        ],
        code: USAGE,
        text: "used twice",
    },
    Row {
        name: "no_vcpus",
        arguments: &["--kernel", "{}/guest", "--cpus", "boot=0"],
        code: USAGE,
        text: "boot",
    },
    Row {
        name: "max_vcpus_below_boot",
        arguments: &["--kernel", "{}/guest", "--cpus", "boot=4,max=2"],
        code: USAGE,
        text: "below",
    },
    Row {
        name: "unknown_option",
        arguments: &["--no-such-option"],
        code: USAGE,
        text: "--no-such-option",
    },
    Row {
        name: "unknown_key",
        arguments: &["--kernel", "{}/guest", "--cpus", "boots=2"],
        code: USAGE,
        text: "boots",
    },
    Row {
        name: "not_a_number",
        arguments: &["--kernel", "{}/guest", "--cpus", "boot=two"],
        code: USAGE,
        text: "two",
    },
    Row {
        name: "not_a_toggle",
        arguments: &["--kernel", "{}/guest", "--memory", "size=64M,shared=perhaps"],
        code: USAGE,
        text: "perhaps",
    },
    Row {
        name: "unsupported_device",
        arguments: &["--kernel", "{}/guest", "--vsock", "cid=3,socket=/s"],
        code: USAGE,
        text: "vsock",
    },
    Row {
        name: "unsupported_key",
        arguments: &["--kernel", "{}/guest", "--memory", "size=64M,hotplug_size=64M"],
        code: USAGE,
        text: "hotplug_size",
    },
    Row {
        name: "unsupported_firmware",
        arguments: &["--firmware", "{}/guest"],
        code: USAGE,
        text: "firmware",
    },
    Row {
        name: "restore_url",
        arguments: &["--restore", "source_url=/x"],
        code: USAGE,
        text: "file://",
    },
    Row {
        name: "restore_missing",
        arguments: &["--restore", "source_url=file:///no/such/snapshot"],
        code: FAILED,
        text: "/no/such/snapshot",
    },
    Row {
        name: "restore_and_a_vm",
        arguments: &["--restore", "source_url=file:///x", "--kernel", "{}/guest"],
        code: USAGE,
        text: "--kernel",
    },
    Row {
        name: "tap_missing",
        arguments: &["--kernel", "{}/guest", "--net", "tap=no-such-tap-0123"],
        code: USAGE,
        text: "tap",
    },
    Row {
        name: "tap_cannot_be_used",
        arguments: &["--kernel", "{}/guest", "--net", "tap=lo"],
        code: FAILED,
        text: "lo",
    },
    Row {
        name: "mac_is_none",
        arguments: &["--kernel", "{}/guest", "--net", "mac=nonsense"],
        code: USAGE,
        text: "mac",
    },
    Row {
        name: "two_ttys",
        arguments: &["--kernel", "{}/guest", "--serial", "tty", "--console", "tty"],
        code: USAGE,
        text: "tty",
    },
    Row {
        name: "serial_file_cannot_be_made",
        arguments: &["--kernel", "{}/guest", "--serial", "file={}/none/x", "--console", "off"],
        code: FAILED,
        text: "{}/none/x",
    },
    Row {
        name: "event_file_cannot_be_made",
        arguments: &["--kernel", "{}/guest", "--event-monitor", "path={}/none/x"],
        code: FAILED,
        text: "{}/none/x",
    },
    Row {
        name: "log_file_cannot_be_made",
        arguments: &["--kernel", "{}/guest", "--log-file", "{}/none/x"],
        code: FAILED,
        text: "{}/none/x",
    },
    Row {
        name: "api_socket_in_no_folder",
        arguments: &["--api-socket", "{}/none/api"],
        code: FAILED,
        text: "{}/none/api",
    },
    Row {
        name: "api_socket_is_a_file",
        arguments: &["--api-socket", "{}/text"],
        code: FAILED,
        text: "{}/text",
    },
    Row {
        name: "cmdline_too_long",
        arguments: &["--kernel", "{}/guest", "--cmdline", "{long}"],
        code: USAGE,
        text: "command line",
    },
];

pub fn add(suite: &mut Suite) {
    for row in ROWS {
        suite.add(&format!("bad_input::{}", row.name), || check(row));
    }
    suite.add("bad_input::kernel_unreadable", unreadable_kernel);
    suite.add("bad_input::no_dev_kvm", no_kvm);
    suite.add("bad_input::dev_kvm_not_permitted", kvm_not_permitted);
    suite.add("bad_input::api_socket_stale_is_replaced", stale_socket);
    suite.add("bad_input::api_socket_live_is_refused", live_socket);
    suite.add("bad_input::no_arguments_is_harmless", no_arguments);
}

fn folder() -> TempDir {
    let folder = TempDir::with_prefix("godwit-bad-").expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let guest = fs::read(image()).expect("the image");
    write_file(&at("guest"), &guest);
    write_file(&at("text"), b"this is no kernel, only a line of text");
    write_file(&at("empty"), b"");
    write_file(&at("short-elf"), &guest[..40.min(guest.len())]);
    // A program of this machine is an ELF file without a PVH note.
    let own = fs::read("/bin/true").expect("/bin/true");
    write_file(&at("plain-elf"), &own);
    for (name, bytes) in [("disk", 1 << 20), ("large", 100 << 20)] {
        fs::File::create(at(name)).and_then(|file| file.set_len(bytes)).expect("a file");
    }
    folder
}

fn fill_in(word: &str, folder: &Path) -> String {
    word.replace("{long}", &"x".repeat(5000)).replace("{}", &folder.display().to_string())
}

fn check(row: &Row) {
    let folder = folder();
    let words: Vec<String> =
        row.arguments.iter().map(|word| fill_in(word, folder.path())).collect();
    let (code, output) = VmmBuilder::new(&words).bare().run();
    expect_end(code, &output, row.code, &fill_in(row.text, folder.path()));
}

#[track_caller]
fn expect_end(code: i32, output: &str, wanted: i32, text: &str) {
    assert!(output.contains(text), "no {text:?} in the message (exit code {code}): {output}");
    assert!(!output.contains("panicked"), "{output}");
    assert_eq!(code, wanted, "{output}");
}

fn unreadable_kernel() {
    if !is_root() {
        skip("only root can start a process as somebody else");
    }
    let folder = folder();
    let kernel = folder.path().join("guest");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o000);
    fs::set_permissions(&kernel, mode).expect("permissions");
    // Root reads everything unless its capabilities are gone.
    let (code, output) = VmmBuilder::new(&["--kernel", kernel.to_str().expect("UTF-8")])
        .bare()
        .wrapped(&[
            "setpriv",
            "--bounding-set=-all",
            "--inh-caps=-all",
            "--reuid=0",
            "--no-new-privs",
        ])
        .run();
    if output.contains("setpriv:") {
        skip(format!("setpriv cannot take capabilities away here: {}", output.trim()));
    }
    expect_end(code, &output, FAILED, &kernel.display().to_string());
    assert!(output.to_lowercase().contains("permission denied"), "{output}");
}

fn no_kvm() {
    if !is_root() {
        skip("only root can hide /dev/kvm");
    }
    let folder = folder();
    let script = "mount -t tmpfs none /dev && exec \"$@\"";
    let wrapper = ["unshare", "--mount", "sh", "-c", script, "sh"];
    let (code, output) = VmmBuilder::new(&["--kernel", image()])
        .with(&["--serial", "off", "--console", "off"])
        .bare()
        .wrapped(&wrapper)
        .run();
    if output.contains("unshare:") || output.contains("mount:") {
        skip(format!("a mount namespace cannot be made here: {}", output.trim()));
    }
    drop(folder);
    expect_end(code, &output, FAILED, "/dev/kvm");
}

fn kvm_not_permitted() {
    if !is_root() {
        skip("only root can start a process as somebody else");
    }
    let mode = fs::metadata("/dev/kvm").map(|data| {
        use std::os::unix::fs::PermissionsExt as _;
        data.permissions().mode()
    });
    if mode.is_ok_and(|mode| mode & 0o006 == 0o006) {
        skip("/dev/kvm is open to everybody here");
    }
    let folder = folder();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(folder.path(), open).expect("permissions");
    let kernel = folder.path().join("guest");
    let program = folder.path().join("vmm");
    fs::copy(crate::harness::vmm::VMM, &program).expect("a copy");
    let output = std::process::Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&program)
        .args(["--serial", "off", "--console", "off", "--kernel"])
        .arg(&kernel)
        .output()
        .expect("setpriv runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    expect_end(output.status.code().unwrap_or(-1), &text, FAILED, "/dev/kvm");
    assert!(text.to_lowercase().contains("permission"), "{text}");
}

fn stale_socket() {
    let folder = folder();
    let path = folder.path().join("api");
    drop(UnixListener::bind(&path).expect("a socket"));
    assert!(path.exists());
    let socket = path.to_str().expect("UTF-8");
    let mut vmm = VmmBuilder::new(&["--api-socket", socket]).bare().spawn();
    crate::harness::wait_for("an answer at the socket that was stale", || {
        assert_eq!(vmm.exited(), None, "{}", vmm.output());
        let api = crate::harness::Api::new(&path);
        api.request("GET", "vmm.ping", None).ok().filter(|answer| answer.status == 200)
    });
}

fn live_socket() {
    let first = Vmm::empty();
    let socket = first.socket();
    let words = ["--api-socket", socket.to_str().expect("UTF-8")];
    let (code, output) = VmmBuilder::new(&words).bare().run();
    expect_end(code, &output, FAILED, words[1]);
    first.api().get("vmm.ping").ok();
    first.shut_down();
}

fn no_arguments() {
    let (code, output) = VmmBuilder::new::<&str>(&[]).bare().run();
    assert!(code == FAILED || code == USAGE, "{code}: {output}");
    assert!(output.contains("--help") || output.contains("--api-socket"), "{output}");
}
