// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Properties of all families: what is printed is parsed, and nothing panics.

use proptest::prelude::*;

use super::*;
use crate::config::family::FamilyInfo;

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
