// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The options of `cloud-hypervisor`, as its help shows them.
//!
//! Owns the options of the process; those that describe a VM have the help of their families. It must never read a
//! value.

use clap::{Arg, ArgAction, Command};
use vmm::config::console::{ConsoleConfig, DebugConsoleConfig, SerialConfig};
use vmm::config::cpus::CpusConfig;
use vmm::config::memory::{MemoryConfig, MemoryZoneConfig};
use vmm::config::migration::RestoreConfig;
use vmm::config::numa::NumaConfig;
use vmm::config::platform::{PciSegmentConfig, PlatformConfig};
use vmm::config::rate_limiter::RateLimitGroupConfig;
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

fn elsewhere(name: &'static str) -> Arg {
    Arg::new(name).long(name).num_args(0..=1).help("Not supported by this version").hide(true)
}

/// The command line of cloud-hypervisor; without help texts unless requested.
pub fn command(with_help: bool) -> Command {
    let say = |help: &'static str| if with_help { help } else { "" };
    let one = |name: &'static str, help: String| {
        Arg::new(name).long(name).num_args(1).value_name("OPTIONS").help(help)
    };
    let path = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).num_args(1).value_name("PATH").help(say(help))
    };
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(say(help))
    };
    let where_to = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).num_args(1).value_name("path=PATH|fd=FD").help(say(help))
    };
    Command::new("cloud-hypervisor")
        .about("Launch a VMM, and a VM if its configuration is given.")
        .arg_required_else_help(true)
        .args_override_self(false)
        .after_help(say("Exit codes: 0 success, 1 failure, 2 invalid command line.\n\
             -h shows the syntax of the options, --help the meaning of each key."))
        .args(vec![
            where_to("api-socket", "Unix socket of the HTTP API"),
            manual::option::<BalloonConfig>("balloon", with_help),
            one("cmdline", say("Kernel command line").to_owned()).value_name("TEXT"),
            manual::option::<ConsoleConfig>("console", with_help),
            manual::option::<CpusConfig>("cpus", with_help),
            manual::option::<DebugConsoleConfig>("debug-console", with_help),
            manual::list::<DeviceConfig>("device", with_help),
            manual::list::<DiskConfig>("disk", with_help),
            where_to("event-monitor", "File to which events are written"),
            path("firmware", "Firmware instead of a kernel: an ELF file with a PVH entry"),
            manual::list::<FsConfig>("fs", with_help),
            manual::list::<GenericVhostUserConfig>("generic-vhost-user", with_help),
            one("host-data", say("Host data (not supported by this version)").to_owned())
                .value_name("TEXT"),
            path("igvm", "IGVM image (not supported by this version)"),
            path("initramfs", "Initial RAM file system"),
            path("kernel", "Kernel: an ELF file with a PVH entry, or a bzImage"),
            flag("landlock", "Confine the process with Landlock to the paths of its configuration"),
            manual::list::<LandlockConfig>("landlock-rules", with_help),
            path("log-file", "File for log messages instead of stderr"),
            one(
                "log-format",
                say(
                    "Format of log lines, with tokens like {wallclock}, {boottime}, {thread}, {level}, \
                     {location}, {msg}; docs/usage.md lists all",
                )
                .to_owned(),
            )
            .value_name("FORMAT"),
            manual::option::<MemoryConfig>("memory", with_help),
            manual::list::<MemoryZoneConfig>("memory-zone", with_help),
            manual::list::<NetConfig>("net", with_help),
            flag("no-shutdown", "Keep the VMM running when the guest shuts down"),
            manual::list::<NumaConfig>("numa", with_help),
            Arg::new("page-server")
                .long("page-server")
                .num_args(1)
                .value_name("US")
                .value_parser(clap::value_parser!(u64))
                .requires("api-socket")
                .help(say("Run as the page server of the VMM at the other end of standard input"))
                .hide(true),
            manual::list::<PciSegmentConfig>("pci-segment", with_help),
            manual::option::<PlatformConfig>("platform", with_help),
            manual::list::<PmemConfig>("pmem", with_help),
            flag("print-openapi", "Print the description of the API").hide(true),
            flag("pvpanic", "Panic device, through which the guest reports that its kernel panicked"),
            manual::list::<RateLimitGroupConfig>("rate-limit-group", with_help),
            manual::option::<RestoreConfig>("restore", with_help),
            manual::option::<RngConfig>("rng", with_help),
            manual::option::<RtcConfig>("rtc", with_help)
                .num_args(0..=1)
                .default_missing_value(""),
            one("seccomp", say("Action on a forbidden system call").to_owned())
                .value_name("MODE")
                .value_parser(["true", "false", "log", "errno"])
                .default_value("true"),
            manual::option::<SerialConfig>("serial", with_help),
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
}
