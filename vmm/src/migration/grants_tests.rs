// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configurations and rules: each kind of name, paths that lead elsewhere, and names that are forgotten.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]
#![expect(clippy::needless_pass_by_value, reason = "json! makes values")]

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::config::reference::families;

fn config(more: Value) -> VmConfig {
    let mut config = json!({
        "payload": {"kernel": "/k"},
        "console": {"mode": "Off"},
        "serial": {"mode": "Null"},
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    serde_json::from_value(config).unwrap()
}

fn rules(texts: &[&str]) -> Vec<Grant> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// What is said of a configuration whose kernel is allowed.
fn verdict(texts: &[&str], more: Value) -> Result<(), String> {
    let all = [&["/k:payload"][..], texts].concat();
    check(Some(&rules(&all)), &config(more)).map_err(|error| error.to_string())
}

#[test]
fn without_rules_everything_goes_and_with_none_nothing_does() {
    let all = config(json!({
        "disks": [{"path": "/etc/shadow"}],
        "serial": {"mode": "File", "file": "/root/.ssh/authorized_keys"},
    }));
    check(None, &all).unwrap();
    let error = check(Some(&[]), &all).unwrap_err().to_string();
    assert!(error.contains("\"/k\"") && error.contains(":payload"), "{error}");
    // What names nothing needs no rule.
    check(Some(&[]), &config(json!({"payload": {}, "console": {"mode": "Pty"}}))).unwrap();
}

#[test]
fn each_kind_of_name_needs_a_rule_of_its_kind() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let root = root.to_str().unwrap();
    let at = |name: &str| format!("{root}/{name}");
    let cases = [
        ("disk", json!({"disks": [{"id": "d", "path": at("x")}]})),
        ("disk", json!({"pmem": [{"id": "p", "file": at("x")}]})),
        (
            "memory",
            json!({"memory": {"size": 0, "zones": [{"id": "z", "size": 4096, "file": at("x")}]}}),
        ),
        ("pool", json!({"memory": {"size": 4096, "prezeroed": at("x")}})),
        (
            "pool",
            json!({"memory": {"size": 0, "zones": [{"id": "z", "size": 4096, "prezeroed": at("x")}]}}),
        ),
        ("console", json!({"serial": {"mode": "File", "file": at("x")}})),
        ("console", json!({"console": {"mode": "File", "file": at("x")}})),
        ("console", json!({"debug_console": {"mode": "File", "file": at("x")}})),
        ("console", json!({"vsock": {"cid": 3, "socket": at("x")}})),
        ("console", json!({"tpm": {"socket": at("x")}})),
        (
            "console",
            json!({"fs": [{"tag": "t", "socket": at("x"), "num_queues": 1, "queue_size": 64}]}),
        ),
        ("console", json!({"net": [{"id": "n", "vhost_user": true, "vhost_socket": at("x")}]})),
        (
            "console",
            json!({"generic_vhost_user": [
                {"socket": at("x"), "queue_sizes": [64], "device_type": 26}
            ]}),
        ),
        ("console", json!({"user_devices": [{"id": "u", "socket": at("x")}]})),
        ("payload", json!({"payload": {"kernel": "/k", "initramfs": at("x")}})),
        ("rng", json!({"rng": {"src": at("x")}})),
        ("device", json!({"devices": [{"id": "v", "path": at("x")}]})),
        ("device", json!({"vdpa": [{"id": "v", "path": at("x"), "num_queues": 1}]})),
    ];
    for (kind, more) in cases {
        let own = format!("{root}:{kind}");
        verdict(&[&own], more.clone()).unwrap();
        let others: Vec<_> = ["disk", "memory", "pool", "console", "payload", "rng", "device"]
            .iter()
            .filter(|other| **other != kind)
            .map(|other| format!("{root}:{other}"))
            .collect();
        let others: Vec<_> = others.iter().map(String::as_str).collect();
        let error = verdict(&others, more).unwrap_err();
        assert!(error.contains(&at("x")) && error.contains(&format!(":{kind})")), "{error}");
    }
}

#[test]
fn taps_and_the_terminal_have_rules_of_their_own() {
    let net = |tap: Value| json!({"net": [{"id": "n", "tap": tap}]});
    verdict(&["vm*:tap"], net(json!("vm3"))).unwrap();
    verdict(&["vm3:tap"], net(json!("vm3"))).unwrap();
    verdict(&["vmtap*:tap"], net(Value::Null)).unwrap();
    for (rule, tap) in
        [("vm:tap", json!("vm3")), ("vm*:tap", json!("eth0")), ("vm*:tap", json!("v"))]
    {
        let error = verdict(&[rule], net(tap)).unwrap_err();
        assert!(error.contains("tap of network device \"n\""), "{error}");
    }
    assert!(verdict(&["/:disk+console"], net(Value::Null)).is_err());
    // Its descriptors came with the request, and no name of this host is used.
    verdict(&["/:disk"], json!({"net": [{"id": "n", "fds": [7]}]})).unwrap();
    let tty = json!({"serial": {"mode": "Tty"}});
    verdict(&["tty:console"], tty.clone()).unwrap();
    assert!(verdict(&["/:console"], tty).unwrap_err().contains("the terminal"));
}

#[test]
fn paths_do_not_lead_out_of_a_root() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().canonicalize().unwrap();
    std::fs::create_dir_all(base.join("vms/sub")).unwrap();
    std::fs::create_dir_all(base.join("vms-of-others")).unwrap();
    std::fs::write(base.join("secret"), "s").unwrap();
    symlink(base.join("secret"), base.join("vms/link")).unwrap();
    symlink(&base, base.join("vms/up")).unwrap();
    symlink(base.join("nothing"), base.join("vms/dangling")).unwrap();
    symlink(base.join("vms/sub"), base.join("vms/inside")).unwrap();
    symlink(base.join("vms"), base.join("alias")).unwrap();
    let base = base.to_str().unwrap();
    let disk = |path: &str| json!({"disks": [{"id": "d", "path": path}]});
    let rule = format!("{base}/vms:disk");
    for inside in ["vms/a.img", "vms/sub/a.img", "vms/inside/a.img", "alias/a.img", "vms/./a.img"] {
        verdict(&[&rule], disk(&format!("{base}/{inside}"))).unwrap();
    }
    for outside in [
        "secret",
        "vms-of-others/a.img",
        "vms/link",
        "vms/up/secret",
        "vms/up/new.img",
        "vms/dangling",
        "vms/../secret",
        "vms/none/a.img",
    ] {
        let error = verdict(&[&rule], disk(&format!("{base}/{outside}"))).unwrap_err();
        assert!(error.contains(outside), "{error}");
    }
    // One that is not absolute is in the working directory.
    assert!(verdict(&[&rule], disk("a.img")).unwrap_err().contains("no rule"));
    let here = std::env::current_dir().unwrap();
    verdict(&[&format!("{}:disk", here.display())], disk("a.img")).unwrap();
    // By the name that an administrator knows, although that is a link.
    let rule = format!("{base}/alias:disk");
    verdict(&[&rule], disk(&format!("{base}/vms/a.img"))).unwrap();
    // A single file, and a root that is not there.
    let one = format!("{base}/secret:disk");
    verdict(&[&one], disk(&format!("{base}/secret"))).unwrap();
    let none = format!("{base}/none:disk");
    assert!(verdict(&[&none], disk(&format!("{base}/secret"))).is_err());
}

/// Every path that an option can set is either known here or of no use to a peer.
#[test]
fn no_path_of_a_configuration_is_forgotten() {
    let of_requests =
        ["send-migration", "receive-migration", "migration-recover", "restore", "snapshot"];
    let mut found = BTreeSet::new();
    for family in families() {
        // A rule of Landlock opens nothing, and without any the process is not confined.
        let is_of_no_use = family.name == "landlock-rules";
        if is_of_no_use || of_requests.contains(&family.name) {
            continue;
        }
        for field in family.fields.iter().filter(|field| !field.spec.unsupported) {
            if field.keys.iter().any(|key| key.value == Some("<path>")) {
                found.insert((family.name, field.spec.field));
            }
        }
    }
    let known = BTreeSet::from([
        ("console", "file"),
        ("console", "socket"),
        ("debug-console", "file"),
        ("device", "path"),
        ("disk", "path"),
        ("fs", "socket"),
        ("generic-vhost-user", "socket"),
        ("memory", "prezeroed"),
        ("memory-zone", "file"),
        ("memory-zone", "prezeroed"),
        ("payload", "firmware"),
        ("payload", "initramfs"),
        ("payload", "kernel"),
        ("pmem", "file"),
        ("rng", "src"),
        ("serial", "file"),
        ("serial", "socket"),
        ("tpm", "socket"),
        ("user-device", "socket"),
        ("vdpa", "path"),
        ("vsock", "socket"),
    ]);
    assert_eq!(found, known, "a name of the host's: see names()");
}

#[test]
fn what_an_image_leads_to_needs_a_rule_as_the_image_does() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let rule = rules(&[&format!("{}:disk", root.display()), "/etc:payload"]);
    let verdict = |rules: Option<&[Grant]>, file: &str| {
        let files = [("root", root.join("base")), ("root", PathBuf::from(file))];
        check_behind(rules, files).map_err(|error| error.to_string())
    };
    verdict(Some(&rule), root.join("other").to_str().unwrap()).unwrap();
    let refused = verdict(Some(&rule), "/etc/passwd").unwrap_err();
    assert!(refused.contains("backing file of disk \"root\""), "{refused}");
    assert!(refused.contains(":disk"), "{refused}");
    verdict(Some(&[]), "/etc/passwd").unwrap_err();
    verdict(None, "/etc/passwd").unwrap();
}

proptest! {
    #[test]
    fn a_peers_words_are_below_a_root_or_refused(path in "[/a.\\n]{0,24}") {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let rule = rules(&[&format!("{}:disk", root.display())]);
        for path in [path.clone(), format!("{}{path}", root.display())] {
            let granted = is_below_a_root(&rule, GrantKind::Disk, Path::new(&path));
            if granted == Ok(true) {
                prop_assert!(resolve(Path::new(&path)).unwrap().starts_with(&root));
            }
        }
    }
}
