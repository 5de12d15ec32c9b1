// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! qcow2 images (QEMU's copy-on-write format, versions 2 and 3), through the crate `imago`.
//!
//! ```text
//!   Chain: the image and its backing files are open; header and tables are checked
//!     |  load                                  ^
//!     v                                        | each reads and writes through
//!   Qcow2Driver > imago > Store (a file) ------+
//! ```
//!
//! Owns the checks of an image before the library uses it, as the library does not expect hostile images.

mod chain;
mod driver;
mod header;
#[cfg(any(test, feature = "testing"))]
mod sample;
mod tables;
#[cfg(test)]
mod tests;

pub(super) use chain::Chain;
#[cfg(any(test, feature = "testing"))]
pub use sample::Sample;
