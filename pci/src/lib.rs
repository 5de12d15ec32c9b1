// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Placeholder head, replaced by the room itself.
