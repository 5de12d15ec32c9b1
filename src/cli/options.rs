// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The options of `cloud-hypervisor`, as its help shows them.
//!
//! Owns the options of the process; those that describe a VM have the help of their families. It must never read a
//! value.

use clap::{Arg, ArgAction, Command};
use vmm::config::console::{ConsoleConfig, DebugConsoleConfig, SerialConfig};
use vmm::config::cpus::CpusConfig;
use vmm::config::family::FamilyInfo;
use vmm::config::memory::{MemoryConfig, MemoryZoneConfig};
use vmm::config::migration::RestoreConfig;
use vmm::config::numa::NumaConfig;
use vmm::config::platform::{PciSegmentConfig, PlatformConfig};
use vmm::config::rate_limiter::RateLimitGroupConfig;
use vmm::config::reference::families;
use vmm::config::tpm::TpmConfig;
use vmm::config::{
    BalloonConfig, DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, LandlockConfig,
    NetConfig, PmemConfig, RngConfig, RtcConfig, UserDeviceConfig, VdpaConfig, VsockConfig,
};

use super::manual;

/// Options that require a VM configuration.
pub(super) const VM_OPTIONS: [&str; 29] = [
    "cpus",
    "memory",
    "memory-zone",
    "initramfs",
    "cmdline",
    "host-data",
    "rate-limit-group",
    "disk",
    "net",
    "rng",
    "rtc",
    "balloon",
    "fs",
    "generic-vhost-user",
    "pmem",
    "serial",
    "console",
    "debug-console",
    "device",
    "user-device",
    "vdpa",
    "vsock",
    "numa",
    "pci-segment",
    "platform",
    "tpm",
    "watchdog",
    "pvpanic",
    "landlock-rules",
];

/// Options of other builds of cloud-hypervisor, which are refused by name.
pub(super) const ELSEWHERE: [&str; 7] = [
    "dbus-object-path",
    "dbus-service-name",
    "dbus-system-bus",
    "fw-cfg-config",
    "gdb",
    "ivshmem",
    "pvmemcontrol",
];

/// The keys of the option string that an option takes; `None` if it takes another value, or none.
pub fn keys(option: &str) -> Option<FamilyInfo> {
    let info = families().into_iter().find(|family| family.name == option)?;
    // Families of the API alone have the name of no option.
    let is_option_string = |arg: &&Arg| {
        arg.get_id() == option
            && arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == "OPTIONS"))
    };
    command(false).get_arguments().find(is_option_string).map(|_| info)
}

fn elsewhere(name: &'static str) -> Arg {
    Arg::new(name).long(name).num_args(0..=1).help("Not supported by this version").hide(true)
}

fn check(help: &'static str) -> Arg {
    Arg::new("check")
        .long("check")
        .num_args(0..=1)
        .require_equals(true)
        .value_name("FORM")
        .value_parser(["text", "json"])
        .default_missing_value("text")
        .help(help)
}

fn cpu_baseline(help: &'static str) -> Arg {
    Arg::new("cpu-baseline")
        .long("cpu-baseline")
        .num_args(1..)
        .value_name("FILE")
        .value_parser(clap::value_parser!(std::path::PathBuf))
        .exclusive(true)
        .help(help)
}

fn page_server(help: &'static str) -> Arg {
    Arg::new("page-server")
        .long("page-server")
        .num_args(1)
        .value_name("US")
        .value_parser(clap::value_parser!(u64))
        .requires("api-socket")
        .help(help)
        .hide(true)
}

fn successor(help: &'static str) -> Arg {
    Arg::new("successor")
        .long("successor")
        .num_args(1)
        .value_name("fd=FD,suffix=TEXT")
        .help(help)
        .hide(true)
}

/// The command line of cloud-hypervisor; without help texts unless requested.
pub fn command(with_help: bool) -> Command {
    let say = |help: &'static str| if with_help { help } else { "" };
    let one = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).num_args(1).value_name(value).help(say(help))
    };
    let path = |name: &'static str, help: &'static str| one(name, "PATH", help);
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(say(help))
    };
    let where_to = |name: &'static str, help: &'static str| one(name, "path=PATH|fd=FD", help);
    Command::new("cloud-hypervisor")
        .about("Launch a VMM, and a VM if its configuration is given.")
        .arg_required_else_help(true)
        .args_override_self(false)
        .after_help(say("Exit codes: 0 success, 1 failure, 2 invalid command line, 6 a VM that --check found to fail.\n\
             -h shows the syntax of the options, --help the meaning of each key."))
        .args(vec![
            where_to("api-socket", "Unix socket of the HTTP API"),
            manual::option::<BalloonConfig>("balloon", with_help),
            check(say("Report what this host lacks for the VM, and start nothing")),
            one("cmdline", "TEXT", "Kernel command line"),
            manual::option::<ConsoleConfig>("console", with_help),
            cpu_baseline(say("Print what the hosts of these reports of --check=json have in common, the oldest first, for --cpus baseline=")),
            manual::option::<CpusConfig>("cpus", with_help),
            manual::option::<DebugConsoleConfig>("debug-console", with_help),
            manual::list::<DeviceConfig>("device", with_help),
            manual::list::<DiskConfig>("disk", with_help),
            where_to("event-monitor", "File to which events are written"),
            path("firmware", "Firmware instead of a kernel: an ELF file with a PVH entry"),
            manual::list::<FsConfig>("fs", with_help),
            manual::list::<GenericVhostUserConfig>("generic-vhost-user", with_help),
            one("host-data", "TEXT", "Host data (not supported by this version)"),
            path("igvm", "IGVM image (not supported by this version)"),
            path("initramfs", "Initial RAM file system"),
            path("kernel", "Kernel: an ELF file with a PVH entry, or a bzImage"),
            flag("landlock", "Confine the process with Landlock to the paths of its configuration"),
            manual::list::<LandlockConfig>("landlock-rules", with_help),
            path("log-file", "File for log messages instead of stderr"),
            one(
                "log-format",
                "FORMAT",
                "Format of log lines, with tokens like {wallclock}, {boottime}, {thread}, {level}, \
                 {location}, {msg}; docs/usage.md lists all",
            ),
            manual::option::<MemoryConfig>("memory", with_help),
            manual::list::<MemoryZoneConfig>("memory-zone", with_help),
            one("metrics", "unix:PATH", "Unix socket at which metrics are scraped"),
            manual::list::<NetConfig>("net", with_help),
            flag("no-shutdown", "Keep the VMM running when the guest shuts down"),
            manual::list::<NumaConfig>("numa", with_help),
            page_server(say("Run as the page server of the VMM at the other end of standard input")),
            manual::list::<PciSegmentConfig>("pci-segment", with_help),
            manual::option::<PlatformConfig>("platform", with_help),
            manual::list::<PmemConfig>("pmem", with_help),
            flag("print-openapi", "Print the description of the API").hide(true),
            flag(
                "pvpanic",
                "Panic device, through which the guest reports that its kernel panicked",
            ),
            manual::list::<RateLimitGroupConfig>("rate-limit-group", with_help),
            manual::option::<RestoreConfig>("restore", with_help),
            manual::option::<RngConfig>("rng", with_help),
            manual::option::<RtcConfig>("rtc", with_help).num_args(0..=1).default_missing_value(""),
            one("seccomp", "MODE", "Action on a forbidden system call")
                .value_parser(["true", "false", "log", "errno"])
                .default_value("true"),
            manual::option::<SerialConfig>("serial", with_help),
            successor(say("Take the place of a VMM whose VM comes from it, for ch-remote upgrade")),
            manual::option::<TpmConfig>("tpm", with_help),
            manual::list::<UserDeviceConfig>("user-device", with_help),
            Arg::new("v")
                .short('v')
                .action(ArgAction::Count)
                .help(say("Increase the log level; may be given several times")),
            manual::list::<VdpaConfig>("vdpa", with_help),
            flag("version", "Print the version").short('V'),
            manual::option::<VsockConfig>("vsock", with_help),
            flag("watchdog", "Watchdog device, which resets a guest that is stuck"),
        ])
        .args(ELSEWHERE.map(elsewhere))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_help_and_a_sorted_place() {
        let command = command(true);
        command.clone().debug_assert();
        let names: Vec<_> = command.get_arguments().map(|arg| arg.get_id().to_string()).collect();
        let shown: Vec<_> =
            names.iter().filter(|name| !ELSEWHERE.contains(&name.as_str())).collect();
        assert!(shown.is_sorted(), "{shown:?}");
        for arg in command.get_arguments() {
            assert!(arg.get_help().is_some_and(|help| !help.to_string().is_empty()), "{arg}");
        }
        for name in VM_OPTIONS {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }

    #[test]
    fn the_keys_of_every_option_string_are_known() {
        for arg in command(true).get_arguments() {
            // The help shows keys if it is that of a family.
            let long = arg.get_long_help().map(ToString::to_string).unwrap_or_default();
            let info = keys(arg.get_id().as_str());
            assert_eq!(info.is_some(), long.contains("\nKeys "), "{arg}");
            assert!(info.is_none_or(|info| long.starts_with(&manual::about(&info))), "{arg}");
        }
        assert!(keys("payload").is_none() && keys("kernel").is_none());
    }
}
