// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What makes a recorded state one that any processor with x86-64-v2 can take.
//!
//! Owns the two steps. [`neutral`] runs when a sample is recorded: it leaves the guest what every such
//! processor has, and takes out what only the recording host knows (its TSC, registers that describe the
//! processor). [`adapt`] runs when it is read: the vendor's name is the only thing that a state has to
//! have in common with its host.

use std::arch::x86_64::__cpuid;

use serde_json::{Value, json};

/// Address bits that every such processor has, given to `--cpus max_phys_bits`: addresses of devices
/// depend on it.
pub const PHYS_BITS: u32 = 36;

/// SSE3, SSSE3, CX16, SSE4.1, SSE4.2, x2APIC, POPCNT, TSC deadline (KVM's own), hypervisor.
const LEAF_1_ECX: u64 =
    1 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 21 | 1 << 23 | 1 << 24 | 1 << 31;
/// FPU to SSE2, without what only one vendor has.
const LEAF_1_EDX: u64 = 0x0783_fbff;
/// Both clocks of KVM and that the second one is stable.
const KVM_FEATURES: u64 = 1 | 1 << 3 | 1 << 24;
/// The largest basic and extended leaf.
const LARGEST: [u64; 2] = [0xb, 0x8000_0008];

/// Registers that every KVM keeps whatever the vendor: SYSENTER, miscellaneous, MTRRs and PAT, KVM's own
/// (but the one that tells a feature of the host), SYSCALL and FS, GS.
fn is_common(msr: u64) -> bool {
    matches!(msr,
        0x11 | 0x12 | 0x174..=0x176 | 0x200..=0x20f | 0x250 | 0x258 | 0x259 | 0x268..=0x26f | 0x277
        | 0x2ff | 0x6e0 | 0x4b56_4d00 | 0x4b56_4d01 | 0xc000_0081..=0xc000_0084 | 0xc000_0102)
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

fn items(value: &mut Value) -> &mut Vec<Value> {
    value.as_array_mut().expect("a list")
}

fn neutral_cpuid(entries: &mut Value) {
    let kept = [0, 1, 0xb, 0x4000_0000, 0x4000_0001, 0x8000_0000, 0x8000_0001, 0x8000_0008];
    items(entries).retain(|entry| kept.contains(&number(&entry["function"])));
    for entry in items(entries) {
        let function = number(&entry["function"]);
        let old = |register: usize, mask: u64| json!(number(&entry["answer"][register]) & mask);
        entry["answer"] = match function {
            0 => json!([LARGEST[0], old(1, !0), old(2, !0), old(3, !0)]),
            // Family 15, a generic one.
            1 => json!([0xf61, old(1, !0), old(2, LEAF_1_ECX), old(3, LEAF_1_EDX)]),
            0x4000_0000 => json!([0x4000_0001, old(1, !0), old(2, !0), old(3, !0)]),
            0x4000_0001 => json!([old(0, KVM_FEATURES), 0, 0, 0]),
            0x8000_0000 => json!([LARGEST[1], 0, 0, 0]),
            // LAHF; SYSCALL, NX, long mode.
            0x8000_0001 => json!([0, 0, old(2, 1), old(3, 1 << 11 | 1 << 20 | 1 << 29)]),
            0x8000_0008 => json!([old(0, 0xffff), 0, 0, 0]),
            _ => entry["answer"].clone(),
        };
    }
}

/// The legacy part and the header of x87 and SSE, without the note that the kernel makes in between. Other
/// components have to be without contents (as PKRU is, which the host's kernel marks present).
fn neutral_xsave(hex: &str) -> String {
    const NOTE: std::ops::Range<usize> = 2 * 464..2 * 512;
    const HEADER: usize = 2 * 512;
    assert!(hex.len() <= HEADER + 16, "more than x87 and SSE: {hex}");
    let mut digits: Vec<u8> = hex.bytes().chain(std::iter::repeat(b'0')).take(HEADER + 2).collect();
    digits[NOTE].fill(b'0');
    let low = char::from(digits[HEADER + 1]).to_digit(16).expect("a digit") & 3;
    digits[HEADER] = b'0';
    digits[HEADER + 1] = b"0123"[low as usize];
    String::from_utf8(digits).expect("digits")
}

/// Makes a recorded machine state neutral.
pub fn neutral(state: &mut Value) {
    neutral_cpuid(&mut state["shown"]);
    state["clock"]["host_tsc"] = Value::Null;
    state["clock"]["host_tsc_khz"] = Value::Null;
    for vcpu in items(&mut state["vcpus"]) {
        neutral_cpuid(&mut vcpu["cpuid"]);
        items(&mut vcpu["msrs"]).retain(|msr| is_common(number(&msr["index"])));
        vcpu["tsc"]["khz"] = Value::Null;
        vcpu["tsc"]["offset"] = Value::Null;
        vcpu["nested"] = Value::Null;
        let xsave = vcpu["xsave"].as_str().expect("text");
        vcpu["xsave"] = json!(neutral_xsave(xsave));
    }
}

/// The same for the configuration that travels with what was shown.
pub fn neutral_document(document: &mut Value) {
    neutral_cpuid(&mut document["common_cpuid"]);
    document.as_object_mut().expect("an object").remove("feature_msrs");
}

/// Gives every CPUID table in `value` the vendor of this processor.
pub fn adapt(value: &mut Value) {
    let here = __cpuid(0);
    let name = [here.ebx, here.ecx, here.edx];
    for table in ["shown", "cpuid", "common_cpuid"] {
        let Some(table) = value.get_mut(table).and_then(Value::as_array_mut) else { continue };
        for leaf in table.iter_mut().filter(|entry| entry["function"] == 0) {
            for (register, word) in (1_usize..).zip(name) {
                leaf["answer"][register] = json!(word);
            }
        }
    }
    if let Some(vcpus) = value.get_mut("vcpus").and_then(Value::as_array_mut) {
        vcpus.iter_mut().for_each(adapt);
    }
}

/// CRC-32C, bit by bit: it runs over some kilobytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
        })
    })
}
