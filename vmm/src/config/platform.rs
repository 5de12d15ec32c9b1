// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--platform` and `--pci-segment`: SMBIOS strings, platform options and PCI segments.
//!
//! Owns the families and the rules within them.

use utoipa::openapi::schema::Schema;
use utoipa::openapi::{Ref, RefOr};

use super::codec::{Choice, Int, IntList, One, Opt, OptionEnum, Text, TextList, Toggle};
use super::descriptor::{ConfigFd, Fd};
use super::enums::enum_schema;
use super::error::ConfigError;
use super::family::{Family as _, option_family};
use super::option_string::{OptionError, split_commas};
use super::value::{FieldValue, SchemaSet};
use crate::platform::PlatformName;

/// Maximum length of an SMBIOS string that common guests display in full.
pub const MAX_SMBIOS_STRING_BYTES: usize = 255;

option_family! {
    /// A PCI segment.
    PciSegmentConfig "pci-segment" {
        /// Number of the segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>, required_json();
        /// Share of the addresses for 32-bit BARs, as a weight of at least 1.
        mmio32_aperture_weight: u32 = 1, "mmio32_aperture_weight" as One<Int>;
        /// Share of the addresses for 64-bit BARs, as a weight of at least 1.
        mmio64_aperture_weight: u32 = 1, "mmio64_aperture_weight" as One<Int>;
    }
}

option_family! {
    /// Options of the machine as a whole.
    PlatformConfig "platform" {
        /// Which machine the guest sees; see docs/platforms.md.
        platform: PlatformName = PlatformName::Godwit, "platform" as One<Choice>;
        /// Number of PCI segments, 1 to 96.
        num_pci_segments: u16 = 1, "num_pci_segments" as One<Int>;
        /// PCI segments behind the virtual IOMMU: all their devices have iommu=on.
        iommu_segments: Option<Vec<u16>> = None, "iommu_segments" as Opt<IntList>;
        /// Address bits of the virtual IOMMU, 1 to 64.
        iommu_address_width_bits: u8 = 64, "iommu_address_width" as One<Int>, range(1, 64);
        /// System serial number (SMBIOS).
        system_serial_number: Option<String> = None, "system_serial_number" as Opt<Text>;
        /// System serial number (SMBIOS), older name.
        serial_number: Option<String> = None, "serial_number" as Opt<Text>, deprecated();
        /// System UUID (SMBIOS).
        system_uuid: Option<String> = None, "system_uuid" as Opt<Text>;
        /// System UUID (SMBIOS), older name.
        uuid: Option<String> = None, "uuid" as Opt<Text>, deprecated();
        /// OEM strings (SMBIOS).
        oem_strings: Option<Vec<String>> = None, "oem_strings" as Opt<TextList>;
        /// System manufacturer (SMBIOS).
        system_manufacturer: Option<String> = None, "system_manufacturer" as Opt<Text>;
        /// System product name (SMBIOS).
        system_product_name: Option<String> = None, "system_product_name" as Opt<Text>;
        /// System version (SMBIOS).
        system_version: Option<String> = None, "system_version" as Opt<Text>;
        /// System family (SMBIOS).
        system_family: Option<String> = None, "system_family" as Opt<Text>;
        /// System SKU number (SMBIOS).
        system_sku_number: Option<String> = None, "system_sku_number" as Opt<Text>;
        /// Chassis asset tag (SMBIOS).
        chassis_asset_tag: Option<String> = None, "chassis_asset_tag" as Opt<Text>;
        /// Intel TDX guest.
        tdx: bool = false, "tdx" as One<Toggle>, unsupported();
        /// AMD SEV-SNP guest.
        sev_snp: bool = false, "sev_snp" as One<Toggle>, unsupported();
        /// Use iommufd for passed-through devices, instead of a type1 container; on the command line, the default with
        /// `iommufd_fd`.
        iommufd: bool = false, "iommufd" as One<Toggle>;
        /// Open descriptor of /dev/iommu.
        iommufd_fd: Option<ConfigFd> = None, "iommufd_fd" as Opt<Fd>;
        /// Peer-to-peer DMA between passed-through devices; with type1 containers only.
        vfio_p2p_dma: bool = true, "vfio_p2p_dma" as One<Toggle>;
    }
}

impl OptionEnum for PlatformName {
    const SYNTAX: &'static str = "godwit|cloud-hypervisor-53";
    const NAMES: &'static [(Self, &'static str)] = Self::ALL;
}

/// The names of the platforms, which are the same in JSON and in option strings.
fn platform_names() -> Vec<&'static str> {
    PlatformName::ALL.iter().map(|(_, text)| *text).collect()
}

impl FieldValue for PlatformName {
    fn schema() -> RefOr<Schema> {
        Ref::from_schema_name("PlatformName").into()
    }

    fn type_name() -> String {
        platform_names().join(", ")
    }

    fn collect_schemas(out: &mut SchemaSet) {
        let schema = || {
            let about = "Which machine the guest sees.";
            enum_schema(about, &platform_names(), Self::default().text()).into()
        };
        out.entry("PlatformName".to_owned()).or_insert_with(schema);
    }
}

impl PlatformConfig {
    /// Parses the option string. A descriptor of iommufd is there to be used: `iommufd` defaults to `on` with one,
    /// which a constant default cannot express.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_platform(text: &str) -> Result<Self, OptionError> {
        let mut config = Self::parse(text)?;
        let parts = split_commas(text).unwrap_or_default();
        let is_given = parts
            .iter()
            .filter_map(|part| part.split_once('='))
            .any(|(key, value)| key.trim() == "iommufd" && !value.trim().is_empty());
        if !is_given {
            config.iommufd = config.iommufd_fd.is_some();
        }
        Ok(config)
    }

    /// The serial number, under either option.
    pub fn serial(&self) -> Option<&str> {
        self.system_serial_number.as_deref().or(self.serial_number.as_deref())
    }

    /// The UUID, under either option, as its sixteen bytes in textual order; `None` if it is absent or
    /// invalid.
    pub fn uuid_bytes(&self) -> Option<[u8; 16]> {
        parse_uuid(self.system_uuid.as_deref().or(self.uuid.as_deref())?)
    }

    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_segments()?;
        let refuse = |problem: String| {
            Err(ConfigError::Device { what: "platform", id: String::new(), problem })
        };
        let twice = |left: &Option<String>, right: &Option<String>| {
            left.is_some() && right.is_some() && left != right
        };
        if twice(&self.system_serial_number, &self.serial_number)
            || twice(&self.system_uuid, &self.uuid)
        {
            return refuse("an old and a new name of one string contradict each other".into());
        }
        let uuid = self.system_uuid.as_deref().or(self.uuid.as_deref());
        if let Some(uuid) = uuid
            && parse_uuid(uuid).is_none()
        {
            return refuse(format!("'{uuid}' is not a UUID"));
        }
        if let Some(fd) = &self.iommufd_fd {
            if !self.iommufd {
                return refuse("iommufd_fd needs iommufd=on".into());
            }
            fd.check().or_else(|problem| refuse(format!("iommufd_fd: {problem}")))?;
        }
        let texts = [
            &self.system_serial_number,
            &self.serial_number,
            &self.system_manufacturer,
            &self.system_product_name,
            &self.system_version,
            &self.system_family,
            &self.system_sku_number,
            &self.chassis_asset_tag,
        ];
        let oem = self.oem_strings.iter().flatten();
        for text in texts.into_iter().flatten().chain(oem) {
            if text.len() > MAX_SMBIOS_STRING_BYTES || text.contains('\0') {
                return refuse(format!("'{text}' is too long for SMBIOS or has a zero byte"));
            }
        }
        if self.oem_strings.as_ref().is_some_and(|list| list.len() > 255) {
            return refuse("there are more than 255 OEM strings".into());
        }
        Ok(())
    }
}

/// Parses `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, with or without dashes.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u32> =
        text.chars().filter(|c| *c != '-').map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    if digits.len() != 32 || !matches!(text.len(), 32 | 36) {
        return None;
    }
    let mut bytes = [0_u8; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::try_from(pair.iter().fold(0, |sum, digit| sum * 16 + digit)).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn a_descriptor_of_iommufd_is_used() {
        let parse = |text: &str| PlatformConfig::parse_platform(text).unwrap();
        for (text, is_on) in [
            ("iommufd_fd=8", true),
            ("iommufd=on,iommufd_fd=8", true),
            ("iommufd_fd=8,iommufd=", true),
            ("iommufd=on", true),
            ("num_pci_segments=2", false),
        ] {
            let config = parse(text);
            assert_eq!((config.iommufd, config.validate()), (is_on, Ok(())), "{text}");
        }
        let error = parse("iommufd=off,iommufd_fd=8").validate().unwrap_err().to_string();
        assert!(error.contains("iommufd_fd needs iommufd=on"), "{error}");
    }

    #[test]
    fn uuids() {
        let bytes = parse_uuid("00112233-4455-6677-8899-aAbBcCdDeEfF");
        assert_eq!(bytes.map(|b| (b[0], b[15])), Some((0, 0xff)));
        for bad in ["", "0011", "00112233-4455-6677-8899-aabbccddeefg", "é0112233"] {
            assert!(parse_uuid(bad).is_none(), "{bad}");
        }
    }
}
