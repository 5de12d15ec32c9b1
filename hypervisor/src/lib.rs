// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM behind traits that are small enough to fake.
//!
//! Owns the VM and vCPU file descriptors, memory slots, interrupt routes, dirty logs and the vCPU
//! threads. Knows nothing of devices, of guest memory contents or of migration.

pub mod irq;
