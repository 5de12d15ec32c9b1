// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM: zones, mappings, prefault, page maps and discards.
//!
//! Owns the zones of guest memory: their backings, their two mappings, prefault, and the per-page
//! residency and zero maps that every other crate reads. Knows nothing of KVM, of devices or of the
//! migration protocol.
//!
//! # One zone, one backing
//!
//! | asked for | memory is | huge pages come from | second mapping |
//! | --- | --- | --- | --- |
//! | `shared=on` | memfd, `MAP_SHARED` | `shmem_enabled`, or collapse while prefaulting | yes |
//! | `hugepages=on` | hugetlb memfd, `MAP_SHARED` | the hugetlb pool | yes |
//! | `file=PATH` | that file, `MAP_SHARED` | the file system | yes |
//! | `file=PATH,shared=off`, PATH holds data | that file, `MAP_PRIVATE` | none | no |
//! | `mergeable=on` | private anonymous | `enabled` | no |
//! | an image ([`RamImage`]), private memory | the image's file, `MAP_PRIVATE` | none | no |
//! | nothing, see below | memfd or private anonymous | either | memfd: yes |
//!
//! With nothing asked for (`shared=off`, [`Backing::Auto`]) the guest gets a memfd, **unless**
//! `thp=on` and the host's `shmem_enabled` prevents huge pages in shared memory. Then it gets
//! private anonymous memory, as with cloud-hypervisor, because a guest on 4 KiB pages is
//! slower for its entire life, whereas migration of private memory costs one copy per page,
//! once. To get the second mapping nevertheless, ask for `shared=on`
//! ([`Backing::Memfd`]) or hugetlb. cloud-hypervisor maps `hugepages=on,shared=off` and
//! `file=PATH,shared=off` privately; this crate does so only where it protects what a file already holds,
//! since a private mapping of a memfd keeps every written page twice.
//!
//! # Two mappings
//!
//! `main` is what KVM's slots, the devices and userfaultfd see; it exists from the start. `alias`
//! is a second `MAP_SHARED` mapping of the same pages that is never watched: postcopy and a restore on demand write
//! through it without faulting on `main`, and what has it is read through it. It is made on first use, so that boot and
//! a move by precopy do not pay for it.
//!
//! # Files
//!
//! A file is locked for as long as anything maps it: exclusively where it is mapped shared, for reading
//! where privately. A second VM, migration, restore or page server is refused by name before it has
//! changed anything. The lock belongs to the open file description and so goes with it to a page server
//! or, in a migration with `local=on`, to another VMM; over a reboot it is kept with
//! [`GuestRam::locked_files`]. Memory whose contents are all to arrive ([`InitialContents::Nothing`]) begins
//! empty, whatever the file held; memory of a guest that boots does not, and
//! [`GuestRam::starts_zero`] says so. An unnamed file in a directory needs none of this.
//!
//! # Memory of a pool
//!
//! A zone may consist of a memfd that a pool has populated and zeroed in advance
//! ([`ProvidedFile::prezeroed`]): one memfd per zone, whose regions are parts of it, as with any
//! other zone, so that the pool need not know where the hole below 4 GiB cuts it. It may be
//! longer than the zone. How a pool is asked is not known here: the zone keeps a [`Lease`].
//!
//! # Reboots
//!
//! The memory of a guest that reboots is kept as it is, with its mappings and its leases, and not cleared:
//! see [`GuestRam::restart`].
//!
//! # What costs nothing
//!
//! Making guest memory takes the same few system calls whatever its size: mappings are not
//! populated, and the maps are themselves untouched zero pages, whose bits are defined such that
//! "nothing known yet" is zero.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("guest RAM needs a 64-bit host");

mod ahead;
pub mod available;
mod backing;
mod backing_error;
mod collapse;
mod config;
mod dirty;
mod discards;
mod file_lock;
mod holds;
mod homes;
mod host;
mod image;
mod lanes;
mod layout;
mod lease;
mod mapping;
mod maps;
mod pins;
mod plan;
mod plugged;
pub mod plugging;
mod populate;
mod populated;
mod prefault;
mod processors;
mod provided;
mod ram;
mod ram_discard;
mod region;
mod reserved;
mod restart;
mod sparing;
mod touch;
mod zero;
mod zone_file;
mod zone_kind;

pub use page_bitmap::PageBitmap;
pub use process_facts::CpuSet;

pub use ahead::{HostMemory, HugePagePool};
pub use available::check_available;
pub use backing::InitialContents;
pub use backing::sealed_file;
pub use backing_error::BackingError;
pub use collapse::{Collapse, CollapseEnd, Collapsed};
pub use config::{Backing, ConfigError, HugePageSize, RamConfig, ZoneSpec};
pub use dirty::DeviceDirtyLog;
pub use holds::PageHold;
pub use homes::Homes;
pub use image::{ImageError, ImageRange, RamImage};
pub use lanes::{LaneProgress, PageKind, PrefaultMeter};
pub use layout::{LATER_ALIGN_BYTES, LayoutError, Placement, RamHole, RamLayout};
pub use lease::Lease;
pub use maps::{ResidentMap, ZeroMap};
pub use pins::{DiscardBan, Pins};
pub use populate::PopulateError;
pub use prefault::{
    ChunkHook, HookError, Populate, PopulateModel, Prefault, PrefaultError, PrefaultEvent,
    PrefaultHelper, PrefaultObserver, PrefaultOptions, PrefaultProgress, StopQuery,
};
pub use processors::run_on_node;
pub use provided::ProvidedFile;
pub use ram::{GuestRam, RamError, RamSources};
pub use ram_discard::Discarded;
pub use region::{AccessError, RamRegion};
pub use reserved::ReservedRange;
pub use restart::ForeignWriter;
pub use sparing::{parse_release, running_release};
pub use zero::is_zero;
pub use zone_file::LockedFile;
pub use zone_kind::ZoneKind;

/// Granularity of every per-page map, and the smallest guest page, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// Guest physical memory as devices see it: checked accesses by guest physical address.
pub type GuestMemory = vm_memory::GuestMemoryMmap<DeviceDirtyLog>;

/// A handle that always refers to the current [`GuestMemory`], also after memory was added.
pub type GuestMemoryHandle = vm_memory::GuestMemoryAtomic<GuestMemory>;

/// Converts a length or offset, which fits because only hosts with 64-bit addresses are supported.
#[expect(
    clippy::cast_possible_truncation,
    reason = "usize has 64 bits: anything else is refused at compile time above"
)]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}
