// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command line of `ch-remote`: one subcommand, one request, its answer on stdout.
//!
//! Owns the table of subcommands. What the VMM refuses is not judged here: unsupported requests
//! are sent and come back with the VMM's own words.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command};
use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;
use vmm::api::client::{Client, ClientError};
use vmm::api::endpoints::Method;
use vmm::api::types::{BUILD_VERSION, COMPATIBLE_VERSION};
use vmm::config::codec::{Bytes, ValueCodec as _};
use vmm::config::later::{
    FsConfig, GenericVhostUserConfig, PmemConfig, UserDeviceConfig, VdpaConfig, VsockConfig,
};
use vmm::config::migration::RestoreConfig;
use vmm::config::{
    ConfigError, ConfigFd, DeviceConfig, DiskConfig, Family, MigrationRecoverData, NetConfig,
    OptionError, ReceiveMigrationData, SendMigrationData,
};

use super::watch::{self, FollowError, View};
use super::{chart, exit, manual};

/// Why a command was not carried out.
#[derive(Debug, Error)]
pub enum RemoteError {
    /// The VMM refuses, or does not answer.
    #[error("{command} failed")]
    Request {
        /// The subcommand.
        command: String,
        /// Why.
        #[source]
        source: ClientError,
    },
    /// An option string cannot be read.
    #[error("the argument of {command} cannot be read")]
    Option {
        /// The subcommand.
        command: String,
        /// Why.
        #[source]
        source: OptionError,
    },
    /// An argument is not allowed.
    #[error("the argument of {command} is not valid")]
    Config {
        /// The subcommand.
        command: String,
        /// Why.
        #[source]
        source: ConfigError,
    },
    /// A number cannot be read.
    #[error("'{text}' is not a valid {what}: {reason}")]
    Number {
        /// What it should be.
        what: &'static str,
        /// What it is.
        text: String,
        /// What was expected.
        reason: String,
    },
    /// A descriptor is not open.
    #[error("the descriptor {number} cannot be sent: is it open in this process?")]
    Descriptor {
        /// Its number.
        number: i32,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The configuration cannot be read.
    #[error("the configuration '{path}' cannot be read")]
    Read {
        /// The file, `-` for stdin.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The report of a migration is not one.
    #[error("the VMM's report of the migration cannot be read")]
    Report(#[source] serde_json::Error),
    /// A file cannot be written.
    #[error("'{path}' cannot be written")]
    Write {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The migration that was followed did not end well, or its end was not seen.
    #[error(transparent)]
    Followed(#[from] FollowError),
}

impl RemoteError {
    /// Whether the command line is to blame and nothing was sent.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Option { .. } | Self::Config { .. } | Self::Number { .. })
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Followed(error) => error.exit_code(),
            error if error.is_usage() => exit::USAGE,
            _ => exit::FAILED,
        }
    }
}

/// What is sent.
#[derive(Debug, PartialEq)]
pub struct Call {
    /// Method.
    pub method: Method,
    /// Path below the root of the API.
    pub path: &'static str,
    /// Body as JSON text.
    pub body: Option<String>,
    /// How the migration that this begins, or that goes on, is followed to its end.
    pub follow: Option<View>,
    /// Descriptors of this process that go with it.
    pub fds: Vec<ConfigFd>,
}

impl Call {
    /// Without a body or anything else.
    const fn bare(method: Method, path: &'static str) -> Self {
        Self { method, path, body: None, follow: None, fds: Vec::new() }
    }
}

/// A subcommand without arguments.
const SIMPLE: [(&str, Method, &str, &str); 12] = [
    ("boot", Method::Put, "vm.boot", "Boot a created VM"),
    ("counters", Method::Get, "vm.counters", "Counters from the VM"),
    ("info", Method::Get, "vm.info", "Info on the VM"),
    (
        "migration-cancel",
        Method::Put,
        "vm.migration-cancel",
        "Cancel the migration that goes on; returns when the guest runs at the source",
    ),
    (
        "migration-start-postcopy",
        Method::Put,
        "vm.migration-start-postcopy",
        "Let a migration with memory_mode=auto go on in postcopy now",
    ),
    ("nmi", Method::Put, "vm.nmi", "Trigger an NMI"),
    ("pause", Method::Put, "vm.pause", "Pause the VM"),
    ("ping", Method::Get, "vmm.ping", "Ping the VMM to check for API server availability"),
    ("power-button", Method::Put, "vm.power-button", "Trigger a power button in the VM"),
    ("reboot", Method::Put, "vm.reboot", "Reboot the VM"),
    ("resume", Method::Put, "vm.resume", "Resume the VM"),
    ("shutdown", Method::Put, "vm.shutdown", "Shutdown the VM"),
];

/// A subcommand that takes the keys of a family.
fn of_family<T: Family>(name: &'static str) -> Command {
    option(name, manual::about::<T>()).after_help(manual::page::<T>(manual::width()))
}

/// A subcommand with one argument that it cannot do without.
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
    flag("watch", "Show the progress until the migration has ended; the exit code says how")
}

fn force() -> Arg {
    flag("force", "Even if a VM elsewhere still needs pages from here, and is lost")
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
        of_family::<UserDeviceConfig>("add-user-device").about("Add a device of another process"),
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
        option("coredump", "Where the dump goes: file:///<path>".to_owned())
            .about("Create a coredump from the VM"),
        Command::new("create").about("Create a VM from a JSON configuration").arg(
            Arg::new("path").index(1).default_value("-").help("File with the JSON, - for stdin"),
        ),
        of_family::<RestoreConfig>("restore").about("Restore a VM from a snapshot"),
        Command::new("delete").about("Delete a VM").arg(force()),
        Command::new("shutdown-vmm").about("Shutdown the VMM").arg(force()),
        option("snapshot", "Where the snapshot goes: file:///<path>".to_owned())
            .about("Create a snapshot from the VM"),
    ]
}

fn migration_commands() -> Vec<Command> {
    vec![
        of_family::<ReceiveMigrationData>("receive-migration")
            .mut_arg("config", |arg| arg.help("<receiver_url>, or keys as below"))
            .about("Receive a VM migration"),
        of_family::<SendMigrationData>("send-migration")
            .mut_arg("config", |arg| arg.help("<destination_url>, or keys as below"))
            .about("Send the VM to another VMM")
            .arg(flag("local", "Same as local=on (older spelling)"))
            .arg(flag("wait", "Return when the migration has ended; the exit code says how"))
            .arg(watch()),
        Command::new("migration-progress")
            .about("Progress of the migration that goes on, or the last one")
            .arg(watch()),
        Command::new("migration-report")
            .about("Report of the last migration: its course in time, how long each vCPU waited")
            .arg(
                Arg::new("svg")
                    .long("svg")
                    .num_args(1)
                    .value_name("FILE")
                    .help("Draw it into this file instead of printing it as JSON, - for stdout"),
            ),
        Command::new("migration-recover")
            .about("Make the connections of a postcopy migration again that has lost them")
            .arg(
                Arg::new("config")
                    .index(1)
                    .default_value("")
                    .help("An address alone, or keys as below"),
            )
            .after_help(manual::page::<MigrationRecoverData>(manual::width())),
    ]
}

/// The command line.
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
        .after_help(manual::wrapped(
            "Exit codes: 0 done, 1 it failed, 2 the command line is wrong. With --wait and \
             --watch also 3 the migration was cancelled, 4 where the guest is has to be looked at.",
            0,
            manual::width(),
        ))
        .subcommands(commands)
}

/// Carries out what the command line says; the text is what goes to stdout.
///
/// # Errors
/// It was not done.
pub fn run(matches: &ArgMatches) -> Result<Option<String>, RemoteError> {
    let socket = matches.get_one::<String>("api-socket").map(PathBuf::from).unwrap_or_default();
    let Some((name, sub)) = matches.subcommand() else { return Ok(None) };
    let call = call(name, sub)?;
    let vm = socket.display().to_string();
    let client = Client::new(socket);
    let request = |source| RemoteError::Request { command: name.to_owned(), source };
    match call.follow {
        Some(view) if call.method == Method::Get => {
            watch::follow(&client, view)?;
            Ok(None)
        }
        Some(view) => {
            // A VMM that has been asked before stays until the end has been seen.
            watch::announce(&client);
            client.ask(call.method, call.path, call.body).map_err(request)?;
            watch::follow(&client, view)?;
            Ok(None)
        }
        None => {
            let fds = open(&call.fds)?;
            let answer =
                client.ask_with(call.method, call.path, call.body, fds).map_err(request)?;
            match sub.try_get_one::<String>("svg").ok().flatten() {
                Some(path) => draw(path, &answer.unwrap_or_default(), &vm),
                None => Ok(answer.map(|text| pretty(&text))),
            }
        }
    }
}

/// The descriptors that the command line names by their numbers.
fn open(fds: &[ConfigFd]) -> Result<Vec<OwnedFd>, RemoteError> {
    let duplicate = |fd: &ConfigFd| {
        let number = fd.number();
        fd.duplicate().map_err(|source| RemoteError::Descriptor { number, source })
    };
    fds.iter().map(duplicate).collect()
}

/// JSON for people.
fn pretty(text: &str) -> String {
    serde_json::from_str::<Value>(text)
        .and_then(|value| serde_json::to_string_pretty(&value))
        .unwrap_or_else(|_| text.to_owned())
}

/// Draws a report; what is to go to stdout comes back.
fn draw(path: &str, report: &str, vm: &str) -> Result<Option<String>, RemoteError> {
    let report = serde_json::from_str(report).map_err(RemoteError::Report)?;
    let picture = chart::svg(&report, vm);
    if path == "-" {
        return Ok(Some(picture));
    }
    std::fs::write(path, picture)
        .map_err(|source| RemoteError::Write { path: path.to_owned(), source })?;
    Ok(None)
}

/// A request that may be forced.
fn forced(path: &'static str, matches: &ArgMatches) -> Call {
    let body = matches.get_flag("force").then(|| json!({"force": true}).to_string());
    Call { body, ..Call::bare(Method::Put, path) }
}

/// Turns a subcommand into a request.
///
/// # Errors
/// Its arguments cannot be read.
pub fn call(name: &str, matches: &ArgMatches) -> Result<Call, RemoteError> {
    if let Some((_, method, path, _)) = SIMPLE.iter().find(|(known, ..)| *known == name) {
        return Ok(Call::bare(*method, path));
    }
    let config = || matches.get_one::<String>("config").cloned().unwrap_or_default();
    let put =
        |path, body: &Value| Call { body: Some(body.to_string()), ..Call::bare(Method::Put, path) };
    Ok(match name {
        "add-device" => {
            let device = option_string::<DeviceConfig>(name, &config())?;
            let fds = device.fd.clone().into_iter().collect();
            Call { fds, ..put("vm.add-device", &to_json(&device)) }
        }
        "add-disk" => put("vm.add-disk", &family::<DiskConfig>(name, &config())?),
        "add-fs" => put("vm.add-fs", &family::<FsConfig>(name, &config())?),
        "add-generic-vhost-user" => {
            put("vm.add-generic-vhost-user", &family::<GenericVhostUserConfig>(name, &config())?)
        }
        "add-net" => {
            let net = option_string::<NetConfig>(name, &config())?;
            let fds = net.fds.clone().unwrap_or_default().0;
            Call { fds, ..put("vm.add-net", &to_json(&net)) }
        }
        "add-pmem" => put("vm.add-pmem", &family::<PmemConfig>(name, &config())?),
        "add-user-device" => {
            put("vm.add-user-device", &family::<UserDeviceConfig>(name, &config())?)
        }
        "add-vdpa" => put("vm.add-vdpa", &family::<VdpaConfig>(name, &config())?),
        "add-vsock" => put("vm.add-vsock", &family::<VsockConfig>(name, &config())?),
        "restore" => {
            let config = option_string::<RestoreConfig>(name, &config())?;
            let fds = config.arriving_fds().in_order();
            Call { fds, ..put("vm.restore", &to_json(&config)) }
        }
        "coredump" => put("vm.coredump", &json!({"destination_url": config()})),
        "snapshot" => put("vm.snapshot", &json!({"destination_url": config()})),
        "remove-device" => put("vm.remove-device", &json!({"id": config()})),
        "resize" => put("vm.resize", &resize(matches)?),
        "resize-disk" => {
            let id = matches.get_one::<String>("disk");
            put("vm.resize-disk", &json!({"id": id, "desired_size": bytes(matches, "size")?}))
        }
        "resize-zone" => {
            let id = matches.get_one::<String>("id");
            put("vm.resize-zone", &json!({"id": id, "desired_ram": bytes(matches, "size")?}))
        }
        "create" => {
            Call { body: Some(configuration(matches)?), ..Call::bare(Method::Put, "vm.create") }
        }
        "migration-progress" => {
            Call { follow: view(matches), ..Call::bare(Method::Get, "vm.migration-progress") }
        }
        "migration-report" => Call::bare(Method::Get, "vm.migration-report"),
        "delete" => forced("vm.delete", matches),
        "shutdown-vmm" => forced("vmm.shutdown", matches),
        "migration-recover" => {
            let data = MigrationRecoverData::parse_or_url(&config())
                .map_err(|source| RemoteError::Option { command: name.to_owned(), source })?;
            data.validate()
                .map_err(|source| RemoteError::Config { command: name.to_owned(), source })?;
            put("vm.migration-recover", &json!(data))
        }
        "send-migration" => send(matches, &config())?,
        "receive-migration" => {
            let data = ReceiveMigrationData::parse_or_url(&config())
                .map_err(|source| RemoteError::Option { command: name.to_owned(), source })?;
            data.validate()
                .map_err(|source| RemoteError::Config { command: name.to_owned(), source })?;
            let fds = data.arriving_fds().in_order();
            Call { fds, ..put("vm.receive-migration", &to_json(&data)) }
        }
        // clap knows no other.
        other => unreachable!("subcommand {other}"),
    })
}

/// How a migration is to be followed.
fn view(matches: &ArgMatches) -> Option<View> {
    if matches.get_flag("watch") {
        return Some(View::for_stdout());
    }
    matches
        .try_get_one::<bool>("wait")
        .ok()
        .flatten()
        .copied()
        .unwrap_or(false)
        .then_some(View::None)
}

fn send(matches: &ArgMatches, config: &str) -> Result<Call, RemoteError> {
    let command = || "send-migration".to_owned();
    let mut data = SendMigrationData::parse_or_url(config)
        .map_err(|source| RemoteError::Option { command: command(), source })?;
    data.local |= matches.get_flag("local");
    data.validate().map_err(|source| RemoteError::Config { command: command(), source })?;
    Ok(Call {
        body: Some(to_json(&data).to_string()),
        follow: view(matches),
        ..Call::bare(Method::Put, "vm.send-migration")
    })
}

fn to_json<T: Serialize>(value: &T) -> Value {
    // Families have string keys and plain values only; writing them cannot fail.
    serde_json::to_value(value).unwrap_or_default()
}

fn option_string<T: Family>(command: &str, text: &str) -> Result<T, RemoteError> {
    T::parse(text).map_err(|source| RemoteError::Option { command: command.to_owned(), source })
}

fn family<T: Family + Serialize>(command: &str, text: &str) -> Result<Value, RemoteError> {
    option_string::<T>(command, text).map(|value| to_json(&value))
}

fn bytes(matches: &ArgMatches, name: &'static str) -> Result<Option<u64>, RemoteError> {
    let Some(text) = matches.get_one::<String>(name) else { return Ok(None) };
    Bytes::parse(text).map(Some).map_err(|reason| RemoteError::Number {
        what: "size",
        text: text.clone(),
        reason,
    })
}

fn resize(matches: &ArgMatches) -> Result<Value, RemoteError> {
    let cpus = matches.get_one::<String>("cpus");
    let cpus: Option<u32> = cpus
        .map(|text| {
            text.parse().map_err(|_| RemoteError::Number {
                what: "number of vCPUs",
                text: text.clone(),
                reason: "expected a whole number".to_owned(),
            })
        })
        .transpose()?;
    Ok(json!({
        "desired_vcpus": cpus,
        "desired_ram": bytes(matches, "memory")?,
        "desired_balloon": bytes(matches, "balloon")?,
    }))
}

fn configuration(matches: &ArgMatches) -> Result<String, RemoteError> {
    let path = matches.get_one::<String>("path").cloned().unwrap_or_default();
    let mut text = String::new();
    let read = if path == "-" {
        std::io::stdin().read_to_string(&mut text).map(|_| ())
    } else {
        std::fs::read_to_string(&path).map(|content| text = content)
    };
    read.map_err(|source| RemoteError::Read { path, source })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    fn parse(args: &str) -> Result<Call, RemoteError> {
        let args = ["ch-remote", "--api-socket", "/s"].into_iter().chain(args.split(' '));
        let matches = command().try_get_matches_from(args).unwrap();
        let (name, sub) = matches.subcommand().unwrap();
        call(name, sub)
    }

    #[test]
    fn simple_commands() {
        let call = parse("info").unwrap();
        assert_eq!((call.method, call.path, call.body), (Method::Get, "vm.info", None));
        assert_eq!(parse("shutdown-vmm").unwrap().path, "vmm.shutdown");
        assert_eq!(parse("power-button").unwrap().path, "vm.power-button");
    }

    #[test]
    fn migrations() {
        let body = |args: &str| -> Value {
            serde_json::from_str(&parse(args).unwrap().body.unwrap()).unwrap()
        };
        let old = body("send-migration unix:/x --local");
        assert_eq!((&old["destination_url"], &old["local"]), (&json!("unix:/x"), &json!(true)));
        let new = body("send-migration destination_url=tcp:h:1,memory_mode=postcopy,downtime_ms=5");
        assert_eq!((&new["memory_mode"], &new["downtime_ms"]), (&json!("Postcopy"), &json!(5)));
        let fewer = body("migration-recover url=tcp:h:2,connections=8");
        assert_eq!((&fewer["url"], &fewer["connections"]), (&json!("tcp:h:2"), &json!(8)));
        assert_eq!(body("migration-recover tcp:h:2")["url"], json!("tcp:h:2"));
        assert_eq!(body("migration-recover connections=1")["connections"], json!(1));
        for wrong in ["connections=0", "connections=129", "preempt=1"] {
            assert!(parse(&format!("migration-recover {wrong}")).is_err(), "{wrong}");
        }
        assert_eq!(parse("send-migration --wait tcp:h:1").unwrap().follow, Some(View::None));
        assert!(parse("send-migration --watch tcp:h:1").unwrap().follow.is_some());
        assert_eq!(parse("send-migration tcp:h:1").unwrap().follow, None);
        assert!(parse("migration-progress --watch").unwrap().follow.is_some());
        assert_eq!(parse("migration-progress").unwrap().follow, None);
        assert_eq!(parse("migration-cancel").unwrap().path, "vm.migration-cancel");
        let receive = body("receive-migration receiver_url=tcp:0.0.0.0:1,memory_mode=postcopy");
        assert_eq!(receive["receiver_url"], "tcp:0.0.0.0:1");
        for bad in ["send-migration http://x", "receive-migration receiver=x"] {
            assert!(parse(bad).unwrap_err().is_usage(), "{bad}");
        }
    }

    #[test]
    fn what_the_vmm_refuses_is_sent_all_the_same() {
        let disk = parse("add-disk path=/d,readonly=on").unwrap();
        assert_eq!(disk.path, "vm.add-disk");
        let body: Value = serde_json::from_str(&disk.body.unwrap()).unwrap();
        assert_eq!((&body["path"], &body["readonly"]), (&json!("/d"), &json!(true)));
        let resize = parse("resize --memory 2G").unwrap().body.unwrap();
        let body: Value = serde_json::from_str(&resize).unwrap();
        assert_eq!(body["desired_ram"], json!(2_u64 << 30));
        assert!(parse("resize --memory 2X").unwrap_err().is_usage());
        assert!(parse("add-disk pth=/d").unwrap_err().is_usage());
    }

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
    fn output_is_pretty() {
        assert_eq!(pretty(r#"{"a":1}"#), "{\n  \"a\": 1\n}");
        assert_eq!(pretty("plain"), "plain");
    }
}
