// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What users get wrong, as a table: arguments, the exit code, a piece of the message.
//!
//! Each row is a test: the process ends by itself, with a code and not a signal, and says what is
//! wrong with which thing.

use std::fs;
use std::os::fd::AsRawFd as _;
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
    /// Whether the test guest comes before the arguments.
    of_guest: bool,
    arguments: Words,
    code: i32,
    text: &'static str,
}

type Words = &'static [&'static str];

const fn row(name: &'static str, arguments: Words, code: i32, text: &'static str) -> Row {
    Row { name, of_guest: false, arguments, code, text }
}

/// Of a VM that would boot without what follows.
const fn of_guest(name: &'static str, arguments: Words, code: i32, text: &'static str) -> Row {
    Row { name, of_guest: true, arguments, code, text }
}

const ROWS: &[Row] = &[
    row("kernel_missing", &["--kernel", "{}/none"], FAILED, "{}/none"),
    row("kernel_is_a_folder", &["--kernel", "{}"], FAILED, "{}"),
    row("kernel_is_text", &["--kernel", "{}/text"], FAILED, "{}/text"),
    row("kernel_is_empty", &["--kernel", "{}/empty"], FAILED, "{}/empty"),
    row("kernel_is_cut_off", &["--kernel", "{}/short-elf"], FAILED, "{}/short-elf"),
    row("kernel_is_no_pvh", &["--kernel", "{}/plain-elf"], FAILED, "PVH"),
    row("no_kernel", &["--cpus", "boot=1"], USAGE, "kernel"),
    of_guest("initramfs_missing", &["--initramfs", "{}/none"], FAILED, "{}/none"),
    of_guest(
        "initramfs_too_large",
        &["--memory", "size=64M", "--initramfs", "{}/large"],
        FAILED,
        "{}/large",
    ),
    of_guest("disk_missing", &["--disk", "path={}/none"], FAILED, "{}/none"),
    of_guest("disk_is_a_folder", &["--disk", "path={}"], FAILED, "{}"),
    of_guest("disk_without_path", &["--disk", "readonly=on"], USAGE, "path"),
    of_guest("device_without_path", &["--device", "id=gpu"], USAGE, "path"),
    of_guest(
        "device_with_a_bar_that_is_none",
        &["--device", "path=/x,x_exclude_mmap_bars=[6]"],
        USAGE,
        "x_exclude_mmap_bars",
    ),
    of_guest("device_missing", &["--device", "path={}/none"], FAILED, "pass"),
    // Refused for its addresses, before it is looked for a group or a driver.
    of_guest(
        "device_cannot_reach_all_memory",
        &["--memory", "size=1013G,high_hole=off", "--device", "path={}/behind-amd"],
        FAILED,
        "guest memory at 0xfd00000000",
    ),
    of_guest(
        "device_cannot_reach_memory_that_comes_later",
        &[
            "--memory",
            "size=1G,high_hole=off,hotplug_method=virtio-mem,hotplug_size=1013G",
            "--device",
            "path={}/behind-amd",
        ],
        FAILED,
        "high_hole=hypertransport",
    ),
    of_guest(
        "device_has_its_hole_in_memory",
        &["--memory", "size=1013G", "--device", "path={}/behind-amd"],
        FAILED,
        "is in no IOMMU group",
    ),
    of_guest("reserve_beyond_the_host", &["--memory", "size=32T,reserve=on"], FAILED, "memory"),
    of_guest("memory_of_odd_size", &["--memory", "size=134217729"], USAGE, "multiple"),
    of_guest("memory_of_no_size", &["--memory", "size=0"], USAGE, "size"),
    of_guest("memory_too_small", &["--memory", "size=4K"], FAILED, "memory"),
    of_guest("memory_beyond_addresses", &["--memory", "size=17179869184G"], USAGE, "size"),
    of_guest(
        "hugepage_of_odd_size",
        &["--memory", "size=128M,hugepages=on,hugepage_size=3M"],
        USAGE,
        "hugepage_size",
    ),
    of_guest(
        "zones_with_one_name",
        &["--memory", "size=0", "--memory-zone", "id=a,size=64M", "id=a,size=64M"],
        USAGE,
        "a",
    ),
    of_guest(
        "zones_and_a_size",
        &["--memory", "size=64M", "--memory-zone", "id=a,size=64M"],
        USAGE,
        "zone",
    ),
    of_guest(
        "zone_file_missing",
        &["--memory", "size=0", "--memory-zone", "id=a,size=64M,file={}/none/file"],
        FAILED,
        "{}/none/file",
    ),
    of_guest(
        "ids_twice",
        &["--disk", "path={}/disk,id=a", "path={}/large,id=a"],
        USAGE,
        "'a' is used twice",
    ),
    of_guest(
        "slots_twice",
        &["--disk", "path={}/disk,pci_device_id=5", "path={}/large,pci_device_id=5"],
        USAGE,
        "used twice",
    ),
    of_guest("no_vcpus", &["--cpus", "boot=0"], USAGE, "boot"),
    of_guest("topology_with_gaps", &["--cpus", "boot=165,topology=1:33:1:5"], USAGE, "288"),
    of_guest("max_vcpus_below_boot", &["--cpus", "boot=4,max=2"], USAGE, "below"),
    row("unknown_option", &["--no-such-option"], USAGE, "--no-such-option"),
    of_guest("unknown_key", &["--cpus", "boots=2"], USAGE, "boots"),
    of_guest("not_a_number", &["--cpus", "boot=two"], USAGE, "two"),
    of_guest("not_a_toggle", &["--memory", "size=64M,shared=perhaps"], USAGE, "perhaps"),
    of_guest("user_device_private", &["--user-device", "socket=/s"], USAGE, "shared=on"),
    of_guest("vdpa_behind_an_iommu", &["--vdpa", "path=/s,iommu=on"], USAGE, "iommu"),
    of_guest("vdpa_missing", &["--vdpa", "path={}/none"], FAILED, "cannot open {}/none"),
    of_guest("vdpa_of_another_kind", &["--vdpa", "path=/dev/null"], FAILED, "VHOST_SET_OWNER"),
    of_guest(
        "zone_with_memory_devices",
        &["--memory", "size=0", "--memory-zone", "id=a,size=64M,hotplug_size=128M"],
        USAGE,
        "hotplug_method=virtio-mem",
    ),
    of_guest("firmware_beside_a_kernel", &["--firmware", "{}/guest"], USAGE, "not both"),
    row(
        "firmware_larger_than_its_place",
        &["--firmware", "{}/guest", "--memory", "size=2M"],
        FAILED,
        "{}/guest",
    ),
    row("firmware_missing", &["--firmware", "{}/none"], FAILED, "firmware {}/none"),
    row("unsupported_igvm", &["--igvm", "{}/guest"], USAGE, "igvm"),
    row("restore_url", &["--restore", "source_url=/x"], USAGE, "file://"),
    row(
        "restore_missing",
        &["--restore", "source_url=file:///no/such/snapshot"],
        FAILED,
        "/no/such/snapshot",
    ),
    of_guest("restore_and_a_vm", &["--restore", "source_url=file:///x"], USAGE, "--kernel"),
    of_guest("tap_missing", &["--net", "tap=no-such-tap-0123"], USAGE, "tap"),
    of_guest("tap_cannot_be_used", &["--net", "tap=lo"], FAILED, "lo"),
    of_guest("mac_is_none", &["--net", "mac=nonsense"], USAGE, "mac"),
    of_guest("two_ttys", &["--serial", "tty", "--console", "tty"], USAGE, "tty"),
    of_guest(
        "serial_file_cannot_be_made",
        &["--serial", "file={}/none/x", "--console", "off"],
        FAILED,
        "{}/none/x",
    ),
    of_guest(
        "event_file_cannot_be_made",
        &["--event-monitor", "path={}/none/x"],
        FAILED,
        "{}/none/x",
    ),
    of_guest("log_file_cannot_be_made", &["--log-file", "{}/none/x"], FAILED, "{}/none/x"),
    row("api_socket_in_no_folder", &["--api-socket", "{}/none/api"], FAILED, "{}/none/api"),
    row("api_socket_is_a_file", &["--api-socket", "{}/text"], FAILED, "{}/text"),
    of_guest("cmdline_too_long", &["--cmdline", "{long}"], USAGE, "command line"),
];

pub fn add(suite: &mut Suite) {
    for row in ROWS {
        suite.add(&format!("bad_input::{}", row.name), || check(row));
    }
    suite.add("bad_input::kernel_unreadable", unreadable_kernel);
    suite.add("bad_input::no_dev_kvm", no_kvm);
    suite.add("bad_input::dev_kvm_not_permitted", kvm_not_permitted);
    suite.add("bad_input::hyperv_where_kvm_has_none", kvm_without_hyperv);
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
    // What sysfs says of a device behind an IOMMU of AMD's.
    fs::create_dir_all(at("behind-amd/iommu_group")).expect("a folder");
    let regions = b"0x000000fd00000000 0x000000ffffffffff reserved\n";
    write_file(&at("behind-amd/iommu_group/reserved_regions"), regions);
    folder
}

fn fill_in(word: &str, folder: &Path) -> String {
    word.replace("{long}", &"x".repeat(5000)).replace("{}", &folder.display().to_string())
}

fn check(row: &Row) {
    if row.name == "tap_cannot_be_used" && !is_root() {
        skip("only root can open /dev/net/tun");
    }
    let folder = folder();
    let guest: Words = if row.of_guest { &["--kernel", "{}/guest"] } else { &[] };
    let words: Vec<String> =
        guest.iter().chain(row.arguments).map(|word| fill_in(word, folder.path())).collect();
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
        skip("only root can start a process as another user");
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

/// Where KVM can present itself as Hyper-V, that is for the lab.
fn kvm_without_hyperv() {
    /// `KVM_CHECK_EXTENSION`, and what kvm_hyperv needs.
    const CHECK: libc::c_ulong = 0xae03;
    const SYNTHETIC_INTERRUPTS: libc::c_ulong = 123;
    let kvm = fs::File::open("/dev/kvm").expect("/dev/kvm");
    // SAFETY: only numbers are passed, and the descriptor is open.
    if unsafe { libc::ioctl(kvm.as_raw_fd(), CHECK, SYNTHETIC_INTERRUPTS) } > 0 {
        skip("this KVM has what kvm_hyperv needs");
    }
    let words = ["--kernel", image(), "--cpus", "boot=1,kvm_hyperv=on"];
    let (code, output) = VmmBuilder::new(&words).bare().run();
    expect_end(code, &output, FAILED, "leave kvm_hyperv=on out");
}

fn kvm_not_permitted() {
    if !is_root() {
        skip("only root can start a process as another user");
    }
    let mode = fs::metadata("/dev/kvm").map(|data| {
        use std::os::unix::fs::PermissionsExt as _;
        data.permissions().mode()
    });
    if mode.is_ok_and(|mode| mode & 0o006 == 0o006) {
        skip("/dev/kvm is open to all users here");
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
