// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The reset of a function of the host.
//!
//! Owns the choice between a reset of the function alone (`VFIO_DEVICE_RESET`) and one of its bus or slot
//! (`VFIO_DEVICE_PCI_HOT_RESET`), which the host has for some functions without the other. The latter must never
//! reset a function besides the one that was asked for. Numbers and structures are those of Linux's
//! `include/uapi/linux/vfio.h`.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use crate::error::VfioError;

const RESET: libc::Ioctl = 0x3b6f;
const HOT_RESET_INFO: libc::Ioctl = 0x3b70;
const HOT_RESET: libc::Ioctl = 0x3b71;
/// `VFIO_PCI_HOT_RESET_FLAG_DEV_ID_OWNED`: the functions that would be reset are all of this iommufd.
const OWNED: u32 = 2;
/// Words of [`HOT_RESET_INFO`]: length, flags, number of functions, and one function of two words.
const INFO_WORDS: usize = 5;

/// How often a reset is tried that the host is too busy for, and how long is waited in between: it is while
/// something else has the function locked, for a reset of its neighbour, say.
const TRIES: u32 = 20;
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// The calls, so that the choice can be tested without a function.
trait Resets {
    /// Resets the function alone.
    fn reset(&self) -> io::Result<()>;
    /// Whether a reset of the bus would reset this function alone, of which the caller has the right to it.
    fn is_alone(&self) -> io::Result<bool>;
    /// Resets the bus.
    fn hot_reset(&self) -> io::Result<()>;
}

struct Function<'a>(BorrowedFd<'a>);

impl Function<'_> {
    fn call(&self, request: libc::Ioctl, words: &mut [u32]) -> io::Result<()> {
        // SAFETY: the kernel reads and writes no more than the first word says, in bytes, which is at most what
        // the slice has; a reset takes no argument. Any bits are valid there.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Resets for Function<'_> {
    fn reset(&self) -> io::Result<()> {
        self.call(RESET, &mut [])
    }

    fn is_alone(&self) -> io::Result<bool> {
        let mut info = [0; INFO_WORDS];
        info[0] = u32::try_from(size_of_val(&info)).map_err(io::Error::other)?;
        match self.call(HOT_RESET_INFO, &mut info) {
            Ok(()) => Ok(info[2] == 1 && info[1] & OWNED != 0),
            // More than one.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn hot_reset(&self) -> io::Result<()> {
        // No descriptors of groups: the function is of an iommufd.
        let mut request = [0; 3];
        request[0] = u32::try_from(size_of_val(&request)).map_err(io::Error::other)?;
        self.call(HOT_RESET, &mut request)
    }
}

/// Calls again while the host is too busy.
fn patiently(call: impl Fn() -> io::Result<()>, wait: &dyn Fn()) -> io::Result<()> {
    let mut result = call();
    for _ in 1..TRIES {
        let Err(error) = &result else { break };
        if error.raw_os_error() != Some(libc::EAGAIN) {
            break;
        }
        wait();
        result = call();
    }
    result
}

/// Resets the function; false if the host knows no way. With `has_reset` it knows one, and answers that there is none
/// (EINVAL, ENOTTY) when the function did not come back from it, or had not when it was opened.
fn reset_by(function: &impl Resets, has_reset: bool, wait: &dyn Fn()) -> io::Result<bool> {
    let refusal = match patiently(|| function.reset(), wait) {
        Ok(()) => return Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP) => error,
            _ => return Err(error),
        },
    };
    if function.is_alone().unwrap_or(false) {
        return patiently(|| function.hot_reset(), wait).map(|()| true);
    }
    if has_reset { Err(refusal) } else { Ok(false) }
}

/// Resets the function with this open file. `id` is for messages; with `has_reset` the host knows how to reset it alone.
///
/// # Errors
/// See [`crate::HostFunction::reset`].
pub(super) fn reset(id: &str, file: BorrowedFd<'_>, has_reset: bool) -> Result<(), VfioError> {
    let wait = || std::thread::sleep(TRY_INTERVAL);
    if !reset_by(&Function(file), has_reset, &wait).map_err(VfioError::Reset)? {
        log::warn!(
            "passed-through device {id} is used without a reset: the host can reset neither the function alone, \
             nor its bus without other functions"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::cell::{Cell, RefCell};

    use super::*;

    /// Answers with these error numbers, the last again and again; 0 is none.
    struct Fake {
        reset: RefCell<Vec<i32>>,
        is_alone: bool,
        hot_reset: i32,
        calls: RefCell<Vec<&'static str>>,
    }

    fn answer(errno: i32) -> io::Result<()> {
        if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
    }

    impl Resets for Fake {
        fn reset(&self) -> io::Result<()> {
            self.calls.borrow_mut().push("reset");
            let mut answers = self.reset.borrow_mut();
            let next = if answers.len() > 1 { answers.remove(0) } else { answers[0] };
            answer(next)
        }

        fn is_alone(&self) -> io::Result<bool> {
            Ok(self.is_alone)
        }

        fn hot_reset(&self) -> io::Result<()> {
            self.calls.borrow_mut().push("hot");
            answer(self.hot_reset)
        }
    }

    fn fake(reset: &[i32], is_alone: bool, hot_reset: i32) -> Fake {
        Fake { reset: RefCell::new(reset.to_vec()), is_alone, hot_reset, calls: RefCell::default() }
    }

    #[test]
    fn the_bus_is_reset_for_one_function_only_and_only_if_that_has_no_reset() {
        for (function, result, calls) in [
            (fake(&[0], true, 0), Some(true), vec!["reset"]),
            (fake(&[libc::EINVAL], true, 0), Some(true), vec!["reset", "hot"]),
            (fake(&[libc::ENOTTY], true, 0), Some(true), vec!["reset", "hot"]),
            (fake(&[libc::EINVAL], false, 0), Some(false), vec!["reset"]),
            (fake(&[libc::EIO], true, 0), None, vec!["reset"]),
            (fake(&[libc::EINVAL], true, libc::EIO), None, vec!["reset", "hot"]),
        ] {
            assert_eq!(reset_by(&function, false, &|| ()).ok(), result);
            assert_eq!(*function.calls.borrow(), calls);
        }
    }

    #[test]
    fn a_reset_that_is_known_and_refused_has_failed() {
        for errno in [libc::EINVAL, libc::ENOTTY] {
            let error = reset_by(&fake(&[errno], false, 0), true, &|| ()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
            assert!(!reset_by(&fake(&[errno], false, 0), false, &|| ()).unwrap());
            // That of its bus does as well.
            assert!(reset_by(&fake(&[errno], true, 0), true, &|| ()).unwrap());
        }
    }

    #[test]
    fn a_host_that_is_busy_is_asked_again_but_not_forever() {
        let waits = Cell::new(0);
        let wait = || waits.set(waits.get() + 1);
        assert!(reset_by(&fake(&[libc::EAGAIN, libc::EAGAIN, 0], true, 0), false, &wait).unwrap());
        assert_eq!(waits.take(), 2);
        let error = reset_by(&fake(&[libc::EAGAIN], true, 0), false, &wait).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(waits.get(), TRIES - 1);
    }

    #[test]
    fn a_file_that_is_no_function_has_no_reset() {
        let file = std::fs::File::open("/dev/null").unwrap();
        reset("none", std::os::fd::AsFd::as_fd(&file), false).unwrap();
    }
}
