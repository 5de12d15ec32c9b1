// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An editable CPUID table.
//!
//! Owns finding, replacing and removing leaves. Must never know what a leaf means.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// One of the four result registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl std::fmt::Display for Register {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Eax => "EAX",
            Self::Ebx => "EBX",
            Self::Ecx => "ECX",
            Self::Edx => "EDX",
        })
    }
}

/// Reads a register of an entry.
pub fn register(entry: &kvm_cpuid_entry2, register: Register) -> u32 {
    match register {
        Register::Eax => entry.eax,
        Register::Ebx => entry.ebx,
        Register::Ecx => entry.ecx,
        Register::Edx => entry.edx,
    }
}

/// Finds a leaf and its subleaf. Leaves without subleaves have the index 0.
pub fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    entries.iter().find(|entry| entry.function == function && entry.index == index)
}

/// Entries in the order in which KVM gave them.
#[derive(Clone, Debug)]
pub struct Table(pub Vec<kvm_cpuid_entry2>);

impl Table {
    pub fn from_host(host: &CpuId) -> Self {
        Self(host.as_slice().to_vec())
    }

    pub fn get(&self, function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
        find(&self.0, function, index)
    }

    pub fn get_mut(&mut self, function: u32, index: u32) -> Option<&mut kvm_cpuid_entry2> {
        self.0.iter_mut().find(|entry| entry.function == function && entry.index == index)
    }

    /// Changes a leaf if it is there.
    pub fn edit(&mut self, function: u32, index: u32, change: impl FnOnce(&mut kvm_cpuid_entry2)) {
        if let Some(entry) = self.get_mut(function, index) {
            change(entry);
        }
    }

    /// Changes all subleaves of a leaf.
    pub fn edit_all(&mut self, function: u32, change: impl FnMut(&mut kvm_cpuid_entry2)) {
        self.0.iter_mut().filter(|entry| entry.function == function).for_each(change);
    }

    /// Removes a leaf with all its subleaves; a guest then reads zeros.
    pub fn remove(&mut self, function: u32) {
        self.0.retain(|entry| entry.function != function);
    }

    /// Replaces or adds a leaf that has no subleaves.
    pub fn set(&mut self, function: u32, [eax, ebx, ecx, edx]: [u32; 4]) {
        self.remove(function);
        self.0.push(kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() });
    }

    /// Adds a subleaf; the caller has removed the old ones.
    pub fn push_subleaf(&mut self, function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) {
        let flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        let entry =
            kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..Default::default() };
        self.0.push(entry);
    }

    /// Highest basic leaf.
    pub fn max_basic(&self) -> u32 {
        self.get(0, 0).map_or(0, |entry| entry.eax)
    }

    /// Vendor string of leaf 0.
    pub fn vendor(&self) -> Vendor {
        match vendor_bytes(&self.0) {
            b if &b == b"GenuineIntel" => Vendor::Intel,
            b if &b == b"AuthenticAMD" || &b == b"HygonGenuine" => Vendor::Amd,
            _ => Vendor::Other,
        }
    }
}

/// CPU vendor, as far as CPUID leaves differ by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    Intel,
    /// AMD and Hygon.
    Amd,
    Other,
}

/// The twelve characters of leaf 0; zeros when there is none.
pub fn vendor_bytes(entries: &[kvm_cpuid_entry2]) -> [u8; 12] {
    let mut bytes = [0; 12];
    if let Some(leaf) = find(entries, 0, 0) {
        for (place, value) in bytes.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}
