// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pieces of memory of one vectored transfer, of which each call of the kernel moves a part.
//!
//! Owns how far a transfer has come, and how many pieces a call takes. Must never look at the memory itself.

/// Most pieces per system call.
pub(crate) const PIECES_MAX: usize = libc::UIO_MAXIOV as usize;

/// The rest of a transfer.
pub(crate) struct Iovecs<'a>(&'a mut [libc::iovec]);

impl<'a> Iovecs<'a> {
    /// A transfer of all pieces.
    pub(crate) fn new(pieces: &'a mut [libc::iovec]) -> Self {
        Self(pieces)
    }

    /// The pieces for the next call; `None` once nothing is left.
    pub(crate) fn next_call(&mut self) -> Option<&mut [libc::iovec]> {
        self.advance(0);
        let count = self.0.len().min(PIECES_MAX);
        self.0.get_mut(..count).filter(|pieces| !pieces.is_empty())
    }

    /// Removes bytes that have been transferred from the front.
    pub(crate) fn advance(&mut self, mut moved: usize) {
        let mut left = std::mem::take(&mut self.0);
        while let Some(first) = left.first_mut() {
            if moved < first.iov_len {
                first.iov_base = first.iov_base.cast::<u8>().wrapping_add(moved).cast();
                first.iov_len -= moved;
                break;
            }
            moved -= first.iov_len;
            left = left.split_at_mut(1).1;
        }
        self.0 = left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_in_a_call_once_and_in_order() {
        let lens = [0_usize, 5, 0, 1, 7].into_iter().chain(std::iter::repeat_n(1, PIECES_MAX));
        let mut next = 0_usize;
        let mut pieces: Vec<_> = lens
            .map(|iov_len| {
                let iov_base = std::ptr::without_provenance_mut(next);
                next += iov_len;
                libc::iovec { iov_base, iov_len }
            })
            .collect();
        let all = next;
        let (mut iovecs, mut seen) = (Iovecs::new(&mut pieces), 0);
        while let Some(call) = iovecs.next_call() {
            assert!(call.len() <= PIECES_MAX);
            assert_eq!(call[0].iov_base.addr(), seen);
            assert!(call[0].iov_len > 0);
            let moved = call.iter().map(|piece| piece.iov_len).sum::<usize>().min(3);
            iovecs.advance(moved);
            seen += moved;
        }
        assert_eq!(seen, all);
    }
}
