// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of rules across families.

use super::*;
use crate::config::memory::HotplugMethod;

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
        ConfigError::DuplicateSlot { segment: 0, slot: 4 }
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
    assert!(MemoryConfig::parse("size=1G,pin_threads=0").is_err());
    assert!(MemoryConfig::parse("size=1G,pin_threads=513").is_err());
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
    for known in ["raw", "qcow2", "vhd", "vhdx", "unknown"] {
        assert!(disk(&format!("path=/a,image_type={known},backing_files=on")).is_ok(), "{known}");
    }
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
        ("iommufd=off,iommufd_fd=9", &["path=/d"][..]),
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
    // What clients send that omit no field.
    assert!(complete(r#"{"payload":{"firmware":"/f","kernel":null,"cmdline":"x"}}"#).is_ok());
    assert!(complete(r#"{"payload":{"firmware":"","kernel":"/k"}}"#).is_ok());
    assert_eq!(
        complete(r#"{"payload":{"firmware":"/f","kernel":"/k"}}"#).unwrap_err(),
        ConfigError::TwoPayloads
    );
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
        ("size=1G,hotplugged_size=128M", "hotplug_size"),
        ("size=1G,hotplug_size=1G,hotplugged_size=64M", "multiple of 134217728"),
        ("size=1G,hotplug_size=1G,hotplugged_size=1152M", "more than"),
        ("size=1G,hotplug_size=255M,hotplugged_size=256M", "more than"),
        (
            "size=1G,hugepages=on,hugepage_size=1G,hotplug_size=2G,hotplugged_size=128M",
            "multiple of",
        ),
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
    // Memory devices may have any room, of which whole blocks are used.
    for size in ["4G", "1000M", "1M"] {
        check(&format!("size=1G,hotplug_size={size}")).unwrap();
    }
    check("size=1G,hotplug_size=1G,hotplugged_size=1G").unwrap();
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
        zone.later(HotplugMethod::VirtioMem).map(|(_, block)| block)
    };
    assert_eq!(later(0, None), None);
    assert_eq!(later(512 << 20, None), Some(2 << 20));
    assert_eq!(later(32 << 30, None), Some(2 << 20));
    assert_eq!(later(1 << 40, None), Some(64 << 20));
    assert_eq!(later(4 << 30, Some(1 << 30)), Some(1 << 30));
    let devices = |size: u64, hugepage_size: Option<u64>| {
        let zone = MemoryZoneConfig {
            hotplug_size: Some(size),
            hugepages: hugepage_size.is_some(),
            hugepage_size,
            ..MemoryZoneConfig::default()
        };
        zone.later(HotplugMethod::Acpi)
    };
    assert_eq!(devices(1 << 20, None), None);
    assert_eq!(devices(1000 << 20, None), Some((896 << 20, 128 << 20)));
    assert_eq!(devices(2500 << 20, Some(1 << 30)), Some((2 << 30, 1 << 30)));
}
