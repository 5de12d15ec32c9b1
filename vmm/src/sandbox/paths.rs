// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Paths that a VMM confined by Landlock may use, derived from the configuration of its VM.
//!
//! Owns which option needs which rights. What it looks up on the host (where links lead, which files are there) is in
//! [`ProcessPaths`]; the rest follows from the configuration alone. It must never restrict anything.

use std::path::{Path, PathBuf};

use landlock::{ABI, AccessFs, BitFlags, make_bitflags};

use crate::config::net::VhostMode;
use crate::config::{ConsoleMode, VmConfig};

/// The newest version of Landlock whose rights are known here: with devices' ioctls, without connecting to sockets.
pub(super) const NEWEST: ABI = ABI::V6;

/// A file or a directory can be read.
const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});
/// A program can be executed, which is read as well.
const EXECUTE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{Execute | ReadFile});
/// An image or a device that is only read. What its driver is asked goes by ioctl(2).
const READ_IN_PLACE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | IoctlDev});
/// An image or a device that is there, and stays.
const USE_IN_PLACE: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | IoctlDev});
/// A directory in which a socket is made and removed. It is opened for its lock.
const SOCKETS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile});
/// A directory in which a file is made and removed.
const MAKE_FILES: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | Truncate | MakeReg | RemoveFile});
/// A directory in which a socket is removed that is there already.
const REMOVE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{RemoveFile});

/// A path and what can be done there and below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathRule {
    /// A file, or a directory.
    pub(super) path: PathBuf,
    /// The rights.
    pub(super) rights: BitFlags<AccessFs>,
    /// A path that is not there is an error, and no rule that says nothing.
    pub(super) is_required: bool,
}

impl PathRule {
    fn new(path: impl Into<PathBuf>, rights: BitFlags<AccessFs>) -> Self {
        Self { path: path.into(), rights, is_required: false }
    }

    /// A directory with files that are read.
    pub fn read(path: impl Into<PathBuf>) -> Self {
        Self::new(path, READ)
    }

    /// The directory of a socket that this process has made and is going to remove.
    pub fn remove_socket(socket: &Path) -> Self {
        Self::new(folder_of(socket), REMOVE)
    }

    /// The directory of a socket that takes the place of another there, and is removed later.
    pub fn replace_socket(socket: &Path) -> Self {
        Self::new(folder_of(socket), REMOVE | AccessFs::MakeSock)
    }
}

/// Directory of a file; the current one for a bare name.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) => Path::new("."),
        None => path,
    }
}

/// What this process needs whatever its VM is, and what the host says of paths.
#[derive(Debug)]
pub(super) struct ProcessPaths {
    /// Socket of the API.
    pub(super) api_socket: Option<PathBuf>,
    /// Files that this program has mapped executable: itself, its libraries, the dynamic linker.
    pub(super) mapped: Vec<PathBuf>,
    /// Standard descriptors that are terminals, which are opened once more.
    pub(super) terminals: Vec<PathBuf>,
    /// Directories of what `/etc/resolv.conf` leads to.
    pub(super) resolver: Vec<PathBuf>,
    /// Character devices of a passed-through device.
    pub(super) device_nodes: fn(&Path) -> Vec<PathBuf>,
    /// Whether something is at a path.
    pub(super) is_there: fn(&Path) -> bool,
    /// Beyond all that: of the request by which the VM comes.
    pub(super) of_request: Vec<PathRule>,
}

impl Default for ProcessPaths {
    fn default() -> Self {
        Self {
            api_socket: None,
            mapped: Vec::new(),
            terminals: Vec::new(),
            resolver: Vec::new(),
            device_nodes: |_| Vec::new(),
            is_there: |_| false,
            of_request: Vec::new(),
        }
    }
}

/// Read by every process.
const ALWAYS_READ: &[&str] = &[
    // Its own threads, pages and limits, and the memory of the host.
    "/proc/self",
    "/proc/meminfo",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/sys/module/kvm",
    "/sys/module/kvm_amd",
    "/sys/module/kvm_intel",
    "/dev/urandom",
    // Names of hosts, of migrations.
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/services",
];

/// Used by every process: standard descriptors of a page server, missing pages.
const ALWAYS_USED: &[&str] = &["/dev/null", "/dev/userfaultfd"];

/// This program, under whatever name it was started.
const PROGRAM: &str = "/proc/self/exe";

/// Whether a library is the dynamic linker, which the kernel executes together with the program.
fn is_linker(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-"))
}

impl ProcessPaths {
    fn rules(&self, out: &mut Vec<PathRule>) {
        out.extend(ALWAYS_READ.iter().map(PathRule::read));
        out.extend(ALWAYS_USED.iter().map(|path| PathRule::new(path, USE_IN_PLACE)));
        out.push(PathRule::new(PROGRAM, EXECUTE));
        for path in &self.mapped {
            if is_linker(path) {
                out.push(PathRule::new(path, EXECUTE));
            }
            // With the libraries beside it that the resolver loads.
            if path.extension().is_some_and(|end| end == "so") || has_version(path) {
                out.push(PathRule::read(folder_of(path)));
            }
        }
        out.extend(self.resolver.iter().map(PathRule::read));
        if let Some(socket) = &self.api_socket {
            // The page server's socket is beside it.
            out.push(PathRule::new(folder_of(socket), make_bitflags!(AccessFs::{MakeSock})));
            out.push(PathRule::remove_socket(socket));
        }
        out.extend(self.of_request.iter().cloned());
    }
}

/// Whether a file name is one of a library with a version: `libc.so.6`.
fn has_version(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so."))
}

/// The rules of a process for a VM: one a path, sorted by path.
///
/// Access of `landlock_rules` has been checked with the configuration; letters that are none give no rights.
pub(super) fn rules(config: &VmConfig, process: &ProcessPaths) -> Vec<PathRule> {
    let mut out = Vec::new();
    process.rules(&mut out);
    payload(config, &mut out);
    disks(config, &mut out);
    pmems(config, &mut out);
    consoles(config, process, &mut out);
    zones(config, process, &mut out);
    nets(config, &mut out);
    devices(config, process, &mut out);
    let vdpas = config.vdpa.iter().flatten();
    out.extend(vdpas.map(|vdpa| PathRule::new(&vdpa.path, USE_IN_PLACE)));
    if let Some(vsock) = &config.vsock {
        out.push(PathRule::new(folder_of(&vsock.socket), SOCKETS));
    }
    out.push(PathRule::new(&config.rng.src, READ_IN_PLACE));
    for rule in config.landlock_rules.iter().flatten() {
        let access = rule.rule_access().unwrap_or_default();
        let mut rights = BitFlags::EMPTY;
        if access.read {
            // A block device is asked for its size and sectors by ioctl(2).
            rights |= READ | AccessFs::IoctlDev;
        }
        if access.write {
            rights |= AccessFs::from_write(NEWEST);
        }
        out.push(PathRule { path: rule.path.clone(), rights, is_required: true });
    }
    merge(out)
}

/// One rule for each path.
fn merge(mut rules: Vec<PathRule>) -> Vec<PathRule> {
    rules.sort_by(|one, other| one.path.cmp(&other.path));
    rules.dedup_by(|next, kept| {
        let is_same = next.path == kept.path;
        if is_same {
            kept.rights |= next.rights;
            kept.is_required |= next.is_required;
        }
        is_same
    });
    rules
}

fn payload(config: &VmConfig, out: &mut Vec<PathRule>) {
    let payload = &config.payload;
    let files = [&payload.kernel, &payload.firmware, &payload.initramfs];
    out.extend(files.into_iter().flatten().map(PathRule::read));
    let baseline = config.cpus.baseline.as_ref().and_then(|baseline| baseline.file.as_ref());
    out.extend(baseline.map(PathRule::read));
}

fn disks(config: &VmConfig, out: &mut Vec<PathRule>) {
    for disk in config.disks.iter().flatten() {
        let rights = if disk.readonly { READ_IN_PLACE } else { USE_IN_PLACE };
        out.extend(disk.path.iter().map(|path| PathRule::new(path, rights)));
    }
}

fn pmems(config: &VmConfig, out: &mut Vec<PathRule>) {
    for pmem in config.pmem.iter().flatten() {
        // A directory gets a file without a name.
        let rights = if pmem.discard_writes { READ_IN_PLACE } else { MAKE_FILES | USE_IN_PLACE };
        out.push(PathRule::new(&pmem.file, rights));
    }
}

fn consoles(config: &VmConfig, process: &ProcessPaths, out: &mut Vec<PathRule>) {
    let VmConfig { serial, console, debug_console, .. } = config;
    for (mode, file, socket) in [
        (serial.mode, &serial.file, serial.socket.as_ref()),
        (console.mode, &console.file, console.socket.as_ref()),
        (debug_console.mode, &debug_console.file, None),
    ] {
        match mode {
            ConsoleMode::File => {
                out.extend(file.iter().map(|path| PathRule::new(path, USE_IN_PLACE)));
            }
            ConsoleMode::Socket => {
                out.extend(socket.iter().map(|path| PathRule::new(folder_of(path), SOCKETS)));
            }
            ConsoleMode::Pty => {
                out.extend(["/dev/ptmx", "/dev/pts"].map(|path| PathRule::new(path, USE_IN_PLACE)));
            }
            ConsoleMode::Tty => {
                out.extend(process.terminals.iter().map(|path| PathRule::new(path, USE_IN_PLACE)));
            }
            ConsoleMode::Off | ConsoleMode::Null => {}
        }
    }
}

fn zones(config: &VmConfig, process: &ProcessPaths, out: &mut Vec<PathRule>) {
    let files = config.memory.zones.iter().flatten().filter_map(|zone| zone.file.as_ref());
    for file in files {
        // A directory gets a file without a name. A file that is not there is made, and removed in the end.
        out.push(PathRule::new(file, MAKE_FILES | USE_IN_PLACE));
        if !(process.is_there)(file) {
            out.push(PathRule::new(folder_of(file), MAKE_FILES));
        }
    }
}

fn nets(config: &VmConfig, out: &mut Vec<PathRule>) {
    for net in config.net.iter().flatten().filter(|net| net.vhost_mode == VhostMode::Server) {
        let sockets = net.vhost_socket.iter().map(|socket| folder_of(Path::new(socket)));
        out.extend(sockets.map(|folder| PathRule::new(folder, SOCKETS)));
    }
    if config.net.iter().flatten().any(|net| net.fds.is_none() && !net.vhost_user) {
        out.push(PathRule::new("/dev/net/tun", USE_IN_PLACE));
        out.push(PathRule::read("/sys/class/net"));
        out.push(PathRule::read("/sys/devices/virtual/net"));
    }
}

fn devices(config: &VmConfig, process: &ProcessPaths, out: &mut Vec<PathRule>) {
    let mut devices = config.devices.iter().flatten().peekable();
    if devices.peek().is_none() {
        return;
    }
    out.extend(["/dev/vfio/vfio", "/dev/iommu"].map(|path| PathRule::new(path, USE_IN_PLACE)));
    out.push(PathRule::read("/sys/module/vfio_iommu_type1"));
    // Addresses that the IOMMU of a device cannot map.
    out.extend(["/sys/kernel/iommu_groups", "/sys/devices/virtual/iommu"].map(PathRule::read));
    for path in devices.filter_map(|device| device.path.as_deref()) {
        out.push(PathRule::read(path));
        let nodes = (process.device_nodes)(path);
        out.extend(nodes.into_iter().map(|node| PathRule::new(node, USE_IN_PLACE)));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};

    use super::*;
    use crate::config::Family;

    fn process() -> ProcessPaths {
        ProcessPaths {
            device_nodes: |path| vec![Path::new("/dev/vfio").join(path.file_name().unwrap())],
            is_there: |path| path.starts_with("/there"),
            ..ProcessPaths::default()
        }
    }

    /// What a VM with these options can use that one without cannot.
    fn derived(options: Value) -> Vec<PathRule> {
        let config = |options: Value| {
            let mut json = json!({"payload": {"kernel": "/k"}, "console": {"mode": "Off"}});
            json.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
            serde_json::from_value::<VmConfig>(json).unwrap()
        };
        let without = rules(&config(json!({})), &process());
        let mut with = rules(&config(options), &process());
        with.retain(|rule| !without.contains(rule));
        with
    }

    fn uses(path: &str, rights: BitFlags<AccessFs>) -> PathRule {
        PathRule::new(path, rights)
    }

    #[test]
    fn a_disk_is_used_in_place_and_only_read_if_it_is_readonly() {
        let disks = json!({"disks": [{"path": "/a"}, {"path": "/b", "readonly": true}]});
        assert_eq!(derived(disks), [uses("/a", USE_IN_PLACE), uses("/b", READ_IN_PLACE)]);
        assert!(!READ_IN_PLACE.contains(AccessFs::WriteFile));
        assert!((READ_IN_PLACE | USE_IN_PLACE | READ).intersects(AccessFs::Execute).eq(&false));
    }

    #[test]
    fn payloads_and_sources_are_read() {
        let payload = json!({"kernel": "/k", "initramfs": "/i"});
        assert_eq!(derived(json!({"payload": payload})), [PathRule::read("/i")]);
        let firmware = derived(json!({"payload": {"firmware": "/f"}}));
        assert_eq!(firmware, [PathRule::read("/f")]);
        let rng = derived(json!({"rng": {"src": "/dev/hwrng"}}));
        assert_eq!(rng.first(), Some(&uses("/dev/hwrng", READ_IN_PLACE)));
    }

    #[test]
    fn a_console_has_its_file_terminals_or_the_directory_of_its_socket() {
        let file = derived(json!({"serial": {"mode": "File", "file": "/out"}}));
        assert_eq!(file, [uses("/out", USE_IN_PLACE)]);
        let pty = derived(json!({"console": {"mode": "Pty"}}));
        assert_eq!(pty, [uses("/dev/ptmx", USE_IN_PLACE), uses("/dev/pts", USE_IN_PLACE)]);
        let socket = derived(json!({"serial": {"mode": "Socket", "socket": "/run/vm/s"}}));
        assert_eq!(socket, [uses("/run/vm", SOCKETS)]);
        let terminals = vec!["/proc/self/fd/0".into()];
        let config = VmConfig::default();
        let all = rules(&config, &ProcessPaths { terminals, ..process() });
        assert!(all.contains(&uses("/proc/self/fd/0", USE_IN_PLACE)), "the default is a terminal");
    }

    #[test]
    fn persistent_memory_is_read_or_written_and_made_in_a_directory() {
        let pmem = derived(json!({"pmem": [
            {"file": "/p", "discard_writes": true}, {"file": "/q", "size": 2 << 20},
        ]}));
        assert_eq!(pmem, [uses("/p", READ_IN_PLACE), uses("/q", MAKE_FILES | USE_IN_PLACE)]);
    }

    #[test]
    fn a_vsock_makes_and_removes_sockets_in_its_directory() {
        let vsock = derived(json!({"vsock": {"cid": 3, "socket": "/run/vm/v"}}));
        assert_eq!(vsock, [uses("/run/vm", SOCKETS)]);
        let bare = derived(json!({"vsock": {"cid": 3, "socket": "v"}}));
        assert_eq!(bare, [uses(".", SOCKETS)]);
    }

    #[test]
    fn a_vhost_user_network_needs_no_tap_and_a_directory_to_listen_in() {
        let connects = json!({"net": [{"vhost_user": true, "vhost_socket": "/run/vm/n"}]});
        assert_eq!(derived(connects), []);
        let listens = json!({"net": [
            {"vhost_user": true, "vhost_socket": "/run/vm/n", "vhost_mode": "Server"}
        ]});
        assert_eq!(derived(listens), [uses("/run/vm", SOCKETS)]);
    }

    #[test]
    fn a_tap_is_opened_unless_its_descriptor_is_given() {
        let tap = derived(json!({"net": [{"tap": "t"}]}));
        assert!(tap.contains(&uses("/dev/net/tun", USE_IN_PLACE)), "{tap:?}");
        assert_eq!(derived(json!({"net": []})), []);
    }

    #[test]
    fn a_zone_has_its_file_and_the_directory_of_one_that_is_not_there() {
        let zone = |file: &str| {
            derived(json!({"memory": {"size": 0, "zones": [{"id": "z", "size": 1, "file": file}]}}))
        };
        assert_eq!(zone("/there/f"), [uses("/there/f", MAKE_FILES | USE_IN_PLACE)]);
        let missing = zone("/new/f");
        assert_eq!(missing, [uses("/new", MAKE_FILES), uses("/new/f", MAKE_FILES | USE_IN_PLACE)]);
    }

    #[test]
    fn a_vdpa_device_is_used_in_place() {
        let vdpa = derived(json!({"vdpa": [{"path": "/dev/vhost-vdpa-0", "num_queues": 1}]}));
        assert_eq!(vdpa, [uses("/dev/vhost-vdpa-0", USE_IN_PLACE)]);
        assert!(USE_IN_PLACE.contains(AccessFs::IoctlDev));
    }

    #[test]
    fn a_device_of_another_process_is_reached_by_its_socket_alone() {
        // Connecting to a socket takes no right of a path.
        let socket = "/run/vm/u";
        for device in [
            json!({"user_devices": [{"socket": socket}]}),
            json!({"fs": [{"tag": "t", "socket": socket}]}),
            json!({"tpm": {"socket": socket}}),
            json!({"disks": [{"vhost_user": true, "vhost_socket": socket}]}),
            json!({"generic_vhost_user": [
                {"socket": socket, "queue_sizes": [16], "device_type": 26}
            ]}),
        ] {
            assert_eq!(derived(device.clone()), [], "{device}");
        }
    }

    /// By field of a VM: its option on the page, or nothing if the field names no path of the host.
    const OPTIONS: &[(&str, &str)] = &[
        ("cpus", "--cpus"),
        ("memory", "--memory-zone"),
        ("payload", "--kernel"),
        ("rate_limit_groups", ""),
        ("disks", "--disk"),
        ("net", "--net"),
        ("rng", "--rng"),
        ("balloon", ""),
        ("fs", "--fs"),
        ("generic_vhost_user", "--generic-vhost-user"),
        ("pmem", "--pmem"),
        ("serial", "--serial"),
        ("console", "--console"),
        ("debug_console", "--debug-console"),
        ("devices", "--device"),
        ("user_devices", "--user-device"),
        ("vdpa", "--vdpa"),
        ("vsock", "--vsock"),
        ("numa", ""),
        ("iommu", ""),
        ("watchdog", ""),
        ("rtc", ""),
        ("pvpanic", ""),
        ("pci_segments", ""),
        ("pci_address_bits", ""),
        ("removed_device_numbers", ""),
        ("pci_numbers", ""),
        ("platform", ""),
        ("tpm", "--tpm"),
        ("landlock_enable", ""),
        ("landlock_rules", "--landlock-rules"),
    ];

    #[test]
    fn the_page_has_a_row_for_each_option_that_names_paths() {
        let fields: Vec<_> = VmConfig::info().fields.iter().map(|field| field.spec.field).collect();
        let known: Vec<_> = OPTIONS.iter().map(|(field, _)| *field).collect();
        assert_eq!(known, fields, "OPTIONS says which field names paths: add it there, and a row");
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sandbox.md");
        let page = std::fs::read_to_string(path).unwrap();
        let rows = page.lines().skip_while(|line| *line != "| option | access |").skip(2);
        let named: Vec<_> = rows
            .take_while(|line| line.starts_with('|'))
            .flat_map(|line| line.split('|').nth(1).unwrap().split('`').skip(1).step_by(2))
            .filter_map(|option| option.split(' ').next())
            .collect();
        for (field, option) in OPTIONS.iter().filter(|(_, option)| !option.is_empty()) {
            assert!(named.contains(option), "no row for {option} ({field}) in docs/sandbox.md");
        }
    }

    #[test]
    fn a_passed_through_device_has_its_nodes_and_what_the_host_says_of_it() {
        let device = derived(json!({"devices": [{"path": "/sys/d/7"}]}));
        for rule in [
            uses("/dev/vfio/7", USE_IN_PLACE),
            uses("/dev/vfio/vfio", USE_IN_PLACE),
            uses("/dev/iommu", USE_IN_PLACE),
            PathRule::read("/sys/d/7"),
            PathRule::read("/sys/kernel/iommu_groups"),
            PathRule::read("/sys/devices/virtual/iommu"),
        ] {
            assert!(device.contains(&rule), "{rule:?} of {device:?}");
        }
    }

    #[test]
    fn a_rule_of_the_user_adds_what_its_letters_say_and_has_to_be_there() {
        let rules = derived(json!({"landlock_rules": [
            {"path": "/r", "access": "r"}, {"path": "/w", "access": "w"}, {"path": "/k", "access": "rw"},
        ]}));
        let required = |path: &str, rights| PathRule { is_required: true, ..uses(path, rights) };
        let (read, write) = (READ | AccessFs::IoctlDev, AccessFs::from_write(NEWEST));
        assert_eq!(
            rules,
            [required("/k", read | write), required("/r", read), required("/w", write)]
        );
    }

    #[test]
    fn nothing_is_executed_but_the_program_and_its_linker() {
        let mapped = ["/opt/cloud-hypervisor", "/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        let mapped = mapped.map(PathBuf::from).to_vec();
        let all = rules(&VmConfig::default(), &ProcessPaths { mapped, ..process() });
        let executed = all.iter().filter(|rule| rule.rights.contains(AccessFs::Execute));
        let executed: Vec<_> = executed.map(|rule| rule.path.to_str().unwrap()).collect();
        assert_eq!(executed, ["/lib64/ld-linux-x86-64.so.2", "/proc/self/exe"]);
        assert!(all.contains(&PathRule::read("/lib")));
        assert!(!all.iter().any(|rule| rule.path == Path::new("/opt")), "{all:?}");
    }

    #[test]
    fn sockets_beside_that_of_the_api_are_made_and_removed_and_nothing_there_is_read() {
        let api_socket = Some("/run/vm/api".into());
        let all = rules(&VmConfig::default(), &ProcessPaths { api_socket, ..process() });
        let there = make_bitflags!(AccessFs::{MakeSock | RemoveFile});
        assert!(all.contains(&uses("/run/vm", there)), "{all:?}");
        assert!(all.is_sorted_by(|one, other| one.path < other.path), "one rule a path");
    }
}
