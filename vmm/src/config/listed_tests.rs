// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whatever help and the reference page list passes validation: nothing is offered that is refused.

use super::*;

/// What a family says of an option string, whether it describes a part of a VM or a request.
fn verdict(family: &str, text: &str) -> Result<(), String> {
    fn told(error: &dyn std::error::Error) -> String {
        error_text::chain(error)
    }
    fn asked<T: Family>(
        parsed: Result<T, OptionError>,
        check: impl FnOnce(&T) -> Result<(), ConfigError>,
    ) -> Result<(), String> {
        let value = parsed.map_err(|error| told(&error))?;
        check(&value).map_err(|error| told(&error))
    }
    let one = || Some(text.to_owned());
    let many = || vec![text.to_owned()];
    let vm = |change: &dyn Fn(&mut VmParams)| {
        // As many segments as the number that is tried for one needs.
        let platform = Some("num_pci_segments=4".to_owned());
        let mut params = VmParams { kernel: Some("/k".into()), platform, ..VmParams::default() };
        change(&mut params);
        params.into_config().map(drop).map_err(|error| told(&error))
    };
    match family {
        "cpus" => vm(&|p| p.cpus = one()),
        "memory" => vm(&|p| p.memory = one()),
        "memory-zone" => vm(&|p| {
            p.memory = Some("size=0,hotplug_method=virtio-mem".to_owned());
            p.memory_zones = many();
        }),
        "balloon" => vm(&|p| p.balloon = one()),
        "platform" => vm(&|p| p.platform = one()),
        "pci-segment" => vm(&|p| p.pci_segments = many()),
        "disk" => vm(&|p| p.disks = many()),
        "net" => vm(&|p| {
            p.memory = Some("size=512M,shared=on".to_owned());
            p.net = many();
        }),
        "generic-vhost-user" => vm(&|p| {
            p.memory = Some("size=512M,shared=on".to_owned());
            p.generic_vhost_user = many();
        }),
        "fs" => vm(&|p| {
            p.memory = Some("size=512M,shared=on".to_owned());
            p.fs = many();
        }),
        "device" => vm(&|p| p.devices = many()),
        "user-device" => vm(&|p| {
            p.memory = Some("size=512M,shared=on".to_owned());
            p.user_devices = many();
        }),
        "vdpa" => vm(&|p| p.vdpa = many()),
        "rate-limit-group" => vm(&|p| p.rate_limit_groups = many()),
        "numa" => vm(&|p| p.numa = many()),
        "vsock" => vm(&|p| p.vsock = one()),
        "pmem" => vm(&|p| p.pmem = many()),
        "rng" => vm(&|p| p.rng = one()),
        "rtc" => vm(&|p| p.rtc = one()),
        "console" => vm(&|p| p.console = one()),
        "serial" => vm(&|p| p.serial = one()),
        "debug-console" => vm(&|p| p.debug_console = one()),
        "send-migration" => {
            asked(SendMigrationData::parse_or_url(text), SendMigrationData::validate)
        }
        "receive-migration" => {
            asked(ReceiveMigrationData::parse_or_url(text), ReceiveMigrationData::validate)
        }
        "migration-recover" => {
            asked(MigrationRecoverData::parse_or_url(text), MigrationRecoverData::validate)
        }
        "restore" => asked(RestoreConfig::parse(text), refuse_unsupported),
        // Its body is JSON alone.
        "payload" | "snapshot" => Ok(()),
        other => panic!("the family {other} is not checked"),
    }
}

/// Values of a key that help lists, one after the other, or one that its placeholder stands for.
fn listed_values(field: &family::FieldInfo, syntax: &'static str) -> Vec<String> {
    if syntax.contains('|') && !syntax.contains('<') {
        return syntax.split('|').map(str::to_owned).collect();
    }
    let number = field.spec.range.map_or(2, |(min, _)| min.max(2));
    vec![match syntax {
        // Those of a limit take no suffix, as with cloud-hypervisor.
        "<bytes>" if field.keys.len() > 1 => number.to_string(),
        "<bytes>" => "64M".to_owned(),
        "<number>" | "<ms>" | "<io_ops>" => number.to_string(),
        "<port>" => "0xe9".to_owned(),
        "<mac_address>" => "02:00:00:00:00:01".to_owned(),
        "<ip_address>" => "10.0.0.1".to_owned(),
        _ => return Vec::new(),
    }]
}

#[test]
fn whatever_is_listed_passes_validation() {
    let required = |family: &str| match family {
        "disk" => "path=/d",
        "memory" => "hotplug_method=virtio-mem",
        "memory-zone" => "id=z,size=512M",
        "device" => "path=/sys/bus/pci/devices/0000:00:01.0",
        "net" => "tap=t",
        "rate-limit-group" => "id=g",
        "numa" => "guest_numa_id=0,cpus=0",
        "fs" => "tag=t,socket=/s",
        "generic-vhost-user" => "socket=/s,virtio_id=26,queue_sizes=[64]",
        "vsock" => "cid=3,socket=/s",
        "pmem" => "file=/p",
        "user-device" => "socket=/s",
        "vdpa" => "path=/v",
        "send-migration" => "destination_url=tcp:h:1",
        "receive-migration" => "receiver_url=tcp:h:1",
        "restore" => "source_url=file:///s",
        _ => "",
    };
    let mut tried = 0;
    for info in reference::families() {
        for field in info.fields.iter().filter(|f| !f.spec.hidden && !f.spec.unsupported) {
            for key in &field.keys {
                let values = match key.value {
                    Some(syntax) => listed_values(field, syntax),
                    None => vec![String::new()],
                };
                for value in values {
                    let pair = if key.value.is_some() {
                        format!("{}={value}", key.key)
                    } else {
                        key.key.to_owned()
                    };
                    let given = required(info.name);
                    let others: Vec<_> = given
                        .split(',')
                        .filter(|one| !one.is_empty() && !one.starts_with(&format!("{}=", key.key)))
                        .collect();
                    let text = [others, vec![pair.as_str()]].concat().join(",");
                    let refused = verdict(info.name, &text).err().unwrap_or_default();
                    let offered = !refused.contains("not supported")
                        && !refused.contains("is not an option")
                        && !refused.contains("expected");
                    assert!(offered, "--{} {text}: {refused}", info.name);
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 100, "only {tried} were tried");
}
