// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The packages that `scripts/package` makes, with programs that stand for the real ones: what is in them, that the same
//! files give the same bytes, and that installing, removing and purging them leaves nothing.
#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use tempfile::TempDir;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const PROGRAMS: [&str; 3] = ["cloud-hypervisor", "ch-remote", "prezero-pool"];
const NAMES: [&str; 3] = ["godwit", "godwit-kvm", "prezero-pool"];
/// Of another day than the sources.
const EPOCH: &str = "1700000000";

/// Whether these programs are there; says that the test is skipped if not.
fn have(programs: &[&str]) -> bool {
    let is_missing = |program: &&&str| match Command::new(program).arg("--version").output() {
        Err(error) => error.kind() == ErrorKind::NotFound,
        Ok(_) => false,
    };
    match programs.iter().find(is_missing) {
        Some(missing) => {
            test_skip::skip!("there is no {missing} here");
            false
        }
        None => true,
    }
}

/// The output of a command, which has to succeed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// What `scripts/release` writes, with a small program in place of each. All belongs to this user alone.
fn release(folder: &Path) {
    run(Command::new(env!("CARGO_BIN_EXE_package-texts")).arg(folder));
    for program in PROGRAMS {
        fs::copy("/bin/true", folder.join(program)).unwrap();
        fs::set_permissions(folder.join(program), fs::Permissions::from_mode(0o700)).unwrap();
    }
    fs::write(folder.join("godwit.spdx.json"), "{}\n").unwrap();
    fs::write(folder.join("crates-licences.txt"), "none\n").unwrap();
}

/// `scripts/package --of RELEASE OUT`, by a shell with another mask and in another time zone if that is asked for.
fn pack(release: &Path, out: &Path, is_elsewhere: bool) {
    let (mask, zone) = if is_elsewhere { ("0077", "Asia/Tokyo") } else { ("0022", "UTC") };
    let script = format!("umask {mask}; exec \"$@\"");
    run(Command::new("bash")
        .args(["-c", &script, "bash"])
        .arg(format!("{ROOT}/scripts/package"))
        .arg("--of")
        .args([release, out])
        .env("GODWIT_NO_INSTALL", "1")
        .env("SOURCE_DATE_EPOCH", EPOCH)
        .env("TZ", zone));
}

/// The packages in a folder, by name.
fn packages(folder: &Path) -> BTreeMap<String, PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .map(|path| {
            let file = path.file_name().unwrap().to_str().unwrap();
            (file.split_once('_').unwrap().0.to_owned(), path)
        })
        .collect()
}

/// Packages of a release that stands for a real one, made once for all tests; nothing, after saying so, where Debian's
/// tools are missing.
fn made() -> Option<&'static BTreeMap<String, PathBuf>> {
    static MADE: OnceLock<BTreeMap<String, PathBuf>> = OnceLock::new();
    if !have(&["dpkg-deb", "dpkg-shlibdeps", "dpkg-gencontrol"]) {
        return None;
    }
    Some(MADE.get_or_init(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
        let _ = fs::remove_dir_all(&place);
        release(&place.join("release"));
        pack(&place.join("release"), &place.join("packages"), false);
        packages(&place.join("packages"))
    }))
}

/// A field of a package.
fn field(package: &Path, name: &str) -> String {
    run(Command::new("dpkg-deb").arg("--field").arg(package).arg(name)).trim().to_owned()
}

/// Paths below a folder with their modes, without what dpkg keeps for itself, and without copies and locks that
/// programs leave beside the files of users.
fn tree(root: &Path) -> BTreeMap<PathBuf, u32> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path().strip_prefix(root).unwrap().to_owned();
            let name = path.to_str().unwrap();
            if name == "var/lib/dpkg"
                || name.ends_with('-')
                || path.extension().is_some_and(|ending| ending == "lock")
            {
                continue;
            }
            let metadata = entry.path().symlink_metadata().unwrap();
            if metadata.is_dir() {
                folders.push(entry.path());
            }
            found.insert(path, metadata.mode() & 0o7777);
        }
    }
    found
}

/// A root that packages are installed to; their scripts run outside of it, with its path in `DPKG_ROOT`.
struct Target(TempDir);

impl Target {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for folder in [
            "var/lib/dpkg/info",
            "var/lib/dpkg/updates",
            "var/lib/dpkg/triggers",
            "etc",
            "usr",
            "run",
        ] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        for (file, text) in [
            ("var/lib/dpkg/status", ""),
            // dpkg removes a folder with the last package that has it, if it is empty.
            ("usr/kept", ""),
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
            ("etc/group", "root:x:0:\n"),
            ("etc/shadow", "root:*:19000:0:99999:7:::\n"),
            ("etc/gshadow", "root:*::\n"),
        ] {
            fs::write(root.path().join(file), text).unwrap();
        }
        Self(root)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn dpkg(&self, action: &str, of: &[&Path]) {
        let root = self.0.path().display();
        run(Command::new("dpkg")
            .args([format!("--root={root}"), format!("--log={root}/var/lib/dpkg/log")])
            // What it depends on is not there, and what a machine's settings leave out is installed all the same.
            .args([
                "--force-depends",
                "--force-script-chrootless",
                "--force-bad-path",
                "--path-include=*",
            ])
            .arg(action)
            .args(of)
            .env("DEBIAN_FRONTEND", "noninteractive"));
    }
}

#[test]
fn the_same_files_give_the_same_bytes() {
    let Some(first) = made() else { return };
    // Another folder, of another path.
    let again = tempfile::tempdir().unwrap();
    let (from, out) = (again.path().join("release"), again.path().join("packages"));
    release(&from);
    pack(&from, &out, true);
    let second = packages(&out);
    assert_eq!(first.keys().collect::<Vec<_>>(), NAMES);
    for (name, path) in first {
        assert_eq!(path.file_name(), second[name].file_name());
        assert!(fs::read(path).unwrap() == fs::read(&second[name]).unwrap(), "{name} differs");
    }
}

#[test]
fn packages_say_what_they_are() {
    let Some(packages) = made() else { return };
    for (name, path) in packages {
        assert_eq!(field(path, "Version"), concat!(env!("CARGO_PKG_VERSION"), "-1"));
        assert_eq!(field(path, "Architecture"), "amd64");
        // Of the programs that it has; one has none.
        let depends = field(path, "Depends");
        assert_eq!(depends.contains("libc6 (>= "), name != "godwit-kvm", "{depends}");
    }
    let godwit = &packages["godwit"];
    let compatible = vmm::api::types::COMPATIBLE_VERSION;
    assert_eq!(field(godwit, "Provides"), format!("cloud-hypervisor (= {compatible})"));
    assert_eq!([field(godwit, "Conflicts"), field(godwit, "Replaces")], ["cloud-hypervisor"; 2]);
}

#[test]
fn scripts_of_packages_are_valid() {
    let Some(packages) = made() else { return };
    let place = tempfile::tempdir().unwrap();
    let have_shellcheck = have(&["shellcheck"]);
    for (name, path) in packages {
        let control = place.path().join(format!("{name}-control"));
        run(Command::new("dpkg-deb").arg("--control").args([path, &control]));
        for script in ["postinst", "prerm", "postrm"].map(|script| control.join(script)) {
            if !script.exists() {
                continue;
            }
            assert_eq!(fs::metadata(&script).unwrap().mode() & 0o777, 0o755);
            run(Command::new("sh").arg("-n").arg(&script));
            if have_shellcheck {
                run(Command::new("shellcheck").arg(&script));
            }
        }
    }
    if have_shellcheck {
        for script in ["godwit-kvm", "godwit-kvm.kernel-postinst", "godwit-kvm.kernel-postrm"] {
            run(Command::new("shellcheck").arg(format!("{ROOT}/packaging/debian/{script}")));
        }
    }
}

#[test]
fn builds_of_modules_have_what_they_need() {
    let Some(packages) = made() else { return };
    let depends = field(&packages["godwit-kvm"], "Depends");
    let depends: Vec<&str> = depends.split(", ").collect();
    let script = fs::read_to_string(format!("{ROOT}/scripts/kvm-modules")).unwrap();
    let needs = script.lines().find_map(|line| line.trim().strip_prefix("need_packages make "));
    for need in needs.unwrap().split(' ').chain(["make", "openssl"]) {
        assert!(depends.contains(&need), "{need} is not in {depends:?}");
    }
}

#[test]
fn the_page_of_modules_has_all_verbs_and_settings() {
    let read = |name: &str| fs::read_to_string(format!("{ROOT}/packaging/debian/{name}")).unwrap();
    let (page, command) = (read("godwit-kvm.8"), read("godwit-kvm"));
    let (_, verbs) = command.rsplit_once("case $verb,$# in\n").unwrap();
    let verbs = verbs.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let verbs =
        verbs.filter_map(|line| line.split_once(')')).flat_map(|(names, _)| names.split('|'));
    let verbs: Vec<_> = verbs.filter_map(|name| name.trim().split_once(',')).collect();
    assert!(verbs.len() >= 11, "{verbs:?}");
    let settings = read("godwit-kvm.conf");
    let settings: Vec<_> = settings
        .lines()
        .filter(|line| !line.starts_with("# "))
        .filter_map(|line| line.trim_start_matches('#').split_once('='))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(settings, ["SIGN_KEY", "SIGN_CERT", "BUILD", "SPACE_MIB"]);
    for word in verbs.iter().map(|(name, _)| *name).chain(settings) {
        let is_term = |line: &str| {
            line.starts_with(".B") && line.split([' ', '"', ',']).any(|part| part == word)
        };
        assert!(page.lines().any(is_term), "{word} is not on the page");
    }
    if have(&["groff"]) {
        let said = Command::new("groff")
            .args(["-man", "-Tutf8", "-ww", "-z"])
            .arg(format!("{ROOT}/packaging/debian/godwit-kvm.8"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stderr), "");
    }
}

/// What a package has to have, besides what programs have alike.
const FILES: [&str; 30] = [
    "etc/godwit-kvm.conf",
    "etc/kernel/postinst.d/zz-godwit-kvm",
    "etc/kernel/postrm.d/zz-godwit-kvm",
    "usr/lib/systemd/system/godwit-kvm-build.service",
    "usr/lib/systemd/system/godwit-kvm-check.service",
    "usr/lib/systemd/system/multi-user.target.wants/godwit-kvm-check.service",
    "usr/sbin/godwit-kvm",
    "usr/share/doc/godwit-kvm/copyright",
    "usr/share/doc/godwit-kvm/changelog.Debian.gz",
    "usr/share/doc/godwit-kvm/fault-exits.md",
    "usr/share/godwit-kvm/kernel/patches/6.12/kernels",
    "usr/share/godwit-kvm/kernel/patches/7.2/kernels",
    "usr/share/godwit-kvm/scripts/kvm-modules",
    "usr/share/man/man8/godwit-kvm.8.gz",
    "etc/cloud-hypervisor",
    "etc/prezero-pool.toml",
    "usr/lib/systemd/system/cloud-hypervisor@.service",
    "usr/lib/systemd/system/cloud-hypervisor@.socket",
    "usr/lib/systemd/system/prezero-pool.service",
    "usr/lib/sysusers.d/prezero-pool.conf",
    "usr/share/doc/godwit/README.md",
    "usr/share/godwit/cpu-baseline",
    "usr/share/doc/godwit/docs/packages.md",
    "usr/share/doc/godwit/docs/openapi.json",
    "usr/share/doc/godwit/copyright",
    "usr/share/doc/godwit/godwit.spdx.json",
    "usr/share/doc/godwit/changelog.Debian.gz",
    "usr/share/doc/prezero-pool/copyright",
    "usr/share/doc/prezero-pool/prezero-pool.md",
    "usr/share/doc/prezero-pool/crates-licences.txt.gz",
];

#[test]
fn what_is_installed_is_whole_and_goes_without_a_trace() {
    let Some(packages) = made() else { return };
    if !have(&["dpkg", "systemd-sysusers", "userdel"]) {
        return;
    }
    // What this process makes belongs to its user.
    let target = Target::new();
    if target.0.path().metadata().unwrap().uid() != 0 {
        return test_skip::skip!("dpkg installs as root alone");
    }
    let before = tree(target.0.path());
    let paths: Vec<&Path> = packages.values().map(PathBuf::as_path).collect();
    target.dpkg("--install", &paths);

    let installed = tree(target.0.path());
    for program in PROGRAMS {
        for path in [
            format!("usr/bin/{program}"),
            format!("usr/share/man/man1/{program}.1.gz"),
            format!("usr/share/bash-completion/completions/{program}"),
            format!("usr/share/zsh/vendor-completions/_{program}"),
            format!("usr/share/fish/vendor_completions.d/{program}.fish"),
        ] {
            assert!(installed.contains_key(Path::new(&path)), "{path}");
        }
    }
    for path in FILES {
        assert!(installed.contains_key(Path::new(path)), "{path}");
    }
    for (path, mode) in installed.iter().filter(|(path, _)| !before.contains_key(*path)) {
        let metadata = target.0.path().join(path).symlink_metadata().unwrap();
        let is_executable = metadata.is_dir()
            || ["usr/bin", "usr/sbin", "etc/kernel"].iter().any(|folder| path.starts_with(folder))
            || ["cpu-baseline", "kvm-modules"].iter().any(|name| path.ends_with(name));
        let of_file = if is_executable { 0o755 } else { 0o644 };
        let wanted = if metadata.is_symlink() { 0o777 } else { of_file };
        assert_eq!((*mode, metadata.uid(), metadata.gid()), (wanted, 0, 0), "{}", path.display());
    }
    let users = fs::read_to_string(target.path("etc/passwd")).unwrap();
    assert!(users.contains("\nprezero-pool:"), "{users}");

    modules_of_a_kernel(&target);

    // A second time, as an upgrade does; what the administrator has changed stays.
    let configuration = target.path("etc/prezero-pool.toml");
    fs::write(&configuration, "socket = '/s'\n").unwrap();
    target.dpkg("--install", &paths);
    assert_eq!(fs::read_to_string(&configuration).unwrap(), "socket = '/s'\n");

    // What `systemctl enable` makes.
    let folder = target.path("etc/systemd/system");
    for (of, unit) in [
        ("multi-user", "prezero-pool.service"),
        ("multi-user", "cloud-hypervisor@a.service"),
        ("sockets", "cloud-hypervisor@a.socket"),
    ] {
        let wants = folder.join(format!("{of}.target.wants"));
        fs::create_dir_all(&wants).unwrap();
        let file = target.path("usr/lib/systemd/system").join(unit.replace("@a", "@"));
        std::os::unix::fs::symlink(file, wants.join(unit)).unwrap();
    }
    let names = NAMES.map(Path::new);
    target.dpkg("--remove", &names);
    let removed = tree(target.0.path());
    assert!(!removed.contains_key(Path::new("lib/modules/1.2-a/updates")), "{removed:?}");
    // A kernel that is installed afterwards still runs the hooks, which count as configuration.
    hook(&target, "postinst.d", "1.2-a");
    hook(&target, "postrm.d", "1.2-a");
    assert_eq!(tree(target.0.path()), removed);
    fs::remove_dir_all(target.path("lib")).unwrap();
    assert!(configuration.exists() && !removed.contains_key(Path::new("usr/bin/ch-remote")));
    target.dpkg("--purge", &names);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    fs::remove_dir_all(target.path("etc/systemd")).unwrap();
    assert_eq!(tree(target.0.path()), before);
    for file in ["etc/passwd", "etc/group", "etc/shadow", "etc/gshadow"] {
        let text = fs::read_to_string(target.path(file)).unwrap();
        assert!(!text.contains("prezero-pool"), "{file}: {text}");
    }
}

/// A hook of kernels as the package has it.
fn hook(target: &Target, of: &str, version: &str) {
    run(Command::new(target.path(&format!("etc/kernel/{of}/zz-godwit-kvm")))
        .arg(version)
        .env("GODWIT_KVM_ROOT", target.0.path()));
}

/// The script that makes modules has all that it needs beside it, and a kernel notes that it wants some; then modules of
/// a kernel, as a build has installed them.
fn modules_of_a_kernel(target: &Target) {
    run(Command::new(target.path("usr/share/godwit-kvm/scripts/kvm-modules"))
        .arg("key")
        .arg("--root")
        .arg(target.0.path())
        .env("GODWIT_NO_INSTALL", "1"));
    hook(target, "postinst.d", "1.2-a");
    let state = target.path("var/lib/godwit-kvm");
    assert!(state.join("wanted/1.2-a").exists());
    fs::rename(state.join("wanted/1.2-a"), state.join("1.2-a.ok")).unwrap();
    let modules = target.path("lib/modules/1.2-a/updates/godwit");
    fs::create_dir_all(&modules).unwrap();
    fs::write(modules.join("kvm.ko"), "").unwrap();
}

#[test]
fn the_pool_takes_its_configuration() {
    let text = fs::read_to_string(format!("{ROOT}/packaging/debian/prezero-pool.toml")).unwrap();
    // With its examples: a comment is a mark and a space.
    let examples: String = text
        .lines()
        .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
        .flat_map(|line| [line, "\n"])
        .collect();
    let slots = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let config = prezero_pool::Config::read(file.path()).unwrap();
        config.classes.iter().map(|class| class.count).sum::<u32>()
    };
    assert_eq!((slots(&text), slots(&examples)), (0, 4));
}
