// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Keeps populated and zeroed memory ready for virtual machines.
