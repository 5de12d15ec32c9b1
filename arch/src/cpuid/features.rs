// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The CPUID registers that are feature sets, and the names of their bits.
//!
//! Owns data only. Names are those that Linux prints in /proc/cpuinfo, or would; a bit without a
//! name here is reported by its number.

use kvm_bindings::kvm_cpuid_entry2;

use super::table::Register::{Eax, Ebx, Ecx, Edx};
use super::table::{Register, find, register};

/// A register in which a set bit promises something to the guest.
pub struct FeatureRegister {
    pub function: u32,
    pub index: u32,
    pub register: Register,
    /// Bits that promise nothing, such as a copy of the guest's own settings.
    pub ignored: u32,
    /// Names by bit number.
    pub names: &'static [(u8, &'static str)],
}

const fn features(
    function: u32,
    index: u32,
    register: Register,
    ignored: u32,
    names: &'static [(u8, &'static str)],
) -> FeatureRegister {
    FeatureRegister { function, index, register, ignored, names }
}

/// KVM's own features (leaf 1 after its signature leaf), in EAX.
pub const KVM_FEATURES: FeatureRegister = features(
    0x4000_0001,
    0,
    Eax,
    0,
    &[
        (0, "kvm-clocksource"),
        (3, "kvm-clocksource2"),
        (4, "kvm-asyncpf"),
        (5, "kvm-steal-time"),
        (6, "kvm-pv-eoi"),
        (7, "kvm-pv-unhalt"),
        (9, "kvm-pv-tlb-flush"),
        (10, "kvm-asyncpf-vmexit"),
        (11, "kvm-pv-send-ipi"),
        (12, "kvm-poll-control"),
        (13, "kvm-pv-sched-yield"),
        (14, "kvm-asyncpf-int"),
        (15, "kvm-msi-ext-dest-id"),
        (24, "kvm-clocksource-stable"),
    ],
);

/// OSXSAVE, which follows the guest's CR4.
const OSXSAVE: u32 = 1 << 27;
/// OSPKE, likewise.
const OSPKE: u32 = 1 << 4;
/// These say that something is gone: not a promise.
const FPU_REMOVALS: u32 = 1 << 6 | 1 << 13;

/// That packages have several logical processors. It follows from the topology, which the VMM decides.
const HTT: u32 = 1 << 28;
/// The same on AMD, and leaves in which the VMM describes that topology.
const AMD_TOPOLOGY: u32 = 1 << 1 | 1 << 22;

/// Of AMD's leaf of 2021: VERW empties the buffers of transient scheduler attacks; in ECX, that there are none such.
pub const VERW_CLEAR: FeatureBit =
    FeatureBit { function: 0x8000_0021, register: Eax, bits: 1 << 5 };
/// Both kinds of them.
pub const NO_TRANSIENT_SCHEDULER: FeatureBit =
    FeatureBit { function: 0x8000_0021, register: Ecx, bits: 1 << 1 | 1 << 2 };

/// Bits of a leaf without subleaves.
#[derive(Clone, Copy)]
pub struct FeatureBit {
    pub function: u32,
    pub register: Register,
    pub bits: u32,
}

impl FeatureBit {
    /// Whether all of them are set.
    pub fn is_in(self, entries: &[kvm_cpuid_entry2]) -> bool {
        find(entries, self.function, 0)
            .is_some_and(|entry| register(entry, self.register) & self.bits == self.bits)
    }
}

/// All sets of features that matter to a running guest, but KVM's.
pub const FEATURES: &[FeatureRegister] = &[
    features(1, 0, Ecx, OSXSAVE, LEAF_1_ECX),
    features(1, 0, Edx, HTT, LEAF_1_EDX),
    features(6, 0, Eax, 0, &[(2, "arat")]),
    features(7, 0, Ebx, FPU_REMOVALS, LEAF_7_EBX),
    features(7, 0, Ecx, OSPKE, LEAF_7_ECX),
    features(7, 0, Edx, 0, LEAF_7_EDX),
    features(7, 1, Eax, 0, LEAF_7_1_EAX),
    features(
        7,
        1,
        Edx,
        0,
        &[
            (4, "avx_vnni_int8"),
            (5, "avx_ne_convert"),
            (8, "amx_complex"),
            (10, "avx_vnni_int16"),
            (14, "prefetchi"),
            (19, "avx10"),
            (21, "apx_f"),
        ],
    ),
    features(7, 1, Ecx, 0, &[(5, "msr_imm")]),
    features(
        7,
        2,
        Edx,
        0,
        &[
            (0, "psfd"),
            (1, "ipred_ctrl"),
            (2, "rrsba_ctrl"),
            (3, "ddpd_u"),
            (4, "bhi_ctrl"),
            (5, "mcdt_no"),
        ],
    ),
    features(
        0xd,
        0,
        Eax,
        0,
        &[
            (0, "x87 state"),
            (1, "sse state"),
            (2, "avx state"),
            (5, "avx512 mask state"),
            (6, "avx512 high state"),
            (7, "avx512 more state"),
            (9, "protection key state"),
            (17, "amx tile configuration state"),
            (18, "amx tile state"),
        ],
    ),
    features(
        0xd,
        1,
        Eax,
        0,
        &[(0, "xsaveopt"), (1, "xsavec"), (2, "xgetbv1"), (3, "xsaves"), (4, "xfd")],
    ),
    features(0xd, 1, Ecx, 0, &[(11, "cet user state"), (12, "cet supervisor state")]),
    features(0x8000_0001, 0, Ecx, AMD_TOPOLOGY, EXT_1_ECX),
    features(
        0x8000_0001,
        0,
        Edx,
        0,
        &[
            (11, "syscall"),
            (20, "nx"),
            (22, "mmxext"),
            (25, "fxsr_opt"),
            (26, "pdpe1gb"),
            (27, "rdtscp"),
            (29, "lm"),
        ],
    ),
    features(0x8000_0007, 0, Edx, 0, &[(8, "invtsc")]),
    features(
        0x8000_0008,
        0,
        Ebx,
        0,
        &[
            (0, "clzero"),
            (2, "xsaveerptr"),
            (9, "wbnoinvd"),
            (12, "ibpb"),
            (14, "ibrs"),
            (15, "stibp"),
            (17, "stibp_always_on"),
            (24, "ssbd"),
            (25, "virt_ssbd"),
            (28, "psfd"),
        ],
    ),
    features(
        0x8000_000a,
        0,
        Edx,
        0,
        &[
            (0, "npt"),
            (3, "nrip_save"),
            (4, "tsc_scale"),
            (5, "vmcb_clean"),
            (6, "flushbyasid"),
            (13, "avic"),
            (15, "v_vmsave_vmload"),
            (16, "vgif"),
        ],
    ),
    features(
        0x8000_0021,
        0,
        Eax,
        0,
        &[
            (0, "no_nested_data_bp"),
            (2, "lfence_rdtsc"),
            (5, "verw_clear"),
            (6, "null_sel_clr_base"),
            (8, "auto_ibrs"),
            (27, "sbpb"),
        ],
    ),
    features(0x8000_0021, 0, Ecx, 0, &[(1, "tsa_sq_no"), (2, "tsa_l1_no")]),
];

const LEAF_1_ECX: &[(u8, &str)] = &[
    (0, "sse3"),
    (1, "pclmulqdq"),
    (3, "monitor"),
    (5, "vmx"),
    (9, "ssse3"),
    (12, "fma"),
    (13, "cx16"),
    (17, "pcid"),
    (19, "sse4_1"),
    (20, "sse4_2"),
    (21, "x2apic"),
    (22, "movbe"),
    (23, "popcnt"),
    (24, "tsc_deadline_timer"),
    (25, "aes"),
    (26, "xsave"),
    (28, "avx"),
    (29, "f16c"),
    (30, "rdrand"),
    (31, "hypervisor"),
];

const LEAF_1_EDX: &[(u8, &str)] = &[
    (0, "fpu"),
    (3, "pse"),
    (4, "tsc"),
    (5, "msr"),
    (6, "pae"),
    (7, "mce"),
    (8, "cx8"),
    (9, "apic"),
    (11, "sep"),
    (12, "mtrr"),
    (13, "pge"),
    (14, "mca"),
    (15, "cmov"),
    (16, "pat"),
    (17, "pse36"),
    (19, "clflush"),
    (23, "mmx"),
    (24, "fxsr"),
    (25, "sse"),
    (26, "sse2"),
    (27, "ss"),
    (28, "ht"),
];

const LEAF_7_EBX: &[(u8, &str)] = &[
    (0, "fsgsbase"),
    (1, "tsc_adjust"),
    (3, "bmi1"),
    (4, "hle"),
    (5, "avx2"),
    (7, "smep"),
    (8, "bmi2"),
    (9, "erms"),
    (10, "invpcid"),
    (11, "rtm"),
    (14, "mpx"),
    (16, "avx512f"),
    (17, "avx512dq"),
    (18, "rdseed"),
    (19, "adx"),
    (20, "smap"),
    (21, "avx512ifma"),
    (23, "clflushopt"),
    (24, "clwb"),
    (28, "avx512cd"),
    (29, "sha_ni"),
    (30, "avx512bw"),
    (31, "avx512vl"),
];

const LEAF_7_ECX: &[(u8, &str)] = &[
    (1, "avx512vbmi"),
    (2, "umip"),
    (3, "pku"),
    (5, "waitpkg"),
    (6, "avx512_vbmi2"),
    (7, "shstk"),
    (8, "gfni"),
    (9, "vaes"),
    (10, "vpclmulqdq"),
    (11, "avx512_vnni"),
    (12, "avx512_bitalg"),
    (14, "avx512_vpopcntdq"),
    (16, "la57"),
    (22, "rdpid"),
    (24, "bus_lock_detect"),
    (25, "cldemote"),
    (27, "movdiri"),
    (28, "movdir64b"),
];

const LEAF_7_EDX: &[(u8, &str)] = &[
    (2, "avx512_4vnniw"),
    (3, "avx512_4fmaps"),
    (4, "fsrm"),
    (8, "avx512_vp2intersect"),
    (10, "md_clear"),
    (14, "serialize"),
    (16, "tsxldtrk"),
    (18, "pconfig"),
    (20, "ibt"),
    (22, "amx_bf16"),
    (23, "avx512_fp16"),
    (24, "amx_tile"),
    (25, "amx_int8"),
    (26, "spec_ctrl"),
    (27, "stibp"),
    (28, "flush_l1d"),
    (29, "arch_capabilities"),
    (31, "ssbd"),
];

const LEAF_7_1_EAX: &[(u8, &str)] = &[
    (0, "sha512"),
    (1, "sm3"),
    (2, "sm4"),
    (4, "avx_vnni"),
    (5, "avx512_bf16"),
    (7, "cmpccxadd"),
    (10, "fzrm"),
    (11, "fsrs"),
    (12, "fsrc"),
    (17, "fred"),
    (18, "lkgs"),
    (19, "wrmsrns"),
    (21, "amx_fp16"),
    (23, "avx_ifma"),
    (26, "lam"),
];

const EXT_1_ECX: &[(u8, &str)] = &[
    (0, "lahf_lm"),
    (1, "cmp_legacy"),
    (2, "svm"),
    (4, "cr8_legacy"),
    (5, "abm"),
    (6, "sse4a"),
    (7, "misalignsse"),
    (8, "3dnowprefetch"),
    (9, "osvw"),
    (11, "xop"),
    (16, "fma4"),
    (21, "tbm"),
    (22, "topoext"),
    (23, "perfctr_core"),
];
