// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate limits and their groups.

use serde_json::{Value, json};

use super::*;

fn complete(groups: &Value, disk: &Value) -> Result<VmConfig, String> {
    let json = json!({
        "payload": { "kernel": "/k" },
        "memory": { "size": 1 << 30, "shared": true },
        "rate_limit_groups": groups,
        "disks": [disk],
    });
    let config = serde_json::from_value::<VmConfig>(json).unwrap();
    config.complete().map_err(|error| error.to_string())
}

fn group(id: &str) -> Value {
    json!({"id": id, "rate_limiter_config": {"ops": {"size": 1, "refill_time": 1}}})
}

#[test]
fn limits_are_part_of_the_configuration() {
    let params = VmParams {
        kernel: Some("/k".into()),
        rate_limit_groups: vec!["id=g,bw_size=1048576,bw_refill_time=100".into()],
        disks: vec![
            "path=/a,rate_limit_group=g".into(),
            "path=/b,ops_size=10,ops_refill_time=100,ops_one_time_burst=5".into(),
        ],
        net: vec!["bw_size=10,bw_refill_time=20".into()],
        ..VmParams::default()
    };
    let config = serde_json::to_value(params.into_config().unwrap()).unwrap();
    let bandwidth = json!({"size": 1 << 20, "refill_time": 100});
    let shown = &config["rate_limit_groups"][0];
    assert_eq!(shown["id"], "g");
    assert_eq!(shown["rate_limiter_config"]["bandwidth"], bandwidth);
    assert_eq!(config["disks"][0]["rate_limit_group"], "g");
    let ops = json!({"size": 10, "one_time_burst": 5, "refill_time": 100});
    assert_eq!(config["disks"][1]["rate_limiter_config"]["ops"], ops);
    assert_eq!(config["net"][0]["rate_limiter_config"]["bandwidth"]["refill_time"], 20);
}

#[test]
fn contradictions_between_limits_are_refused_by_name() {
    let own = json!({"bandwidth": {"size": 1, "refill_time": 1}});
    let in_group = json!({"path": "/a", "id": "root", "rate_limit_group": "g"});
    complete(&json!([group("g")]), &in_group).unwrap();
    let both = json!({
        "path": "/a", "id": "root", "rate_limit_group": "g", "rate_limiter_config": own
    });
    let vhost = |key: &str, value: Value| json!({"id": "root", "vhost_user": true, "vhost_socket": "/s", key: value});
    for (groups, disk, words) in [
        (json!([group("other")]), in_group.clone(), ["'root'", "'g'"]),
        (Value::Null, in_group.clone(), ["'root'", "'g'"]),
        (json!([group("g")]), both, ["'root'", "exclude each other"]),
        (json!([group("g"), group("g")]), in_group.clone(), ["'g'", "twice"]),
        (json!([group("")]), in_group, ["rate-limit-group", "empty id"]),
        (
            json!([group("g")]),
            vhost("rate_limit_group", json!("g")),
            ["'root'", "rate_limit_group"],
        ),
        (Value::Null, vhost("rate_limiter_config", own.clone()), ["'root'", "limits"]),
    ] {
        let error = complete(&groups, &disk).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn disks_are_added_to_the_groups_that_exist() {
    let disk = json!({"path": "/a"});
    let config = complete(&json!([group("g")]), &disk).unwrap();
    let add = |name: &str| {
        let json = json!({"path": "/b", "rate_limit_group": name});
        NewDevice::Disk(serde_json::from_value(json).unwrap()).add_to(&config)
    };
    let (added, _) = add("g").unwrap();
    assert_eq!(added.disks.unwrap()[1].rate_limit_group.as_deref(), Some("g"));
    let error = add("h").unwrap_err().to_string();
    assert!(error.contains("'h'"), "{error}");
}

#[test]
fn the_largest_numbers_are_taken() {
    let largest = json!({"size": u64::MAX, "one_time_burst": u64::MAX, "refill_time": u64::MAX});
    let limit = json!({"bandwidth": largest, "ops": largest});
    complete(&Value::Null, &json!({"path": "/a", "rate_limiter_config": limit})).unwrap();
}
