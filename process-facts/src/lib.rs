// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the kernel says of a process: its status, its control groups, and the processors that it may use.
//!
//! Owns the forms of those texts in `/proc` and of files in which control groups limit processors. A text of another form
//! says nothing, and is never an error. Must never decide what follows from it.

mod cgroups;
mod cpu_set;
mod processors;
mod status;

pub use cgroups::{CGROUP_ROOT, Cgroups, groups_in};
pub use cpu_set::{CPUS_MAX, CpuSet};
pub use processors::{CpuQuota, unified_cpu_quota, usable_processors};
pub use status::Status;
