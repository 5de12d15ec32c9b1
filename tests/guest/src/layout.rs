// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which memory is what: page directories, shadow table and test pages, from the RAM ranges.
//!
//! Pure arithmetic, shared with the host's reader. Must never touch memory.

use crate::abi::{self, PAGE_BYTES};

/// Most ranges taken from the memory map.
pub const MAX_RANGES: usize = abi::control::MAX_RANGES;
/// End of what the tables in the image map.
const STATIC_MAP_END: u64 = 4 << 30;
/// End of what one page-directory-pointer table maps; RAM above it is left alone.
const MAP_END: u64 = 512 << 30;
const GIB: u64 = 1 << 30;

/// A run of bytes of guest-physical memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
}

/// A run of test pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Address of the first.
    pub gpa: u64,
    /// Its number.
    pub first: u64,
    /// How many.
    pub pages: u64,
}

/// A short list without an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List<T> {
    items: [T; MAX_RANGES],
    len: usize,
}

impl<T: Copy + Default> List<T> {
    /// An empty list.
    pub fn new() -> Self {
        Self { items: [T::default(); MAX_RANGES], len: 0 }
    }

    /// Adds an item; false when the list is full.
    pub fn push(&mut self, item: T) -> bool {
        let Some(slot) = self.items.get_mut(self.len) else { return false };
        *slot = item;
        self.len += 1;
        true
    }

    /// The last item.
    pub fn last_mut(&mut self) -> Option<&mut T> {
        self.len.checked_sub(1).and_then(|last| self.items.get_mut(last))
    }

    /// The items.
    pub fn as_slice(&self) -> &[T] {
        self.items.get(..self.len).unwrap_or(&[])
    }
}

impl<T: Copy + Default> Default for List<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Where everything is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// First of the page directories built at run time, one per GiB of RAM above 4 GiB.
    pub tables_gpa: u64,
    /// The shadow table.
    pub shadow_gpa: u64,
    /// Distance of two vCPUs' parts of it.
    pub shadow_stride: u64,
    /// Test pages.
    pub pages: u64,
    /// Where they are.
    pub ranges: List<Range>,
    /// RAM in all, bytes.
    pub ram_bytes: u64,
    /// End of RAM.
    pub ram_end: u64,
    /// RAM at the end that holds no test pages.
    pub reserved: Span,
}

impl Layout {
    /// Lays out `ram` for `vcpus` vCPUs; none if there is too little at the addresses needed.
    pub fn new(ram: &[Span], vcpus: u64) -> Option<Self> {
        let vcpus = vcpus.max(1);
        let ram_bytes = ram.iter().map(|span| span.end.saturating_sub(span.start)).sum::<u64>();
        let ram_end = ram.iter().map(|span| span.end).max()?;

        let tables_gpa = abi::vcpu_gpa(vcpus);
        let table_pages = ram_end.min(MAP_END).saturating_sub(STATIC_MAP_END).div_ceil(GIB);
        let shadow_gpa = tables_gpa + table_pages * PAGE_BYTES;
        // One counter for every page of RAM: a few more than needed, and no circular reasoning.
        let each = (ram_bytes / PAGE_BYTES).div_ceil(vcpus);
        let shadow_stride = (each * 4).next_multiple_of(PAGE_BYTES);
        let test_start = shadow_gpa + shadow_stride * vcpus;
        let home = ram.iter().find(|s| s.start <= abi::CONTROL_GPA && abi::CONTROL_GPA < s.end)?;
        if home.end < test_start + PAGE_BYTES {
            return None;
        }

        let mut layout = Self {
            tables_gpa,
            shadow_gpa,
            shadow_stride,
            pages: 0,
            ranges: List::new(),
            ram_bytes,
            ram_end,
            reserved: Span { start: ram_end, end: ram_end },
        };
        for span in ram {
            let gpa = span.start.max(test_start).next_multiple_of(PAGE_BYTES);
            let pages = span.end.min(MAP_END).saturating_sub(gpa) / PAGE_BYTES;
            if pages == 0 {
                continue;
            }
            if !layout.ranges.push(Range { gpa, first: layout.pages, pages }) {
                break;
            }
            layout.pages += pages;
        }
        Some(layout)
    }

    /// Takes test pages away from the end of RAM, at least one of the last run is left.
    pub fn reserve(&mut self, bytes: u64) {
        let Some(last) = self.ranges.last_mut() else { return };
        let pages = (bytes / PAGE_BYTES).min(last.pages.saturating_sub(1));
        last.pages -= pages;
        self.pages -= pages;
        self.reserved.start = last.gpa + last.pages * PAGE_BYTES;
    }

    /// Gpa of a test page (0 when there is no such page).
    #[inline]
    pub fn gpa(&self, page: u64) -> u64 {
        for range in self.ranges.as_slice() {
            let offset = page.wrapping_sub(range.first);
            if offset < range.pages {
                return range.gpa + offset * PAGE_BYTES;
            }
        }
        0
    }

    /// Gpa of the counter of the page that has `index` among `vcpu`'s own.
    #[inline]
    pub fn counter_gpa(&self, vcpu: u64, index: u64) -> u64 {
        self.shadow_gpa + self.shadow_stride * vcpu + index * 4
    }
}

/// The pages of a window that one vCPU owns, as a run of its own indices: page = index * n + id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Own {
    /// First own index.
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl Own {
    /// Of the pages `first` to `first + pages` those that are `vcpu` modulo `vcpus`.
    pub fn new(first: u64, pages: u64, vcpu: u64, vcpus: u64) -> Self {
        let vcpus = vcpus.max(1);
        let below = |limit: u64| limit.saturating_sub(vcpu).div_ceil(vcpus);
        let start = below(first);
        Self { first: start, count: below(first.saturating_add(pages)) - start }
    }
}
