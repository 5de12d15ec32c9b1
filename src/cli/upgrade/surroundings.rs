// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a process has from whatever started it, for the one that takes its place: user, directory, environment, limits,
//! processors, namespaces and control group.
//!
//! Owns reading that of one process and giving it to another before that executes its program. Must never start one of whose
//! predecessor not all of this can be seen: in another directory or namespace the same paths and taps are other ones.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use process_facts::{CGROUP_ROOT, Cgroups, CpuSet, Status};
use thiserror::Error;
use vmm::api::successor::NOTIFY_SOCKET;

use super::process::child_has_ended;

/// Namespaces that a process can enter by itself.
const ENTERED: [&str; 5] = ["cgroup", "ipc", "net", "uts", "mnt"];

/// Namespaces that are those of the program that starts a process.
const SAME: [&str; 2] = ["user", "pid"];

/// Time that systemd has to say what it knows of a unit.
const MANAGER_TIME: Duration = Duration::from_secs(3);

/// Kinds of limits that Linux has (setrlimit(2)).
const LIMITS: libc::__rlimit_resource_t = 16;

/// Why a process cannot be given what another has.
#[derive(Debug, Error)]
pub enum SurroundingsError {
    /// Something of the process cannot be read.
    #[error("what process {pid} was started with cannot be read ({what}): run ch-remote as root")]
    Read {
        /// The process.
        pid: i32,
        /// The file below /proc.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It is of another user.
    #[error("it is a process of user {uid}: only that user and root can start another one for it")]
    User {
        /// Its user.
        uid: u32,
    },
    /// It is in a namespace that cannot be entered.
    #[error("it is in another {name} namespace: ch-remote has to run there, too")]
    Namespace {
        /// Kind of the namespace.
        name: &'static str,
    },
    /// A service is a control group.
    #[error("a process cannot be put into the control group of its service '{unit}'")]
    Service {
        /// Name of the unit.
        unit: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The service would end with the old process.
    #[error(
        "it is the main process of '{unit}', which would end with it: the unit needs NotifyAccess=all (docs/upgrade.md)"
    )]
    MainProcess {
        /// Name of the unit.
        unit: String,
    },
}

/// User, group and further groups of a process.
#[derive(Debug, PartialEq, Eq)]
struct User {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

/// What the child needs; read before it is made, as it may not allocate.
#[derive(Debug, Default)]
struct Given {
    cgroup: Option<File>,
    namespaces: Vec<OwnedFd>,
    user: Option<User>,
    limits: Vec<(libc::__rlimit_resource_t, libc::rlimit)>,
    processors: Option<CpuSet>,
    nice: i32,
    /// What the kernel adds to its score when memory is short, as text.
    oom_score: Vec<u8>,
    directory: Option<CString>,
}

/// What a process has from whatever started it.
#[derive(Debug)]
pub struct Surroundings {
    given: Arc<Given>,
    environment: Vec<(OsString, OsString)>,
    /// What could not be taken over, for the operator.
    pub note: Option<String>,
}

fn read(pid: i32, name: &str) -> Result<Vec<u8>, SurroundingsError> {
    fs::read(format!("/proc/{pid}/{name}")).map_err(|source| {
        let what = name.to_owned();
        SurroundingsError::Read { pid, what, source }
    })
}

/// The effective user and groups in the text of `/proc/PID/status`.
fn user(status: &str) -> Option<User> {
    let status = Status::of(status);
    let (uid, gid) = (status.effective("Uid")?, status.effective("Gid")?);
    Some(User { uid, gid, groups: status.numbers("Groups")? })
}

/// The variables in `/proc/PID/environ`.
fn variables(text: &[u8]) -> Vec<(OsString, OsString)> {
    let pair = |word: &[u8]| {
        let at = word.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (word.get(..at)?, word.get(at + 1..)?);
        let own = |bytes: &[u8]| OsString::from_vec(bytes.to_owned());
        (!name.is_empty()).then(|| (own(name), own(value)))
    };
    text.split(|byte| *byte == 0).filter_map(pair).collect()
}

/// Opens the namespaces of a process that are not this one's.
fn namespaces(pid: i32) -> Result<Vec<OwnedFd>, SurroundingsError> {
    let is_other = |name: &str| {
        let link = |of: &str| fs::read_link(format!("/proc/{of}/ns/{name}"));
        match (link(&pid.to_string()), link("self")) {
            (Ok(theirs), Ok(ours)) => Ok(theirs != ours),
            // A kind that this kernel does not have.
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            (Err(source), _) | (_, Err(source)) => {
                let what = format!("ns/{name}");
                Err(SurroundingsError::Read { pid, what, source })
            }
        }
    };
    for name in SAME {
        if is_other(name)? {
            return Err(SurroundingsError::Namespace { name });
        }
    }
    let open = |name: &str| {
        let what = format!("ns/{name}");
        File::open(format!("/proc/{pid}/{what}"))
            .map(OwnedFd::from)
            .map_err(|source| SurroundingsError::Read { pid, what, source })
    };
    let mut others = Vec::new();
    for name in ENTERED {
        if is_other(name)? {
            others.push(open(name)?);
        }
    }
    Ok(others)
}

/// A service by its control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Service<'a> {
    unit: &'a str,
    /// It is one of a user's service manager, of which the system's knows nothing.
    is_of_user: bool,
}

/// The service whose control group is in the text of `/proc/PID/cgroup`, which has the group of each hierarchy. That of a user's
/// service manager is a slice among others.
fn service(text: &str) -> Option<Service<'_>> {
    Cgroups::of(text).paths().find_map(|group| {
        let (above, below) = group.rsplit_once(".slice/").unwrap_or(("", group));
        let unit = below.split('/').find(|name| name.ends_with(".service"))?;
        Some(Service { unit, is_of_user: above.contains("/user@") })
    })
}

/// Whether a service manager has started a process itself, as far as its parent shows that.
fn is_started_by_manager(status: &str) -> bool {
    let parent = Status::of(status).field("PPid").unwrap_or_default();
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
    name.trim_end() == "systemd"
}

/// What systemd says of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnitState {
    main_pid: i32,
    /// Any process of it may name another main one.
    hears_all: bool,
}

/// The state of a unit that is loaded and has a main process.
fn unit_state(answer: &str) -> Option<UnitState> {
    let value = |key: &str| answer.lines().find_map(|line| line.strip_prefix(key));
    if value("LoadState=") != Some("loaded") {
        return None;
    }
    let main_pid = value("MainPID=")?.parse().ok().filter(|pid| *pid > 0)?;
    Some(UnitState { main_pid, hears_all: value("NotifyAccess=") == Some("all") })
}

/// Asks systemd, which may have no time for it.
fn ask_manager(service: Service<'_>) -> Option<UnitState> {
    if service.is_of_user {
        return None;
    }
    let mut command = Command::new("systemctl");
    command.args(["show", "--property=LoadState,MainPID,NotifyAccess", "--", service.unit]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut asked = command.spawn().ok()?;
    let is_late = !child_has_ended(&asked, Instant::now() + MANAGER_TIME);
    if is_late {
        let _ = asked.kill();
    }
    let output = asked.wait_with_output().ok()?;
    if is_late { None } else { unit_state(&String::from_utf8_lossy(&output.stdout)) }
}

/// What a service has to do with the process of it whose place is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It would end with that process, and cannot be told of another one.
    EndsWithIt,
    /// It is told of another one, if it listens.
    IsTold,
    /// It has another main process, and is to keep that.
    HasAnother,
}

/// By what systemd says, or else by the parent of process `pid`; `can_be_told`: the new process is in the service, and has its socket.
fn role(
    state: Option<UnitState>,
    is_started_by_manager: bool,
    can_be_told: bool,
    pid: i32,
) -> Role {
    match state {
        Some(state) if state.main_pid != pid => Role::HasAnother,
        Some(state) if !(can_be_told && state.hears_all) => Role::EndsWithIt,
        None if is_started_by_manager && !can_be_told => Role::EndsWithIt,
        Some(_) | None => Role::IsTold,
    }
}

/// The control group of a process, open, if it is not this one's; or what is to be said if it cannot be opened.
fn cgroup(pid: i32) -> Result<(Option<File>, Option<String>), SurroundingsError> {
    let text = |of: &str| fs::read_to_string(format!("/proc/{of}/cgroup")).unwrap_or_default();
    let (theirs, ours) = (text(&pid.to_string()), text("self"));
    let [theirs, ours] = [&theirs, &ours].map(|text| Cgroups::of(text).unified());
    let Some(theirs) = theirs.filter(|_| theirs != ours) else {
        return Ok((None, None));
    };
    match File::options().write(true).open(format!("{CGROUP_ROOT}{theirs}/cgroup.procs")) {
        Ok(file) => Ok((Some(file), None)),
        Err(error) => {
            if let Some(service) = service(&format!("0::{theirs}")) {
                let unit = service.unit.to_owned();
                return Err(SurroundingsError::Service { unit, source: error });
            }
            let note = format!(
                "the new process is not in the control group '{theirs}' of the old one: {error}"
            );
            Ok((None, Some(note)))
        }
    }
}

fn limits(pid: i32) -> Vec<(libc::__rlimit_resource_t, libc::rlimit)> {
    let limit = |resource| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes one structure, which lives during the call, and changes no limit.
        let done = unsafe { libc::prlimit(pid, resource, std::ptr::null(), &raw mut limit) };
        (done == 0).then_some((resource, limit))
    };
    (0..LIMITS).filter_map(limit).collect()
}

fn nice(pid: i32) -> i32 {
    // SAFETY: takes numbers only. An error is told apart from a value of -1 by nothing that matters here.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, pid.cast_unsigned()) }
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Given {
    /// Gives it to the calling process, between fork(2) and execve(2): system calls alone.
    fn take(&self) -> io::Result<()> {
        // SAFETY: raw calls with numbers, and with memory that lives as long as `self`; the calling process is a child that
        // has one thread and executes a program next.
        unsafe {
            // Not of the terminal of ch-remote, and a group that can be ended as one.
            libc::setsid();
            let scores = c"/proc/self/oom_score_adj";
            let score = libc::open(scores.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if score >= 0 {
                // One that may not be lowered stays.
                libc::write(score, self.oom_score.as_ptr().cast(), self.oom_score.len());
                libc::close(score);
            }
            if let Some(cgroup) = &self.cgroup {
                let zero = b"0";
                if libc::write(cgroup.as_raw_fd(), zero.as_ptr().cast(), 1) != 1 {
                    return Err(io::Error::last_os_error());
                }
            }
            for (resource, limit) in &self.limits {
                let mut own = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                if libc::getrlimit(*resource, &raw mut own) == 0
                    && (own.rlim_cur, own.rlim_max) != (limit.rlim_cur, limit.rlim_max)
                {
                    // One that may not be raised stays.
                    libc::setrlimit(*resource, &raw const *limit);
                }
            }
            if let Some(set) = &self.processors {
                // Where it may run on none of them it stays where it is.
                let _ = set.bind(0);
            }
            libc::setpriority(libc::PRIO_PROCESS, 0, self.nice);
            for namespace in &self.namespaces {
                check(libc::setns(namespace.as_raw_fd(), 0).into())?;
            }
            if let Some(user) = &self.user {
                let (uid, gid) = (user.uid, user.gid);
                check(libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr()))?;
                check(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
                check(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
            }
            if let Some(directory) = &self.directory {
                check(libc::chdir(directory.as_ptr()).into())?;
            }
        }
        Ok(())
    }
}

impl Surroundings {
    /// Those of a process, in its directory if that is known.
    ///
    /// # Errors
    /// [`SurroundingsError`]
    pub fn of(pid: i32, directory: Option<&Path>) -> Result<Self, SurroundingsError> {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let status = text(read(pid, "status")?);
        let own = user(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let theirs = user(&status).filter(|user| own.as_ref() != Some(user));
        let own_uid = own.map_or(u32::MAX, |own| own.uid);
        let theirs = match theirs {
            Some(User { uid, .. }) if own_uid != 0 && uid != own_uid => {
                return Err(SurroundingsError::User { uid });
            }
            // Other groups of the same user are root's to give.
            theirs => theirs.filter(|_| own_uid == 0),
        };
        let mut environment = variables(&read(pid, "environ")?);
        let groups = text(read(pid, "cgroup")?);
        if let Some(service) = service(&groups) {
            let can_be_told = Cgroups::of(&groups).unified().is_some()
                && environment.iter().any(|(name, _)| name == NOTIFY_SOCKET);
            let is_started_by_manager = is_started_by_manager(&status);
            match role(ask_manager(service), is_started_by_manager, can_be_told, pid) {
                Role::EndsWithIt => {
                    let unit = service.unit.to_owned();
                    return Err(SurroundingsError::MainProcess { unit });
                }
                Role::IsTold => {}
                Role::HasAnother => environment.retain(|(name, _)| name != NOTIFY_SOCKET),
            }
        }
        let (cgroup, note) = cgroup(pid)?;
        let given = Given {
            cgroup,
            namespaces: namespaces(pid)?,
            user: theirs,
            limits: limits(pid),
            processors: CpuSet::of_thread(pid).ok(),
            nice: nice(pid),
            oom_score: read(pid, "oom_score_adj").unwrap_or_default(),
            directory: directory.and_then(|path| CString::new(path.as_os_str().as_bytes()).ok()),
        };
        Ok(Self { given: Arc::new(given), environment, note })
    }

    /// Has a program start with them.
    pub fn give(&self, command: &mut Command) {
        command.env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        let given = Arc::clone(&self.given);
        // SAFETY: system calls alone, on memory that was made before: nothing allocates and no lock is taken.
        unsafe { command.pre_exec(move || given.take()) };
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_process_is_read() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \n";
        assert_eq!(user(status), Some(User { uid: 2, gid: 6, groups: vec![9, 10] }));
        assert_eq!(user("Uid:\t1\t2\nGid:\tx\n"), None);
        for (text, unit, is_of_user) in [
            ("0::/system.slice/vm@a.service\n", "vm@a.service", false),
            ("0::/system.slice/agent.service/vm\n", "agent.service", false),
            ("4:x:/\n1:name=systemd:/system.slice/vm.service\n", "vm.service", false),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vm.service\n",
                "vm.service",
                true,
            ),
        ] {
            assert_eq!(service(text), Some(Service { unit, is_of_user }), "{text}");
        }
        for text in [
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n",
            "0::/user.slice/user-1000.slice/session-3.scope\n",
            "0::/\n",
        ] {
            assert_eq!(service(text), None, "{text}");
        }
        let pairs = variables(b"A=1\0B=\0rubbish\0=2\0C=x=y\0");
        let names: Vec<_> =
            pairs.iter().map(|(name, value)| (name.to_str(), value.to_str())).collect();
        let expected = [("A", "1"), ("B", ""), ("C", "x=y")].map(|(n, v)| (Some(n), Some(v)));
        assert_eq!(names, expected);
    }

    #[test]
    fn a_service_is_told_or_keeps_its_process_or_would_end() {
        let answer = "LoadState=loaded\nMainPID=12\nNotifyAccess=all\n";
        let loaded = unit_state(answer);
        let deaf = unit_state(&answer.replace("all", "main"));
        assert_eq!(loaded, Some(UnitState { main_pid: 12, hears_all: true }));
        assert_eq!(deaf, Some(UnitState { main_pid: 12, hears_all: false }));
        for unknown in [answer.replace("loaded", "not-found"), answer.replace("12", "0")] {
            assert_eq!(unit_state(&unknown), None, "{unknown}");
        }
        for is_started in [false, true] {
            assert_eq!(role(loaded, is_started, true, 12), Role::IsTold);
            assert_eq!(role(loaded, is_started, false, 12), Role::EndsWithIt, "it has no socket");
            assert_eq!(role(deaf, is_started, true, 12), Role::EndsWithIt);
            for can_be_told in [false, true] {
                assert_eq!(role(loaded, is_started, can_be_told, 13), Role::HasAnother);
                assert_eq!(role(deaf, is_started, can_be_told, 13), Role::HasAnother);
            }
            assert_eq!(role(None, is_started, true, 12), Role::IsTold);
        }
        assert_eq!(role(None, true, false, 12), Role::EndsWithIt);
        assert_eq!(role(None, false, false, 12), Role::IsTold, "no service manager's");
        let of_user = Service { unit: "vm.service", is_of_user: true };
        assert_eq!(ask_manager(of_user), None);
    }

    #[test]
    fn a_program_has_directory_limits_and_variables_of_a_process() {
        let mut of = Command::new("sleep");
        of.arg("1000").env_clear().env("GODWIT_TEST", "1").current_dir("/");
        // SAFETY: one system call.
        unsafe {
            of.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 77, rlim_max: 77 };
                check(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit).into())
            });
        }
        let mut of = of.spawn().unwrap();
        let pid = i32::try_from(of.id()).unwrap();
        let surroundings = Surroundings::of(pid, Some(Path::new("/")));
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "pwd; ulimit -n; echo $GODWIT_TEST; cut -d' ' -f1,6 /proc/$$/stat"]);
        let surroundings = surroundings.unwrap();
        surroundings.give(&mut command);
        let output = command.output();
        of.kill().unwrap();
        of.wait().unwrap();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.get(..3), Some(&["/", "77", "1"][..]), "{text}");
        let (own, session) = lines[3].split_once(' ').unwrap();
        assert_eq!(own, session, "it leads a session of its own");
    }
}
