// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Minimal bpf(2) interface for one small program on a tracepoint.
//!
//! May contain `unsafe`: the system call. Owns numbers and structures of the interface. Must never
//! decide what a program does.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const MAP_CREATE: libc::c_int = 0;
const PROG_LOAD: libc::c_int = 5;
const RAW_TRACEPOINT_OPEN: libc::c_int = 17;
const MAP_LOOKUP_AND_DELETE_ELEM: libc::c_int = 21;

const MAP_TYPE_HASH: u32 = 1;
const MAP_TYPE_ARRAY: u32 = 2;
/// The values of an array can be mapped, since Linux 5.5.
const MAP_MAPPABLE: u32 = 1 << 10;
const PROG_TYPE_RAW_TRACEPOINT: u32 = 17;

/// Licence of the program, which the kernel checks for calls of GPL-only functions; there are none.
const LICENCE: &CStr = c"Apache-2.0 OR BSD-3-Clause";

/// A BPF instruction.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insn {
    code: u8,
    /// Destination register in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// A register: 0 holds results, 1 to 5 arguments, 6 to 9 survive calls, 10 is the frame pointer.
#[derive(Clone, Copy, Debug)]
pub struct Reg(pub u8);

/// A helper function of the kernel.
#[derive(Clone, Copy, Debug)]
pub enum Helper {
    /// `bpf_map_update_elem`.
    MapUpdate = 2,
    /// `bpf_get_ns_current_pid_tgid`, since Linux 5.7.
    PidsInNamespace = 120,
}

impl Insn {
    const fn new(code: u8, to: Reg, from: Reg, offset: i16, immediate: i32) -> Self {
        Self { code, registers: to.0 | from.0 << 4, offset, immediate }
    }

    /// `to = from`.
    pub const fn copy(to: Reg, from: Reg) -> Self {
        Self::new(0xbf, to, from, 0, 0)
    }

    /// `to = value`.
    pub const fn set(to: Reg, value: i32) -> Self {
        Self::new(0xb7, to, Reg(0), 0, value)
    }

    /// `to += value`.
    pub const fn add(to: Reg, value: i32) -> Self {
        Self::new(0x07, to, Reg(0), 0, value)
    }

    /// `to = value` of 64 bits, which takes two instructions.
    pub const fn set_wide(to: Reg, value: u64) -> [Self; 2] {
        Self::wide(to, Reg(0), value)
    }

    /// `to` = a map of this process.
    pub fn set_map(to: Reg, map: &OwnedFd) -> [Self; 2] {
        const PSEUDO_MAP_FD: Reg = Reg(1);
        Self::wide(to, PSEUDO_MAP_FD, u64::from(map.as_raw_fd().unsigned_abs()))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the value")]
    const fn wide(to: Reg, kind: Reg, value: u64) -> [Self; 2] {
        let (low, high) = ((value as u32).cast_signed(), ((value >> 32) as u32).cast_signed());
        [Self::new(0x18, to, kind, 0, low), Self::new(0, Reg(0), Reg(0), 0, high)]
    }

    /// `to` = the address of the only value of an array of this process.
    pub fn set_value(to: Reg, array: &OwnedFd) -> [Self; 2] {
        const PSEUDO_MAP_VALUE: Reg = Reg(2);
        Self::wide(to, PSEUDO_MAP_VALUE, u64::from(array.as_raw_fd().unsigned_abs()))
    }

    /// `to += from`.
    pub const fn add_register(to: Reg, from: Reg) -> Self {
        Self::new(0x0f, to, from, 0, 0)
    }

    /// `to &= mask`.
    pub const fn and(to: Reg, mask: i32) -> Self {
        Self::new(0x57, to, Reg(0), 0, mask)
    }

    /// `to <<= bits`.
    pub const fn shift_left(to: Reg, bits: i32) -> Self {
        Self::new(0x67, to, Reg(0), 0, bits)
    }

    /// Skips `over` instructions if both registers have the same value.
    pub const fn skip_if_same(one: Reg, other: Reg, over: i16) -> Self {
        Self::new(0x1d, one, other, over, 0)
    }

    /// Skips `over` instructions.
    pub const fn skip(over: i16) -> Self {
        Self::new(0x05, Reg(0), Reg(0), over, 0)
    }

    /// `to` = the 64 bits at `from + offset`.
    pub const fn load(to: Reg, from: Reg, offset: i16) -> Self {
        Self::new(0x79, to, from, offset, 0)
    }

    /// `to` = the 32 bits at `from + offset`.
    pub const fn load32(to: Reg, from: Reg, offset: i16) -> Self {
        Self::new(0x61, to, from, offset, 0)
    }

    /// The 64 bits at `to + offset` = `from`.
    pub const fn store(to: Reg, offset: i16, from: Reg) -> Self {
        Self::new(0x7b, to, from, offset, 0)
    }

    /// The 64 bits at `to + offset` = `value`.
    pub const fn store_value(to: Reg, offset: i16, value: i32) -> Self {
        Self::new(0x7a, to, Reg(0), offset, value)
    }

    /// Skips `over` instructions unless `register == value`.
    pub const fn skip_unless(register: Reg, value: i32, over: i16) -> Self {
        Self::new(0x55, register, Reg(0), over, value)
    }

    /// Calls a helper.
    pub const fn call(helper: Helper) -> Self {
        Self::new(0x85, Reg(0), Reg(0), 0, helper as i32)
    }

    /// Returns register 0.
    pub const fn exit() -> Self {
        Self::new(0x95, Reg(0), Reg(0), 0, 0)
    }
}

/// Makes a BPF system call with its part of `union bpf_attr`.
///
/// # Safety
/// `attributes` must be those of the request, and the memory that their addresses point to must be valid
/// for the lengths that the kernel expects.
unsafe fn bpf<T>(request: libc::c_int, attributes: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads and writes no more of the attributes than the size says; the caller
    // vouches for what they point to.
    let answer = unsafe {
        libc::syscall(libc::SYS_bpf, request, std::ptr::from_mut(attributes), size_of::<T>())
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Takes ownership of a descriptor returned by a request.
fn own(answer: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(answer).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address<T: ?Sized>(of: *const T) -> u64 {
    of.cast::<u8>().expose_provenance() as u64
}

/// Creates a table of `entries` 64-bit values with 32-bit keys.
///
/// # Errors
/// The kernel's error: `EPERM` without the permission.
pub fn create_table(entries: u32) -> io::Result<OwnedFd> {
    create(MAP_TYPE_HASH, 8, entries, 0)
}

/// Creates an array with one value of so many bytes, which can be mapped.
///
/// # Errors
/// The kernel's error: `EPERM` without the permission, `EINVAL` where arrays cannot be mapped.
pub fn create_mappable(value_bytes: u32) -> io::Result<OwnedFd> {
    create(MAP_TYPE_ARRAY, value_bytes, 1, MAP_MAPPABLE)
}

fn create(map_type: u32, value_bytes: u32, entries: u32, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        map_type: u32,
        key_bytes: u32,
        value_bytes: u32,
        entries: u32,
        flags: u32,
    }
    let mut attributes = Attributes { map_type, key_bytes: 4, value_bytes, entries, flags };
    // SAFETY: these attributes have no addresses.
    own(unsafe { bpf(MAP_CREATE, &mut attributes) }?)
}

/// Removes a key from a table, and returns its value.
///
/// # Errors
/// The kernel's error: `ENOENT` if there is none.
pub fn take_value(table: &OwnedFd, key: u32) -> io::Result<u64> {
    #[repr(C)]
    struct Attributes {
        map: u32,
        pad: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut value = 0_u64;
    let mut attributes = Attributes {
        map: table.as_raw_fd().unsigned_abs(),
        pad: 0,
        key: address(&raw const key),
        value: address(&raw mut value),
        flags: 0,
    };
    // SAFETY: tables are made by `create_table`, whose keys have the 4 bytes of `key` and values
    // the 8 of `value`; both outlive the call. Another descriptor makes it fail.
    unsafe { bpf(MAP_LOOKUP_AND_DELETE_ELEM, &mut attributes) }?;
    Ok(value)
}

/// Loads a program for a raw tracepoint. What the verifier says of it is put into `log`, unless that is empty.
///
/// # Errors
/// The kernel's error: `EPERM` without the permission, `EACCES` or `EINVAL` for a program that it refuses.
pub fn load(program: &[Insn], log: &mut [u8]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        program_type: u32,
        count: u32,
        instructions: u64,
        licence: u64,
        log_level: u32,
        log_bytes: u32,
        log: u64,
    }
    let mut attributes = Attributes {
        program_type: PROG_TYPE_RAW_TRACEPOINT,
        count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: address(program.as_ptr()),
        licence: address(LICENCE.as_ptr()),
        log_level: u32::from(!log.is_empty()),
        log_bytes: u32::try_from(log.len()).map_err(io::Error::other)?,
        log: if log.is_empty() { 0 } else { log.as_mut_ptr().expose_provenance() as u64 },
    };
    // SAFETY: the kernel reads `count` instructions and a terminated string, and writes at most `log_bytes` to `log`, which
    // all outlive the call.
    own(unsafe { bpf(PROG_LOAD, &mut attributes) }?)
}

/// Attaches a program to a tracepoint, until the returned descriptor is closed.
///
/// # Errors
/// The kernel's error: `ENOENT` if there is no such tracepoint, `EINVAL` if it has fewer arguments than the
/// program reads.
pub fn attach(program: &OwnedFd, tracepoint: &CStr) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        name: u64,
        program: u32,
        pad: u32,
    }
    let program = program.as_raw_fd().unsigned_abs();
    let mut attributes = Attributes { name: address(tracepoint.as_ptr()), program, pad: 0 };
    // SAFETY: the kernel reads a terminated string, which outlives the call.
    own(unsafe { bpf(RAW_TRACEPOINT_OPEN, &mut attributes) }?)
}

/// Runs a program for a raw tracepoint once, on the calling thread, with these arguments of the tracepoint.
///
/// # Errors
/// The kernel's error: `EPERM` without the permission.
#[cfg(test)]
pub fn run(program: &OwnedFd, arguments: &[u64]) -> io::Result<()> {
    const PROG_TEST_RUN: libc::c_int = 10;
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        program: u32,
        answer: u32,
        data_bytes: [u32; 2],
        data: [u64; 2],
        repeat: u32,
        duration: u32,
        context_bytes: [u32; 2],
        context: [u64; 2],
        flags: u32,
        cpu: u32,
        batch: u32,
        pad: u32,
    }
    let context_bytes = u32::try_from(size_of_val(arguments)).map_err(io::Error::other)?;
    let mut attributes = Attributes {
        program: program.as_raw_fd().unsigned_abs(),
        context_bytes: [context_bytes, 0],
        context: [address(arguments.as_ptr()), 0],
        ..Attributes::default()
    };
    // SAFETY: the kernel reads `context_bytes` of the arguments, which outlive the call.
    unsafe { bpf(PROG_TEST_RUN, &mut attributes) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_encoded_as_the_kernel_has_them() {
        assert_eq!(size_of::<Insn>(), 8);
        let load = Insn::load(Reg(7), Reg(6), 8);
        assert_eq!((load.code, load.registers, load.offset), (0x79, 0x67, 8));
        let [low, high] = Insn::set_wide(Reg(2), 0x1122_3344_8000_0001);
        assert_eq!((low.registers, low.immediate), (2, i32::MIN + 1));
        assert_eq!((high.code, high.immediate), (0, 0x1122_3344));
        assert_eq!(Insn::call(Helper::PidsInNamespace).immediate, 120);
    }
}
