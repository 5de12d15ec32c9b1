// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The storage under [`PageBitmap`](super::PageBitmap): an array of atomic words, all zero at first.
//!
//! Owns one anonymous mapping, sparse or populated. Must never touch a sparse one while allocating: a
//! bitmap for a terabyte has 32 MiB, and boot must not pay for them.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(not(loom))]
pub use mapped::Words;
#[cfg(loom)]
pub use modelled::Words;

#[cfg(not(loom))]
mod mapped {
    use std::alloc::{Layout, handle_alloc_error};
    use std::io;
    use std::ops::Deref;
    use std::ptr::NonNull;

    use super::AtomicU64;

    /// Maps from this size on would attract transparent huge pages: one set bit would then cost
    /// 2 MiB of cleared memory.
    const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// A fixed number of zero-initialised atomic words.
    #[derive(Debug)]
    pub struct Words {
        start: NonNull<AtomicU64>,
        count: usize,
    }

    // SAFETY: the words are owned by this value and only reached through shared references to
    // atomics, which any thread may use.
    unsafe impl Send for Words {}
    // SAFETY: as above; there is no interior access other than through atomics.
    unsafe impl Sync for Words {}

    impl Words {
        /// Words that take memory as they are written.
        pub fn sparse(count: usize) -> io::Result<Self> {
            Self::map(count, libc::MAP_NORESERVE)
        }

        /// Words with their memory; ends the process when there is none, as every collection does.
        pub fn populated(count: usize) -> Self {
            Self::map(count, libc::MAP_POPULATE).unwrap_or_else(|_| {
                let layout =
                    Layout::array::<AtomicU64>(count).unwrap_or(Layout::new::<AtomicU64>());
                handle_alloc_error(layout)
            })
        }

        fn map(count: usize, flags: libc::c_int) -> io::Result<Self> {
            if count == 0 {
                return Ok(Self { start: NonNull::dangling(), count });
            }
            let len_bytes = count
                .checked_mul(size_of::<AtomicU64>())
                .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
            // SAFETY: a new private mapping at an address of the kernel's choice replaces nothing.
            let address = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    len_bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                    -1,
                    0,
                )
            };
            if address == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            if len_bytes >= HUGE_PAGE_BYTES {
                // A kernel without huge pages refuses the advice, which is as good as taking it.
                // SAFETY: the range was mapped just above and advice does not change contents.
                unsafe { libc::madvise(address, len_bytes, libc::MADV_NOHUGEPAGE) };
            }
            let start = NonNull::new(address.cast::<AtomicU64>())
                .ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))?;
            Ok(Self { start, count })
        }
    }

    impl Deref for Words {
        type Target = [AtomicU64];

        fn deref(&self) -> &[AtomicU64] {
            // SAFETY: `start` is page aligned (or dangling with count 0) and covers `count` words
            // for as long as `self` lives; zero bytes are a valid AtomicU64.
            unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
        }
    }

    impl Drop for Words {
        fn drop(&mut self) {
            if self.count > 0 {
                // SAFETY: exactly the mapping made in `new`; no code can hold a reference into it
                // beyond the life of `self`.
                unsafe { libc::munmap(self.start.as_ptr().cast(), self.count * 8) };
            }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use std::io;
    use std::ops::Deref;

    use super::AtomicU64;

    /// Loom's atomics live on the heap: it tracks each one as an object.
    #[derive(Debug)]
    pub struct Words(Vec<AtomicU64>);

    impl Words {
        pub fn sparse(count: usize) -> io::Result<Self> {
            Ok(Self::populated(count))
        }

        pub fn populated(count: usize) -> Self {
            Self((0..count).map(|_| AtomicU64::new(0)).collect())
        }
    }

    impl Deref for Words {
        type Target = [AtomicU64];

        fn deref(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}
