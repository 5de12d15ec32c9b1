// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! qcow2 images, QEMU's copy-on-write format, of versions 2 and 3, read and written by the crate `imago`.
//!
//! ```text
//!   Chain: the image and its backing files are open; header and tables are checked
//!     |  load                                  ^
//!     v                                        | each reads and writes through
//!   Qcow2Driver > imago > Store (a file) ------+
//! ```
//!
//! Owns what an image must keep to, as the library trusts more of it than may be trusted: an image comes from outside.

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
