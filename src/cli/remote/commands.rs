// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The subcommands of `ch-remote` and their help.
//!
//! Owns their names and arguments; [`super::call`] turns them into requests.

use clap::{Arg, ArgAction, Command};
use vmm::api::endpoints::Method;
use vmm::api::types::{BUILD_VERSION, COMPATIBLE_VERSION};
use vmm::config::codec::OptionEnum as _;
use vmm::config::migration::RestoreConfig;
use vmm::config::{
    DeviceConfig, DiskConfig, Family, FsConfig, GenericVhostUserConfig, MigrationRecoverData,
    NetConfig, PmemConfig, ReceiveMigrationData, SendMigrationData, SnapshotFormat,
    UserDeviceConfig, VdpaConfig, VsockConfig,
};

use crate::cli::manual;

/// Subcommands without arguments: name, method, endpoint, help.
pub(super) const SIMPLE: [(&str, Method, &str, &str); 12] = [
    ("boot", Method::Put, "vm.boot", "Boot a created VM"),
    ("counters", Method::Get, "vm.counters", "Show the counters of the VM's devices"),
    ("info", Method::Get, "vm.info", "Show configuration and state of the VM"),
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

/// A subcommand with the keys of an option family.
fn of_family<T: Family>(name: &'static str) -> Command {
    option(name, manual::about::<T>()).after_help(manual::page::<T>(manual::width()))
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
        of_family::<DeviceConfig>("add-device").about("Add a host device"),
        of_family::<DiskConfig>("add-disk").about("Add a block device"),
        of_family::<FsConfig>("add-fs").about("Add a shared directory"),
        of_family::<GenericVhostUserConfig>("add-generic-vhost-user")
            .about("Add a vhost-user device"),
        of_family::<NetConfig>("add-net").about("Add a network device"),
        of_family::<PmemConfig>("add-pmem").about("Add persistent memory"),
        of_family::<UserDeviceConfig>("add-user-device")
            .about("Add a device emulated by another process"),
        of_family::<VdpaConfig>("add-vdpa").about("Add a vDPA device"),
        of_family::<VsockConfig>("add-vsock").about("Add a socket device"),
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
        of_family::<RestoreConfig>("restore").about("Restore a VM from a snapshot"),
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

fn migration_commands() -> Vec<Command> {
    vec![
        of_family::<ReceiveMigrationData>("receive-migration")
            .mut_arg("config", |arg| arg.help("<receiver_url>, or keys as below"))
            .about("Receive a VM from another VMM"),
        of_family::<SendMigrationData>("send-migration")
            .mut_arg("config", |arg| arg.help("<destination_url>, or keys as below"))
            .about("Migrate the VM to another VMM")
            .arg(flag("local", "Same as local=on (older spelling)"))
            .arg(flag("wait", "Return when the migration has ended; the exit code says how"))
            .arg(watch()),
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
        Command::new("migration-recover")
            .about("Re-establish the lost connections of a postcopy migration")
            .arg(
                Arg::new("config")
                    .index(1)
                    .default_value("")
                    .help("An address alone, or keys as below"),
            )
            .after_help(manual::page::<MigrationRecoverData>(manual::width())),
    ]
}

/// The command line of ch-remote.
pub fn command() -> Command {
    let mut commands: Vec<Command> =
        SIMPLE.iter().map(|(name, _, _, about)| Command::new(*name).about(*about)).collect();
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
             --watch also 3 the migration was cancelled, 4 where the guest is has to be looked at. With \
             --timeout also 5 there was no answer in time.",
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
