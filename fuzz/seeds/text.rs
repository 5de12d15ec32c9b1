// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are text: option strings, bodies of API requests, saved device states.

use super::Seed;

const OPTION_STRINGS: [(&str, &str); 46] = [
    ("cpus", "boot=2"),
    ("cpus", "boot=2,max=4,topology=1:2:2:1,max_phys_bits=40,affinity=[0@[1,3],1@[2-3]]"),
    ("cpus", "boot=1,nested=off,features=amx,kvm_hyperv=off,core_scheduling=vcpu"),
    ("memory", "size=1G,shared=on,thp=off,prefault=on"),
    ("memory", "size=1G,prefault=background,prefault_threads=4,pin_threads=2,prezeroed=/run/pool"),
    ("memory", "size=512M,hugepages=on,hugepage_size=2M,reserve=on,mergeable=off"),
    ("memory", "size=0,hotplug_method=acpi"),
    ("memory", "size=512M,hotplug_method=acpi,hotplug_size=4G,hotplugged_size=128M"),
    ("memory-zone", "id=low,size=1G,host_numa_node=0,shared=on"),
    ("memory-zone", "id=\"a,b\",size=4096,file=/dev/shm,reserve=on"),
    (
        "platform",
        "serial_number=12,uuid=5aa1c2a0-7c0b-4d55-bd2a-7c9f1e6b0a11,oem_strings=[a,b,\"c,d\"]",
    ),
    ("platform", "num_pci_segments=1,iommu_segments=[0-1],system_manufacturer=a b,vfio_p2p_dma=on"),
    ("platform", "num_pci_segments=96"),
    ("pci-segment", "pci_segment=3,mmio32_aperture_weight=2,mmio64_aperture_weight=7"),
    ("disk", "path=/images/root.raw,readonly=on,direct=on,id=root"),
    ("disk", "path=a,image_type=qcow2,backing_files=on"),
    (
        "disk",
        "path=a,num_queues=4,queue_size=256,serial=s1,image_type=raw,sparse=off,pci_device_id=3",
    ),
    ("disk", "path=\"a,b\",queue_affinity=[0@[0-1,3],1@[2]],lock_granularity=full"),
    (
        "disk",
        "path=a,bw_size=1000000,bw_one_time_burst=0,bw_refill_time=100,ops_size=9,ops_refill_time=1",
    ),
    ("net", "tap=vmtap0,mac=12:34:56:78:90:ab,mtu=1500,id=net0"),
    ("net", "ip=192.168.4.1,mask=255.255.255.0,num_queues=4,queue_size=256,offload_tso=off"),
    ("net", "fd=[3,4],num_queues=4,offload_ufo=on,offload_csum=on,host_mac=02:00:00:00:00:01"),
    ("net", "vhost_user=on,socket=/s,vhost_mode=server,num_queues=2"),
    ("fs", "tag=share,socket=/s,num_queues=1,queue_size=1024,id=share"),
    ("generic-vhost-user", "socket=/s,virtio_id=26,queue_sizes=[64,64]"),
    ("user-device", "socket=/run/nvme/cntrl,pci_segment=0,pci_device_id=9,id=u"),
    ("vdpa", "path=/dev/vhost-vdpa-0,num_queues=3,pci_device_id=9,id=v"),
    ("rng", "src=/dev/urandom"),
    ("vsock", "cid=3,socket=/run/vm.vsock,id=sock"),
    ("tpm", "socket=/run/vm/tpm.sock"),
    ("balloon", "size=256M,deflate_on_oom=on,free_page_reporting=on,statistics_interval_s=5"),
    ("console", "tty"),
    ("console", "file=/tmp/out"),
    ("console", "null"),
    ("serial", "socket=/tmp/serial"),
    ("serial", "pty"),
    ("debug-console", "file=/tmp/debug,iobase=0xe9"),
    ("numa", "guest_numa_id=0,cpus=[0-3],distances=[1@20,2@30],memory_zones=[low,high]"),
    ("numa", "guest_numa_id=2,device_id=gpu,distances=[0@25]"),
    ("device", "path=/sys/bus/pci/devices/0000:01:00.0,iommu=on,id=gpu"),
    (
        "send-migration",
        "destination_url=tcp:host:4444,downtime_ms=300,timeout_s=3600,memory_mode=postcopy",
    ),
    ("send-migration", "unix:/tmp/sock"),
    ("receive-migration", "receiver_url=unix:/s,allow=/var/lib/vms:disk+console"),
    ("receive-migration", "receiver_url=unix:/s,zone_updates=[low@1,high@0],prezeroed=off"),
    (
        "receive-migration",
        "receiver_url=tcp:0.0.0.0:0,allow=[\"/with,comma:payload+rng\",vm*:tap,tty:console,/d:device]",
    ),
    ("rate-limit-group", "id=g,bw_size=1000,bw_refill_time=10,ops_size=5,ops_refill_time=7"),
];

const FULL_CONFIG: &str = r#"{
"cpus":{"boot_vcpus":2,"max_vcpus":2,"topology":{"threads_per_core":1,"cores_per_die":2,"dies_per_package":1,"packages":1},"affinity":[{"vcpu":0,"host_cpus":[0,1]}]},
"memory":{"size":0,"zones":[{"id":"low","size":1073741824,"shared":true}]},
"payload":{"kernel":"/k","cmdline":"console=hvc0 root=/dev/vda","initramfs":"/i"},
"platform":{"serial_number":"1","oem_strings":["a"]},
"disks":[{"path":"/d","readonly":true,"num_queues":2,"id":"d0"},{"path":"/e","direct":true}],
"net":[{"tap":"t","mac":"12:34:56:78:90:ab","ip":"192.168.4.1","mask":"255.255.255.0","num_queues":2}],
"rng":{"src":"/dev/urandom"},
"serial":{"mode":"Null"},"console":{"mode":"File","file":"/c"},
"watchdog":false,"pvpanic":false}"#;

const BODIES: [(&str, &str); 11] = [
    ("smallest", r#"{"payload":{"kernel":"/k"}}"#),
    ("full", FULL_CONFIG),
    (
        "memory",
        r#"{"payload":{"kernel":"/k"},"memory":{"size":536870912,"hugepages":true,"hugepage_size":2097152,"thp":false}}"#,
    ),
    (
        "queue-affinity",
        r#"{"payload":{"kernel":"/k"},"disks":[{"path":"/e","queue_affinity":[{"queue_index":0,"host_cpus":[1]}]}]}"#,
    ),
    (
        "refused",
        r#"{"payload":{"firmware":"/f"},"fs":[{"tag":"t","socket":"/s"}],"balloon":{"size":0}}"#,
    ),
    (
        "numa",
        r#"{"payload":{"kernel":"/k"},"cpus":{"boot_vcpus":1,"max_vcpus":2},"numa":[{"guest_numa_id":0,"memory_zones":["mem0"]},{"guest_numa_id":1,"cpus":[1],"distances":[{"destination":0,"distance":21}]}]}"#,
    ),
    ("send", r#"{"destination_url":"tcp:10.0.0.2:4444","memory_mode":"Postcopy"}"#),
    (
        "send-local",
        r#"{"destination_url":"unix:/s","local":true,"downtime_ms":300,"timeout_s":3600}"#,
    ),
    ("receive", r#"{"receiver_url":"tcp:0.0.0.0:4444"}"#),
    ("receive-unix", r#"{"receiver_url":"unix:/s"}"#),
    ("receive-rules", r#"{"receiver_url":"unix:/s","allow":["/v:disk+memory+pool","*:tap"]}"#),
];

const STATES: &[(&str, &str)] = &[
    (
        "balloon",
        r#"{"kind":"virtio-balloon","version":1,"data":{"target_pages":4,"actual_pages":2,"poison":0,"hint_command":2}}"#,
    ),
    (
        "net",
        r#"{"kind":"virtio-net","version":1,"data":{"mac":[2,0,0,0,0,1],"offloads":0,"active_pairs":1,"announce_pending":false}}"#,
    ),
    ("console", r#"{"kind":"virtio-console","version":1,"data":{"columns":80,"rows":25}}"#),
    ("rng", r#"{"kind":"virtio-rng","version":1,"data":{}}"#),
    ("rtc", r#"{"kind":"virtio-rtc","version":1,"data":{}}"#),
    ("vsock", r#"{"kind":"virtio-vsock","version":1,"data":{}}"#),
    ("watchdog", r#"{"kind":"virtio-watchdog","version":1,"data":{"is_armed":true}}"#),
    (
        "block",
        r#"{"kind":"virtio-block","version":1,"data":{"writeback":true,"capacity_sectors":128,"readonly":false}}"#,
    ),
    (
        "pmem",
        r#"{"kind":"virtio-pmem","version":1,"data":{"gpa":4294967296,"len_bytes":2097152}}"#,
    ),
    (
        "vhost-user-net",
        r#"{"kind":"vhost-user-net","version":1,"data":{"active_pairs":2,"announce_pending":true,"mtu":1500}}"#,
    ),
    ("vhost-user-fs", r#"{"kind":"vhost-user-fs","version":1,"data":{"back_end":"00ff"}}"#),
    (
        "tpm",
        r#"{"kind":"tpm","version":1,"data":{"registers":{"is_assigned":true,"is_idle":false,"buffer":[128,1]},"permanent":{"flags":0,"bytes":[1,2]},"volatile":{"flags":1,"bytes":[]},"save_state":{"flags":0,"bytes":[]}}}"#,
    ),
];

/// One entry of a CPUID table, in the words of the migration.
const CPUID: &str = r#"{"function":7,"index":0,"flags":1,"answer":[0,1,0,0]}"#;

fn documents() -> Vec<Seed> {
    let seed = |name: &str, text: String| Seed::new("machine_document", name, text);
    vec![
        seed("full", format!(r#"{{"vm_config":{FULL_CONFIG},"common_cpuid":[{CPUID},{CPUID}]}}"#)),
        seed("no-cpuid", format!(r#"{{"vm_config":{FULL_CONFIG}}}"#)),
        seed("configuration-alone", FULL_CONFIG.to_owned()),
    ]
}

pub fn seeds() -> Vec<Seed> {
    let options = OPTION_STRINGS.iter().enumerate().map(|(number, (family, text))| {
        Seed::new("option_string", format!("{family}-{number}"), format!("{family}\n{text}"))
    });
    let bodies = BODIES.iter().map(|(name, body)| Seed::new("api_json", *name, *body));
    let states = STATES.iter().map(|(name, state)| Seed::new("virtio_state", *name, *state));
    options.chain(bodies).chain(states).chain(documents()).collect()
}
