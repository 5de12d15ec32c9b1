// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The reset of a function of the host.
//!
//! Owns the choice between a reset of the function alone (`VFIO_DEVICE_RESET`) and one of its bus or slot
//! (`VFIO_DEVICE_PCI_HOT_RESET`), which the host has for some functions without the other. The latter must never
//! reset a function that another has, or that the guest uses.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use crate::error::VfioError;
use crate::groups::{Affected, Lease, USE_WAIT};
use crate::ioctl::{self, answered, argument, number, u32_at};

/// `VFIO_PCI_HOT_RESET_FLAG_DEV_ID`: functions are described by numbers in an iommufd, not by groups.
const BY_NUMBER: u32 = 1;
/// `VFIO_PCI_HOT_RESET_FLAG_DEV_ID_OWNED`: the functions that would be reset are all of this iommufd.
const OWNED: u32 = 2;
/// Bytes before the functions: length, flags, number of functions.
const INFO_BYTES: usize = 12;
/// Bytes of a function: group or number, segment, bus, and its address there.
const FUNCTION_BYTES: usize = 8;
/// Functions on a bus for which there is room at first.
const FUNCTIONS_FIRST: usize = 32;
/// Limit on functions, in case the kernel names an absurd number; a bus has 256, and may have others behind it.
const FUNCTIONS_MAX: usize = 4096;

/// How often a reset is tried that the host is too busy for, and how long is waited in between: it is while
/// something else has the function locked, for a reset of its neighbour, say.
const TRIES: u32 = 20;
/// For how long a reset of the bus is tried again: another function on it may be in a reset of its own for seconds. No try
/// begins once a guest, which may not use those functions meanwhile, is kept waiting no longer.
const BUS_TIME: Duration = Duration::from_secs(4);
/// Between two of them.
const TRY_INTERVAL: Duration = Duration::from_millis(50);
const _: () = assert!(BUS_TIME.as_millis() < USE_WAIT.as_millis());

/// The calls, so that the choice can be tested without a function.
trait Resets {
    /// Resets the function alone.
    fn reset(&self) -> io::Result<()>;
    /// Resets its bus.
    ///
    /// # Errors
    /// Why that must not be; within, why it failed.
    fn reset_bus(&self, wait: &dyn Fn()) -> Result<io::Result<()>, String>;
}

struct Function<'a> {
    file: BorrowedFd<'a>,
    /// Of its group; `None` if it is of an iommufd.
    lease: Option<&'a Lease>,
}

/// What the kernel says of the functions that a reset of the bus affects.
struct BusInfo {
    flags: u32,
    /// One has [`FUNCTION_BYTES`].
    functions: Vec<u8>,
}

impl BusInfo {
    /// As `ask` says, again with more room if there are more functions.
    fn of(ask: &mut dyn FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<Self> {
        let mut room = FUNCTIONS_FIRST;
        loop {
            let mut info = vec![0; INFO_BYTES + room * FUNCTION_BYTES];
            let answer = ask(&mut info);
            let count = usize::try_from(u32_at(&info, 8)).map_err(io::Error::other)?;
            match answer {
                Ok(()) if count <= room => {
                    let flags = u32_at(&info, 4);
                    info.truncate(INFO_BYTES + count * FUNCTION_BYTES);
                    return Ok(Self { flags, functions: info.split_off(INFO_BYTES) });
                }
                Err(error) if error.raw_os_error() != Some(libc::ENOSPC) => return Err(error),
                _ if count <= room || count > FUNCTIONS_MAX => {
                    return Err(io::Error::other(format!("{count} functions would be reset")));
                }
                _ => room = count,
            }
        }
    }

    /// Whether it is one function, which an iommufd of this process has.
    fn is_alone(&self) -> bool {
        self.functions.len() == FUNCTION_BYTES && self.flags & OWNED != 0
    }

    /// The functions, where they are described by their groups.
    fn affected(&self) -> Option<Vec<Affected>> {
        let one = |function: &[u8]| {
            let [group @ .., segment_low, segment_high, bus, devfn] = function else { return None };
            let segment = u16::from_ne_bytes([*segment_low, *segment_high]);
            let name = format!("{segment:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7);
            Some(Affected::new(&name, &u32_at(group, 0).to_string()))
        };
        let is_by_group = self.flags & BY_NUMBER == 0 && !self.functions.is_empty();
        let functions = self.functions.chunks(FUNCTION_BYTES);
        is_by_group.then(|| functions.map(one).collect())?
    }
}

impl Function<'_> {
    /// Resets the bus, by the right that these files of groups give; none for a function of an iommufd.
    fn reset_bus_by(&self, groups: &[BorrowedFd<'_>], wait: &dyn Fn()) -> io::Result<()> {
        let count = u32::try_from(groups.len()).map_err(io::Error::other)?;
        let groups: Vec<_> =
            groups.iter().flat_map(|file| file.as_raw_fd().to_ne_bytes()).collect();
        let mut request = argument(&[0, count]);
        request.extend(groups);
        let call = || ioctl::call(self.file, ioctl::HOT_RESET, &mut request.clone());
        let begun = Instant::now();
        patiently(call, || begun.elapsed() < BUS_TIME, wait)
    }
}

impl Resets for Function<'_> {
    fn reset(&self) -> io::Result<()> {
        // SAFETY: the call takes no argument.
        answered(unsafe { libc::ioctl(self.file.as_raw_fd(), number::RESET) }).map(|_| ())
    }

    fn reset_bus(&self, wait: &dyn Fn()) -> Result<io::Result<()>, String> {
        let ask = &mut |info: &mut [u8]| ioctl::call(self.file, ioctl::HOT_RESET_INFO, info);
        let info = BusInfo::of(ask).map_err(|error| format!("it knows none ({error})"))?;
        let result = if let Some(lease) = self.lease {
            let affected = info.affected().ok_or("it names no groups of its functions")?;
            let own = lease.device().ok_or("it is no device of this VM")?;
            let claim = lease.groups().claim(own, &affected)?;
            let files: Vec<_> = claim.files().collect();
            self.reset_bus_by(&files, wait)
        } else if info.is_alone() {
            self.reset_bus_by(&[], wait)
        } else {
            return Err("that resets other functions, too".to_owned());
        };
        match result {
            // It looks before it does anything.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Err("not all functions that this resets are bound to vfio-pci".to_owned())
            }
            result => Ok(result),
        }
    }
}

/// Calls again while the host is too busy, and `may_try` lets it. The reset of a bus says EBUSY while another of its functions
/// is being reset or asked (`vfio_pci_dev_set_hot_reset`, which waits for no lock of theirs).
fn patiently(
    call: impl Fn() -> io::Result<()>,
    mut may_try: impl FnMut() -> bool,
    wait: &dyn Fn(),
) -> io::Result<()> {
    loop {
        let result = call();
        let is_busy =
            |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY));
        if !result.as_ref().is_err_and(is_busy) || !may_try() {
            return result;
        }
        wait();
    }
}

/// Resets the function; within, why it is not reset if the host knows no way. With `has_reset` it knows one, and answers that
/// there is none (EINVAL, ENOTTY) when the function did not come back from it, or had not when it was opened.
fn reset_by(
    function: &impl Resets,
    has_reset: bool,
    wait: &dyn Fn(),
) -> io::Result<Result<(), String>> {
    let mut tries_left = TRIES;
    let may_try = || {
        tries_left -= 1;
        tries_left > 0
    };
    let refusal = match patiently(|| function.reset(), may_try, wait) {
        Ok(()) => return Ok(Ok(())),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP) => error,
            _ => return Err(error),
        },
    };
    match function.reset_bus(wait) {
        Ok(result) => result.map(Ok),
        Err(_) if has_reset => Err(refusal),
        Err(why) => Ok(Err(why)),
    }
}

/// Resets the function with this open file. `id` is for messages; with `has_reset` the host knows how to reset it alone.
/// `lease` is that of its group, if it has not come by an iommufd.
///
/// # Errors
/// See [`crate::HostFunction::reset`].
pub(super) fn reset(
    id: &str,
    file: BorrowedFd<'_>,
    has_reset: bool,
    lease: Option<&Lease>,
) -> Result<(), VfioError> {
    let wait = || std::thread::sleep(TRY_INTERVAL);
    let done = reset_by(&Function { file, lease }, has_reset, &wait).map_err(VfioError::Reset)?;
    if let Err(why) = done {
        log::warn!(
            "passed-through device {id} is used without a reset: the host can reset neither the function alone, \
             nor its bus: {why}"
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

        fn reset_bus(&self, _wait: &dyn Fn()) -> Result<io::Result<()>, String> {
            if !self.is_alone {
                return Err("others are there".to_owned());
            }
            self.calls.borrow_mut().push("hot");
            Ok(answer(self.hot_reset))
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
            let reset = reset_by(&function, false, &|| ()).ok();
            assert_eq!(reset.map(|done| done.is_ok()), result);
            assert_eq!(*function.calls.borrow(), calls);
        }
    }

    #[test]
    fn a_reset_that_is_known_and_refused_has_failed() {
        for errno in [libc::EINVAL, libc::ENOTTY] {
            let error = reset_by(&fake(&[errno], false, 0), true, &|| ()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
            let why = reset_by(&fake(&[errno], false, 0), false, &|| ()).unwrap().unwrap_err();
            assert_eq!(why, "others are there");
            // That of its bus does as well.
            reset_by(&fake(&[errno], true, 0), true, &|| ()).unwrap().unwrap();
        }
    }

    #[test]
    fn a_host_that_is_busy_is_asked_again_but_not_forever() {
        let waits = Cell::new(0);
        let wait = || waits.set(waits.get() + 1);
        let busy = fake(&[libc::EAGAIN, libc::EAGAIN, 0], true, 0);
        reset_by(&busy, false, &wait).unwrap().unwrap();
        assert_eq!(waits.take(), 2);
        let error = reset_by(&fake(&[libc::EAGAIN], true, 0), false, &wait).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(waits.get(), TRIES - 1);
    }

    #[test]
    fn a_bus_of_which_another_function_is_locked_is_waited_for() {
        let (calls, waits) = (Cell::new(0), Cell::new(0));
        let busy = |until: u32, last: u32| {
            calls.set(0);
            let call = || {
                calls.set(calls.get() + 1);
                answer(if calls.get() > until { 0 } else { libc::EBUSY })
            };
            patiently(call, || calls.get() < last, &|| waits.set(waits.get() + 1))
        };
        busy(79, 80).unwrap();
        assert_eq!(waits.take(), 79);
        assert_eq!(busy(80, 80).unwrap_err().raw_os_error(), Some(libc::EBUSY));
        assert_eq!(calls.get(), 80, "none begins when it may not");
    }

    #[test]
    fn a_file_that_is_no_function_has_no_reset() {
        let file = std::fs::File::open("/dev/null").unwrap();
        reset("none", std::os::fd::AsFd::as_fd(&file), false, None).unwrap();
    }

    /// A bus as the kernel describes it: groups or numbers, segment, bus and place.
    fn bus(flags: u32, functions: &[(u32, u16, u8, u8)]) -> io::Result<BusInfo> {
        let asked = Cell::new(0);
        let info = BusInfo::of(&mut |info| {
            asked.set(asked.get() + 1);
            info[4..8].copy_from_slice(&flags.to_ne_bytes());
            info[8..12].copy_from_slice(&u32::try_from(functions.len()).unwrap().to_ne_bytes());
            let all: Vec<u8> = functions
                .iter()
                .flat_map(|(group, segment, bus, devfn)| {
                    [&group.to_ne_bytes()[..], &segment.to_ne_bytes(), &[*bus, *devfn]].concat()
                })
                .collect();
            match info.get_mut(12..12 + all.len()) {
                Some(room) => room.copy_from_slice(&all),
                None => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            }
            Ok(())
        });
        assert!(asked.get() <= 2);
        info
    }

    #[test]
    fn functions_on_a_bus_are_named_with_their_groups() {
        let affected = bus(0, &[(7, 0x1_u16, 0x65, 0), (12, 1, 0x65, 0x1b)]).unwrap().affected();
        let expected = [("0001:65:00.0", "7"), ("0001:65:03.3", "12")];
        assert_eq!(affected.unwrap(), expected.map(|(name, group)| Affected::new(name, group)));
        let widest = bus(0, &[(u32::MAX, u16::MAX, 0xff, 0xff)]).unwrap().affected().unwrap();
        assert_eq!(widest, [Affected::new("ffff:ff:1f.7", "4294967295")]);
        assert!(bus(0, &[]).unwrap().affected().is_none());
        assert!(bus(BY_NUMBER, &[(7, 1, 2, 3)]).unwrap().affected().is_none(), "no groups");
    }

    #[test]
    fn an_iommufd_resets_the_bus_of_one_function_that_is_its_own() {
        let one = (7, 1, 2, 3);
        assert!(bus(BY_NUMBER | OWNED, &[one]).unwrap().is_alone());
        assert!(!bus(BY_NUMBER, &[one]).unwrap().is_alone());
        assert!(!bus(BY_NUMBER | OWNED, &[one, one]).unwrap().is_alone());
    }

    #[test]
    fn a_bus_may_have_many_functions_but_no_absurd_number() {
        let many = |count| bus(0, &vec![(7, 0, 2, 3); count]);
        assert_eq!(many(300).unwrap().affected().unwrap().len(), 300);
        assert!(many(FUNCTIONS_MAX + 1).is_err());
        // As many as fit, it says, but does not.
        let refuses = BusInfo::of(&mut |_| Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert!(refuses.is_err());
        let lies = BusInfo::of(&mut |info| {
            info[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
            Ok(())
        });
        assert!(lies.is_err());
    }
}
