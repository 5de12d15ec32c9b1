// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The size of the terminal that is standard output.
//!
//! Owns the question. It must never keep an answer, as the size changes.

/// Lines and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Lines.
    pub rows: usize,
    /// Characters of a line.
    pub columns: usize,
}

/// That of standard output; `None` if it is no terminal, or does not say.
pub fn size() -> Option<TerminalSize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel writes one winsize, which lives across the call, or nothing.
    let known = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) } == 0;
    let size = TerminalSize { rows: size.ws_row.into(), columns: size.ws_col.into() };
    (known && size.rows > 0 && size.columns > 0).then_some(size)
}
