// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the option families as a whole: option strings and JSON.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

mod limits;
mod numa;
mod properties;
mod rules;

use super::*;

fn minimal() -> VmConfig {
    serde_json::from_str(r#"{"payload":{"kernel":"/boot/vmlinux"}}"#).unwrap()
}

fn complete(json: &str) -> Result<VmConfig, ConfigError> {
    serde_json::from_str::<VmConfig>(json).unwrap().complete()
}

fn params(change: impl FnOnce(&mut VmParams)) -> Result<VmConfig, ConfigError> {
    let mut params = VmParams { kernel: Some("/k".into()), ..VmParams::default() };
    change(&mut params);
    params.into_config()
}

#[test]
fn defaults_are_those_of_the_original() {
    let config = minimal();
    assert_eq!((config.cpus.boot_vcpus, config.cpus.max_vcpus), (1, 1));
    assert_eq!(config.cpus.max_phys_bits, 46);
    assert!(config.cpus.nested && config.memory.thp);
    assert_eq!(config.memory.size, 512 << 20);
    assert_eq!(config.serial.mode, ConsoleMode::Null);
    assert_eq!(config.console.mode, ConsoleMode::Tty);
    assert_eq!(config.debug_console.mode, ConsoleMode::Off);
    assert_eq!(config.debug_console.iobase, Some(0xe9));
    assert_eq!(config.rng.src.to_str(), Some("/dev/urandom"));
    let disk = DiskConfig::default();
    assert_eq!((disk.num_queues, disk.queue_size, disk.sparse), (1, 128, true));
    let net = NetConfig::default();
    assert_eq!((net.num_queues, net.queue_size), (2, 256));
    assert!(net.offload_tso && net.offload_ufo && net.offload_csum);
    let send = SendMigrationData::default();
    assert_eq!((send.downtime_ms, send.timeout_s, send.connections), (300, 3600, 1));
}

#[test]
fn option_strings_and_json_say_the_same() {
    let disk = DiskConfig::parse(
        "path=/d,readonly=on,direct=on,num_queues=4,queue_size=256,id=a,serial=s,pci_device_id=5,\
         sparse=off,image_type=raw,lock_granularity=full",
    )
    .unwrap();
    let json: DiskConfig = serde_json::from_str(
        r#"{"path":"/d","readonly":true,"direct":true,"num_queues":4,"queue_size":256,"id":"a",
            "serial":"s","pci_device_id":5,"sparse":false,"image_type":"Raw",
            "lock_granularity":"Full"}"#,
    )
    .unwrap();
    assert_eq!(disk, json);

    let cpus = CpusConfig::parse_cpus(
        "boot=2,max=8,topology=2:2:2:1,affinity=[0@[1,3],1@[4-6]],features=amx,nested=off",
    )
    .unwrap();
    let json: CpusConfig = serde_json::from_str(
        r#"{"boot_vcpus":2,"max_vcpus":8,"topology":{"threads_per_core":2,"cores_per_die":2,
            "dies_per_package":2,"packages":1},"affinity":[{"vcpu":0,"host_cpus":[1,3]},
            {"vcpu":1,"host_cpus":[4,5,6]}],"features":{"amx":true},"nested":false}"#,
    )
    .unwrap();
    assert_eq!(cpus, json);
    assert!(cpus.validate().is_ok());

    let net = NetConfig::parse(
        "tap=t0,ip=10.0.0.1,mask=255.255.255.0,mac=02:00:00:00:00:01,mtu=1500,bw_size=10,\
         bw_refill_time=20,offload_tso=off",
    )
    .unwrap();
    let limiter = net.rate_limiter_config.as_ref().unwrap().bandwidth.as_ref().unwrap();
    assert_eq!((limiter.size, limiter.refill_time, limiter.one_time_burst), (10, 20, None));
}

#[test]
fn max_vcpus_follow_boot() {
    assert_eq!(CpusConfig::parse_cpus("boot=4").unwrap().max_vcpus, 4);
    assert_eq!(CpusConfig::parse_cpus("boot=4,max=8").unwrap().max_vcpus, 8);
    assert_eq!(CpusConfig::parse_cpus("boot=4,max_phys_bits=40").unwrap().max_vcpus, 4);
}

#[test]
fn console_modes() {
    let parse = |text| ConsoleConfig::parse(text).map(|config| config.mode);
    assert_eq!(parse("off").unwrap(), ConsoleMode::Off);
    assert_eq!(parse("tty").unwrap(), ConsoleMode::Tty);
    assert_eq!(parse("file=/x").unwrap(), ConsoleMode::File);
    assert_eq!(parse("socket=/x").unwrap(), ConsoleMode::Socket);
    assert!(parse("").is_err() && parse("file=").is_err());
    assert!(parse("tty,off").is_err() && parse("tty,file=/x").is_err());
    let debug = DebugConsoleConfig::parse("off,iobase=0xe9").unwrap();
    assert_eq!(debug, DebugConsoleConfig::default());
    // The last `file=` counts, and it names no file: nothing says where the text goes.
    DebugConsoleConfig::parse("file=/a,file=").unwrap_err();
    for text in ["socket=/x", "file=/x", "pty"] {
        params(|p| p.serial = Some(text.into())).unwrap();
        params(|p| p.console = Some(text.into())).unwrap();
    }
    let without = |name: &str| {
        let json = serde_json::json!({"payload": {"kernel": "/k"}, name: {"mode": "Socket"}});
        serde_json::from_value::<VmConfig>(json).unwrap().complete().unwrap_err().to_string()
    };
    for name in ["serial", "console", "debug_console"] {
        assert!(without(name).contains("needs a socket"), "{}", without(name));
    }
}

#[test]
fn numbers_out_of_range_are_refused_in_both_forms() {
    assert!(CpusConfig::parse("boot=0").is_err());
    assert!(CpusConfig::parse("boot=255").is_err());
    assert!(DiskConfig::parse("path=/a,queue_size=2").is_err());
    let error =
        serde_json::from_str::<VmConfig>(r#"{"payload":{},"cpus":{"boot_vcpus":0,"max_vcpus":1}}"#)
            .unwrap_err()
            .to_string();
    assert!(error.contains("cpus: boot_vcpus: must be from 1 to 254, not 0"), "{error}");
}

#[test]
fn json_errors_name_the_field() {
    let error = |json| serde_json::from_str::<VmConfig>(json).unwrap_err().to_string();
    assert!(error("{}").contains("missing field `payload`"));
    assert!(
        error(r#"{"payload":{},"cpus":{"boot_vcpus":1}}"#).contains("missing field `max_vcpus`")
    );
    let wrong = error(r#"{"payload":{},"disks":[{"path":7}]}"#);
    assert!(wrong.contains("disks: path: invalid type: integer `7`"), "{wrong}");
    assert!(error(r#"{"payload":{},"payload":{}}"#).contains("duplicate field `payload`"));
    assert!(
        error(r#"{"payload":{},"console":{"mode":"Loud"}}"#).contains("unknown variant `Loud`")
    );
}

#[test]
fn unknown_json_fields_are_refused_by_name_unless_they_are_null() {
    let read = |text: &str| serde_json::from_str::<VmConfig>(text);
    let config = read(r#"{"payload":{"kernel":"/k","x":null},"new":null}"#).unwrap();
    assert!(config.complete().is_ok());
    let error = |text: &str| read(text).unwrap_err().to_string();
    let inner = error(r#"{"payload":{"kernel":"/k","x":1}}"#);
    assert!(inner.contains("payload: unknown field `x` of PayloadConfig"), "{inner}");
    for value in ["false", "0", "[]", r#"{"deep":[1,2]}"#] {
        let outer = error(&format!(r#"{{"payload":{{"kernel":"/k"}},"new":{value}}}"#));
        assert!(outer.contains("unknown field `new` of VmConfig"), "{outer}");
    }
}

#[test]
fn everything_unsupported_is_named_at_once() {
    let error = complete(
        r#"{"payload":{"kernel":"/k"},
            "devices":[{"path":"/d","iommu":true}],
            "balloon":{"size":0,"iommu":true}}"#,
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "'balloon.iommu', 'devices[0].iommu' are not supported by this version"
    );
    let error = params(|p| p.igvm = Some("/i".into())).unwrap_err();
    assert_eq!(error.to_string(), "'payload.igvm' is not supported by this version");
}

#[test]
fn defaults_and_empty_lists_of_unsupported_things_are_accepted() {
    let config = complete(
        r#"{"payload":{"kernel":"/k"},"watchdog":false,"iommu":false,"fs":[],"pmem":null,
            "landlock_enable":false,"disks":[{"path":"/d","iommu":false,"vhost_user":false,
            "backing_files":false}],"memory":{"size":1073741824,"hotplug_method":"Acpi"},
            "platform":{"num_pci_segments":1,"vfio_p2p_dma":true,"tdx":false}}"#,
    );
    assert!(config.is_ok(), "{config:?}");
}

#[test]
fn devices_get_names_from_one_count() {
    let config = complete(
        r#"{"payload":{"kernel":"/k"},"disks":[{"path":"/a"},{"path":"/b","id":"_net2"},
            {"path":"/c"}],"net":[{},{"id":"mine"}]}"#,
    )
    .unwrap();
    let ids: Vec<_> = config.disks.iter().flatten().map(|disk| disk.id.clone().unwrap()).collect();
    assert_eq!(ids, ["_disk0", "_net2", "_disk1"]);
    let ids: Vec<_> = config.net.iter().flatten().map(|net| net.id.clone().unwrap()).collect();
    assert_eq!(ids, ["_net3", "mine"]);
    assert_eq!(config.console.id.as_deref(), Some("__console"));
    assert_eq!(config.rng.id.as_deref(), Some("__rng"));
    assert!(config.net.iter().flatten().all(|net| net.mac.is_some()));
}

#[test]
fn passed_through_devices() {
    let with = |device: &str| {
        complete(&format!(r#"{{"payload":{{"kernel":"/k"}},"devices":[{device}]}}"#))
    };
    let config = with(r#"{"path":"/d"},{"path":"/e","id":"gpu","pin":"Strict"}"#).unwrap();
    let devices = config.devices.unwrap();
    assert_eq!((devices[0].id.as_deref(), devices[0].pin), (Some("_vfio0"), PinMode::Auto));
    assert_eq!((devices[1].id.as_deref(), devices[1].pin), (Some("gpu"), PinMode::Strict));
    let parsed = DeviceConfig::parse("path=/e,id=gpu,pin=strict").unwrap();
    assert_eq!(parsed, devices[1]);
    assert!(matches!(with(r#"{"id":"gpu"}"#), Err(ConfigError::Device { what: "device", .. })));
    let refused = with(r#"{"path":"/d","iommu":true}"#);
    assert!(matches!(refused, Err(ConfigError::Unsupported { .. })), "{refused:?}");
    assert!(with(r#"{"path":"/d","x_exclude_mmap_bars":[6]}"#).is_err());
    for clique in [0, 15] {
        let device = format!(r#"{{"path":"/d","x_nv_gpudirect_clique":{clique}}}"#);
        let devices = with(&device).unwrap().devices.unwrap();
        assert_eq!(devices[0].x_nv_gpudirect_clique, Some(clique));
    }
    let too_large = r#"{"path":"/d","x_nv_gpudirect_clique":16}"#;
    assert!(serde_json::from_str::<DeviceConfig>(too_large).is_err());
    assert!(DeviceConfig::parse("path=/d,x_nv_gpudirect_clique=16").is_err());
    assert!(with(r#"{"path":"/d","x_nv_gpudirect_clique":null}"#).is_ok());
    let parsed = DeviceConfig::parse("path=/e,x_nv_gpudirect_clique=3").unwrap();
    assert_eq!(parsed.x_nv_gpudirect_clique, Some(3));
    for platform in [r#"{"vfio_p2p_dma":false}"#, r#"{"iommufd":true}"#] {
        let refused = complete(&format!(
            r#"{{"payload":{{"kernel":"/k"}},"platform":{platform},
                "devices":[{{"path":"/d","x_nv_gpudirect_clique":0}}]}}"#
        ));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("x_nv_gpudirect_clique needs"), "{platform}: {refused}");
    }
    assert!(with(r#"{"path":"/d","id":"x"},{"path":"/e","id":"x"}"#).is_err());
    assert!(with(r#"{"path":"/d","pci_device_id":3},{"path":"/e","pci_device_id":3}"#).is_err());
}

#[test]
fn completing_twice_changes_nothing() {
    let once =
        complete(r#"{"payload":{"kernel":"/k"},"disks":[{"path":"/a"}],"net":[{"tap":"t"}]}"#)
            .unwrap();
    let json = serde_json::to_string(&once).unwrap();
    assert_eq!(serde_json::from_str::<VmConfig>(&json).unwrap().complete().unwrap(), once);
}

#[test]
fn hidden_options_work_and_are_not_shown() {
    let disk = DiskConfig::parse("path=/a,_disable_io_uring=on").unwrap();
    assert!(disk.disable_io_uring);
    assert!(!reference::help::<DiskConfig>().contains("_disable"));
    assert!(!reference::reference_page().contains("_disable"));
    let json = serde_json::to_string(&DiskConfig::default()).unwrap();
    assert!(!json.contains("disable_io_uring"));
}

#[test]
fn errors_of_option_strings_name_the_option() {
    let error = params(|p| p.disks = vec!["pth=/a".into()]).unwrap_err();
    assert_eq!(error.to_string(), "--disk cannot be read");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(source, "'pth' is not an option of disk, did you mean 'path'?");
}

#[test]
fn reference_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/options.md");
    let now = reference::reference_page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &now).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == now, "docs/options.md is stale, run the test with UPDATE_DOCS=1");
}
