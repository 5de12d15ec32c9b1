// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that a pool has mapped for the device: what the VMM does with it until the device may use all of it.
//!
//! Nothing is modelled: zones are files of that size without pages, and what a pool grants is compared with them and
//! entered into the record of mappings as in a VM. Opening the device comes on top, and takes as long as its reset.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use memory::{GuestRam, Lease, ProvidedFile, RamConfig, RamLayout, RamRegion, ZoneSpec};
use prezero_pool_client::{PinnedGrant, PinnedRegion, PinnedZone, SlotPages};
use vfio::{DmaGate, DmaMap, Pinning, mapped_pieces};

use super::millis;
use super::model::{GIB, Host, Plan};

/// Pieces in which a pool maps memory.
const PIECE_BYTES: u64 = 64 << 20;

/// A VM of several zones, each a slot of the pool's, in order.
pub struct Slots {
    config: RamConfig,
    files: Vec<ProvidedFile>,
    grant: PinnedGrant,
}

impl Slots {
    /// So many slots that have this much memory together.
    pub fn new(size_gib: u64, count: u64) -> Result<Self, Box<dyn Error>> {
        let size_bytes = size_gib * GIB / count;
        let zone = |at| ZoneSpec { shared: true, ..ZoneSpec::new(format!("m{at}"), size_bytes) };
        let config = RamConfig { zones: (0..count).map(zone).collect() };
        // A pool lays the memory out as a VM does.
        let like = GuestRam::new(&config, RamLayout::default())?;
        let number = |id: &str| config.zones.iter().position(|zone| zone.id == id).unwrap_or(0);
        let region = |region: &Arc<RamRegion>| PinnedRegion {
            zone: number(region.zone_id()),
            gpa: region.gpa(),
            len_bytes: region.len_bytes(),
            offset: region.file_offset(),
        };
        let file = |zone: &ZoneSpec| {
            let regions = like.regions().iter();
            let mut files = regions.filter(|region| region.zone_id() == zone.id);
            let file = files.next().and_then(|region| region.file().cloned());
            let file = file.ok_or_else(|| io::Error::other("no file"))?;
            Ok(ProvidedFile::prezeroed(&zone.id, file, Lease::new(Arc::new(()))))
        };
        let files = config.zones.iter().map(file).collect::<io::Result<_>>()?;
        let grant = PinnedGrant {
            device: "0000:65:00.0".parse()?,
            zones: (0..count).map(|_| PinnedZone { size_bytes, pages: SlotPages::Small }).collect(),
            piece_bytes: PIECE_BYTES,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: like.regions().iter().map(region).collect(),
        };
        Ok(Self { config, files, grant })
    }

    /// Milliseconds from the grant until the device may use all memory.
    pub fn take(&self) -> Result<f64, Box<dyn Error>> {
        let begin = Instant::now();
        let ram = GuestRam::with_provided(&self.config, RamLayout::default(), &self.files)?;
        let mapped = mapped_pieces(&ram, &self.grant)?;
        let host = Arc::new(Host::new(Plan::Beside, 1, 1, 1));
        let dma_map = DmaMap::prepinned(host, mapped, PIECE_BYTES, Box::new(|_| {}));
        let gate = Arc::new(DmaGate::default());
        let pinning = Pinning::complete(dma_map, Arc::clone(&gate), Box::new(|_| {}));
        gate.wait()?;
        let took_ms = millis(begin.elapsed());
        let bytes = pinning.progress().pinned_bytes;
        if bytes == ram.total_bytes() { Ok(took_ms) } else { Err("not all is mapped".into()) }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn all_slots_of_a_vm_are_taken() {
        for count in [1, 2, 8] {
            let slots = Slots::new(64, count).unwrap();
            assert_eq!(slots.grant.zones.len() as u64, count);
            assert!(slots.take().unwrap() > 0.0);
            assert!(slots.take().is_ok(), "again, by the next VM");
        }
    }

    #[test]
    fn other_memory_than_was_granted_is_refused() {
        let mut slots = Slots::new(64, 2).unwrap();
        slots.grant.regions[1].gpa += GIB;
        assert!(slots.take().is_err());
    }
}
