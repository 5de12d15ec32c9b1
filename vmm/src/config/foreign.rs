// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration fields of cloud-hypervisor that are unknown to this program.
//!
//! Owns their names, of versions 40 to 53 and the one in development: generated clients send every field of the
//! version that they were generated for. A field with another value than its default is refused by name, as any
//! unknown field is; this must never give one of them a meaning.

use serde_json::Value;

/// Fields of cloud-hypervisor that do not exist here: type and field.
const FIELDS: [(&str, &str); 19] = [
    ("ConsoleConfig", "iobase"),
    ("DebugConsoleConfig", "id"),
    ("DebugConsoleConfig", "iommu"),
    ("DebugConsoleConfig", "socket"),
    ("FsConfig", "iommu"),
    ("GenericVhostUserConfig", "iommu"),
    ("NumaConfig", "sgx_epc_sections"),
    ("PayloadConfig", "fw_cfg_config"),
    ("SendMigrationData", "preserve_source"),
    ("SerialConfig", "id"),
    ("SerialConfig", "iobase"),
    ("SerialConfig", "iommu"),
    ("SerialConfig", "pci_device_id"),
    ("SerialConfig", "pci_segment"),
    ("UserDeviceConfig", "iommu"),
    ("VmConfig", "gdb"),
    ("VmConfig", "ivshmem"),
    ("VmConfig", "preserved_fds"),
    ("VmConfig", "sgx_epc"),
];

/// Whether `value` is the default of an unknown field: `null` in any field, and in known ones of
/// cloud-hypervisor what clients send if nothing was set.
pub fn says_nothing(type_name: &str, field: &str, value: &Value) -> bool {
    if value.is_null() {
        return true;
    }
    let is_empty = match value {
        Value::Null => true,
        Value::Bool(is_on) => !is_on,
        Value::Number(number) => number.as_u64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    };
    is_empty && FIELDS.contains(&(type_name, field))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use crate::config::{SendMigrationData, VmConfig};

    fn read(more: &Value) -> Result<VmConfig, serde_json::Error> {
        let mut config = json!({"payload": {"kernel": "/k"}});
        let fields = more.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(fields);
        serde_json::from_value(config)
    }

    use super::Value;

    #[test]
    fn what_generated_clients_send_without_being_told_means_nothing() {
        let plain = read(&json!({})).unwrap();
        for nothing in [
            json!({"serial": {"iommu": false, "mode": "Null", "pci_segment": 0}}),
            json!({"gdb": false, "sgx_epc": [], "preserved_fds": null, "ivshmem": null}),
            json!({"debug_console": {"mode": "Off", "iommu": false}}),
            json!({"payload": {"kernel": "/k", "fw_cfg_config": {}}}),
        ] {
            let read = read(&nothing).unwrap();
            assert_eq!((&read.cpus, &read.payload), (&plain.cpus, &plain.payload), "{nothing}");
        }
    }

    #[test]
    fn a_source_that_ends_after_its_migration_is_what_every_source_does() {
        let read = |preserve: bool| {
            let body = json!({"destination_url": "unix:/x", "preserve_source": preserve});
            serde_json::from_value::<SendMigrationData>(body)
        };
        assert_eq!(
            read(false).unwrap(),
            SendMigrationData {
                destination_url: "unix:/x".to_owned(),
                ..SendMigrationData::default()
            }
        );
        assert!(read(true).unwrap_err().to_string().contains("`preserve_source`"));
    }

    #[test]
    fn what_says_something_is_refused_by_its_name() {
        for (something, field) in [
            (json!({"serial": {"iommu": true, "mode": "Null"}}), "iommu"),
            (json!({"gdb": true}), "gdb"),
            (json!({"sgx_epc": [{"id": "a", "size": 1}]}), "sgx_epc"),
            // An unknown name is refused, whatever its value.
            (json!({"serail": {}}), "serail"),
            (json!({"memory": {"size": 1 << 20, "shard": false}}), "shard"),
        ] {
            let error = read(&something).unwrap_err().to_string();
            assert!(error.contains(&format!("unknown field `{field}`")), "{error}");
        }
    }
}
