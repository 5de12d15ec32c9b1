// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sets of the host's CPUs, of any number that Linux can have.
//!
//! The kernel fills no set that is smaller than the number of CPUs that the host could have, which is up to 8192 on x86-64;
//! that of the C library has room for 1024.
//!
//! Owns the form of a set, and the calls by which a thread's is read and set. Must never decide which CPUs a thread gets.

use std::io;

const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// Numbers of CPUs are below this: eight times as many as Linux can have on x86-64 (`NR_CPUS_RANGE_END`).
pub const CPUS_MAX: usize = 65536;

/// CPUs for which a set has room at least. Most kernels can have no more.
const CPUS_MIN: usize = 1024;

/// A set of CPUs as the kernel represents it: a bit for each, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSet(Vec<libc::c_ulong>);

impl CpuSet {
    fn empty(cpus: usize) -> Self {
        Self(vec![0; cpus.max(CPUS_MIN).div_ceil(WORD_BITS)])
    }

    /// Of these CPUs.
    ///
    /// # Errors
    /// One that no host has.
    pub fn of(cpus: &[usize]) -> io::Result<Self> {
        let mut set =
            Self::empty(cpus.iter().max().map_or(0, |last| last.saturating_add(1).min(CPUS_MAX)));
        for cpu in cpus {
            let Some(word) = set.0.get_mut(cpu / WORD_BITS) else {
                let what = format!("host CPU {cpu} does not exist");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            };
            *word |= 1 << (cpu % WORD_BITS);
        }
        Ok(set)
    }

    /// Those on which a thread may run; 0 is the calling one.
    ///
    /// # Errors
    /// The kernel does not say, or there is no such thread.
    pub fn of_thread(thread: libc::pid_t) -> io::Result<Self> {
        Self::filled_by(|words| {
            let len_bytes = size_of_val(words);
            // SAFETY: the kernel writes words of a set of any size, at most `len_bytes`, which are there.
            match unsafe { libc::sched_getaffinity(thread, len_bytes, words.as_mut_ptr().cast()) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
    }

    /// A set that `fill` has room for, which fails with `EINVAL` in one that is too small.
    fn filled_by(mut fill: impl FnMut(&mut [libc::c_ulong]) -> io::Result<()>) -> io::Result<Self> {
        let mut cpus = CPUS_MIN;
        loop {
            let mut set = Self::empty(cpus);
            match fill(&mut set.0) {
                Ok(()) => return Ok(set),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && cpus < CPUS_MAX => {
                    cpus *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Has a thread run on these CPUs and no other; 0 is the calling one. Takes no memory, so that it can be called between
    /// fork(2) and execve(2).
    ///
    /// # Errors
    /// The thread may run on none of them.
    pub fn bind(&self, thread: libc::pid_t) -> io::Result<()> {
        let len_bytes = size_of_val(self.0.as_slice());
        // SAFETY: the kernel reads at most `len_bytes` of the words, which outlive the call.
        match unsafe { libc::sched_setaffinity(thread, len_bytes, self.0.as_ptr().cast()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The numbers of its CPUs, in ascending order.
    pub fn cpus(&self) -> Vec<usize> {
        let of_word = |(at, word): (usize, &libc::c_ulong)| {
            let word = *word;
            (0..WORD_BITS)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at * WORD_BITS + bit)
        };
        self.0.iter().enumerate().flat_map(of_word).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_set_has_room_for_all_cpus_of_the_largest_host() {
        for last in [0, 1023, 1024, 8191, CPUS_MAX - 1] {
            let mut cpus = vec![0, 63, 64, 1000, last];
            cpus.sort_unstable();
            cpus.dedup();
            let set = CpuSet::of(&cpus).unwrap();
            assert_eq!(set.cpus(), cpus);
            let bits = set.0.len() * WORD_BITS;
            assert!(
                bits > last && bits >= CPUS_MIN && bits <= CPUS_MIN.max(last + WORD_BITS),
                "{last}: {bits}"
            );
        }
        for beyond in [CPUS_MAX, usize::MAX] {
            let error = CpuSet::of(&[7, beyond]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains(&format!("host CPU {beyond} ")), "{error}");
        }
    }

    /// A kernel that can have so many CPUs.
    fn kernel(possible: usize) -> impl FnMut(&mut [libc::c_ulong]) -> io::Result<()> {
        move |words| {
            if words.len() * WORD_BITS < possible {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            words[(possible - 1) / WORD_BITS] = 1 << ((possible - 1) % WORD_BITS);
            Ok(())
        }
    }

    #[test]
    fn a_set_grows_to_what_the_kernel_needs() {
        for possible in [1, 64, 1024, 1025, 5000, 8192, CPUS_MAX] {
            let set = CpuSet::filled_by(kernel(possible)).unwrap();
            assert_eq!(set.cpus(), [possible - 1], "{possible}");
        }
        let error = CpuSet::filled_by(kernel(CPUS_MAX + 1)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        let refused = |_: &mut [libc::c_ulong]| Err(io::Error::from_raw_os_error(libc::ESRCH));
        assert_eq!(CpuSet::filled_by(refused).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_thread_keeps_what_it_is_bound_to() {
        std::thread::spawn(|| {
            let all = CpuSet::of_thread(0).unwrap();
            let last = *all.cpus().last().unwrap();
            // Others beyond those of the host change nothing.
            CpuSet::of(&[last, 8191]).unwrap().bind(0).unwrap();
            assert_eq!(CpuSet::of_thread(0).unwrap().cpus(), [last]);
            all.bind(0).unwrap();
            assert_eq!(CpuSet::of_thread(0).unwrap(), all);
        })
        .join()
        .unwrap();
    }
}
