// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Landlock: sets of paths beyond which a thread, and the threads that it starts, can open nothing.
//!
//! Owns the rulesets of the kernel and which are in force. A ruleset restricts the thread that applies it; it cannot be
//! widened or taken back, and a further one restricts the thread to what both allow. It must never decide when a thread
//! is confined.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use landlock::{
    Access as _, AccessFs, AddRuleError, AddRulesError, CompatLevel, Compatible as _, Erratum,
    PathBeneath, PathFd, PathFdError, RestrictSelfError, Ruleset, RulesetAttr as _, RulesetCreated,
    RulesetCreatedAttr as _, RulesetError, Scope,
};
use thiserror::Error;

use super::paths::{self, NEWEST, PathRule, ProcessPaths};
use crate::config::{ConsoleMode, VmConfig};

/// Why a process is not confined.
#[derive(Debug, Error)]
pub enum LandlockError {
    /// The kernel has none.
    #[error(
        "the host's kernel has no Landlock (CONFIG_SECURITY_LANDLOCK, from Linux 5.13 on): leave out --landlock, or \
         landlock_enable, to run without"
    )]
    Missing,
    /// It is off.
    #[error(
        "Landlock is off on this host: its kernel needs 'landlock' in the list of its parameter lsm= \
         (/sys/kernel/security/lsm shows the list), or leave out --landlock, or landlock_enable, to run without"
    )]
    Off,
    /// A path.
    #[error("there can be no Landlock rule for '{}'", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel takes no rules.
    #[error("the kernel does not take the Landlock rules of the VM")]
    Ruleset(#[source] RulesetError),
    /// As many as the kernel takes are in force.
    #[error(
        "this process has been confined by Landlock as often as the kernel allows (16 times): start the VM in another \
         process"
    )]
    TooOften,
    /// The descriptor of a ruleset.
    #[error("the Landlock rules of the VM cannot be handed to a thread")]
    Descriptor(#[source] io::Error),
    /// The VMM thread is busy or gone.
    #[error("the VMM thread is not confined by Landlock, so the VM does not run")]
    NoVmmThread,
}

/// What follows an error where access is denied.
const DENIED_REASON: &str = "Landlock keeps this process from paths that neither its configuration nor a rule \
                             names (--landlock-rules path=PATH,access=rw, before the VM runs)";

/// Name of `landlock_create_ruleset(2)`'s question for the version.
const ASK_VERSION: libc::c_uint = 1;

/// Whether the kernel has Landlock.
///
/// # Errors
/// [`LandlockError::Missing`] or [`LandlockError::Off`].
pub fn check_kernel() -> Result<(), LandlockError> {
    let (none, no_bytes) = (std::ptr::null::<libc::c_void>(), 0_usize);
    // SAFETY: with this flag the kernel reads nothing and answers a number.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, no_bytes, ASK_VERSION) };
    match io::Error::last_os_error().raw_os_error() {
        _ if version >= 1 => Ok(()),
        Some(libc::EOPNOTSUPP) => Err(LandlockError::Off),
        _ => Err(LandlockError::Missing),
    }
}

/// A set of paths, in the kernel. Threads apply it one by one.
#[derive(Debug)]
pub struct PathSet {
    paths: Arc<Paths>,
    ruleset: RulesetCreated,
}

/// What is in a set.
#[derive(Debug)]
struct Paths {
    rules: Vec<PathRule>,
    /// A rule for a path below /proc counts as long as the kernel keeps its directory entry.
    _held: Vec<PathFd>,
}

/// The sets that are in force on a thread, and on those that it starts from now on.
#[derive(Clone, Debug, Default)]
pub struct Confinement(Vec<Arc<Paths>>);

impl Confinement {
    /// Whether another set of these rules would change nothing.
    fn has(&self, rules: &[PathRule]) -> bool {
        self.0.iter().any(|paths| paths.rules == rules)
    }

    /// Notes that a set has been applied to the thread.
    pub fn note(&mut self, set: &PathSet) {
        self.0.push(Arc::clone(&set.paths));
    }
}

impl PathSet {
    /// The paths of a VM; none if they are in force already. Looks at every path, which takes as long as the storage
    /// behind it. A file for a console's output that is not there is made.
    ///
    /// # Errors
    /// [`LandlockError`]: there is no Landlock, or a path of `landlock_rules` is not there.
    pub fn of(
        config: &VmConfig,
        api_socket: Option<&Path>,
        of_request: Vec<PathRule>,
        confinement: &Confinement,
    ) -> Result<Option<Self>, LandlockError> {
        check_kernel()?;
        make_console_files(config);
        let process = ProcessPaths {
            api_socket: api_socket.map(ToOwned::to_owned),
            mapped: mapped_executable(&fs::read_to_string("/proc/self/maps").unwrap_or_default()),
            terminals: terminals(),
            resolver: resolver_folders(),
            device_nodes: vfio::host_nodes,
            is_there: Path::exists,
            of_request,
        };
        let rules = paths::rules(config, &process);
        if confinement.has(&rules) { Ok(None) } else { Self::new(rules).map(Some) }
    }

    fn new(rules: Vec<PathRule>) -> Result<Self, LandlockError> {
        let handled = AccessFs::from_all(NEWEST);
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(handled)
            .and_then(|ruleset| ruleset.scope(Scope::AbstractUnixSocket))
            .map_err(LandlockError::Ruleset)?;
        // Without this mend of the kernel a thread could not signal one that was confined apart from it.
        if Erratum::current().contains(Erratum::ScopedSignalHandling) {
            ruleset = ruleset.scope(Scope::Signal).map_err(LandlockError::Ruleset)?;
        }
        // Always on; another prctl(2) would not be let through.
        let mut created = ruleset.create().map_err(LandlockError::Ruleset)?.no_new_privs(false);
        let mut held = Vec::new();
        for rule in &rules {
            let path = match PathFd::new(&rule.path) {
                Ok(path) => path,
                Err(_) if !rule.is_required => continue,
                Err(PathFdError::OpenCall { source, .. }) => {
                    return Err(LandlockError::Path { path: rule.path.clone(), source });
                }
                Err(error) => {
                    let (path, source) = (rule.path.clone(), io::Error::other(error));
                    return Err(LandlockError::Path { path, source });
                }
            };
            created = add(created, rule, &path)?;
            if rule.path.starts_with("/proc") {
                held.push(path);
            }
        }
        Ok(Self { paths: Arc::new(Paths { rules, _held: held }), ruleset: created })
    }

    /// Confines the calling thread to these paths.
    ///
    /// # Errors
    /// [`LandlockError`]; the thread is as free as before.
    pub fn confine_thread(&self) -> Result<(), LandlockError> {
        let ruleset = self.ruleset.try_clone().map_err(LandlockError::Descriptor)?;
        ruleset.restrict_self().map_err(|error| match &error {
            RulesetError::RestrictSelf(RestrictSelfError::RestrictSelfCall { source, .. })
                if source.raw_os_error() == Some(libc::E2BIG) =>
            {
                LandlockError::TooOften
            }
            _ => LandlockError::Ruleset(error),
        })?;
        error_text::set_denied_reason(DENIED_REASON);
        Ok(())
    }
}

/// Adds a rule. A file takes those rights only that files have; a pipe or socket needs none.
fn add(
    ruleset: RulesetCreated,
    rule: &PathRule,
    path: &PathFd,
) -> Result<RulesetCreated, LandlockError> {
    // Adding to the copy adds to the ruleset, which stays if the rule is not taken.
    let copy = ruleset.try_clone().map_err(LandlockError::Descriptor)?;
    match copy.add_rule(PathBeneath::new(path.as_fd(), rule.rights)) {
        Ok(added) => Ok(added),
        Err(RulesetError::AddRules(AddRulesError::Fs(AddRuleError::AddRuleCall {
            source,
            ..
        }))) if source.raw_os_error() == Some(libc::EBADFD) => Ok(ruleset),
        Err(error) => Err(LandlockError::Ruleset(error)),
    }
}

/// Makes the files of consoles that are not there: a rule is for a file that is. What is there, a link with nothing
/// behind it for example, is left to the console, which says what is wrong with it.
fn make_console_files(config: &VmConfig) {
    let VmConfig { serial, console, debug_console, .. } = config;
    let consoles = [
        (serial.mode, &serial.file),
        (console.mode, &console.file),
        (debug_console.mode, &debug_console.file),
    ];
    let files = consoles.into_iter().filter(|(mode, _)| *mode == ConsoleMode::File);
    for file in files.filter_map(|(_, file)| file.as_ref()) {
        drop(fs::File::options().write(true).create_new(true).open(file));
    }
}

/// Files in `/proc/self/maps` that are mapped executable.
fn mapped_executable(maps: &str) -> Vec<PathBuf> {
    let mapped = maps.lines().filter_map(|line| {
        let (numbers, path) = line.split_at(line.find('/')?);
        let is_executable = numbers.split(' ').nth(1)?.contains('x');
        is_executable.then(|| PathBuf::from(path.trim_end_matches(" (deleted)")))
    });
    let mut mapped: Vec<_> = mapped.collect();
    mapped.sort();
    mapped.dedup();
    mapped
}

/// Standard descriptors that are terminals.
fn terminals() -> Vec<PathBuf> {
    let descriptors = ["/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"];
    let is_device =
        |path: &&str| fs::metadata(path).is_ok_and(|there| there.file_type().is_char_device());
    descriptors.into_iter().filter(is_device).map(PathBuf::from).collect()
}

/// Where the addresses of name servers are, if they are not in `/etc` itself: the file there is replaced by another
/// one when the network changes.
fn resolver_folders() -> Vec<PathBuf> {
    let file = fs::canonicalize("/etc/resolv.conf").ok();
    let folder = file.as_deref().and_then(Path::parent);
    folder.filter(|folder| folder.starts_with("/run")).into_iter().map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    fn ruled(path: &Path, access: &str) -> VmConfig {
        serde_json::from_value(serde_json::json!({
            "payload": {"kernel": "/nowhere/kernel"}, "console": {"mode": "Null"},
            "landlock_rules": [{"path": path, "access": access}],
        }))
        .unwrap()
    }

    #[test]
    fn a_path_of_a_rule_has_to_be_there_and_one_of_the_configuration_need_not() {
        let folder = tempfile::tempdir().unwrap();
        let of =
            |path: &Path| PathSet::of(&ruled(path, "r"), None, vec![], &Confinement::default());
        assert!(of(folder.path()).unwrap().is_some());
        let missing = folder.path().join("missing");
        let error = of(&missing).unwrap_err();
        assert!(matches!(&error, LandlockError::Path { path, .. } if *path == missing), "{error}");
    }

    #[test]
    fn the_same_rules_are_not_applied_twice() {
        let folder = tempfile::tempdir().unwrap();
        let mut confinement = Confinement::default();
        let config = ruled(folder.path(), "rw");
        let set = PathSet::of(&config, None, vec![], &confinement).unwrap().unwrap();
        confinement.note(&set);
        assert!(PathSet::of(&config, None, vec![], &confinement).unwrap().is_none());
        let other = ruled(folder.path(), "r");
        assert!(PathSet::of(&other, None, vec![], &confinement).unwrap().is_some());
    }

    #[test]
    fn a_confined_thread_opens_what_its_rules_name_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, outside) = (folder.path().join("in"), folder.path().join("out"));
        fs::create_dir(&inside).unwrap();
        fs::write(inside.join("file"), "x").unwrap();
        fs::write(&outside, "x").unwrap();
        let set = PathSet::of(&ruled(&inside, "r"), None, vec![], &Confinement::default());
        let set = set.unwrap().unwrap();
        let thread = std::thread::spawn(move || {
            set.confine_thread().unwrap();
            fs::read(inside.join("file")).unwrap();
            // Threads that it starts have its rules.
            let denied = std::thread::spawn(move || {
                [fs::read(outside).map(drop), fs::write(inside.join("new"), "x")]
            });
            for denied in denied.join().unwrap() {
                let denied = denied.unwrap_err();
                assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
                let error = LandlockError::Descriptor(denied);
                assert!(error_text::chain(&error).contains("--landlock-rules"), "{error}");
            }
            fs::read("/proc/self/status").unwrap();
        });
        thread.join().unwrap();
        fs::read(folder.path().join("out")).unwrap();
    }

    #[test]
    fn a_seventeenth_set_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let thread = std::thread::spawn(move || {
            let set =
                PathSet::of(&ruled(folder.path(), "r"), None, vec![], &Confinement::default());
            let set = set.unwrap().unwrap();
            for _ in 0..16 {
                set.confine_thread().unwrap();
            }
            assert!(matches!(set.confine_thread(), Err(LandlockError::TooOften)));
        });
        thread.join().unwrap();
    }

    #[test]
    fn the_file_of_a_console_is_there_for_its_rule() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out");
        let mut config = ruled(folder.path(), "r");
        (config.serial.mode, config.serial.file) = (ConsoleMode::File, Some(file.clone()));
        make_console_files(&config);
        assert!(file.is_file());
    }

    #[test]
    fn programs_and_libraries_are_found_among_mappings() {
        let maps = "\
7f00-7f01 r--p 00000000 08:01 1 /usr/lib/libc.so.6
7f01-7f02 r-xp 00001000 08:01 1 /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 08:01 2 /opt/a vmm (deleted)
7f03-7f04 rw-p 00000000 00:00 0 [heap]
7f04-7f05 r-xp 00000000 00:00 0 [vdso]
7f05-7f06 rw-s 00000000 00:01 9 /memfd:ram (deleted)
";
        let found = ["/opt/a vmm", "/usr/lib/libc.so.6"].map(PathBuf::from);
        assert_eq!(mapped_executable(maps), found);
        let own = mapped_executable(&fs::read_to_string("/proc/self/maps").unwrap());
        assert!(own.iter().any(|path| path.ends_with("libc.so.6")), "{own:?}");
    }
}
