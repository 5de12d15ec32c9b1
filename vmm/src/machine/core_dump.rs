// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a core file has of a paused machine apart from its memory: the registers of its vCPUs.
//!
//! Owns no state. Must never run a vCPU.

use arch::core_dump::{CoreFile, CoreRange, CoreVcpu};
use hypervisor::{KvmError, Vcpu};

use super::{Machine, MachineError};

/// `IA32_KERNEL_GS_BASE`.
const KERNEL_GS_BASE: u32 = 0xc000_0102;

impl Machine {
    /// The core file of the machine, which must be paused, with these ranges of RAM.
    ///
    /// # Errors
    /// The registers of a vCPU cannot be read.
    pub fn core_file(&self, ranges: Vec<CoreRange>) -> Result<CoreFile, MachineError> {
        // Also those that were added since the pause, and run: memory must not change while it is written.
        self.parts.passthrough.stop()?;
        let vcpus: Result<Vec<_>, KvmError> =
            self.vcpus.on_each(|vcpu| registers(vcpu))?.into_iter().collect();
        Ok(CoreFile::new(ranges, vcpus?))
    }
}

fn registers(vcpu: &Vcpu) -> Result<CoreVcpu, KvmError> {
    let kernel_gs_base = vcpu.read_registers(&[KERNEL_GS_BASE])?.first().map_or(0, |msr| msr.value);
    Ok(CoreVcpu { regs: vcpu.regs()?, sregs: vcpu.sregs()?, kernel_gs_base })
}
