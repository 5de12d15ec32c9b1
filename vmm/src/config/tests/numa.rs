// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of NUMA nodes and what they name.

use super::*;
use crate::config::numa::distances;
use crate::config::zone_update::PoolUpdate;

/// A VM of four vCPUs, two zones and these nodes.
fn vm(nodes: &[&str]) -> Result<VmConfig, ConfigError> {
    params(|p| {
        p.cpus = Some("boot=2,max=4".into());
        p.memory = Some("size=0".into());
        p.memory_zones = vec!["id=low,size=1G".into(), "id=high,size=1G".into()];
        p.devices = vec!["path=/d,id=gpu".into()];
        p.numa = nodes.iter().map(|node| (*node).to_owned()).collect();
    })
}

#[test]
fn nodes_with_vcpus_memory_and_devices_are_taken() {
    let nodes = [
        "guest_numa_id=0,cpus=[0-1],memory_zones=[low],distances=[1@20,2@25],pci_segments=[0]",
        "guest_numa_id=1,cpus=[2,3],memory_zones=high,distances=[2@30]",
        "guest_numa_id=2,device_id=gpu",
    ];
    let config = vm(&nodes).unwrap();
    let json = serde_json::to_value(&config).unwrap();
    let zones = json.pointer("/numa/1/memory_zones").unwrap();
    assert_eq!(*zones, serde_json::json!(["high"]));
    let again: VmConfig = serde_json::from_value(json).unwrap();
    assert_eq!(again.complete().unwrap(), config);
    let nodes = config.numa.unwrap();
    assert_eq!(distances(&nodes), [[10, 20, 25], [20, 10, 30], [25, 30, 10]]);
    // Some vCPUs and zones are in no node, or there is no zone but the only one.
    vm(&["guest_numa_id=7,cpus=2"]).unwrap();
    vm(&["guest_numa_id=7,cpus=2", "guest_numa_id=3,memory_zones=[high]"]).unwrap();
    params(|p| p.numa = vec!["guest_numa_id=0,cpus=[0],memory_zones=[mem0]".into()]).unwrap();
}

#[test]
fn distances_are_those_given_in_either_direction() {
    let given = |nodes: &[&str]| distances(&vm(nodes).unwrap().numa.unwrap());
    let both =
        ["guest_numa_id=0,cpus=0,distances=[1@15]", "guest_numa_id=1,cpus=1,distances=[0@21]"];
    assert_eq!(given(&both), [[10, 15], [21, 10]]);
    let none = ["guest_numa_id=1,cpus=1", "guest_numa_id=0,cpus=0"];
    assert_eq!(given(&none), [[10, 20], [20, 10]]);
    // cloud-hypervisor takes a node's distance to itself, and says 10.
    let own = ["guest_numa_id=0,cpus=0,distances=[0@20]"];
    assert_eq!(given(&own), [[10]]);
    // Numbers may be left out; the table has rows for them.
    let gap = ["guest_numa_id=0,cpus=0,distances=[2@255]", "guest_numa_id=2,cpus=1"];
    assert_eq!(given(&gap), [[10, 20, 255], [20, 10, 20], [255, 20, 10]]);
}

#[test]
fn what_nodes_cannot_be_is_refused_by_name() {
    let none = "guest_numa_id=0,cpus=0";
    for (nodes, problem) in [
        (
            &["guest_numa_id=1,memory_zones=[lw]"] as &[&str],
            "numa '1': there is no memory zone 'lw'",
        ),
        (
            &["guest_numa_id=0,memory_zones=[low]", "guest_numa_id=1,memory_zones=[high,low]"],
            "numa '1': memory zone 'low' is in node 0 as well",
        ),
        (&["guest_numa_id=0,memory_zones=[low,low]"], "memory zone 'low' is named twice"),
        (&[none, "guest_numa_id=1,cpus=[0-1]"], "numa '1': vCPU '0' is in node 0 as well"),
        (&["guest_numa_id=0,cpus=[4]"], "numa '0': there is no vCPU 4, the VM has at most 4"),
        (
            &["guest_numa_id=0,cpus=0,distances=[1@20]"],
            "a distance to node 1, which does not exist",
        ),
        (&[none, "guest_numa_id=1,cpus=1,distances=[0@9]"], "the distance to node 0 is 9"),
        (&[none, "guest_numa_id=1,cpus=1,distances=[0@10]"], "the distance to node 0 is 10"),
        (&["guest_numa_id=0,cpus=0,distances=[0@9]"], "the distance to node 0 is 9"),
        (&[none, "guest_numa_id=1,cpus=1,distances=[0@20,0@21]"], "it has two distances to node 0"),
        (&[none, "guest_numa_id=0,cpus=1"], "numa '0': there is another node of this number"),
        (&["guest_numa_id=0"], "it needs cpus, memory_zones or a device_id"),
        (&["guest_numa_id=0,cpus=[]"], "its list of cpus is empty"),
        (&["guest_numa_id=0,cpus=0,memory_zones=[]"], "its list of memory_zones is empty"),
        (&["guest_numa_id=0,cpus=0,pci_segments=[1]"], "there is no PCI segment 1"),
        (&[none, "guest_numa_id=1,cpus=1,pci_segments=[0]"], "PCI segment 0 is in node 0"),
        (&["guest_numa_id=1,device_id=gpu,cpus=0"], "device_id excludes cpus and memory_zones"),
        (&["guest_numa_id=1,device_id=gpu,memory_zones=low"], "device_id excludes cpus"),
        (&["guest_numa_id=1,device_id=npu"], "numa '1': there is no --device 'npu'"),
        (
            &["guest_numa_id=1,device_id=gpu", "guest_numa_id=2,device_id=gpu"],
            "device 'gpu' is in node 1 as well",
        ),
    ] {
        let error = vm(nodes).unwrap_err().to_string();
        assert!(error.contains(problem), "{nodes:?}: {error}");
    }
    for text in [
        "cpus=0",
        "guest_numa_id=256,cpus=0",
        "guest_numa_id=0,cpus=0,distances=[1@256]",
        "guest_numa_id=0,cpus=0,distances=[1]",
        "guest_numa_id=0,cpus=0,distances=[a@20]",
    ] {
        assert!(matches!(vm(&[text]), Err(ConfigError::Option { option: "numa", .. })), "{text}");
    }
    let json = |node: &str| {
        let text = format!(r#"{{"payload":{{"kernel":"/k"}},"numa":[{node}]}}"#);
        serde_json::from_str::<VmConfig>(&text).map_err(|error| error.to_string())
    };
    assert!(json(r#"{"cpus":[0]}"#).unwrap_err().contains("guest_numa_id"));
    assert!(json(r#"{"guest_numa_id":256,"cpus":[0]}"#).unwrap_err().contains("from 0 to 255"));
    let far =
        json(r#"{"guest_numa_id":0,"cpus":[0],"distances":[{"destination":1,"distance":256}]}"#);
    assert!(far.unwrap_err().contains("distance"));
}

/// A guest may have lost the device since it booted, and goes on elsewhere.
#[test]
fn a_node_may_be_left_without_its_device() {
    let config = vm(&["guest_numa_id=0,cpus=0", "guest_numa_id=1,device_id=gpu"]).unwrap();
    let without = config.without("gpu").unwrap();
    assert!(without.clone().complete().is_err());
    without.complete_begun().unwrap();
}

#[test]
fn zones_of_a_vm_that_arrives_get_other_nodes_of_the_host() {
    let text = r#"receiver_url=unix:/s,zone_updates=[high@1,"a,b"@0]"#;
    let parsed = ReceiveMigrationData::parse(text).unwrap();
    parsed.validate().unwrap();
    let json = serde_json::json!({
        "receiver_url": "unix:/s",
        "zone_updates": [{"id": "high", "host_numa_node": 1}, {"id": "a,b", "host_numa_node": 0}],
    });
    assert_eq!(serde_json::from_value::<ReceiveMigrationData>(json).unwrap(), parsed);
    assert_eq!(ReceiveMigrationData::parse(&parsed.print()).unwrap(), parsed);
    let pool = "receiver_url=unix:/s,prezeroed=/run/pool";
    let parsed = ReceiveMigrationData::parse(pool).unwrap();
    assert_eq!(parsed.memory_updates().pool, Some(PoolUpdate::At("/run/pool".into())));
    let none = RestoreConfig::parse("source_url=file:///s,prezeroed=off").unwrap();
    assert_eq!(none.memory_updates().pool, Some(PoolUpdate::Off));
    for bad in ["high", "high@", "high@a", "high@-1", "high@4294967296"] {
        let text = format!("source_url=file:///s,zone_updates=[{bad}]");
        assert!(RestoreConfig::parse(&text).is_err(), "{bad}");
    }
}
