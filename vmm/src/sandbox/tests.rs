// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table against the documents and against what no thread may call; and processes that make a call which they
//! may not.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeSet;
use std::process::Output;

use super::calls::{Check, RUNTIME};
use super::reference::reference;
use super::table::{KINDS, Kind};
use super::*;
use crate::panicking;
use crate::testing::again;

const MODE_OF_TEST: &str = "GODWIT_TEST_SECCOMP";

/// Names in the first column of the table of threads.
fn documented() -> BTreeSet<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/architecture.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows = text.lines().skip_while(|line| !line.starts_with("| name | started by |")).skip(2);
    rows.take_while(|line| line.starts_with('|'))
        .flat_map(|line| line.split('|').nth(1).unwrap().split('`').skip(1).step_by(2))
        .filter(|name| !name.starts_with('_'))
        .map(|name| match name {
            "vcpuN" => "vcpu".to_owned(),
            "prefaultQ.N" => "prefault".to_owned(),
            other => other.to_owned(),
        })
        .collect()
}

#[test]
fn the_table_has_each_thread_of_the_architecture_and_no_other() {
    let table: BTreeSet<String> = KINDS.iter().map(|kind| kind.name.to_owned()).collect();
    assert_eq!(table.len(), KINDS.len(), "a kind is there twice");
    assert_eq!(table, documented());
    for kind in KINDS {
        for started in kind.starts.iter().copied().flatten() {
            assert!(table.contains(*started), "{} starts {started}, which is no kind", kind.name);
        }
    }
}

#[test]
fn what_a_thread_starts_may_call_no_more_than_it() {
    for kind in KINDS {
        let calls: BTreeSet<_> =
            kind.calls().map(|call| (call.number, format!("{:?}", call.check))).collect();
        for started in kind.family() {
            for call in started.calls() {
                let call = (call.number, format!("{:?}", call.check));
                assert!(calls.contains(&call), "{}: {call:?} of {}", kind.name, started.name);
            }
        }
    }
}

#[test]
fn a_name_with_a_number_is_of_its_kind() {
    let kind = |name| Kind::of_thread(name).map(|(_, kind)| kind.name);
    assert_eq!(kind("vcpu12"), Some("vcpu"));
    assert_eq!(kind("prefault1.15"), Some("prefault"));
    assert_eq!(kind("pin"), Some("pin"));
    assert_eq!(kind("pin3"), None);
    assert_eq!(kind("_disk0_q0"), None);
}

fn kinds_with(number: i64) -> Vec<&'static str> {
    let has = |kind: &&Kind| kind.calls().any(|call| call.number == number);
    KINDS.iter().filter(has).map(|kind| kind.name).collect()
}

#[test]
fn only_what_starts_the_page_server_executes_a_program() {
    let starts = |kind: &&Kind| {
        kind.family()
            .iter()
            .any(|kind| kind.starts.iter().copied().flatten().any(|name| *name == "page-server"))
    };
    let starting: Vec<_> = KINDS.iter().filter(starts).map(|kind| kind.name).collect();
    assert_eq!(starting, ["main", "migration-send"]);
    assert_eq!(kinds_with(libc::SYS_execve), starting);
    for never in
        [libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_mount, libc::SYS_unshare, libc::SYS_setns]
    {
        assert!(kinds_with(never).is_empty(), "{never}");
    }
}

#[test]
fn no_thread_makes_memory_of_its_own_executable() {
    let mapping = [libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_pkey_mprotect];
    for kind in KINDS {
        for call in kind.calls().filter(|call| mapping.contains(&call.number)) {
            assert!(matches!(call.check, Check::NotExecutable | Check::Library), "{}", kind.name);
        }
    }
    let library = |kind: &&Kind| kind.calls().any(|call| call.check == Check::Library);
    let with_libraries: Vec<_> = KINDS.iter().filter(library).map(|kind| kind.name).collect();
    for kind in ["vcpu", "device-net", "http-server", "metrics-server", "mig-receive", "vm-boot"] {
        assert!(!with_libraries.contains(&kind), "{with_libraries:?}");
    }
}

#[test]
fn requests_and_sockets_are_never_unchecked() {
    let checked =
        [libc::SYS_ioctl, libc::SYS_socket, libc::SYS_prctl, libc::SYS_seccomp, libc::SYS_bpf];
    for call in KINDS.iter().flat_map(Kind::calls) {
        assert!(!checked.contains(&call.number) || call.check != Check::Any, "{}", call.name());
    }
    let opening = [libc::SYS_open, libc::SYS_openat];
    for kind in ["device-block", "http-server", "metrics-server", "throttle", "mig-alive", "end"] {
        let (_, kind) = Kind::of_thread(kind).unwrap();
        assert!(!kind.calls().any(|call| opening.contains(&call.number)), "{}", kind.name);
    }
}

/// A thread that is no kind ends the process as it starts: each name that is written where threads are started.
#[test]
fn every_thread_that_is_started_is_a_kind() {
    // Tests and their stand-ins, and what ch-remote does at Ctrl-C and in an upgrade.
    const NOT_OF_A_VMM: [&str; 5] = ["test", "fakes", "scripted", "interrupt", "upgrade"];
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders: Vec<_> =
        ["devices", "hypervisor", "memory", "prezero-pool", "src", "vfio", "vm-migration", "vmm"]
            .map(|name| root.join(name))
            .into();
    let mut names = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name =
                path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if NOT_OF_A_VMM.iter().any(|part| name.contains(part)) {
            } else if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).expect("text");
                // Tests at the end of a file start threads of other names.
                let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
                for call in text.split("stoppable_thread::spawn").skip(1) {
                    let arguments = call.split(';').next().unwrap_or_default();
                    // Of a vCPU the name has a number.
                    let name = arguments.split('"').nth(1).filter(|name| !name.contains('{'));
                    names.extend(name.map(str::to_owned));
                }
            }
        }
    }
    assert!(names.contains("mig-state") && names.len() > 20, "{names:?}");
    let known: BTreeSet<_> = KINDS.iter().map(|kind| kind.name.to_owned()).collect();
    let unknown: Vec<_> = names.difference(&known).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// A peer reaches the code of these threads first.
#[test]
fn threads_that_face_a_peer_open_and_connect_nothing() {
    let opening = [
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_connect,
        libc::SYS_io_uring_setup,
        libc::SYS_execve,
        libc::SYS_stat,
        libc::SYS_access,
        libc::SYS_readlinkat,
        libc::SYS_getdents64,
        libc::SYS_statfs,
        libc::SYS_unlink,
        libc::SYS_unlinkat,
    ];
    // The last owners of an address.
    let removing = ["mig-hand-on", "mig-linger"];
    let faces = [
        "mig-send",
        "mig-state",
        "mig-urgent",
        "mig-bulk",
        "mig-look",
        "mig-alive",
        "mig-hand-on",
        "mig-receive",
        "mig-prepare",
        "mig-faults",
        "mig-pages",
        "mig-linger",
        "restore-fault",
        "restore-fill",
        "snapshot-mem",
    ];
    for name in faces {
        let kind = KINDS.iter().find(|kind| kind.name == name).expect("a kind of thread");
        let found: BTreeSet<_> =
            kind.calls().map(|call| call.number).filter(|call| opening.contains(call)).collect();
        let unlinks = [libc::SYS_unlink, libc::SYS_unlinkat];
        let expected: &[_] = if removing.contains(&name) { &unlinks } else { &[] };
        assert_eq!(found, expected.iter().copied().collect(), "{name}");
    }
}

/// A guest reaches the code of these threads first.
#[test]
fn threads_that_face_the_guest_open_and_connect_nothing() {
    let opening = [
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_connect,
        libc::SYS_unlink,
        libc::SYS_unlinkat,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_register,
        libc::SYS_timerfd_create,
    ];
    // Each with the reason why it is there.
    let excepted = [
        // Connects to sockets of the host for the guest.
        ("device-vsock", libc::SYS_socket),
        ("device-vsock", libc::SYS_bind),
        ("device-vsock", libc::SYS_connect),
        ("device-vsock", libc::SYS_timerfd_create),
        ("device-balloon", libc::SYS_timerfd_create),
        ("device-watchdog", libc::SYS_timerfd_create),
    ];
    let faces = |kind: &&Kind| {
        kind.name == "vcpu" || kind.name.starts_with("device-") && kind.name != "device-start"
    };
    let found: BTreeSet<_> = KINDS
        .iter()
        .filter(faces)
        .flat_map(|kind| kind.calls().map(|call| (kind.name, call.number)))
        .filter(|(_, number)| opening.contains(number))
        .collect();
    assert_eq!(found, BTreeSet::from(excepted));
}

#[test]
fn only_threads_that_build_a_machine_make_a_vm() {
    let makes = |kind: &&Kind| {
        kind.calls().any(|call| match call.check {
            Check::Requests(list) => list.iter().any(|request| request.value == 0xae01),
            Check::Second(list) => {
                list.iter().any(|request| request & 0xffff == 0xaea3 && *request != 0xaea3)
            }
            _ => false,
        })
    };
    let making: Vec<_> = KINDS.iter().filter(makes).map(|kind| kind.name).collect();
    assert!(making.contains(&"main") && making.contains(&"mig-build"), "{making:?}");
    for kind in KINDS.iter().map(|kind| kind.name) {
        let runs_a_guest = kind.starts_with("device-")
            || ["vcpu", "mig-faults", "mig-urgent", "pin", "prefault", "throttle", "serve"]
                .contains(&kind);
        assert!(!runs_a_guest || !making.contains(&kind), "{kind}");
    }
}

#[test]
fn each_call_says_why_it_is_there() {
    for call in RUNTIME.calls.iter().chain(KINDS.iter().flat_map(Kind::calls)) {
        assert!(!call.why.is_empty() && !call.name().starts_with("SYS_"), "{}", call.name());
    }
}

#[test]
fn each_filter_can_be_made() {
    for mode in [SeccompMode::Enforce, SeccompMode::Log, SeccompMode::Errno] {
        for kind in KINDS {
            assert!(!seccomp::programs(kind.calls(), mode, kind.is_first()).unwrap().is_empty());
        }
    }
}

/// Instructions of the longest chain of filters that a thread of this kind and those that it starts inherit.
fn longest_chain(kind: &Kind, above: &mut Vec<&'static str>) -> usize {
    /// What the kernel counts for each filter beyond its instructions (`kernel/seccomp.c`).
    const EACH: usize = 4;
    let programs = seccomp::programs(kind.calls(), SeccompMode::Enforce, kind.is_first()).unwrap();
    let own: usize = programs.iter().map(|program| program.len() + EACH).sum();
    above.push(kind.name);
    let started: BTreeSet<_> = kind.starts.iter().copied().flatten().copied().collect();
    let below = started
        .into_iter()
        .filter(|name| !above.contains(name))
        .collect::<Vec<_>>()
        .into_iter()
        .map(|name| longest_chain(Kind::of_thread(name).unwrap().1, above))
        .max();
    above.pop();
    own + below.unwrap_or(0)
}

#[test]
fn no_thread_inherits_more_filters_than_the_kernel_takes() {
    /// `MAX_INSNS_PER_PATH`.
    const INSTRUCTIONS_MAX: usize = 32768;
    let (_, main) = Kind::of_thread("main").unwrap();
    let longest = longest_chain(main, &mut Vec::new());
    assert!(longest <= INSTRUCTIONS_MAX, "{longest}");
}

#[test]
fn the_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sandbox.md");
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    let mark = "<!-- From here on generated: UPDATE_DOCS=1 cargo test -p vmm sandbox -->\n";
    let (hand_written, _) = kept.split_once(mark).unwrap();
    let now = format!("{hand_written}{mark}{}", reference());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &now).unwrap();
        return;
    }
    assert!(kept == now, "docs/sandbox.md is stale, run the test with UPDATE_DOCS=1");
}

/// Runs the test of this name in a process of its own, with `mode`.
fn run(test: &str, mode: SeccompMode) -> Output {
    let mut command = again(&format!("sandbox::tests::{test}"));
    command.env(MODE_OF_TEST, mode.text()).env_remove("RUST_MIN_STACK").output().unwrap()
}

/// The mode, in the process that [`run`] starts.
fn mode_of_test() -> Option<SeccompMode> {
    std::env::var(MODE_OF_TEST).ok().map(|text| SeccompMode::parse(&text))
}

#[test]
fn the_number_that_is_no_call_is_answered_by_the_kernel() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        // SAFETY: the kernel does nothing for this number.
        let answer = unsafe { libc::syscall(-1) };
        println!("answer {answer} {:?}", io::Error::last_os_error().raw_os_error());
        return;
    }
    let test = "the_number_that_is_no_call_is_answered_by_the_kernel";
    let done = run(test, SeccompMode::Enforce);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(text.contains(&format!("answer -1 Some({})", libc::ENOSYS)), "{text} {done:?}");
}

/// Asks for a socket in a thread that may have none; says what the kernel answered.
fn ask_for_socket() -> (libc::c_int, Option<i32>) {
    let ask = || {
        // As threads do that leave signals to others: a blocked SIGSYS would end the process without the line.
        crate::signals::block_signals();
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) };
        (fd, io::Error::last_os_error().raw_os_error())
    };
    stoppable_thread::spawn("throttle", ask).unwrap().join().unwrap()
}

#[test]
fn a_call_that_is_not_in_the_table_ends_as_the_mode_says() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        let (fd, errno) = ask_for_socket();
        println!("answer {}", if fd >= 0 { 0 } else { errno.unwrap_or(0) });
        return;
    }
    let test = "a_call_that_is_not_in_the_table_ends_as_the_mode_says";
    let stopped = run(test, SeccompMode::Enforce);
    let text = String::from_utf8_lossy(&stopped.stderr).into_owned();
    assert_eq!(stopped.status.code(), Some(STOPPED.into()), "{text}");
    assert!(text.contains("system call 41 (socket 0x2) of a thread of kind throttle"), "{text}");
    assert!(text.contains("--seccomp log"), "{text}");
    for (mode, errno) in
        [(SeccompMode::Errno, libc::EPERM), (SeccompMode::Log, 0), (SeccompMode::Off, 0)]
    {
        let done = run(test, mode);
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(
            done.status.success() && text.contains(&format!("answer {errno}\n")),
            "{mode:?}: {text}"
        );
    }
}

#[test]
fn a_thread_that_is_not_in_the_table_ends_the_process() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        let _ = stoppable_thread::spawn("no-such-kind", || {}).unwrap().join();
        println!("it ran");
        return;
    }
    let stopped = run("a_thread_that_is_not_in_the_table_ends_the_process", SeccompMode::Enforce);
    assert_eq!(stopped.status.code(), Some(STOPPED.into()), "{stopped:?}");
}

#[test]
fn libraries_that_look_up_names_are_refused_other_calls() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        let ask = || {
            // SAFETY: takes numbers only.
            let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
            (fd, io::Error::last_os_error().raw_os_error())
        };
        let answer = stoppable_thread::spawn("mig-resolve", ask).unwrap().join().unwrap();
        println!("answer {answer:?}");
        return;
    }
    let test = "libraries_that_look_up_names_are_refused_other_calls";
    for (mode, errno) in [(SeccompMode::Enforce, libc::ENOSYS), (SeccompMode::Errno, libc::EPERM)] {
        let done = run(test, mode);
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(text.contains(&format!("answer (-1, Some({errno}))")), "{mode:?}: {text} {done:?}");
    }
}

#[test]
fn a_panic_in_the_narrowest_thread_ends_the_process_as_ever() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        panicking::end_with_process();
        let panics = stoppable_thread::spawn("end", || panic!("as a test wants it")).unwrap();
        let _ = panics.join();
        unreachable!("the process has ended");
    }
    let test = "a_panic_in_the_narrowest_thread_ends_the_process_as_ever";
    for backtrace in ["0", "full"] {
        let mut command = again(&format!("sandbox::tests::{test}"));
        command.env(MODE_OF_TEST, "true").env("RUST_BACKTRACE", backtrace);
        let ended = command.env_remove("RUST_MIN_STACK").output().unwrap();
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(panicking::PANICKED.into()), "{text}");
        assert!(text.contains("as a test wants it"), "{text}");
    }
}

#[test]
fn no_namespace_is_made() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        // Threads start without clone3(2).
        stoppable_thread::spawn("end", || {}).unwrap().join().unwrap();
        let (arguments, no_bytes) = (std::ptr::null::<libc::c_void>(), 0_usize);
        // SAFETY: the kernel reads nothing of no bytes.
        let answer = unsafe { libc::syscall(libc::SYS_clone3, arguments, no_bytes) };
        println!("clone3 {answer} {:?}", io::Error::last_os_error().raw_os_error());
        // SAFETY: does not return where it is let through: it is refused without privileges, or the child ends.
        unsafe {
            if libc::syscall(libc::SYS_clone, libc::CLONE_NEWUSER, 0, 0, 0, 0) == 0 {
                libc::_exit(0);
            }
        }
        println!("clone {:?}", io::Error::last_os_error().raw_os_error());
        return;
    }
    for mode in [SeccompMode::Enforce, SeccompMode::Errno] {
        let done = run("no_namespace_is_made", mode);
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(text.contains(&format!("clone3 -1 Some({})", libc::ENOSYS)), "{mode:?}: {text}");
        let is_refused = text.contains(&format!("clone Some({})", libc::EPERM));
        assert_eq!(is_refused, mode == SeccompMode::Errno, "{text}");
    }
    let stopped = run("no_namespace_is_made", SeccompMode::Enforce);
    let text = String::from_utf8_lossy(&stopped.stderr).into_owned();
    assert_eq!(stopped.status.code(), Some(STOPPED.into()), "{text}");
    assert!(text.contains("(clone 0x10000000)"), "{text}");
}

#[test]
fn a_thread_signals_and_schedules_nothing_of_another_process() {
    if let Some(mode) = mode_of_test() {
        let other = i64::from(std::os::unix::process::parent_id());
        begin(Process::Vmm, mode).unwrap();
        let ask = move || {
            let own = i64::from(std::process::id());
            // SAFETY: takes nothing.
            let thread = unsafe { libc::syscall(libc::SYS_gettid) };
            let mut cpus = [0_u64; 16];
            let size = i64::try_from(size_of_val(&cpus)).unwrap();
            let cpus = cpus.as_mut_ptr() as i64;
            // SAFETY: the kernel writes to the array, which lives during the call.
            unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size, cpus) };
            let (signal, affinity) = (libc::SYS_tgkill, libc::SYS_sched_setaffinity);
            let (scheduler, priority) = (libc::SYS_sched_setscheduler, libc::SYS_setpriority);
            let parameters = 0_i32;
            let parameters = (&raw const parameters) as i64;
            let calls = [
                [signal, own, thread, 0],
                [affinity, 0, size, cpus],
                [scheduler, 0, i64::from(libc::SCHED_OTHER), parameters],
                [priority, 0, 0, 19],
                [signal, other, other, 0],
                [libc::SYS_kill, other, 0, 0],
                [libc::SYS_fcntl, 0, i64::from(libc::F_SETOWN), other],
                [affinity, other, size, cpus],
                [scheduler, other, i64::from(libc::SCHED_OTHER), parameters],
                [priority, 0, other, 19],
            ];
            calls.map(|[call, one, two, three]| {
                // SAFETY: numbers, and pointers to values that live during the call.
                let answer = unsafe { libc::syscall(call, one, two, three) };
                let refused = io::Error::last_os_error().raw_os_error();
                if answer == 0 { None } else { refused }
            })
        };
        println!("{:?}", stoppable_thread::spawn("throttle", ask).unwrap().join().unwrap());
        return;
    }
    let done = run("a_thread_signals_and_schedules_nothing_of_another_process", SeccompMode::Errno);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let (may, refused) = (None::<i32>, Some(libc::EPERM));
    let wanted = format!("{:?}", [[may; 4].as_slice(), [refused; 6].as_slice()].concat());
    assert!(text.contains(&wanted), "{text} {done:?}");
}

#[test]
fn the_process_gives_up_new_rights_and_dumps() {
    if let Some(mode) = mode_of_test() {
        begin(Process::Vmm, mode).unwrap();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let rights = status.lines().find_map(|line| line.strip_prefix("NoNewPrivs:")).unwrap();
        // SAFETY: takes and gives numbers only.
        let dumps = unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) };
        let mut core = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
        // SAFETY: one rlimit is written, which lives during the call.
        unsafe { libc::getrlimit(libc::RLIMIT_CORE, &raw mut core) };
        println!(
            "rights {} dumps {dumps} core {} of {}",
            rights.trim(),
            core.rlim_cur,
            core.rlim_max
        );
        return;
    }
    let done = run("the_process_gives_up_new_rights_and_dumps", SeccompMode::Enforce);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(text.contains("rights 1 dumps 0 core 0 of 0\n"), "{text} {done:?}");
}
