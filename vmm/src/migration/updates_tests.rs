// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Changes at a restore, on recorded state with a network device added.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::path::Path;

use serde_json::json;

use super::*;

fn config() -> VmConfig {
    let config: VmConfig = serde_json::from_value(json!({
        "payload": {"kernel": "/k"}, "disks": [{"path": "/a"}],
        "net": [{"id": "lan", "mac": "02:00:00:00:00:01", "tap": "tap0"}]}))
    .unwrap();
    config.complete().unwrap()
}

fn state() -> MachineState {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/snapshots");
    let text = std::fs::read(root.join("v1-generic/state.json")).unwrap();
    let mut state: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let mut lan = state["pci"]["_disk0"].clone();
    lan["state"]["data"]["device"] = json!({"kind": "virtio-net", "version": 1, "data": {
        "mac": [2, 0, 0, 0, 0, 1], "offloads": 0, "active_pairs": 1, "announce_pending": false}});
    state["pci"]["lan"] = lan;
    MachineState::from_json(state.to_string().as_bytes()).unwrap()
}

fn request(json: serde_json::Value) -> RestoreConfig {
    let mut json = json;
    json["source_url"] = json!("file:///s");
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_copy_gets_what_it_may_not_share() {
    let request = request(json!({
        "net_updates": [{"id": "lan", "mac": "02:00:00:00:00:77", "tap": "tap1", "new_id": "_disk0"}],
        "disk_updates": [{"id": "_disk0", "path": "/b", "new_id": "lan"}]}));
    let (mut config, mut state) = (config(), state());
    let before = state.pci["_disk0"].bdf.clone();
    change_config(&mut config, &request).unwrap();
    change_state(&mut state, &request).unwrap();
    let config = config.complete().unwrap();
    let (net, disk) = (&config.net.as_ref().unwrap()[0], &config.disks.as_ref().unwrap()[0]);
    assert_eq!((net.id.as_deref(), net.tap.as_deref()), (Some("_disk0"), Some("tap1")));
    assert_eq!(net.mac.unwrap().to_string(), "02:00:00:00:00:77");
    assert_eq!((disk.id.as_deref(), disk.path.as_deref()), (Some("lan"), Some(Path::new("/b"))));
    assert_eq!(
        state.pci["_disk0"].state.data["device"]["data"]["mac"],
        json!([2, 0, 0, 0, 0, 0x77])
    );
    assert_eq!(state.pci["lan"].state.data["device"]["kind"], "virtio-block");
    assert_eq!(state.pci["lan"].bdf, before);
}

#[test]
fn what_is_not_asked_for_stays() {
    let (mut changed, mut there) = (config(), state());
    let nothing =
        request(json!({"net_updates": [{"id": "lan"}], "disk_updates": [{"id": "_disk0"}]}));
    change_config(&mut changed, &nothing).unwrap();
    change_state(&mut there, &nothing).unwrap();
    assert_eq!(changed, config());
    assert_eq!(serde_json::to_value(&there).unwrap(), serde_json::to_value(state()).unwrap());
}

#[test]
fn what_is_not_there_or_named_twice_is_refused() {
    let refused = |json| change_config(&mut config(), &request(json)).unwrap_err();
    let unknown = |list, id: &str| UpdateError::Unknown { list, id: id.to_owned() };
    assert_eq!(
        refused(json!({"net_updates": [{"id": "_disk0"}]})),
        unknown("net_updates", "_disk0")
    );
    assert_eq!(refused(json!({"disk_updates": [{"id": "x"}]})), unknown("disk_updates", "x"));
    let zone = json!({"zone_updates": [{"id": "z", "host_numa_node": 1}]});
    assert_eq!(refused(zone), unknown("zone_updates", "z"));
    let twice = refused(json!({"disk_updates": [{"id": "_disk0"}, {"id": "_disk0"}]}));
    assert!(matches!(twice, UpdateError::Twice { .. }), "{twice}");
    let mut zones = config();
    zones.memory.zones = serde_json::from_value(json!([{"id": "z", "size": 1 << 30}])).unwrap();
    let to = |nodes: &[u32]| {
        let updates = nodes.iter().map(|node| json!({"id": "z", "host_numa_node": node}));
        request(json!({"zone_updates": updates.collect::<Vec<_>>()}))
    };
    change_config(&mut zones, &to(&[1])).unwrap();
    assert_eq!(zones.memory.zones.as_ref().unwrap()[0].host_numa_node, Some(1));
    let twice = change_config(&mut zones, &to(&[0, 1])).unwrap_err();
    assert!(matches!(twice, UpdateError::Twice { .. }), "{twice}");
    // Two devices of one name are refused with all other rules.
    let mut config = config();
    let same = request(json!({"net_updates": [{"id": "lan", "new_id": "_disk0"}]}));
    change_config(&mut config, &same).unwrap();
    assert!(config.complete().is_err());
}

#[test]
fn an_address_of_zeros_is_none() {
    let request = request(json!({"net_updates": [{"id": "lan", "mac": "00:00:00:00:00:00"}]}));
    let refused = change_config(&mut config(), &request);
    assert_eq!(refused, Err(UpdateError::ZeroMac("lan".to_owned())));
}
