// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a test page holds: a function of seed, page number and write counter, for all 512 words.
//!
//! A page is 64 lines of 8 words. Line 0 is the header: page number, counter, six pattern words.
//! Counter 0 means never written (zero). Filling makes counter 1 and writes all lines. Each later
//! write adds one to the counter and writes the header and one other line, which the counter
//! names, so that every line's content is known from the counter alone and an older version of
//! the page differs in at least two lines. Pure; compiled into the guest and the host's reader.

/// 64-bit words in a page.
pub const WORDS: u64 = 512;
/// Words in a line.
pub const LINE_WORDS: u64 = 8;
/// Lines that rotate under the writes (all but the header).
const ROTATING: u64 = 63;

/// A word that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Index in the page.
    pub word: u64,
    /// What it should be.
    pub expected: u64,
    /// What it is.
    pub found: u64,
}

/// The pattern of one seed.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    seed: u64,
}

impl Pattern {
    /// The pattern of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The line alongside the header that the write to `counter` (2 or more) touches, 1 to 63.
    pub const fn line_written(counter: u64) -> u64 {
        1 + counter % ROTATING
    }

    /// The counter at which `line` (1 to 63) was last written when the page is at `counter`.
    pub const fn line_counter(counter: u64, line: u64) -> u64 {
        let since = (counter + ROTATING - (line - 1)) % ROTATING;
        if counter < since + 2 { 1 } else { counter - since }
    }

    /// Writes a whole page at counter 1.
    #[inline]
    pub fn fill(self, page: u64, mut store: impl FnMut(u64, u64)) {
        self.write_line(page, 1, 0, &mut store);
        let key = self.key(page, 1);
        for word in LINE_WORDS..WORDS {
            store(word, value(key, word));
        }
    }

    /// Writes what changes when the page goes from `counter - 1` to `counter` (2 or more).
    #[inline]
    pub fn advance(self, page: u64, counter: u64, mut store: impl FnMut(u64, u64)) {
        self.write_line(page, counter, 0, &mut store);
        self.write_line(page, counter, Self::line_written(counter), &mut store);
    }

    /// Checks every word of a page at `counter`.
    #[inline]
    pub fn check_full(
        self,
        page: u64,
        counter: u64,
        load: impl Fn(u64) -> u64,
    ) -> Result<(), Mismatch> {
        if counter == 0 {
            return check_zero(0, WORDS, &load);
        }
        for line in 0..WORDS / LINE_WORDS {
            self.check_line(page, counter, line, &load)?;
        }
        Ok(())
    }

    /// Checks the header, the line written last, and one more that differs from page to page.
    #[inline]
    pub fn check_light(
        self,
        page: u64,
        counter: u64,
        load: impl Fn(u64) -> u64,
    ) -> Result<(), Mismatch> {
        if counter == 0 {
            return check_zero(0, LINE_WORDS, &load);
        }
        self.check_line(page, counter, 0, &load)?;
        self.check_line(page, counter, Self::line_written(counter), &load)?;
        let other = Self::line_written(page.wrapping_add(counter.wrapping_mul(29)));
        self.check_line(page, counter, other, &load)
    }

    fn key(self, page: u64, counter: u64) -> u64 {
        let page = page.wrapping_mul(0x9fb2_1c65_1e98_df25);
        let counter = counter.wrapping_mul(0xd6e8_feb8_6659_fd93);
        finish(self.seed ^ page.rotate_left(23) ^ counter)
    }

    #[inline]
    fn write_line(self, page: u64, counter: u64, line: u64, store: &mut impl FnMut(u64, u64)) {
        let key = self.key(page, counter);
        for word in line * LINE_WORDS..(line + 1) * LINE_WORDS {
            store(word, expected_word(key, page, counter, word));
        }
    }

    #[inline]
    fn check_line(
        self,
        page: u64,
        counter: u64,
        line: u64,
        load: &impl Fn(u64) -> u64,
    ) -> Result<(), Mismatch> {
        let counter = if line == 0 { counter } else { Self::line_counter(counter, line) };
        let key = self.key(page, counter);
        for word in line * LINE_WORDS..(line + 1) * LINE_WORDS {
            let expected = expected_word(key, page, counter, word);
            let found = load(word);
            if found != expected {
                return Err(Mismatch { word, expected, found });
            }
        }
        Ok(())
    }
}

#[inline]
fn expected_word(key: u64, page: u64, counter: u64, word: u64) -> u64 {
    match word {
        0 => page,
        1 => counter,
        _ => value(key, word),
    }
}

#[inline]
fn value(key: u64, word: u64) -> u64 {
    let mixed = key ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed.wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31) ^ key
}

fn finish(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 29;
    x = x.wrapping_mul(0x9fb2_1c65_1e98_df25);
    x ^ (x >> 32)
}

fn check_zero(first: u64, end: u64, load: &impl Fn(u64) -> u64) -> Result<(), Mismatch> {
    for word in first..end {
        let found = load(word);
        if found != 0 {
            return Err(Mismatch { word, expected: 0, found });
        }
    }
    Ok(())
}

/// A small generator of uniformly spread numbers (xorshift with a multiplication), one per vCPU.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator whose sequence depends on both numbers.
    pub fn new(seed: u64, stream: u64) -> Self {
        let state = finish(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { state: state | 1 }
    }

    /// The next number.
    #[inline]
    pub fn number(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit` (0 when `limit` is 0).
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        let product = u128::from(self.number()) * u128::from(limit);
        (product >> 64) as u64
    }
}
