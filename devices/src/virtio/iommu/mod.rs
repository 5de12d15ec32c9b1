// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio IOMMU (virtio 1.3, 5.13), and the view of guest memory that devices behind it have.
//!
//! | module | what it is |
//! | --- | --- |
//! | `request` | requests and their answers as bytes |
//! | `table` | the mappings of one domain |
//! | `domains` | which endpoint is in which domain, and the limits |
//! | `endpoint` | what devices see: translation, what is in flight, faults |
//! | `device`, `worker`, `state` | the device, its thread, what is saved |
//!
//! Devices of this program alone are behind it: it translates for their queues, and programs no IOMMU of the host.

mod device;
mod domains;
mod endpoint;
mod request;
mod state;
mod table;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::{Iommu, IommuConfig};
pub use domains::IommuHandle;
pub use endpoint::{Endpoint, QueueDma};
