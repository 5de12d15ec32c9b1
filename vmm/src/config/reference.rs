// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The documentation of the options: the syntax lines of `--help` and the reference
//! page in `docs/options.md`. Both come from the definitions.
//!
//! Owns the list of families. It must never contain text about a particular option.

use std::fmt::Write as _;

use super::family::{Family, FamilyInfo, FieldInfo};
use super::{
    console, cpus, disk, memory, migration, net, numa, payload, platform, pmem, rate_limiter, rng,
    rtc, tpm, user_device, vdpa, vsock,
};

/// The families, in the order of the reference page.
pub fn families() -> Vec<FamilyInfo> {
    vec![
        cpus::CpusConfig::info(),
        memory::MemoryConfig::info(),
        memory::MemoryZoneConfig::info(),
        super::BalloonConfig::info(),
        payload::PayloadConfig::info(),
        platform::PlatformConfig::info(),
        disk::DiskConfig::info(),
        net::NetConfig::info(),
        super::FsConfig::info(),
        super::GenericVhostUserConfig::info(),
        pmem::PmemConfig::info(),
        super::DeviceConfig::info(),
        user_device::UserDeviceConfig::info(),
        vdpa::VdpaConfig::info(),
        vsock::VsockConfig::info(),
        rng::RngConfig::info(),
        rtc::RtcConfig::info(),
        console::ConsoleConfig::info(),
        console::SerialConfig::info(),
        console::DebugConsoleConfig::info(),
        migration::SendMigrationData::info(),
        migration::ReceiveMigrationData::info(),
        migration::MigrationRecoverData::info(),
        migration::RestoreConfig::info(),
        migration::VmSnapshotConfig::info(),
        migration::VmCoredumpData::info(),
        rate_limiter::RateLimitGroupConfig::info(),
        numa::NumaConfig::info(),
        tpm::TpmConfig::info(),
        super::LandlockConfig::info(),
        platform::PciSegmentConfig::info(),
    ]
}

/// Syntax and meaning of one family, for `--help`.
pub fn help<T: Family>() -> String {
    let info = T::info();
    let about = info.about.trim().trim_end_matches('.').to_owned();
    format!("{about}: \"{}\"", info.syntax())
}

/// The reference page, in Markdown.
pub fn reference_page() -> String {
    let mut out = String::from(
        "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n\
         # Options\n\n\
         This page is generated from the definitions in `vmm/src/config/`; a test keeps it up to \
         date.\n\n\
         An option string is a list `key=value,key=value`. Lists are enclosed in brackets, values with \
         commas in double quotes. JSON uses the field names. An option marked *refused* is known by \
         name, but only its default is accepted.\n",
    );
    for family in families() {
        let _ = write!(
            out,
            "\n## `{}` (`{}`)\n\n{}\n\n\
             | key | JSON field | type | default | range | since | meaning |\n\
             | --- | --- | --- | --- | --- | --- | --- |\n",
            family.name,
            family.type_name,
            family.about.trim(),
        );
        for field in family.fields.iter().filter(|field| !field.spec.hidden) {
            let _ = writeln!(out, "{}", row(field));
        }
    }
    out
}

fn row(field: &FieldInfo) -> String {
    let keys: Vec<_> = field
        .keys
        .iter()
        .map(|key| match key.value {
            Some(value) => format!("`{}={}`", key.key, value.replace('|', "\\|")),
            None => format!("`{}`", key.key),
        })
        .collect();
    let default = match (&field.default, field.spec.required_json, field.spec.required_key) {
        (_, true, true) => "required".to_owned(),
        (Some(default), _, _) => format!("`{}`", default.replace('|', "\\|")),
        (None, ..) => String::new(),
    };
    let range = field.spec.range.map(|(min, max)| format!("{min} to {max}")).unwrap_or_default();
    let note = match (field.spec.unsupported, field.spec.deprecated) {
        (true, _) => " *Refused.*",
        (_, true) => " *Deprecated.*",
        _ => "",
    };
    format!(
        "| {} | `{}` | {} | {} | {} | {} | {}{} |",
        keys.join(" "),
        field.spec.field,
        field.type_name,
        default,
        range,
        field.spec.since,
        field.spec.help.trim().replace('|', "\\|"),
        note
    )
}
