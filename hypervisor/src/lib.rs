// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM hypervisor interface: a VM, its vCPUs and their threads, memory slots, interrupts and state.
//!
//! Owns the VM and vCPU file descriptors, memory slots, interrupt routes, dirty logs and the vCPU
//! threads. Knows nothing of devices, of guest memory contents or of migration. Devices use interrupts
//! through traits ([`irq`]) that tests implement without KVM.
//!
//! # The modules
//!
//! | layer | modules | contents |
//! | --- | --- | --- |
//! | trial | `fault_trial` | one access that the host refuses, in a VM made for it |
//! | threads | `threads`, `exits`, `throttle`, `stage2` | vCPUs on threads: run, pause, answer exits, slow down, fill page tables |
//! | vCPU | `vcpu`, `vcpu_save`, `run_page`, `kick` | one vCPU: registers, its state saved and set, the shared page, the signal that ends `KVM_RUN` |
//! | parts of VM | `dirty`, `clock`, `irqchip`, `vfio` | each an `impl Vm`: dirty log, time, interrupt controllers, files of VFIO devices |
//! | VM | `vm`, with `memslots` and `msi` | the descriptor and what all parts share: memory slots, interrupt routes |
//! | host | `caps`, `fault_trace`, `fault_slots` | what this KVM can do; faults that another process takes |
//! | kinds of state | `vcpu_state`, `tsc`, `msr`, `amx`, `hyperv`, `shadow_stack`, `routing`, `userfault` | the saved form; one feature of the processor or of KVM each |
//! | base | `ioctl`, `bpf`, `blob`, `error`, `irq` | calls that no crate wraps, bytes from outside, errors, the traits of interrupts |
//!
//! Modules import from their own layer and those below.
//!
//! # Making a VM
//!
//! [`Hypervisor::open`] probes the host, [`Vm::create`] makes a VM with the interrupt controllers
//! in the kernel, [`Vm::create_vcpu`] a vCPU, [`Vcpu::init`] gives it its boot state, and
//! [`VcpuThreads::start`] puts each vCPU on a separate thread, parked.
//!
//! # Moving a VM
//!
//! Save, with the vCPUs parked ([`VcpuThreads::pause_all`]), in any order: [`Vm::clock`],
//! [`Vcpu::state`] of each vCPU, [`Vm::irqchips`].
//!
//! Restore in this order, as each step depends on the one before:
//!
//! 1. create the VM, its memory slots and all vCPUs;
//! 2. [`Vm::restore_clock`], which says how far guest time has moved;
//! 3. [`Vcpu::set_state`] of each vCPU with that answer: the TSC follows the clock, and the timers
//!    of the local APIC follow the TSC;
//! 4. [`Vm::set_irqchips`]: the IOAPIC may deliver what is pending to local APICs, so they must
//!    have their state;
//! 5. MSI vectors are programmed by their devices, which delivers pending triggers.
//!
//! State that comes from outside ([`VcpuState`], [`ClockState`], [`IrqchipState`]) is untrusted:
//! every length in it is checked before the kernel sees it.

mod amx;
mod blob;
mod bpf;
mod caps;
mod clock;
mod dirty;
mod error;
mod exits;
mod fault_slots;
mod fault_trace;
mod fault_trial;
mod hyperv;
mod ioctl;
pub mod irq;
mod irqchip;
mod kick;
mod msr;
mod routing;
mod run_page;
mod shadow_stack;
mod stage2;
mod threads;
mod throttle;
mod tsc;
mod userfault;
mod vcpu;
mod vcpu_save;
mod vcpu_state;
mod vfio;
mod vm;

pub use amx::AmxError;
pub use blob::{Blob, BlobError};
pub use caps::{Capabilities, Hypervisor, ManualDirtyLog, OpenError};
pub use clock::{ClockPolicy, ClockState, TimeBase, now_ns};
pub use error::KvmError;
pub use exits::{AfterExit, ExitHandler, FaultAction, StopReason};
pub use fault_trace::{FaultTraceError, FaultTracer, FaultedAt};
pub use fault_trial::{FaultTrialError, try_refused_access};
pub use hyperv::NoHyperv;
pub use irqchip::{IrqchipState, IrqchipStateError};
pub use msr::MsrValue;
pub use routing::{GODWIT_INTERRUPTS, InterruptRules};
pub use stage2::{Stage2Fill, Stage2Filled};
pub use threads::{NotAdded, Standstill, ThreadsConfig, ThreadsError, VcpuThreads};
pub use throttle::{THROTTLE_PERCENT_MAX, VcpuThrottle};
pub use tsc::{SharedTsc, TscState};
pub use userfault::{FaultCause, FaultedAccess, UserfaultBitmap, UserfaultSupport};
pub use vcpu::{BootRegisters, Vcpu, VcpuInit};
pub use vcpu_state::{CpuidEntry, VCPU_STATE_VERSION, VcpuState, VcpuStateError};
pub use vfio::{AttachedFile, LevelLine, VfioFiles};
pub use vm::{InterruptLine, MemslotConfig, MemslotError, Vm, VmConfig};
