// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The kernel's permission for guests of this process to use AMX.
//!
//! Owns the one request. Linux gives tile data, 8 KiB of state, only to processes that ask for it
//! (Documentation/arch/x86/xstate.rst): without it KVM leaves the component out of CPUID leaf 0xD, and
//! so contradicts the feature bits of leaf 7. What is permitted is fixed with the first vCPU of the
//! process.

use std::io;

/// `ARCH_REQ_XCOMP_GUEST_PERM` of asm/prctl.h.
const REQUEST_GUEST_PERMISSION: libc::c_int = 0x1025;
/// `XFEATURE_XTILEDATA`: number of the component in XCR0.
const TILE_DATA: libc::c_ulong = 18;

/// Why guests of this process cannot have AMX.
#[derive(Debug, thiserror::Error)]
pub enum AmxError {
    /// A VM without AMX has run in this process.
    #[error(
        "guests of this process cannot be given AMX any more, as one without it has run: start a new \
         process for this VM"
    )]
    TooLate,
    /// The host has no AMX, or does not permit it.
    #[error(
        "this host does not give AMX to guests: leave features=amx out, or use a host with AMX"
    )]
    Refused(#[source] io::Error),
    /// KVM does not report its features.
    #[error(transparent)]
    Kvm(#[from] crate::KvmError),
}

/// Requests the permission. Idempotent.
pub fn request_permission() -> Result<(), AmxError> {
    // SAFETY: this arch_prctl takes two numbers and touches no memory of the process.
    let result =
        unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_GUEST_PERMISSION, TILE_DATA) };
    if result == 0 { Ok(()) } else { Err(refusal(io::Error::last_os_error())) }
}

fn refusal(error: io::Error) -> AmxError {
    match error.raw_os_error() {
        Some(libc::EBUSY) => AmxError::TooLate,
        _ => AmxError::Refused(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_comes_too_late_is_told_from_a_host_without() {
        let text = |number| refusal(io::Error::from_raw_os_error(number)).to_string();
        assert!(text(libc::EBUSY).contains("start a new process"), "{}", text(libc::EBUSY));
        assert!(text(libc::EOPNOTSUPP).contains("this host"), "{}", text(libc::EOPNOTSUPP));
        assert!(text(libc::EINVAL).contains("this host"), "{}", text(libc::EINVAL));
    }
}
