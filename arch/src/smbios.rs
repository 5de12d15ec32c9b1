// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! SMBIOS tables: the names and numbers that identify a machine to software in it.
//!
//! Owns the structures of types 0, 1, 3, 11, 32 and 127 and their entry point at
//! [`layout::SMBIOS_GPA`]. Must never invent an identity: what is not configured is a constant or
//! is left out.
//!
//! Format: DMTF DSP0134, version 3.2.

use memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::layout;

/// Identification for guests that look for this kind of machine: cloud-hypervisor's names, as images and
/// inventories know them.
const DEFAULT_MANUFACTURER: &str = "Cloud Hypervisor";
const DEFAULT_PRODUCT: &str = "cloud-hypervisor";

const ENTRY_BYTES: usize = 24;
/// The structures follow the entry point at this distance.
const TABLE_OFFSET: u64 = 32;
const VERSION: [u8; 3] = [3, 2, 0];

// Structure types (chapter 7).
const TYPE_BIOS: u8 = 0;
const TYPE_SYSTEM: u8 = 1;
const TYPE_CHASSIS: u8 = 3;
const TYPE_OEM_STRINGS: u8 = 11;
const TYPE_BOOT: u8 = 32;
const TYPE_END: u8 = 127;

/// BIOS characteristics: none are described.
const BIOS_CHARACTERISTICS_UNSUPPORTED: u64 = 1 << 3;
/// Second extension byte: the tables describe a virtual machine.
const BIOS_VIRTUAL_MACHINE: u8 = 1 << 4;
const WAKEUP_POWER_SWITCH: u8 = 6;
const CHASSIS_OTHER: u8 = 1;
const STATE_SAFE: u8 = 3;
const SECURITY_NONE: u8 = 3;

/// What the configuration says about the machine's identity (`platform` options).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SmbiosInputs {
    /// `system_manufacturer`.
    pub manufacturer: Option<String>,
    /// `system_product_name`.
    pub product_name: Option<String>,
    /// `system_version`.
    pub version: Option<String>,
    /// `system_serial_number`.
    pub serial_number: Option<String>,
    /// `system_uuid`, the bytes in the order of its text; see [`parse_uuid`].
    pub uuid: Option<[u8; 16]>,
    /// `system_sku_number`.
    pub sku_number: Option<String>,
    /// `system_family`.
    pub family: Option<String>,
    /// `chassis_asset_tag`.
    pub asset_tag: Option<String>,
    /// `oem_strings`.
    pub oem_strings: Vec<String>,
}

/// Why the tables could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SmbiosError {
    /// Not 32 hexadecimal digits in five groups.
    #[error("{text:?} is not a UUID (8-4-4-4-12 hexadecimal digits)")]
    Uuid {
        /// What was given.
        text: String,
    },
    /// A zero byte ends a string in the tables.
    #[error("the SMBIOS string {text:?} contains a zero byte")]
    StringWithNul {
        /// What was given.
        text: String,
    },
    /// Strings of a structure are counted with one byte.
    #[error("there are {count} OEM strings, at most 255 can be given to the guest")]
    TooManyOemStrings {
        /// How many were given.
        count: usize,
    },
    /// The area is full.
    #[error("the SMBIOS tables have {len_bytes} bytes, there is room for {max_bytes}")]
    TooLarge {
        /// Length of all tables.
        len_bytes: u64,
        /// Room for them.
        max_bytes: u64,
    },
    /// There is no RAM where they belong.
    #[error("cannot write the SMBIOS tables to guest memory at {gpa:#x}")]
    Write {
        /// Where.
        gpa: u64,
        /// What the memory said.
        #[source]
        source: GuestMemoryError,
    },
}

/// Reads a UUID in its usual form (8-4-4-4-12 hexadecimal digits).
pub fn parse_uuid(text: &str) -> Result<[u8; 16], SmbiosError> {
    let bad = || SmbiosError::Uuid { text: text.to_owned() };
    let groups: Vec<&str> = text.split('-').collect();
    if !groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        || !text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
    {
        return Err(bad());
    }
    let value = u128::from_str_radix(&groups.concat(), 16).map_err(|_| bad())?;
    Ok(value.to_be_bytes())
}

/// Makes the tables and writes them at [`layout::SMBIOS_GPA`].
pub fn write_tables(mem: &GuestMemory, inputs: &SmbiosInputs) -> Result<(), SmbiosError> {
    let bytes = build_tables(inputs)?;
    let gpa = layout::SMBIOS_GPA;
    mem.write_slice(&bytes, GuestAddress(gpa)).map_err(|source| SmbiosError::Write { gpa, source })
}

/// The entry point and the structures, as they are to lie at [`layout::SMBIOS_GPA`].
pub fn build_tables(inputs: &SmbiosInputs) -> Result<Vec<u8>, SmbiosError> {
    let mut tables = Tables::default();
    tables.bios()?;
    tables.system(inputs)?;
    tables.chassis(inputs)?;
    tables.oem_strings(&inputs.oem_strings)?;
    tables.push(TYPE_BOOT, &[0; 7], &[])?;
    tables.push(TYPE_END, &[], &[])?;

    let table_len = tables.bytes.len() as u64;
    let len_bytes = TABLE_OFFSET + table_len;
    let max_bytes = layout::SMBIOS_END_GPA - layout::SMBIOS_GPA;
    let too_large = SmbiosError::TooLarge { len_bytes, max_bytes };
    let Ok(table_len) = u32::try_from(table_len) else { return Err(too_large) };
    if len_bytes > max_bytes {
        return Err(too_large);
    }
    let mut area = entry_point(table_len).to_vec();
    area.resize(32, 0);
    area.extend(tables.bytes);
    Ok(area)
}

/// The 64-bit entry point (section 5.2.2).
fn entry_point(table_len_bytes: u32) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    entry[..5].copy_from_slice(b"_SM3_");
    entry[6] = 0x18; // length
    entry[7..10].copy_from_slice(&VERSION);
    entry[10] = 1; // revision of this entry point
    entry[12..16].copy_from_slice(&table_len_bytes.to_le_bytes());
    entry[16..24].copy_from_slice(&(layout::SMBIOS_GPA + TABLE_OFFSET).to_le_bytes());
    let sum = entry.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    entry[5] = sum.wrapping_neg();
    entry
}

#[derive(Default)]
struct Tables {
    bytes: Vec<u8>,
    count: u16,
}

/// The strings that follow a structure; a field holds a string's number, zero for none.
#[derive(Default)]
struct Strings<'a>(Vec<&'a str>);

impl<'a> Strings<'a> {
    fn add(&mut self, text: &'a str) -> u8 {
        if text.is_empty() {
            return 0;
        }
        self.0.push(text);
        // No structure here has more than seven fields that are strings.
        u8::try_from(self.0.len()).unwrap_or(0)
    }

    fn add_optional(&mut self, text: Option<&'a String>) -> u8 {
        text.map_or(0, |text| self.add(text))
    }
}

impl Tables {
    /// Appends a structure: header, fields, strings. A handle is the structure's number.
    fn push(&mut self, kind: u8, fields: &[u8], strings: &[&str]) -> Result<(), SmbiosError> {
        let len = u8::try_from(fields.len() + 4).unwrap_or(u8::MAX);
        self.bytes.extend([kind, len]);
        self.bytes.extend(self.count.to_le_bytes());
        self.bytes.extend(fields);
        self.count += 1;
        for text in strings {
            if text.contains('\0') {
                return Err(SmbiosError::StringWithNul { text: (*text).to_owned() });
            }
            self.bytes.extend(text.as_bytes());
            self.bytes.push(0);
        }
        // A structure ends with two zero bytes; one is the last string's.
        if strings.is_empty() {
            self.bytes.push(0);
        }
        self.bytes.push(0);
        Ok(())
    }

    fn bios(&mut self) -> Result<(), SmbiosError> {
        let mut strings = Strings::default();
        let vendor = strings.add(DEFAULT_PRODUCT);
        let version = strings.add("0");
        let mut fields = vec![vendor, version, 0, 0, 0, 0];
        fields.extend(BIOS_CHARACTERISTICS_UNSUPPORTED.to_le_bytes());
        fields.extend([0, BIOS_VIRTUAL_MACHINE]);
        // Releases of system BIOS (0.0) and of an embedded controller (there is none).
        fields.extend([0, 0, 0xff, 0xff]);
        self.push(TYPE_BIOS, &fields, &strings.0)
    }

    fn system(&mut self, inputs: &SmbiosInputs) -> Result<(), SmbiosError> {
        let mut strings = Strings::default();
        let manufacturer = inputs.manufacturer.as_deref().unwrap_or(DEFAULT_MANUFACTURER);
        let product = inputs.product_name.as_deref().unwrap_or(DEFAULT_PRODUCT);
        let mut fields = vec![
            strings.add(manufacturer),
            strings.add(product),
            strings.add_optional(inputs.version.as_ref()),
            strings.add_optional(inputs.serial_number.as_ref()),
        ];
        // The first three groups of a UUID are little-endian here (section 7.2.1).
        let mut uuid = inputs.uuid.unwrap_or([0; 16]);
        uuid[..4].reverse();
        uuid[4..6].reverse();
        uuid[6..8].reverse();
        fields.extend(uuid);
        fields.push(WAKEUP_POWER_SWITCH);
        fields.push(strings.add_optional(inputs.sku_number.as_ref()));
        fields.push(strings.add_optional(inputs.family.as_ref()));
        self.push(TYPE_SYSTEM, &fields, &strings.0)
    }

    fn chassis(&mut self, inputs: &SmbiosInputs) -> Result<(), SmbiosError> {
        let mut strings = Strings::default();
        let manufacturer = inputs.manufacturer.as_deref().unwrap_or(DEFAULT_MANUFACTURER);
        let manufacturer = strings.add(manufacturer);
        let asset_tag = strings.add_optional(inputs.asset_tag.as_ref());
        let mut fields = vec![manufacturer, CHASSIS_OTHER, 0, 0, asset_tag];
        fields.extend([STATE_SAFE, STATE_SAFE, STATE_SAFE, SECURITY_NONE]);
        // OEM word, height, power cords, contained elements and their length, SKU.
        fields.extend([0; 9]);
        self.push(TYPE_CHASSIS, &fields, &strings.0)
    }

    fn oem_strings(&mut self, texts: &[String]) -> Result<(), SmbiosError> {
        let count = u8::try_from(texts.len())
            .map_err(|_| SmbiosError::TooManyOemStrings { count: texts.len() })?;
        if count == 0 {
            return Ok(());
        }
        // An empty one would end the list early, and the others are found by their number.
        let texts: Vec<&str> =
            texts.iter().map(|text| if text.is_empty() { " " } else { text }).collect();
        self.push(TYPE_OEM_STRINGS, &[count], &texts)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn full() -> SmbiosInputs {
        let text = |text: &str| Some(text.to_owned());
        SmbiosInputs {
            manufacturer: text("Maker"),
            product_name: text("Product"),
            version: text("7"),
            serial_number: text("SN-1"),
            uuid: Some(parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap()),
            sku_number: text("SKU"),
            family: text("Family"),
            asset_tag: text("Tag"),
            oem_strings: vec!["io.systemd.credential:x=y".to_owned(), "two".to_owned()],
        }
    }

    /// Type, fields and strings of every structure, found as a guest finds them.
    fn structures(area: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let len = u32::from_le_bytes(area[12..16].try_into().unwrap()) as usize;
        let mut rest = &area[32..32 + len];
        let mut found = Vec::new();
        while !rest.is_empty() {
            let (kind, fields) = (rest[0], rest[4..usize::from(rest[1])].to_vec());
            rest = &rest[usize::from(rest[1])..];
            let end = rest.windows(2).position(|pair| pair == [0, 0]).unwrap();
            let strings = String::from_utf8(rest[..end].to_vec()).unwrap();
            rest = &rest[end + 2..];
            let strings = strings.split('\0').filter(|s| !s.is_empty()).map(str::to_owned);
            found.push((kind, fields, strings.collect()));
        }
        found
    }

    #[test]
    fn entry_point_is_valid() {
        let area = build_tables(&SmbiosInputs::default()).unwrap();
        assert_eq!(&area[..5], b"_SM3_");
        assert_eq!(area[..24].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        let gpa = u64::from_le_bytes(area[16..24].try_into().unwrap());
        assert_eq!(gpa, layout::SMBIOS_GPA + 32);
    }

    #[test]
    fn system_carries_what_is_configured() {
        let area = build_tables(&full()).unwrap();
        let found = structures(&area);
        let kinds: Vec<_> = found.iter().map(|(kind, ..)| *kind).collect();
        assert_eq!(kinds, [0, 1, 3, 11, 32, 127]);
        let (_, fields, strings) = &found[1];
        assert_eq!(strings, &["Maker", "Product", "7", "SN-1", "SKU", "Family"]);
        assert_eq!(fields[..4], [1, 2, 3, 4]);
        assert_eq!(fields[4..12], [0x33, 0x22, 0x11, 0x00, 0x55, 0x44, 0x77, 0x66]);
        assert_eq!(fields[12..20], [0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff]);
        assert_eq!(found[2].2, ["Maker", "Tag"]);
        assert_eq!(found[3].2, ["io.systemd.credential:x=y", "two"]);
    }

    #[test]
    fn defaults_name_the_kind_of_machine() {
        let found = structures(&build_tables(&SmbiosInputs::default()).unwrap());
        assert_eq!(found[1].2, ["Cloud Hypervisor", "cloud-hypervisor"]);
        assert_eq!(found[1].1[2..4], [0, 0]);
        assert!(found.iter().all(|(kind, ..)| *kind != TYPE_OEM_STRINGS));
    }

    #[test]
    fn bad_values_are_named() {
        let refused = |change: &dyn Fn(&mut SmbiosInputs)| {
            let mut inputs = SmbiosInputs::default();
            change(&mut inputs);
            build_tables(&inputs).unwrap_err().to_string()
        };
        let nul = refused(&|inputs| inputs.family = Some("a\0b".to_owned()));
        assert!(nul.contains("zero byte"), "{nul}");
        let many = refused(&|inputs| inputs.oem_strings = vec![String::new(); 256]);
        assert!(many.contains("256 OEM strings"), "{many}");
        let large = refused(&|inputs| inputs.version = Some("x".repeat(1 << 16)));
        assert!(large.contains("room for 65520"), "{large}");
        for text in [
            "",
            "00112233",
            "0011223-34455-6677-8899-aabbccddeeff",
            "+0112233-4455-6677-8899-aabbccddeeff",
        ] {
            assert!(parse_uuid(text).is_err(), "{text}");
        }
    }

    /// 8-4-4-4-12 digits.
    fn usual_form(uuid: [u8; 16]) -> String {
        let digits = format!("{:032x}", u128::from_be_bytes(uuid));
        [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &digits[group]).join("-")
    }

    /// An independent reader, where it is installed.
    #[test]
    fn dmidecode_reads_the_tables() {
        let dir = tempfile::tempdir().unwrap();
        let mut area = build_tables(&full()).unwrap();
        // In a dump the structures follow the entry point at an offset instead of an address.
        area[16..24].copy_from_slice(&32_u64.to_le_bytes());
        area[5] = 0;
        area[5] = area[..24].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg();
        let path = dir.path().join("dump");
        std::fs::write(&path, &area).unwrap();
        let output = match Command::new("dmidecode").arg("--from-dump").arg(&path).output() {
            Ok(output) => output,
            Err(error) => {
                test_skip::skip!("dmidecode cannot be run: {error}");
                return;
            }
        };
        let text = String::from_utf8_lossy(&output.stdout);
        for expected in [
            "Manufacturer: Maker",
            "UUID: 00112233-4455-6677-8899-aabbccddeeff",
            "Asset Tag: Tag",
            "String 2: two",
            "System is a virtual machine",
            "End Of Table",
        ] {
            assert!(text.contains(expected), "no {expected} in {text}");
        }
        assert!(!text.contains("Wrong") && !text.contains("truncated"), "{text}");
    }

    proptest! {
        #[test]
        fn a_uuid_is_read_in_its_usual_form_and_no_other(
            uuid: [u8; 16], at in 0_usize..36, other in any::<char>(), anything in ".{0,40}",
        ) {
            let usual = usual_form(uuid);
            prop_assert_eq!(parse_uuid(&usual).unwrap(), uuid);
            prop_assert_eq!(parse_uuid(&usual.to_ascii_uppercase()).unwrap(), uuid);
            let mut changed = usual.clone();
            changed.replace_range(at..=at, &other.to_string());
            for text in [&usual[..at], &changed, &anything] {
                match parse_uuid(text) {
                    Ok(read) => prop_assert_eq!(usual_form(read), text.to_ascii_lowercase()),
                    Err(error) => {
                        let quoted = format!("{text:?}");
                        prop_assert!(error.to_string().contains(&quoted), "{error}");
                    }
                }
            }
        }

        #[test]
        fn strings_come_back(texts in prop::collection::vec("[ -~]{1,40}", 1..20)) {
            let inputs = SmbiosInputs { oem_strings: texts.clone(), ..full() };
            let found = structures(&build_tables(&inputs).unwrap());
            prop_assert_eq!(&found[3].2, &texts);
        }
    }
}
