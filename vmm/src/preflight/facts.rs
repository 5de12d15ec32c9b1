// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All that is read of a host before it is judged.
//!
//! Owns the order of reading. It must never judge.

use ::memory::HostMemory;

use super::devices::DeviceFacts;
use super::faults::FaultFacts;
use super::host_files::HostFiles;
use super::kernel::KernelFacts;
use super::kvm::KvmFacts;
use super::limits::LimitFacts;
use super::memory::MemoryFacts;
use super::net::NetFacts;
use super::passthrough::PassthroughFacts;
use super::rights::Rights;
use crate::config::VmConfig;
use crate::machine::{Host, ahead};

/// What is known of a host, as far as it matters for a VM.
pub struct Facts {
    pub kernel: KernelFacts,
    pub kvm: KvmFacts,
    pub faults: FaultFacts,
    pub memory: MemoryFacts,
    pub passthrough: PassthroughFacts,
    pub net: NetFacts,
    pub devices: DeviceFacts,
    pub limits: LimitFacts,
}

impl Facts {
    /// Those of this host. What a start chooses for the devices of the host is put into the configuration.
    pub fn read(config: &mut VmConfig) -> Self {
        let files = HostFiles::real();
        let rights = Rights::of(&files.text("/proc/self/status").unwrap_or_default());
        let opened = Host::open();
        let layout = ahead::layout(config, opened.as_ref().ok());
        let memory = MemoryFacts::read(&HostMemory::real(), config, layout);
        let stand_in = memory.zones.as_ref().ok().and_then(|zones| ahead::stand_in(zones, layout));
        let stand_in = stand_in.as_deref();
        Self {
            kernel: KernelFacts::read(&files, config),
            kvm: KvmFacts::read(opened.as_ref(), &files, config),
            faults: FaultFacts::read(&files),
            memory,
            passthrough: PassthroughFacts::read(&files, config, stand_in),
            net: NetFacts::read(&files, &rights),
            devices: DeviceFacts::read(config, stand_in),
            limits: LimitFacts::read(&files, &rights),
        }
    }
}
