// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The storage under [`PageBitmap`](super::PageBitmap): an array of atomic words, all zero at first.
//!
//! Owns their memory, from the allocator or in a mapping of its own. Must never touch it while
//! allocating: a bitmap for a terabyte has 32 MiB, and neither boot nor the pause of a migration may pay
//! for what stays empty.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub use modelled::Words;
#[cfg(not(loom))]
pub use native::Words;

#[cfg(not(loom))]
mod native {
    use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
    use std::io;
    use std::ops::Deref;
    use std::ptr::NonNull;

    use super::AtomicU64;

    /// From this size on, transparent huge pages would be used: one set bit would then cost 2 MiB of
    /// cleared memory.
    const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// A fixed number of zero-initialised atomic words.
    #[derive(Debug)]
    pub struct Words {
        start: NonNull<AtomicU64>,
        count: usize,
        /// Mapped separately, not from the allocator.
        is_mapped: bool,
    }

    /// The layout of `count` words. Panics, as any collection does, if they cannot exist in the address
    /// space.
    fn layout_of(count: usize) -> Layout {
        Layout::array::<AtomicU64>(count).expect("a bitmap that fits in the address space")
    }

    // SAFETY: the words are owned by this value and only reached through shared references to
    // atomics, which any thread may use.
    unsafe impl Send for Words {}
    // SAFETY: as above; there is no interior access other than through atomics.
    unsafe impl Sync for Words {}

    impl Words {
        /// Words from the allocator.
        #[expect(clippy::cast_ptr_alignment, reason = "the layout has the words' alignment")]
        pub fn new(count: usize) -> Self {
            if count == 0 {
                return Self { start: NonNull::dangling(), count, is_mapped: false };
            }
            let layout = layout_of(count);
            // SAFETY: the layout is not empty.
            let address = unsafe { alloc_zeroed(layout) };
            match NonNull::new(address.cast::<AtomicU64>()) {
                Some(start) => Self { start, count, is_mapped: false },
                None => handle_alloc_error(layout),
            }
        }

        /// Words in a mapping of their own, which use memory as they are written.
        pub fn sparse(count: usize) -> io::Result<Self> {
            if count == 0 {
                return Ok(Self { start: NonNull::dangling(), count, is_mapped: false });
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
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if address == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            if len_bytes >= HUGE_PAGE_BYTES {
                // A kernel without huge pages refuses the advice, which has the same effect.
                // SAFETY: the range was mapped just above and advice does not change contents.
                unsafe { libc::madvise(address, len_bytes, libc::MADV_NOHUGEPAGE) };
            }
            let start = NonNull::new(address.cast::<AtomicU64>())
                .ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))?;
            Ok(Self { start, count, is_mapped: true })
        }
    }

    impl Deref for Words {
        type Target = [AtomicU64];

        fn deref(&self) -> &[AtomicU64] {
            // SAFETY: `start` is aligned (or dangling with count 0) and covers `count` words
            // for as long as `self` lives; zero bytes are a valid AtomicU64.
            unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
        }
    }

    impl Drop for Words {
        fn drop(&mut self) {
            let start = self.start.as_ptr();
            if self.is_mapped {
                // SAFETY: exactly the mapping made in `sparse`; no code can hold a reference into it
                // beyond the life of `self`.
                unsafe { libc::munmap(start.cast(), self.count * size_of::<AtomicU64>()) };
            } else if self.count > 0 {
                // SAFETY: allocated in `new` with this layout; references end as above.
                unsafe { dealloc(start.cast(), layout_of(self.count)) };
            }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use std::io;
    use std::ops::Deref;

    use super::AtomicU64;

    /// Loom's atomics are on the heap, because it tracks each one as an object.
    #[derive(Debug)]
    pub struct Words(Vec<AtomicU64>);

    impl Words {
        pub fn sparse(count: usize) -> io::Result<Self> {
            Ok(Self::new(count))
        }

        pub fn new(count: usize) -> Self {
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
