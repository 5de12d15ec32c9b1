// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The subcommands of `ch-remote` and their help.
//!
//! Owns their names and arguments; [`super::call`] turns them into requests.

use clap::{Arg, ArgAction, Command};
use vmm::api::endpoints::Method;
use vmm::api::types::{BUILD_VERSION, COMPATIBLE_VERSION};
use vmm::config::codec::OptionEnum as _;
use vmm::config::family::FamilyInfo;
use vmm::config::migration::RestoreConfig;
use vmm::config::{
    DeviceConfig, DiskConfig, Family, FsConfig, GenericVhostUserConfig, MigrationRecoverData,
    NetConfig, PmemConfig, ReceiveMigrationData, SendMigrationData, SnapshotFormat,
    UserDeviceConfig, VdpaConfig, VsockConfig,
};

use super::check::MIGRATE_CHECK;
use super::{TOP, UPGRADE};
use crate::cli::{manual, upgrade};

/// Subcommands without arguments: name, method, endpoint, help.
pub(super) const SIMPLE: [(&str, Method, &str, &str); 13] = [
    ("boot", Method::Put, "vm.boot", "Boot a created VM"),
    ("counters", Method::Get, "vm.counters", "Show the counters of the VM's devices"),
    ("info", Method::Get, "vm.info", "Show configuration and state of the VM"),
    (
        "metrics",
        Method::Get,
        "vm.metrics",
        "Show metrics of the VMM and its VM, as OpenMetrics text",
    ),
    (
        "migration-cancel",
        Method::Put,
        "vm.migration-cancel",
        "Cancel the current migration; returns when the guest runs at the source",
    ),
    (
        "migration-start-postcopy",
        Method::Put,
        "vm.migration-start-postcopy",
        "Switch a migration with memory_mode=auto to postcopy now",
    ),
    ("nmi", Method::Put, "vm.nmi", "Trigger an NMI"),
    ("pause", Method::Put, "vm.pause", "Pause the VM"),
    ("ping", Method::Get, "vmm.ping", "Check that the VMM responds"),
    ("power-button", Method::Put, "vm.power-button", "Press the power button of the VM"),
    ("reboot", Method::Put, "vm.reboot", "Reboot the VM"),
    ("shutdown", Method::Put, "vm.shutdown", "Shut the VM down"),
    (
        "snapshot-cancel",
        Method::Put,
        "vm.snapshot-cancel",
        "Cancel the snapshot being written; returns when the VM is paused as before",
    ),
];

/// A subcommand whose argument is an option string: its name, its keys, its help.
type OfFamily = (&'static str, fn() -> FamilyInfo, &'static str);

/// All of them.
const OF_FAMILY: [OfFamily; 14] = [
    ("add-device", DeviceConfig::info, "Add a host device"),
    ("add-disk", DiskConfig::info, "Add a block device"),
    ("add-fs", FsConfig::info, "Add a shared directory"),
    ("add-generic-vhost-user", GenericVhostUserConfig::info, "Add a vhost-user device"),
    ("add-net", NetConfig::info, "Add a network device"),
    ("add-pmem", PmemConfig::info, "Add persistent memory"),
    ("add-user-device", UserDeviceConfig::info, "Add a device emulated by another process"),
    ("add-vdpa", VdpaConfig::info, "Add a vDPA device"),
    ("add-vsock", VsockConfig::info, "Add a socket device"),
    (
        MIGRATE_CHECK,
        SendMigrationData::info,
        "Check whether a migration of the VM would succeed, and what it would take; nothing is moved",
    ),
    (
        "migration-recover",
        MigrationRecoverData::info,
        "Re-establish the lost connections of a postcopy migration",
    ),
    ("receive-migration", ReceiveMigrationData::info, "Receive a VM from another VMM"),
    ("restore", RestoreConfig::info, "Restore a VM from a snapshot"),
    ("send-migration", SendMigrationData::info, "Migrate the VM to another VMM"),
];

/// The keys of the option string that a subcommand takes; `None` if it takes another argument, or none.
pub fn keys(subcommand: &str) -> Option<FamilyInfo> {
    OF_FAMILY.iter().find(|(name, ..)| *name == subcommand).map(|(_, info, _)| info())
}

/// A subcommand with the keys of an option family, and what it has besides.
fn of_family(&(name, info, help): &OfFamily) -> Command {
    let info = info();
    let command = option(name, manual::about(&info))
        .about(help)
        .after_help(manual::keys(&info, manual::width()));
    let say = |help: &'static str| move |arg: Arg| arg.help(help);
    match name {
        MIGRATE_CHECK => command
            .mut_arg("config", say("<destination_url>, or keys as below"))
            .arg(flag("json", "Print the answer as JSON")),
        "migration-recover" => command
            .mut_arg("config", say("An address alone, or keys as below"))
            .mut_arg("config", |arg| arg.required(false).default_value("")),
        "receive-migration" => command.mut_arg("config", say("<receiver_url>, or keys as below")),
        "send-migration" => command
            .mut_arg("config", say("<destination_url>, or keys as below"))
            .arg(flag("local", "Same as local=on (older spelling)"))
            .arg(flag("wait", "Return when the migration has ended; the exit code says how"))
            .arg(watch()),
        _ => command,
    }
}

/// A subcommand with one required argument.
fn option(name: &'static str, help: String) -> Command {
    Command::new(name).arg(Arg::new("config").index(1).required(true).help(help))
}

fn number(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).num_args(1).help(help)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn watch() -> Arg {
    flag("watch", "Show the progress until the migration has ended; the exit code tells the result")
}

fn force() -> Arg {
    flag(
        "force",
        "Even if a VM is lost with it that needs pages from this process, or may not run elsewhere",
    )
}

fn device_commands() -> Vec<Command> {
    vec![
        option("remove-device", "Name of the device".to_owned()).about("Remove a device"),
        Command::new("resize")
            .about("Resize the VM")
            .arg(number("balloon", "New balloon size in bytes (K, M, G allowed)"))
            .arg(number("cpus", "New number of vCPUs"))
            .arg(number("memory", "New memory size in bytes (K, M, G allowed)")),
        Command::new("resize-disk")
            .about("Resize a disk")
            .arg(number("disk", "Name of the disk").required(true))
            .arg(number("size", "New size in bytes (K, M, G allowed)").required(true)),
        Command::new("resize-zone")
            .about("Resize a memory zone")
            .arg(number("id", "Name of the zone").required(true))
            .arg(number("size", "New size in bytes (K, M, G allowed)").required(true)),
    ]
}

fn life_cycle_commands() -> Vec<Command> {
    vec![
        option("coredump", "Destination of the dump: file:///<path>".to_owned())
            .about("Create a coredump of the VM"),
        Command::new("create").about("Create a VM from a JSON configuration").arg(
            Arg::new("path").index(1).default_value("-").help("File with the JSON, - for stdin"),
        ),
        Command::new("delete").about("Delete a VM").arg(force()),
        Command::new("shutdown-vmm").about("Shut the VMM down").arg(force()),
        Command::new("resume").about("Resume the VM").arg(flag(
            "force",
            "Also if it was sent to a destination that has not answered: it does not run there",
        )),
        option("snapshot", "Where the snapshot goes: file:///<path>".to_owned())
            .about("Create a snapshot of the VM")
            .arg(
                Arg::new("format")
                    .long("format")
                    .num_args(1)
                    .value_name(SnapshotFormat::SYNTAX)
                    .help("Which program restores it"),
            ),
    ]
}

/// A number from 1 on, with a default if it has one.
fn at_least_one(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    number(name, help).value_name(value).value_parser(clap::value_parser!(u32).range(1..))
}

fn migration_commands() -> Vec<Command> {
    vec![
        Command::new(TOP)
            .about("Show again and again what the VM does: vCPUs, memory, devices, migration")
            .arg(at_least_one("interval", "SECONDS", "Time between two looks").default_value("2"))
            .arg(at_least_one("count", "NUMBER", "End after so many; without it, at Ctrl-C")),
        Command::new(UPGRADE)
            .about("Have another program take the place of the VMM, while the guest runs on")
            .arg(
                Arg::new("binary")
                    .long("binary")
                    .num_args(1)
                    .required(true)
                    .value_name("PATH")
                    .value_parser(clap::value_parser!(std::path::PathBuf))
                    .help("The cloud-hypervisor that is to have the guest"),
            )
            .arg(
                at_least_one("timeout-ms", "MS", "Give up after so long: the guest stays where it is")
                    .default_value(upgrade::TIMEOUT_MS),
            ),
        Command::new("migration-progress")
            .about("Show the progress of the current or last migration")
            .arg(watch()),
        Command::new("migration-report")
            .about("Show the report of the current or last migration: timeline, and waits of each vCPU")
            .arg(
                Arg::new("svg")
                    .long("svg")
                    .num_args(1)
                    .value_name("FILE")
                    .help("Draw a chart into this SVG file instead of printing JSON; - for stdout"),
            ),
    ]
}

/// The command line of ch-remote.
pub fn command() -> Command {
    let mut commands: Vec<Command> =
        SIMPLE.iter().map(|(name, _, _, about)| Command::new(*name).about(*about)).collect();
    commands.extend(OF_FAMILY.iter().map(of_family));
    commands.extend(device_commands());
    commands.extend(life_cycle_commands());
    commands.extend(migration_commands());
    commands.sort_by(|left, right| left.get_name().cmp(right.get_name()));
    Command::new("ch-remote")
        .about("Remotely control a cloud-hypervisor VMM.")
        .version(format!("v{COMPATIBLE_VERSION} ({BUILD_VERSION})"))
        .arg_required_else_help(true)
        .subcommand_required(true)
        .arg(
            Arg::new("api-socket")
                .long("api-socket")
                .num_args(1)
                .required(true)
                .value_name("PATH")
                .help("Unix socket of the VMM"),
        )
        .arg(flag("pretty", "Indent the JSON of answers, which is on one line otherwise").global(true))
        .arg(
            Arg::new("timeout")
                .long("timeout")
                .num_args(1)
                .value_name("SECONDS")
                .value_parser(clap::value_parser!(u32).range(1..))
                .help(
                    "Give up when an answer takes longer: exit code 5, and the VMM may still carry \
                     the request out",
                ),
        )
        .after_help(manual::wrapped(
            "Exit codes: 0 done, 1 it failed, 2 the command line is wrong. With --wait and \
             --watch also 3 the migration was cancelled; with these and upgrade 4 where the guest is has to be looked at. With \
             --timeout also 5 there was no answer in time. Of migrate-check also 7 the migration would not succeed.",
            0,
            manual::width(),
        ))
        .subcommands(commands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_help() {
        let command = command();
        command.clone().debug_assert();
        for sub in command.get_subcommands() {
            assert!(sub.get_about().is_some(), "{}", sub.get_name());
        }
        let names: Vec<_> = command.get_subcommands().map(Command::get_name).collect();
        assert!(names.is_sorted());
    }

    #[test]
    fn answers_are_indented_if_that_is_asked_for() {
        for (line, is_pretty) in [
            ("ch-remote --api-socket /s info", false),
            ("ch-remote --api-socket /s --pretty info", true),
            ("ch-remote --api-socket /s info --pretty", true),
        ] {
            let matches = command().try_get_matches_from(line.split(' '));
            let matches = matches.expect("a valid command line");
            assert_eq!(matches.get_flag("pretty"), is_pretty, "{line}");
        }
    }
}
