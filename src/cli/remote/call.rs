// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Converts a subcommand and its arguments to an API request.
//!
//! Owns what each of them means. It must never send anything.

use std::io::Read as _;

use clap::ArgMatches;
use serde::Serialize;
use serde_json::{Value, json};
use vmm::api::endpoints::Method;
use vmm::config::codec::{Bytes, ValueCodec as _};
use vmm::config::migration::RestoreConfig;
use vmm::config::{
    ConfigFd, DeviceConfig, DiskConfig, Family, FsConfig, GenericVhostUserConfig,
    MigrationRecoverData, NetConfig, PmemConfig, ReceiveMigrationData, SendMigrationData,
    UserDeviceConfig, VdpaConfig, VsockConfig,
};

use super::RemoteError;
use super::check::MIGRATE_CHECK;
use super::commands::SIMPLE;
use crate::cli::watch::View;

/// A request to the VMM.
#[derive(Debug, PartialEq)]
pub struct Call {
    /// HTTP method.
    pub method: Method,
    /// Path below the root of the API.
    pub path: &'static str,
    /// Body as JSON text.
    pub body: Option<String>,
    /// How to follow the migration that the request starts or continues.
    pub follow: Option<View>,
    /// Descriptors of this process to send with the request.
    pub fds: Vec<ConfigFd>,
}

impl Call {
    /// A request without a body.
    const fn bare(method: Method, path: &'static str) -> Self {
        Self { method, path, body: None, follow: None, fds: Vec::new() }
    }
}

/// A request with an optional `force` flag.
fn forced(path: &'static str, matches: &ArgMatches) -> Call {
    let body = matches.get_flag("force").then(|| json!({"force": true}).to_string());
    Call { body, ..Call::bare(Method::Put, path) }
}

/// Builds the request of a subcommand.
///
/// # Errors
/// The arguments are invalid.
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
        "snapshot" => {
            let mut body = json!({"destination_url": config()});
            if let (Some(format), Some(fields)) =
                (matches.get_one::<String>("format"), body.as_object_mut())
            {
                fields.insert("format".to_owned(), json!(format));
            }
            put("vm.snapshot", &body)
        }
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
        "resume" => forced("vm.resume", matches),
        "shutdown-vmm" => forced("vmm.shutdown", matches),
        "migration-recover" => {
            let data = MigrationRecoverData::parse_or_url(&config())
                .map_err(|source| RemoteError::Option { command: name.to_owned(), source })?;
            data.validate()
                .map_err(|source| RemoteError::Config { command: name.to_owned(), source })?;
            put("vm.migration-recover", &json!(data))
        }
        MIGRATE_CHECK => {
            let data = migration(name, &config())?;
            put("vm.migrate-check", &to_json(&data))
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
        // clap accepts no other.
        other => unreachable!("subcommand {other}"),
    })
}

/// How a migration is followed.
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

/// The options of a migration.
fn migration(command: &str, config: &str) -> Result<SendMigrationData, RemoteError> {
    let data = SendMigrationData::parse_or_url(config)
        .map_err(|source| RemoteError::Option { command: command.to_owned(), source })?;
    data.validate()
        .map_err(|source| RemoteError::Config { command: command.to_owned(), source })?;
    Ok(data)
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
    // Families have only string keys and plain values, so serialising them cannot fail.
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

    use super::super::command;
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
        let check = body("migrate-check destination_url=tcp:h:1,memory_mode=postcopy --json");
        assert_eq!(check, body("send-migration destination_url=tcp:h:1,memory_mode=postcopy"));
        assert_eq!(parse("migrate-check tcp:h:1").unwrap().path, "vm.migrate-check");
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
        for bad in
            ["send-migration http://x", "migrate-check http://x", "receive-migration receiver=x"]
        {
            assert!(parse(bad).unwrap_err().is_usage(), "{bad}");
        }
    }

    #[test]
    fn what_the_vmm_refuses_is_sent_all_the_same() {
        let fs = parse("add-fs tag=t,socket=/s,num_queues=2").unwrap();
        assert_eq!(fs.path, "vm.add-fs");
        assert!(fs.body.unwrap().contains("\"queue_size\":1024"));
        let generic = "add-generic-vhost-user socket=/s,virtio_id=26,queue_sizes=[64]";
        let generic = parse(generic).unwrap();
        assert_eq!(generic.path, "vm.add-generic-vhost-user");
        assert!(generic.body.unwrap().contains("\"device_type\":26"));
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
}
