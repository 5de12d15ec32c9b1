// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page that says what of cloud-hypervisor's interface this version has, made from the list of that interface and
//! from the definitions here.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use super::super::endpoints::ENDPOINTS;
use super::super::openapi;
use super::behaviour::BEHAVIOUR;
use crate::config::reference::families;
use crate::events::NAMES;

/// What is accepted and is not as there: the schema, the field, and how it differs.
const DIFFERENT: &[(&str, &str, &str)] = &[
    (
        "MemoryConfig",
        "hotplug_method",
        "with `Acpi` memory is added, up to eight times until a reboot, and not removed",
    ),
    (
        "DiskConfig",
        "image_type",
        "`Unknown` never detects a format, but refuses an image that looks like another than raw",
    ),
];

/// The field is in the schema, and only its default is accepted; and why.
const REFUSED: &[(&str, &str, &str)] = &[
    (
        "BalloonConfig",
        "iommu",
        "what its driver names are pages of the guest, which no IOMMU translates: only its rings would be behind one",
    ),
    ("DeviceConfig", "iommu", BEHIND_IOMMU),
    ("VdpaConfig", "iommu", BEHIND_IOMMU),
    ("PayloadConfig", "host_data", "as `--host-data`"),
    ("PayloadConfig", "igvm", "as `--igvm`"),
    (
        "PlatformConfig",
        "sev_snp",
        "only in builds of cloud-hypervisor with its feature `sev_snp`, which is off by default",
    ),
    (
        "PlatformConfig",
        "tdx",
        "only in builds of cloud-hypervisor with its feature `tdx`, which is off by default",
    ),
];

const BEHIND_IOMMU: &str = "all guest memory is mapped for such devices once, so that none waits: behind a virtual IOMMU each \
    mapping by the guest would be one of the host's ([virtio-iommu.md](virtio-iommu.md))";

fn upstream() -> Value {
    serde_json::from_str(include_str!("../compat.json")).unwrap()
}

fn names(list: impl Iterator<Item = String>) -> String {
    let list: Vec<_> = list.map(|name| format!("`{name}`")).collect();
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

fn page() -> String {
    let mut out = String::from(
        "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n\
         # Compatibility with cloud-hypervisor\n\n\
         What of the interface of cloud-hypervisor v53 (API 0.3.0) this version has. The page is generated from the\n\
         list of that interface and from the definitions in the code; tests keep it up to date, and try each option and\n\
         field. Options of the command line have the same keys as the JSON fields; [options.md](options.md) has all of\n\
         them, and [events.md](events.md) all events.\n\n\
         ## Requests\n\n\
         | request | here |\n| --- | --- |\n",
    );
    let upstream = upstream();
    let paths = upstream["paths"].as_object().unwrap();
    for path in paths.keys() {
        let here = if ENDPOINTS.iter().any(|it| it.path == path) { "yes" } else { "no" };
        let _ = writeln!(out, "| `{path}` | {here} |");
    }
    let own = ENDPOINTS.iter().map(|endpoint| endpoint.path);
    let own = own.filter(|path| !paths.contains_key(*path)).map(str::to_owned);
    let _ = writeln!(out, "\nOnly here: {}.\n", names(own));
    out.push_str(
        "## JSON fields\n\n\
         Fields in the third column are known by name, and only their default is accepted: the VM is refused with all of\n\
         them in one message. The last column has the fields that cloud-hypervisor does not know.\n\n\
         | object | accepted | default only | only here |\n| --- | --- | --- | --- |\n",
    );
    let mut all_refused = Vec::new();
    let described = serde_json::to_value(openapi::document()).unwrap();
    for family in families() {
        let fields = &upstream["schemas"][family.type_name]["fields"];
        let Some(fields) = fields.as_object() else { continue };
        let ours = &described["components"]["schemas"][family.type_name]["properties"];
        let is_accepted = |name: &String| {
            let field = family.fields.iter().find(|field| field.spec.field == name);
            !ours[name].is_null() && field.is_none_or(|field| !field.spec.unsupported)
        };
        let (accepted, refused): (Vec<_>, Vec<_>) = fields.keys().cloned().partition(is_accepted);
        all_refused.extend(refused.iter().map(|field| (family.type_name, field.clone())));
        let own = family.fields.iter().filter(|field| !field.spec.hidden && !field.spec.answer);
        let own = own.map(|field| field.spec.field.to_owned());
        let own = own.filter(|name| !name.is_empty() && !fields.contains_key(name));
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} |",
            family.type_name,
            names(accepted.into_iter()),
            names(refused.into_iter()),
            names(own)
        );
    }
    out.push_str("\n## Differences\n\n| field | how |\n| --- | --- |\n");
    for (schema, field, how) in DIFFERENT {
        assert!(
            upstream["schemas"][schema]["fields"][field].is_string(),
            "{schema}.{field} is not in the list"
        );
        let _ = writeln!(out, "| `{schema}.{field}` | {how} |");
    }
    out.push_str(
        "\n## Fields of which only the default is accepted\n\n| field | why |\n| --- | --- |\n",
    );
    let reasons: BTreeSet<_> = REFUSED.iter().map(|(schema, field, _)| (*schema, *field)).collect();
    let refused: BTreeSet<_> =
        all_refused.iter().map(|(schema, field)| (*schema, field.as_str())).collect();
    assert_eq!(reasons, refused, "each has a reason, and each reason is for one");
    for (schema, field, why) in REFUSED {
        let _ = writeln!(out, "| `{schema}.{field}` | {why} |");
    }
    behaviour(&mut out);
    options(&mut out, &upstream["options"]);
    events(&mut out, &upstream["events"]);
    out
}

/// What no list of the interface shows.
fn behaviour(out: &mut String) {
    out.push_str(
        "\n## Differences in behaviour\n\n| of | cloud-hypervisor v53 | here |\n| --- | --- | --- |\n",
    );
    for (what, there, here) in BEHAVIOUR {
        assert!([what, there, here].iter().all(|text| !text.contains(['|', '\n'])), "{what}");
        let _ = writeln!(out, "| {what} | {there} | {here} |");
    }
}

/// The options of the command line; a test of the program tries each.
fn options(out: &mut String, upstream: &Value) {
    out.push_str("\n## Options of the command line\n\n| option | here |\n| --- | --- |\n");
    for (name, option) in upstream.as_object().unwrap() {
        let dashes = if name.len() == 1 { "-" } else { "--" };
        let here = option["no"].as_str().map_or("yes".to_owned(), |why| format!("no: {why}"));
        let _ = writeln!(out, "| `{dashes}{name}` | {here} |");
    }
}

fn events(out: &mut String, upstream: &Value) {
    out.push_str("\n## Events\n\n| source | event | here |\n| --- | --- | --- |\n");
    for name in upstream.as_array().unwrap() {
        let (source, event) = name.as_str().unwrap().split_once('.').unwrap();
        let is_here = NAMES.iter().any(|known| (known.0, known.1) == (source, event));
        let here = if is_here { "yes" } else { "no" };
        let _ = writeln!(out, "| {source} | `{event}` | {here} |");
    }
}

#[test]
fn the_page_of_compatibility_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/compatibility.md");
    let now = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &now).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == now, "docs/compatibility.md is stale, run the test with UPDATE_DOCS=1");
}
