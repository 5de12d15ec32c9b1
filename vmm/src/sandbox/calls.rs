// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System calls in groups: what the threads of the VMM may call, what is checked of the arguments, and why.
//!
//! Owns the groups. Which thread has which of them is in `table`; what a filter is made of them in
//! `seccomp`.

use super::requests::{self, Request};

/// What is checked of the arguments of a call. The kernel shows a filter the numbers, not what pointers point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// Nothing.
    Any,
    /// The third argument, a protection, is without PROT_EXEC.
    NotExecutable,
    /// The first argument, flags of clone(2), asks for no namespace.
    NoNamespace,
    /// The third argument is PROT_READ | PROT_EXEC, and the fourth has no MAP_ANONYMOUS: the text of a library.
    Library,
    /// The first argument is the number of this process.
    ThisProcess,
    /// The first two arguments are zero: of a priority, that of the calling thread.
    OwnPriority,
    /// The first argument is one of these.
    First(&'static [u32]),
    /// The second argument is one of these: the request of ioctl(2) or fcntl(2).
    Second(&'static [u32]),
    /// The second argument, a request of ioctl(2), has type and number of one of these.
    Requests(&'static [Request]),
}

/// A system call that a thread may make.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) number: i64,
    /// As in libc: `SYS_read`.
    #[cfg_attr(not(test), expect(dead_code, reason = "what the page of the sandbox shows"))]
    constant: &'static str,
    pub(super) check: Check,
    #[cfg_attr(not(test), expect(dead_code, reason = "what the page of the sandbox shows"))]
    pub(super) why: &'static str,
}

#[cfg(test)]
impl Call {
    /// As in the manual: `read`.
    pub(super) fn name(&self) -> &'static str {
        self.constant.strip_prefix("SYS_").unwrap_or(self.constant)
    }
}

/// Calls that one purpose needs.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) calls: &'static [Call],
}

macro_rules! group {
    ($(#[$doc:meta])* $ident:ident $name:literal { $($number:ident $([$check:expr])? $why:literal;)* }) => {
        $(#[$doc])*
        pub(super) static $ident: Group = Group {
            name: $name,
            calls: &[$(Call {
                number: libc::$number,
                constant: stringify!($number),
                check: group!(@check $($check)?),
                why: $why,
            }),*],
        };
    };
    (@check) => { Check::Any };
    (@check $check:expr) => { $check };
}

/// KVM_GET_TSC_KHZ. KVM_ENABLE_CAP has the same number with a direction and a length.
const TSC_KHZ: &[u32] = &[0xaea3];
/// KVM_ENABLE_CAP.
const ENABLE_CAP: &[u32] = &[0x4068_aea3];

/// TCGETS, TCSETS, TCSETSW, TCSETSF, their successors with a 2, TIOCGWINSZ, TIOCSWINSZ, FIONREAD, FIONBIO, FIOCLEX.
const TERMINAL: &[u32] = &[
    0x5401,
    0x5402,
    0x5403,
    0x5404,
    0x802c_542a,
    0x402c_542b,
    0x402c_542c,
    0x402c_542d,
    0x5413,
    0x5414,
    0x541b,
    0x5421,
    0x5451,
];
/// TIOCGPTN, TIOCSPTLCK, TIOCGPTPEER, TIOCSCTTY.
const PSEUDOTERMINAL: &[u32] = &[0x8004_5430, 0x4004_5431, 0x5441, 0x540e];
/// SIOCOUTQ.
const OUTPUT_QUEUE: &[u32] = &[0x5411];
/// PAGEMAP_SCAN, which is read and write of a structure of 96 bytes, type `f`, number 16.
const PAGEMAP_SCAN: &[u32] = &[0xc060_6610];
/// Requests of tap devices: TUNSETIFF, TUNGETFEATURES, TUNSETOFFLOAD, TUNGETIFF, TUNGETVNETHDRSZ, TUNSETVNETHDRSZ,
/// TUNSETQUEUE, TUNSETVNETLE.
const TAP: &[u32] = &[
    0x4004_54ca,
    0x8004_54cf,
    0x4004_54d0,
    0x8004_54d2,
    0x8004_54d7,
    0x4004_54d8,
    0x4004_54d9,
    0x4004_54dc,
];
/// Requests by which a driver's settings reach an open tap: TUNSETOFFLOAD, TUNSETQUEUE.
const TAP_SETTINGS: &[u32] = &[0x4004_54d0, 0x4004_54d9];
/// Requests of network interfaces: flags, address, mask, MTU, hardware address, index; read and write.
const INTERFACE: &[u32] = &[
    0x8910, 0x8913, 0x8914, 0x8915, 0x8916, 0x891b, 0x891c, 0x8921, 0x8922, 0x8927, 0x8924, 0x8933,
];
/// Requests of block devices: BLKGETSIZE64, BLKSSZGET, BLKPBSZGET, BLKIOMIN, BLKIOOPT, BLKALIGNOFF, BLKROGET,
/// BLKFLSBUF, BLKDISCARD, BLKDISCARDZEROES, BLKZEROOUT, BLKROTATIONAL.
const BLOCK: &[u32] = &[
    0x8008_1272,
    0x1268,
    0x127b,
    0x1278,
    0x1279,
    0x127a,
    0x125e,
    0x1261,
    0x1277,
    0x127c,
    0x127f,
    0x127e,
];
/// PR_SET_NAME, PR_GET_NAME, PR_SET_NO_NEW_PRIVS, PR_GET_DUMPABLE, PR_SET_VMA, PR_GET_SECCOMP.
const THREAD: &[u32] = &[15, 16, 38, 3, 0x5356_4d41, 21];
/// F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK to F_SETLKW, F_OFD_GETLK to F_OFD_SETLKW, F_DUPFD_CLOEXEC,
/// F_SETPIPE_SZ, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS.
const DESCRIPTOR: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034];
/// F_SETLEASE.
const LEASE: &[u32] = &[1024];
/// PR_SCHED_CORE.
const CORE: &[u32] = &[62];
/// PR_SET_DUMPABLE, of a process at its start.
const START: &[u32] = &[4];
const UNIX: &[u32] = &[1];
/// AF_INET and AF_INET6.
const INTERNET: &[u32] = &[2, 10];
const NETLINK: &[u32] = &[16];
/// BPF_MAP_CREATE, BPF_PROG_LOAD, BPF_RAW_TRACEPOINT_OPEN.
const BPF_START: &[u32] = &[0, 5, 17];
/// BPF_MAP_LOOKUP_AND_DELETE_ELEM.
const BPF_LOOKUP: &[u32] = &[21];
/// SECCOMP_SET_MODE_FILTER, SECCOMP_GET_ACTION_AVAIL.
const FILTER: &[u32] = &[1, 2];

group! {
    /// What the standard library and the C library do on each thread; also what ends the process after a panic,
    /// as a thread may panic wherever it is.
    RUNTIME "runtime" {
        SYS_read "files, eventfds";
        SYS_write "files, eventfds, the log";
        SYS_readv "files, taps";
        SYS_writev "files, taps";
        SYS_close "every descriptor";
        SYS_poll "waiting with a limit";
        SYS_ppoll "waiting with a limit";
        SYS_lseek "sizes, holes of sparse files and memory";
        SYS_fstat "the standard library, about to read a file";
        SYS_newfstatat "the standard library";
        SYS_statx "the standard library";
        SYS_fcntl [Check::Second(DESCRIPTOR)] "copies of descriptors, O_NONBLOCK, locks of open files; no owner, who would be signalled";
        SYS_dup "copies of descriptors";
        SYS_ioctl [Check::Second(TERMINAL)] "a terminal's settings are put back also after a panic; FIONBIO";
        SYS_shutdown "a connection is ended by the thread that gives it up";
        SYS_readlink "the program's own path in a backtrace";
        SYS_getcwd "paths in a backtrace";
        SYS_eventfd2 "waking other threads";
        SYS_epoll_create1 "event loops";
        SYS_epoll_ctl "event loops";
        SYS_epoll_wait "event loops";
        SYS_epoll_pwait "event loops";
        SYS_futex "locks, condition variables, channels, the end of threads";
        SYS_mmap [Check::NotExecutable] "the allocator, stacks, mappings of guest memory";
        SYS_mprotect [Check::NotExecutable] "guard pages, the allocator";
        SYS_munmap "the allocator, stacks";
        SYS_mremap "the allocator";
        SYS_madvise "the allocator, guest memory";
        SYS_brk "the allocator";
        SYS_getrandom "hash tables, the allocator";
        SYS_clock_gettime "where the vDSO cannot answer";
        SYS_clock_getres "where the vDSO cannot answer";
        SYS_gettimeofday "where the vDSO cannot answer";
        SYS_time "where the vDSO cannot answer";
        SYS_clock_nanosleep "waiting";
        SYS_nanosleep "waiting";
        SYS_sched_yield "waiting for another thread";
        SYS_getcpu "where the vDSO cannot answer";
        SYS_sched_getaffinity "the standard library, about the thread's stack";
        SYS_getpid "abort(3)";
        SYS_gettid "names of threads, abort(3)";
        SYS_getuid "messages about rights";
        SYS_geteuid "messages about rights";
        SYS_getgid "messages about rights";
        SYS_getegid "messages about rights";
        SYS_tgkill [Check::ThisProcess] "kicks of vCPU threads, abort(3)";
        SYS_rt_sigaction "abort(3), handlers";
        SYS_rt_sigprocmask "start of a thread, abort(3)";
        SYS_rt_sigreturn "end of a handler";
        SYS_sigaltstack "start and end of a thread";
        SYS_restart_syscall "a call that a signal or a stop has interrupted";
        SYS_set_robust_list "start of a thread";
        SYS_rseq "start of a thread";
        SYS_clone3 "start of a thread: fails with ENOSYS, as its arguments are behind a pointer";
        SYS_clone [Check::NoNamespace] "start of a thread";
        SYS_prctl [Check::First(THREAD)] "name of a thread, its own filter";
        SYS_seccomp [Check::First(&[1])] "a thread's own filter, which only takes away";
        SYS_prlimit64 [Check::First(&[0])] "limits of descriptors and locked memory of this process, the size of a stack";
        SYS_membarrier "the standard library";
        SYS_exit "end of a thread";
        SYS_exit_group "end of the process, also after a panic";
    }
}

group! {
    /// Cookies of threads, by which the kernel says what may run beside a vCPU on its core.
    CORE_SCHEDULING "core scheduling" {
        SYS_prctl [Check::First(CORE)] "cookies of vCPU threads";
    }
}

group! {
    /// What a thread does that another has started, under the filters of that one.
    CAPABILITIES "capabilities" {
        SYS_capget "what a new thread has";
        SYS_capset "a new thread drops what it does not need; a permitted set never grows";
    }
}

group! {
    /// Opening by path and reading directories.
    OPEN "open" {
        SYS_open "files, devices, /proc and /sys";
        SYS_openat "files, devices, /proc and /sys";
        SYS_stat "paths";
        SYS_lstat "paths";
        SYS_access "paths";
        SYS_faccessat "paths";
        SYS_faccessat2 "paths";
        SYS_readlinkat "devices in /sys";
        SYS_getdents64 "directories, /proc and /sys";
        SYS_statfs "file systems of memory and images";
        SYS_fstatfs "file systems of memory and images";
    }
}

group! {
    /// Reading and writing files at offsets, and giving their space back.
    FILES "files" {
        SYS_pread64 "images, snapshots, registers of passed-through devices";
        SYS_pwrite64 "images, snapshots, registers of passed-through devices";
        SYS_preadv "images, snapshots";
        SYS_pwritev "images, snapshots";
        SYS_preadv2 "images, snapshots, eventfds of interrupts that another process has";
        SYS_pwritev2 "images, snapshots";
        SYS_fallocate "holes in images and memory";
        SYS_ftruncate "sizes of images, memory and snapshots";
        SYS_fsync "stable storage";
        SYS_fdatasync "stable storage";
        SYS_sync_file_range "writing back early";
        SYS_fadvise64 "the page cache of images and snapshots";
        SYS_flock "locks of images";
        SYS_copy_file_range "copies by the standard library";
    }
}

group! {
    /// Changing directories: snapshots, sockets, logs.
    NAMES "names" {
        SYS_rename "a snapshot becomes whole";
        SYS_renameat "a snapshot becomes whole";
        SYS_renameat2 "a snapshot becomes whole";
        SYS_mkdir "directories of snapshots";
        SYS_mkdirat "directories of snapshots";
        SYS_rmdir "directories of snapshots";
        SYS_unlink "paths of sockets, files of an unfinished snapshot";
        SYS_unlinkat "paths of sockets, files of an unfinished snapshot";
        SYS_linkat "files without a name get one";
        SYS_symlink "links to pseudoterminals";
        SYS_symlinkat "links to pseudoterminals";
        SYS_chmod "rights of sockets";
        SYS_fchmod "rights of sockets and files";
        SYS_fchmodat "rights of sockets";
        SYS_chown "owners of sockets";
        SYS_fchown "owners of sockets";
        SYS_fchownat "owners of sockets";
        SYS_lchown "owners of sockets";
        SYS_umask "rights of new files";
    }
}

group! {
    /// Removing what a thread listened at.
    SOCKET_PATHS "paths of sockets" {
        SYS_unlink "the path of a socket that nothing listens at any more";
        SYS_unlinkat "the path of a socket that nothing listens at any more";
    }
}

group! {
    /// Making rings for asynchronous I/O. What a ring does no filter sees; which operations it takes the ring's
    /// restrictions say.
    RING "ring" {
        SYS_io_uring_setup "rings of disks";
        SYS_io_uring_register "rings of disks, and what they may do";
    }
}

group! {
    /// A ring that is there.
    RING_REQUESTS "ring requests" {
        SYS_io_uring_enter "requests to disks";
    }
}

group! {
    /// What a connection's peer has not received.
    UNRECEIVED "unreceived" {
        SYS_ioctl [Check::Second(OUTPUT_QUEUE)] "the commit of a migration that has no other";
    }
}

group! {
    /// Connections that are there.
    CONNECTIONS "connections" {
        SYS_recvfrom "connections";
        SYS_recvmsg "connections, descriptors that come along";
        SYS_sendto "connections";
        SYS_sendmsg "connections, descriptors that go along";
        SYS_accept4 "connections that come in";
        SYS_accept "connections that come in";
        SYS_getsockopt "connections";
        SYS_setsockopt "connections";
        SYS_getsockname "connections";
        SYS_getpeername "connections";
        SYS_splice "pages that go out without a copy";
        SYS_vmsplice "pages that go out without a copy";
        SYS_pipe2 "pages that go out without a copy";
    }
}

group! {
    /// New sockets on this host.
    LOCAL_SOCKETS "local sockets" {
        SYS_socket [Check::First(UNIX)] "sockets of consoles, the API, migrations";
        SYS_socketpair [Check::First(UNIX)] "the page server";
        SYS_bind "sockets that listen";
        SYS_listen "sockets that listen";
        SYS_connect "sockets of consoles, the API, migrations";
    }
}

group! {
    /// New sockets to other hosts.
    INTERNET_SOCKETS "internet sockets" {
        SYS_socket [Check::First(INTERNET)] "migrations; addresses of tap devices";
        SYS_bind "a migration that listens";
        SYS_listen "a migration that listens";
        SYS_connect "a migration";
    }
}

group! {
    /// Names of hosts. The C library loads what the host is configured to look them up with.
    RESOLVER "resolver" {
        SYS_socket [Check::First(NETLINK)] "getaddrinfo(3) looks which address families there are";
        SYS_sendmmsg "questions to a name server";
        SYS_recvmmsg "answers of a name server";
        SYS_uname "the host's own name";
        SYS_mmap [Check::Library] "libraries of the name service";
        SYS_mprotect [Check::NotExecutable] "libraries of the name service";
    }
}

group! {
    /// KVM, with a VM that exists.
    KVM_REQUESTS "kvm" {
        SYS_ioctl [Check::Requests(requests::KVM_OF_A_VM)] "vCPUs, memory slots, interrupts, time";
        SYS_ioctl [Check::Second(TSC_KHZ)] "KVM_GET_TSC_KHZ";
    }
}

group! {
    /// KVM, making a VM.
    KVM_CREATION "kvm creation" {
        SYS_ioctl [Check::Requests(requests::KVM_NEW_VM)] "what the host has; a VM, its vCPUs and chips";
        SYS_ioctl [Check::Second(ENABLE_CAP)] "KVM_ENABLE_CAP";
    }
}

group! {
    /// Passed-through devices and their address spaces.
    VFIO_REQUESTS "vfio" {
        SYS_ioctl [Check::Requests(requests::VFIO)] "devices of VFIO, mappings of type1";
        SYS_ioctl [Check::Requests(requests::IOMMUFD)] "mappings and dirty bits of iommufd";
        SYS_pread64 "registers of devices";
        SYS_pwrite64 "registers of devices";
    }
}

group! {
    /// vDPA devices. Mappings for them are messages, by write(2).
    VDPA_REQUESTS "vdpa" {
        SYS_ioctl [Check::Requests(requests::VHOST_VDPA)] "vDPA devices: their steps, queues, eventfds";
        SYS_ioctl [Check::Requests(requests::VHOST_VDPA_CONFIG)] "the configuration of vDPA devices";
    }
}

group! {
    /// The configuration of vDPA devices alone.
    VDPA_CONFIG "configuration of vdpa" {
        SYS_ioctl [Check::Requests(requests::VHOST_VDPA_CONFIG)] "the configuration of vDPA devices";
    }
}

group! {
    /// Guest memory.
    MEMORY "memory" {
        SYS_ioctl [Check::Requests(requests::USERFAULTFD)] "pages that arrive when they are touched";
        SYS_ioctl [Check::Second(PAGEMAP_SCAN)] "which pages are populated";
        SYS_userfaultfd "pages that arrive when they are touched";
        SYS_memfd_create "memory without a path";
        SYS_mincore "which pages are populated";
        SYS_mlock "memory that stays";
        SYS_mlock2 "memory that stays";
        SYS_munlock "memory that stays";
        SYS_mbind "NUMA nodes";
        SYS_set_mempolicy "NUMA nodes";
        SYS_get_mempolicy "NUMA nodes";
        SYS_msync "memory that is a file";
        SYS_fallocate "memory that is given up";
        SYS_ftruncate "size of memory";
        SYS_pread64 "/proc/self/pagemap, memory files";
    }
}

group! {
    /// The host's kernel.
    KERNEL "kernel" {
        SYS_uname "its version, by which memory is populated";
    }
}

group! {
    /// Leases of files.
    LEASES "leases" {
        SYS_fcntl [Check::Second(LEASE)] "whether another process has a file of memory";
    }
}

group! {
    /// Timers of devices.
    TIMERS "timers" {
        SYS_timerfd_create "waiting with a limit";
        SYS_timerfd_settime "waiting with a limit";
        SYS_timerfd_gettime "waiting with a limit";
    }
}

group! {
    /// Timers that another thread has made.
    SET_TIMERS "set timers" {
        SYS_timerfd_settime "waiting for a rate limit";
    }
}

group! {
    /// Where and when a thread runs.
    SCHEDULING "scheduling" {
        SYS_sched_setaffinity [Check::First(&[0])] "CPUs of a thread";
        SYS_sched_setscheduler [Check::First(&[0])] "threads that answer faults go first, threads that prepare go last";
        SYS_sched_getscheduler "threads that answer faults go first";
        SYS_sched_getparam "threads that answer faults go first";
        SYS_sched_get_priority_min "threads that answer faults go first";
        SYS_sched_get_priority_max "threads that answer faults go first";
        SYS_setpriority [Check::OwnPriority] "threads that prepare go last";
        SYS_getpriority "threads that prepare go last";
    }
}

group! {
    /// Tap devices.
    TAPS "taps" {
        SYS_ioctl [Check::Second(TAP)] "offloads and queues of a tap";
        SYS_ioctl [Check::Second(INTERFACE)] "a tap's address and flags";
    }
}

group! {
    /// Settings of an open tap.
    TAP_OF_DRIVER "tap of a driver" {
        SYS_ioctl [Check::Second(TAP_SETTINGS)] "offloads and queues, as the driver has chosen them";
    }
}

group! {
    /// Disks.
    DISKS "disks" {
        SYS_ioctl [Check::Second(BLOCK)] "sizes of block devices, and what is discarded";
    }
}

group! {
    /// The trace of faults, by which a fault is told from a defect where KVM does not say.
    FAULT_TRACE "fault trace" {
        SYS_bpf [Check::First(BPF_START)] "a program on the tracepoint of page faults, and its table";
        SYS_bpf [Check::First(BPF_LOOKUP)] "the faults that it has recorded";
    }
}

group! {
    /// What the trace of faults has recorded for the calling vCPU.
    FAULT_LOOKUP "fault lookup" {
        SYS_bpf [Check::First(BPF_LOOKUP)] "the fault that the program has recorded";
    }
}

group! {
    /// Pseudoterminals of consoles.
    PSEUDOTERMINALS "pseudoterminals" {
        SYS_ioctl [Check::Second(PSEUDOTERMINAL)] "a new pseudoterminal";
    }
}

group! {
    /// What the main thread of a process does when it starts and for signals.
    PROCESS "process" {
        SYS_signalfd4 "signals that end the process";
        SYS_uname "the host's kernel";
        SYS_sysinfo "memory of the host";
        SYS_getppid "the process at the other end";
        SYS_getresuid "rights";
        SYS_getresgid "rights";
        SYS_getgroups "rights";
        SYS_capget "rights";
        SYS_kill [Check::ThisProcess] "a signal for this process";
        SYS_rt_sigpending "a signal that waits";
        SYS_rt_sigtimedwait "a signal that waits";
        SYS_prctl [Check::First(START)] "no dumps of this process";
        SYS_seccomp [Check::First(FILTER)] "whether the kernel has filters";
        SYS_arch_prctl [Check::First(&[0x1022, 0x1023, 0x1024, 0x1025])] "AMX: the state that guests may have";
    }
}

group! {
    /// Confining a thread to paths, before a machine is built on it.
    LANDLOCK "Landlock" {
        SYS_landlock_create_ruleset "what the kernel knows of Landlock, and a set of paths";
        SYS_landlock_add_rule "a path of the configuration";
        SYS_landlock_restrict_self "no other paths for this thread and those that it starts";
    }
}

group! {
    /// Ending a page server that is not needed.
    END_PAGE_SERVER "end of the page server" {
        SYS_kill "signals the page server's process";
        SYS_wait4 "collects its exit status";
        SYS_waitid "collects its exit status";
        SYS_pidfd_open "waits for its end with a limit";
        SYS_pidfd_send_signal "signals the page server's process";
    }
}

group! {
    /// Starting this program as page server, up to its `main`.
    START_PAGE_SERVER "start of the page server" {
        SYS_execve "this program, as page server";
        SYS_tgkill "abort(3) in its process, which inherits this filter";
        SYS_vfork "its process";
        SYS_fork "its process";
        SYS_setpgid "a process group of its own";
        SYS_chdir "no directory is held";
        SYS_dup2 "its standard descriptors";
        SYS_dup3 "its standard descriptors";
        SYS_pipe2 "what execve(2) says";
        SYS_close_range "it drops descriptors that it has inherited";
        SYS_set_tid_address "start of a process";
        SYS_arch_prctl "start of a process";
        SYS_setrlimit "no dumps of this process";
        SYS_mmap [Check::Library] "the dynamic linker maps the program's libraries";
        SYS_rt_sigpending "start of a process";
    }
}
