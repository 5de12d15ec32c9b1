// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the option families as a whole: option strings, JSON, rules across families.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use proptest::prelude::*;

use super::family::FamilyInfo;
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
    assert!(matches!(
        params(|p| p.serial = Some("socket=/x".into())),
        Err(ConfigError::Unsupported { .. })
    ));
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
        r#"{"payload":{"kernel":"/k"},"watchdog":true,"fs":[{"tag":"t","socket":"/s",
            "num_queues":1,"queue_size":1024}],"disks":[{"path":"/d","iommu":true}],
            "vsock":{"cid":3,"socket":"/v"}}"#,
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "'disks[0].iommu', 'fs', 'vsock', 'watchdog' are not supported by this version"
    );
    let error = params(|p| p.tpm = Some("socket=/t".into())).unwrap_err();
    assert_eq!(error.to_string(), "'tpm' is not supported by this version");
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
    assert_eq!((devices[0].id.as_deref(), devices[0].pin), (Some("_vfio0"), PinMode::Overlap));
    assert_eq!((devices[1].id.as_deref(), devices[1].pin), (Some("gpu"), PinMode::Strict));
    let parsed = DeviceConfig::parse("path=/e,id=gpu,pin=strict").unwrap();
    assert_eq!(parsed, devices[1]);
    assert!(matches!(with(r#"{"id":"gpu"}"#), Err(ConfigError::Device { what: "device", .. })));
    for later in [r#""iommu":true"#, r#""pci_segment":1"#] {
        let refused = with(&format!(r#"{{"path":"/d",{later}}}"#));
        assert!(matches!(refused, Err(ConfigError::Unsupported { .. })), "{later}");
    }
    assert!(with(r#"{"path":"/d","x_exclude_mmap_bars":[6]}"#).is_err());
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
fn rules_across_devices() {
    let two = |a: &str, b: &str| complete(&format!(r#"{{"payload":{{"kernel":"/k"}},{a},{b}}}"#));
    assert_eq!(
        two(r#""disks":[{"path":"/a","id":"x"}]"#, r#""net":[{"id":"x"}]"#).unwrap_err(),
        ConfigError::DuplicateId { id: "x".into() }
    );
    assert_eq!(
        two(r#""disks":[{"path":"/a","pci_device_id":4}]"#, r#""net":[{"pci_device_id":4}]"#)
            .unwrap_err(),
        ConfigError::DuplicateSlot { slot: 4 }
    );
    assert_eq!(
        two(r#""console":{"mode":"Tty"}"#, r#""serial":{"mode":"Tty"}"#).unwrap_err(),
        ConfigError::DoubleTty
    );
    assert_eq!(
        two(r#""disks":[{"path":"/a","id":"__x"}]"#, r#""net":[]"#).unwrap_err(),
        ConfigError::ReservedId { id: "__x".into() }
    );
    assert_eq!(
        two(r#""disks":[{"path":"/a","id":""}]"#, r#""net":[]"#).unwrap_err(),
        ConfigError::EmptyId { family: "disk" }
    );
}

#[test]
fn rules_of_cpus() {
    let error = |text: &str| CpusConfig::parse_cpus(text).unwrap().validate().unwrap_err();
    assert_eq!(error("boot=4,max=2"), ConfigError::VcpusMaxBelowBoot { max: 2, boot: 4 });
    assert_eq!(
        error("boot=4,topology=1:2:1:1"),
        ConfigError::TopologyProduct { product: 2, max: 4 }
    );
    // 33 cores take six bits.
    let gaps = CpusConfig::parse_cpus("boot=165,topology=1:33:1:5").unwrap();
    let refusal = ConfigError::TopologyApicId { apic_id: 288, max: 254 };
    assert_eq!(gaps.check_apic_ids().unwrap_err(), refusal);
    let fits = CpusConfig::parse_cpus("boot=254,topology=1:127:1:2").unwrap();
    fits.validate().unwrap();
    fits.check_apic_ids().unwrap();
    // A guest that runs already has them.
    let json = serde_json::json!({ "payload": { "kernel": "/k" }, "cpus": gaps });
    let config: VmConfig = serde_json::from_value(json).unwrap();
    assert_eq!(config.clone().complete().unwrap_err(), refusal);
    config.complete_begun().unwrap();
    assert_eq!(error("boot=1,affinity=[1@[0]]"), ConfigError::AffinityVcpu { vcpu: 1, max: 1 });
    assert_eq!(error("boot=1,affinity=[0@[0],0@[1]]"), ConfigError::AffinityEntry { vcpu: 0 });
    assert!(CpusConfig::parse_cpus("boot=1,topology=0:1:1:1").is_err());
}

#[test]
fn rules_of_memory() {
    let memory = |text: &str| MemoryConfig::parse(text).unwrap().validate();
    for good in
        ["size=512M", "size=4K", "size=1G,hugepages=on,hugepage_size=1G", "size=8G,shared=on"]
    {
        assert!(memory(good).is_ok(), "{good}");
    }
    for bad in [
        "size=0",
        "size=4097",
        "size=3M,hugepages=on",
        "size=512M,hugepage_size=2M",
        "size=512M,hugepages=on,hugepage_size=3M",
        "size=512M,mergeable=on,shared=on",
        "size=65T",
        "size=1G,mergeable=on,prezeroed=/run/pool",
    ] {
        assert!(matches!(memory(bad), Err(ConfigError::Memory { .. })), "{bad}");
    }
    let zones = |size: &str, zones: &[&str]| {
        params(|p| {
            p.memory = Some(format!("size={size}"));
            p.memory_zones = zones.iter().map(|zone| (*zone).to_owned()).collect();
        })
    };
    assert!(zones("0", &["id=a,size=1G", "id=b,size=1G,shared=on,prefault=on"]).is_ok());
    assert!(zones("0", &["id=a,size=1G,hugepages=on,prezeroed=/p,prefault=background"]).is_ok());
    assert!(zones("0", &["id=a,size=1G,file=/f,prezeroed=/p"]).is_err());
    assert!(zones("0,prezeroed=/p", &["id=a,size=1G"]).is_err());
    assert!(zones("0,prefault_threads=2", &["id=a,size=1G"]).is_ok());
    assert!(MemoryConfig::parse("size=1G,prefault_threads=0").is_err());
    assert!(zones("1G", &["id=a,size=1G"]).is_err());
    // What is on for all of them may be said of the whole as well, and of no fewer.
    for property in ["shared", "hugepages", "mergeable", "prefault"] {
        let with = format!("id=a,size=1G,{property}=on");
        let whole = format!("0,{property}=on");
        assert!(zones(&whole, &[&with, "id=b,size=1G"]).is_err(), "{property}");
        let second = with.replace("id=a", "id=b");
        zones(&whole, &[&with, &second]).unwrap();
    }
    assert!(zones("0", &["id=a,size=1000"]).is_err());
    assert!(zones("0", &["size=1G"]).is_err());
    assert_eq!(
        zones("0", &["id=a,size=1G", "id=a,size=1G"]).unwrap_err(),
        ConfigError::DuplicateId { id: "a".into() }
    );
    let sum = complete(
        r#"{"payload":{"kernel":"/k"},"memory":{"size":0,"zones":[
        {"id":"a","size":18446744073709547520},{"id":"b","size":18446744073709547520}]}}"#,
    );
    assert!(matches!(sum, Err(ConfigError::Memory { .. })));
}

#[test]
fn rules_of_disks_and_nets() {
    let disk = |text: &str| DiskConfig::parse(text).unwrap().validate(4);
    assert!(disk("path=/a,num_queues=4").is_ok());
    for bad in [
        "readonly=on",
        "path=/a,num_queues=5",
        "path=/a,queue_size=100",
        "path=/a,serial=123456789012345678901",
    ] {
        assert!(matches!(disk(bad), Err(ConfigError::Device { .. })), "{bad}");
    }
    assert!(disk("path=/a,num_queues=2,queue_affinity=[0@[0-1],1@[2]]").is_ok());
    for bad in ["[1@[0]]", "[0@[0],0@[1]]", "[0@[]]"] {
        let text = format!("path=/a,queue_affinity={bad}");
        let refused = DiskConfig::parse(&text).is_ok_and(|disk| disk.validate(4).is_err());
        assert!(refused || DiskConfig::parse(&text).is_err(), "{bad}");
    }
    assert!(matches!(disk("path=/a,image_type=qcow2"), Err(ConfigError::Unsupported { .. })));
    let net = |text: &str| NetConfig::parse(text).unwrap().validate(4);
    for good in ["", "tap=t", "fd=[5,6],num_queues=4", "ip=10.0.0.1,mask=255.255.0.0", "ip=fe80::1"]
    {
        assert!(net(good).is_ok(), "{good}");
    }
    for bad in [
        "num_queues=3",
        "num_queues=10",
        "queue_size=3",
        "tap=interface_name_too_long",
        "mac=01:00:00:00:00:00",
        "mask=255.0.0.0",
        "ip=10.0.0.1,mask=255.0.255.0",
        "ip=10.0.0.1,mask=ffff::",
        "fd=[5],num_queues=4",
        "fd=2",
        "tap=t,fd=5",
    ] {
        assert!(matches!(net(bad), Err(ConfigError::Device { .. })), "{bad}");
    }
}

#[test]
fn descriptors_come_from_the_command_line_only() {
    let net = NetConfig::parse("fd=[5,6],num_queues=4").unwrap();
    assert!(net.validate(2).is_ok());
    let json = serde_json::to_string(&net).unwrap();
    let travelled: NetConfig = serde_json::from_str(&json).unwrap();
    assert!(matches!(travelled.validate(2), Err(ConfigError::Device { .. })));
}

#[test]
fn devices_by_descriptor_need_the_iommufd_that_they_belong_to() {
    let with = |platform: &str, devices: &[&str]| {
        params(|params| {
            params.platform = (!platform.is_empty()).then(|| platform.to_owned());
            params.devices = devices.iter().map(|&device| device.to_owned()).collect();
        })?
        .complete()
    };
    let both = "iommufd=on,iommufd_fd=9";
    let config = with(both, &["fd=8", "path=/d,id=nic", "fd=7,id=gpu"]).unwrap();
    let devices = config.devices.clone().unwrap();
    let last = Some(ConfigFd::inherited(7));
    assert_eq!((devices[0].id.as_deref(), &devices[2].fd), (Some("_vfio0"), &last));
    assert!(with("iommufd=on", &["path=/d"]).is_ok());
    for (platform, devices) in [
        ("iommufd_fd=9", &["path=/d"][..]),
        ("iommufd=on,iommufd_fd=2", &["path=/d"]),
        ("", &["fd=8"]),
        ("iommufd=on", &["fd=8"]),
        (both, &["fd=2"]),
        (both, &["fd=8,path=/d"]),
        (both, &["fd=8", "fd=8"]),
        (both, &["id=gpu"]),
    ] {
        let refused = with(platform, devices);
        assert!(
            matches!(refused, Err(ConfigError::Device { .. } | ConfigError::DuplicatePath { .. })),
            "{platform} {devices:?}: {refused:?}"
        );
    }
    let json = serde_json::to_string(&config).unwrap();
    let travelled = serde_json::from_str::<VmConfig>(&json).unwrap().complete();
    assert!(matches!(travelled, Err(ConfigError::Device { .. })));
    let add = |device: &str| NewDevice::Host(DeviceConfig::parse(device).unwrap()).add_to(&config);
    assert!(matches!(add("fd=8"), Err(ConfigError::DuplicatePath { .. })));
    assert_eq!(add("fd=10").unwrap().0.devices.unwrap().len(), 4);
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
fn payload_rules() {
    assert_eq!(VmParams::default().into_config().unwrap_err(), ConfigError::KernelMissing);
    assert!(matches!(
        params(|p| p.cmdline = Some("x".repeat(2048))),
        Err(ConfigError::CmdlineTooLong { bytes: 2048, .. })
    ));
    assert!(params(|p| p.cmdline = Some("x".repeat(2047))).is_ok());
    assert_eq!(params(|p| p.firmware = Some("/f".into())).unwrap_err(), ConfigError::TwoPayloads);
    let firmware = VmParams { firmware: Some("/f".into()), ..VmParams::default() };
    assert!(firmware.into_config().is_ok());
    // What clients say who leave nothing out.
    assert!(complete(r#"{"payload":{"firmware":"/f","kernel":null,"cmdline":"x"}}"#).is_ok());
    assert!(complete(r#"{"payload":{"firmware":"","kernel":"/k"}}"#).is_ok());
    assert_eq!(
        complete(r#"{"payload":{"firmware":"/f","kernel":"/k"}}"#).unwrap_err(),
        ConfigError::TwoPayloads
    );
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

#[test]
fn refused_families_are_known() {
    let known: Vec<_> = reference::families().iter().map(|family| family.name).collect();
    for name in reference::UNSUPPORTED_FAMILIES {
        assert!(known.contains(&name), "{name}");
    }
}

/// A plausible value for a key, by the placeholder that help shows.
fn value_for(placeholder: &'static str) -> BoxedStrategy<String> {
    match placeholder {
        "on|off" => prop_oneof!["on", "off", "true"].boxed(),
        "<number>" | "<ms>" | "<io_ops>" => (0_u64..300).prop_map(|n| n.to_string()).boxed(),
        "<bytes>" => prop_oneof![
            (0_u64..1 << 40).prop_map(|n| n.to_string()),
            (0_u64..4096).prop_map(|n| format!("{n}M"))
        ]
        .boxed(),
        "<port>" => (0_u16..u16::MAX).prop_map(|n| format!("{n:#x}")).boxed(),
        "<ip_address>" => prop_oneof!["10.0.0.1", "fe80::1"].boxed(),
        "<mac_address>" => "02:[0-9a-f]{2}:00:00:00:01".boxed(),
        "<list_of_numbers>" => "\\[[0-9]{1,2}(-9[0-9])?,[0-9]{1,3}\\]".boxed(),
        "<list_of_file_descriptors>" => "\\[[0-9]{1,2},[0-9]{1,2}\\]".boxed(),
        "<file_descriptor>" => (0_u8..99).prop_map(|n| n.to_string()).boxed(),
        "<list_of_texts>" => "\\[[a-z]{0,3},\"[a-z,]{0,5}\"\\]".boxed(),
        other if other.contains("cpuset") => "\\[[0-9]@\\[[0-9],[0-9]\\]\\]".boxed(),
        other if other.contains("distances") => "\\[[0-9]@[0-9]{2}\\]".boxed(),
        other if other.contains("features") => prop_oneof!["amx", "[amx]"].boxed(),
        other if other.contains(':') => "[1-4]:[1-4]:1:1".boxed(),
        other if other.contains('|') => {
            let words: Vec<_> = other.split('|').map(str::to_owned).collect();
            proptest::sample::select(words).boxed()
        }
        _ => prop_oneof!["[a-z/]{0,8}", "\"[a-z, \\[\\]]{0,8}\""].boxed(),
    }
}

/// Option strings of a family: any of its keys in any order with plausible values.
fn option_string(info: &FamilyInfo) -> BoxedStrategy<String> {
    let pairs: Vec<_> = info
        .fields
        .iter()
        .flat_map(|field| field.keys.clone())
        .map(|key| match key.value {
            Some(value) => value_for(value).prop_map(move |v| format!("{}={v}", key.key)).boxed(),
            None => Just(key.key.to_owned()).boxed(),
        })
        .collect();
    let count = pairs.len();
    (pairs, proptest::collection::vec(any::<bool>(), count))
        .prop_map(|(pairs, mask)| {
            let chosen: Vec<_> =
                pairs.into_iter().zip(mask).filter(|(_, on)| *on).map(|(pair, _)| pair).collect();
            chosen.join(",")
        })
        .boxed()
}

fn any_family() -> BoxedStrategy<(String, String)> {
    let all: Vec<_> = reference::families()
        .into_iter()
        .map(|info| {
            let name = info.name.to_owned();
            option_string(&info).prop_map(move |text| (name.clone(), text)).boxed()
        })
        .collect();
    proptest::strategy::Union::new(all).boxed()
}

proptest! {
    #[test]
    fn printing_is_undone_by_parsing((family, text) in any_family()) {
        // The fuzz entry asserts that what was parsed and printed parses to the same.
        fuzz_option_string(format!("{family}\n{text}").as_bytes());
    }

    #[test]
    fn random_option_strings_never_panic(data in proptest::collection::vec(any::<u8>(), 0..80)) {
        fuzz_option_string(&data);
        for family in ["cpus", "net", "numa", "console", "memory", "platform"] {
            let mut with_name = format!("{family}\n").into_bytes();
            with_name.extend_from_slice(&data);
            fuzz_option_string(&with_name);
        }
    }

    #[test]
    fn random_json_never_panics(text in "[{}\\[\\]\",:a-z_0-9 ]{0,80}") {
        fuzz_api_json(text.as_bytes());
        fuzz_api_json(format!(r#"{{"payload":{{"kernel":"/k"}},"disks":[{text}]}}"#).as_bytes());
    }

    #[test]
    fn json_is_undone_by_json((family, text) in any_family()) {
        if family == "disk" && let Ok(disk) = DiskConfig::parse(&text) {
            let json = serde_json::to_vec(&disk).unwrap();
            prop_assert_eq!(serde_json::from_slice::<DiskConfig>(&json).unwrap(), disk);
        }
        if family == "cpus" && let Ok(cpus) = CpusConfig::parse(&text) {
            let json = serde_json::to_vec(&cpus).unwrap();
            prop_assert_eq!(serde_json::from_slice::<CpusConfig>(&json).unwrap(), cpus);
        }
    }
}

#[test]
fn memory_that_comes_later_needs_room_blocks_and_a_method() {
    let check = |option: &str| {
        let memory: MemoryConfig = MemoryConfig::parse(option).unwrap();
        memory.validate().map(|()| memory)
    };
    let memory = check("size=1G,hotplug_method=virtio-mem,hotplug_size=64G").unwrap();
    assert_eq!(memory.hotplug_size, Some(64 << 30));
    for (option, why) in [
        ("size=1G,hotplug_size=1G", "virtio-mem"),
        ("size=1G,hotplug_method=virtio-mem,hotplugged_size=1G", "hotplug_size"),
        ("size=1G,hotplug_method=virtio-mem,hotplug_size=3M", "multiples of 2097152"),
        ("size=1G,hotplug_method=virtio-mem,hotplug_size=1G,hotplugged_size=1M", "multiples"),
        ("size=1G,hotplug_method=virtio-mem,hotplug_size=1G,hotplugged_size=2G", "more than"),
        ("size=1G,hotplug_method=virtio-mem,hotplug_size=65T", "64 TiB"),
        (
            "size=1G,hugepages=on,hugepage_size=1G,hotplug_method=virtio-mem,hotplug_size=512M",
            "multiples of 1073741824",
        ),
    ] {
        let error = check(option).unwrap_err().to_string();
        assert!(error.contains(why), "{option}: {error}");
    }
    assert!(check("size=1G,hotplug_method=virtio-mem").is_ok());
}

#[test]
fn blocks_grow_with_the_memory_that_consists_of_them() {
    let later = |size: u64, hugepage_size: Option<u64>| {
        let zone = MemoryZoneConfig {
            hotplug_size: Some(size),
            hugepages: hugepage_size.is_some(),
            hugepage_size,
            ..MemoryZoneConfig::default()
        };
        zone.later().map(|(_, block)| block)
    };
    assert_eq!(later(0, None), None);
    assert_eq!(later(512 << 20, None), Some(2 << 20));
    assert_eq!(later(32 << 30, None), Some(2 << 20));
    assert_eq!(later(1 << 40, None), Some(64 << 20));
    assert_eq!(later(4 << 30, Some(1 << 30)), Some(1 << 30));
}
