// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--cpus`: number, topology, features and host CPU affinity of vCPUs.
//!
//! Owns the family and the rules within it. It must never query the host's capabilities.

use super::codec::{Choice, Int, IntList, JsonOnly, One, Opt, Toggle, ValueCodec, pair_items};
use super::cpu_baseline::{BaselineFile, CpuBaseline};
use super::enums::option_enum;
use super::error::ConfigError;
use super::family::option_family;
use super::option_string::list_items;

/// Maximum number of vCPUs: local APIC ids have eight bits in the firmware tables, and 255 is broadcast.
pub const MAX_VCPUS: u32 = 254;

/// Highest local APIC id: interrupts address it with eight bits, and 255 is broadcast.
pub const MAX_APIC_ID: u32 = 254;

/// Physical address bits of a guest that was booted through PVH with 4-level paging.
pub const DEFAULT_MAX_PHYS_BITS: u8 = 46;

option_enum! {
    /// Which vCPUs may share a physical core at the same time.
    CoreSchedulingMode = "vm|vcpu|off", default Vm {
        /// Only vCPUs of the same VM.
        Vm = "vm",
        /// Only the vCPU itself.
        Vcpu = "vcpu",
        /// No restriction.
        Off = "off",
    }
}

option_enum! {
    /// Which processor the guest sees.
    CpuProfile = "Host", default Host {
        /// That of the host.
        Host = "host",
    }
}

option_family! {
    /// CPU topology: number of threads, cores, dies and packages.
    CpuTopology "topology" {
        /// Threads per core.
        threads_per_core: u16 = 1, "" as JsonOnly, range(1, 254);
        /// Cores per die.
        cores_per_die: u16 = 1, "" as JsonOnly, range(1, 254);
        /// Dies per package.
        dies_per_package: u16 = 1, "" as JsonOnly, range(1, 254);
        /// Packages (sockets).
        packages: u16 = 1, "" as JsonOnly, range(1, 254);
    }
}

impl CpuTopology {
    /// Number of logical CPUs.
    pub fn product(&self) -> u64 {
        u64::from(self.threads_per_core)
            * u64::from(self.cores_per_die)
            * u64::from(self.dies_per_package)
            * u64::from(self.packages)
    }

    /// The highest APIC id. Each level has its own bits, so counts that are not powers of two leave gaps.
    /// `None` if the topology is invalid.
    pub fn highest_apic_id(&self) -> Option<u32> {
        let Self { threads_per_core, cores_per_die, dies_per_package, packages } = *self;
        let topology = arch::cpuid::CpuTopology::new(
            threads_per_core,
            cores_per_die,
            dies_per_package,
            packages,
        );
        let topology = topology.ok()?;
        Some(topology.apic_id(topology.vcpus().saturating_sub(1)))
    }
}

option_family! {
    /// Host CPUs on which a vCPU may run.
    CpuAffinity "affinity" {
        /// The vCPU.
        vcpu: u32 = 0, "" as JsonOnly, required_json();
        /// The host CPUs.
        host_cpus: Vec<u32> = Vec::new(), "" as JsonOnly, required_json();
    }
}

option_family! {
    /// Optional CPU features.
    CpuFeatures "features" {
        /// Advanced matrix extensions.
        amx: bool = false, "" as JsonOnly;
    }
}

option_family! {
    /// Virtual CPUs.
    CpusConfig "cpus" {
        /// Number of vCPUs at boot.
        boot_vcpus: u32 = 1, "boot" as One<Int>, required_json(), range(1, 254);
        /// Maximum number of vCPUs; by default the number at boot.
        max_vcpus: u32 = 1, "max" as One<Int>, required_json(), range(1, 254);
        /// Threads, cores, dies and packages; their product must be the maximum number of vCPUs.
        topology: Option<CpuTopology> = None, "topology" as Opt<TopologyText>;
        /// Hyper-V enlightenments, for Windows.
        kvm_hyperv: bool = false, "kvm_hyperv" as One<Toggle>;
        /// Maximum number of physical address bits visible to the guest.
        max_phys_bits: u8 = DEFAULT_MAX_PHYS_BITS, "max_phys_bits" as One<Int>, range(32, 52);
        /// Host CPUs for each vCPU.
        affinity: Option<Vec<CpuAffinity>> = None, "affinity" as Opt<AffinityText>;
        /// CPU features to enable.
        features: CpuFeatures = CpuFeatures::default(), "features" as One<FeaturesText>;
        /// Allow nested virtualization, where the host supports it.
        nested: bool = true, "nested" as One<Toggle>;
        /// What may run on the other hyperthreads of a core while a vCPU is in the guest.
        core_scheduling: CoreSchedulingMode = CoreSchedulingMode::Vm,
            "core_scheduling" as One<Choice>;
        /// The processor that the guest sees.
        profile: CpuProfile = CpuProfile::Host, "profile" as One<Choice>;
        /// Features to which the processor that the guest sees is limited: those that several hosts have in common.
        baseline: Option<CpuBaseline> = None, "baseline" as Opt<BaselineFile>;
    }
}

impl CpusConfig {
    /// Parses the option string. `max` defaults to `boot`, which a constant default cannot express.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_cpus(text: &str) -> Result<Self, super::option_string::OptionError> {
        use super::family::Family as _;
        let mut config = Self::parse(text)?;
        let parts = super::option_string::split_commas(text).unwrap_or_default();
        let max_given = parts
            .iter()
            .filter_map(|part| part.split_once('='))
            .any(|(key, value)| key.trim() == "max" && !value.trim().is_empty());
        if !max_given {
            config.max_vcpus = config.boot_vcpus;
        }
        Ok(config)
    }

    /// Checks that interrupts can address every vCPU.
    ///
    /// # Errors
    /// An APIC id is above the limit.
    pub fn check_apic_ids(&self) -> Result<(), ConfigError> {
        let highest = self.topology.as_ref().and_then(CpuTopology::highest_apic_id);
        match highest.filter(|id| *id > MAX_APIC_ID) {
            Some(apic_id) => Err(ConfigError::TopologyApicId { apic_id, max: MAX_APIC_ID }),
            None => Ok(()),
        }
    }

    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.max_vcpus < self.boot_vcpus {
            return Err(ConfigError::VcpusMaxBelowBoot {
                max: self.max_vcpus,
                boot: self.boot_vcpus,
            });
        }
        if let Some(topology) = &self.topology {
            let product = topology.product();
            if product != u64::from(self.max_vcpus) {
                return Err(ConfigError::TopologyProduct { product, max: self.max_vcpus });
            }
        }
        if let Some(baseline) = &self.baseline {
            baseline.validate()?;
            if self.features.amx {
                return Err(ConfigError::AmxBaseline);
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        for entry in self.affinity.iter().flatten() {
            if entry.vcpu >= self.max_vcpus {
                return Err(ConfigError::AffinityVcpu { vcpu: entry.vcpu, max: self.max_vcpus });
            }
            if entry.host_cpus.is_empty() || !seen.insert(entry.vcpu) {
                return Err(ConfigError::AffinityEntry { vcpu: entry.vcpu });
            }
        }
        Ok(())
    }
}

/// `threads:cores:dies:packages`.
#[derive(Debug)]
pub struct TopologyText;

impl ValueCodec<CpuTopology> for TopologyText {
    const SYNTAX: &'static str = "<threads_per_core>:<cores_per_die>:<dies_per_package>:<packages>";

    fn parse(raw: &str) -> Result<CpuTopology, String> {
        const EXPECTED: &str = "expected threads:cores:dies:packages, each from 1 to 254";
        let parts: Option<Vec<u16>> = raw
            .split(':')
            .map(|part| part.parse().ok().filter(|n| (1..=254).contains(n)))
            .collect();
        match parts.as_deref() {
            Some(&[threads_per_core, cores_per_die, dies_per_package, packages]) => {
                Ok(CpuTopology { threads_per_core, cores_per_die, dies_per_package, packages })
            }
            _ => Err(EXPECTED.to_owned()),
        }
    }

    fn print(value: &CpuTopology) -> String {
        format!(
            "{}:{}:{}:{}",
            value.threads_per_core, value.cores_per_die, value.dies_per_package, value.packages
        )
    }
}

/// `[vcpu@[cpus],...]`.
#[derive(Debug)]
pub struct AffinityText;

impl ValueCodec<Vec<CpuAffinity>> for AffinityText {
    const SYNTAX: &'static str = "<list_of_vcpus_with_their_associated_cpuset>";

    fn parse(raw: &str) -> Result<Vec<CpuAffinity>, String> {
        const EXPECTED: &str = "expected vCPUs with their host CPUs, like [0@[0,1],1@[2-3]]";
        let mut out = Vec::new();
        for (vcpu, cpus) in pair_items(raw).ok_or(EXPECTED)? {
            let vcpu = vcpu.parse().map_err(|_| EXPECTED)?;
            out.push(CpuAffinity {
                vcpu,
                host_cpus: <IntList as ValueCodec<Vec<u32>>>::parse(cpus)?,
            });
        }
        Ok(out)
    }

    fn print(value: &Vec<CpuAffinity>) -> String {
        let items: Vec<_> = value
            .iter()
            .map(|entry| format!("{}@{}", entry.vcpu, IntList::print(&entry.host_cpus)))
            .collect();
        format!("[{}]", items.join(","))
    }
}

/// `amx` or `[amx]`.
#[derive(Debug)]
pub struct FeaturesText;

impl ValueCodec<CpuFeatures> for FeaturesText {
    const SYNTAX: &'static str = "<list_of_features_to_enable>";

    fn parse(raw: &str) -> Result<CpuFeatures, String> {
        let mut features = CpuFeatures::default();
        for name in list_items(raw).ok_or("expected a list of features, like [amx]")? {
            match name {
                "amx" => features.amx = true,
                _ => return Err(format!("feature '{name}' is unknown (known: amx)")),
            }
        }
        Ok(features)
    }

    fn print(value: &CpuFeatures) -> String {
        if value.amx { "[amx]" } else { "[]" }.to_owned()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;

    #[test]
    fn the_only_profile_is_the_host() {
        let parsed = CpusConfig::parse_cpus("boot=2,profile=Host").unwrap();
        assert_eq!(parsed, CpusConfig { boot_vcpus: 2, max_vcpus: 2, ..CpusConfig::default() });
        let read = |profile: &str| {
            let cpus = json!({"boot_vcpus": 1, "max_vcpus": 1, "profile": profile});
            serde_json::from_value::<CpusConfig>(cpus)
        };
        let host = read("Host").unwrap();
        assert_eq!(host.profile, CpuProfile::Host);
        assert_eq!(serde_json::to_value(&host).unwrap()["profile"], "Host");
        for name in ["skylake", "sapphire-rapids", "Nothing"] {
            let error = CpusConfig::parse_cpus(&format!("profile={name}")).unwrap_err();
            assert!(error.to_string().contains("profile"), "{error}");
            let error = read(name).unwrap_err().to_string();
            assert!(error.contains("profile: unknown variant"), "{error}");
        }
    }
}
