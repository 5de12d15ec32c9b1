// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A pool slot whose memory is already mapped for a device of the machine, and that device.
//!
//! Owns what came from the pool until the machine has it: the memory first, then the address space, then
//! the device. Must never fail a VM: a mismatch is reported, and everything is done as without the pool.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memory::{Lease, ProvidedFile, ZoneSpec};
use pci::Bdf;
use prezero_pool_client::{
    DEVICES_MAX, PinnedGrant, PinnedRegion, PoolConnection, PoolError, TakePinned, ZONES_MAX,
    ZoneWanted,
};
use vfio::{
    DmaMap, DmaSpace, DmaTarget, HostPlace, IommufdSpace, OnLost, VfioError, VfioFunction,
    mapped_pieces,
};

use super::PassthroughError;
use super::backend::Backend;
use crate::config::{DeviceConfig, VmConfig};
use crate::events;
use crate::machine::prezeroed;
use crate::machine::ram::{self, MachineRamError};
use crate::machine::virtio::PciContext;

/// Memory, mapped for a device, that a pool has provided.
pub struct PrepinnedSlot {
    /// By zone.
    given: Vec<ProvidedFile>,
    iommufd: Option<OwnedFd>,
    /// Path of the device, as configured.
    path: PathBuf,
    /// Descriptor of the device, until taken.
    device: Option<OwnedFd>,
    /// The device in the address space, until it is its turn to be opened.
    attached: Option<VfioFunction>,
    grant: PinnedGrant,
    /// The mapped ranges, once compared with the machine's memory.
    mapped: BTreeMap<u64, u64>,
}

/// What came of asking a pool.
#[derive(Default)]
pub struct SlotAnswer {
    /// The slot.
    pub slot: Option<PrepinnedSlot>,
    /// The pool leaves the machine's devices alone for as long as this is open.
    pub pool: Option<Arc<PoolConnection>>,
}

/// What a machine asks a pool for.
struct Wish {
    request: TakePinned,
    /// The path of each device of the request, as configured.
    paths: Vec<PathBuf>,
    /// The zones of the request.
    zones: Vec<ZoneSpec>,
    /// The pool.
    socket: PathBuf,
}

/// Address of the device at a sysfs path.
fn address_of(path: &Path) -> Option<Bdf> {
    path.canonicalize().ok()?.file_name()?.to_str()?.parse().ok()
}

fn warn(devices: &[Bdf], error: &dyn std::error::Error) {
    let why = error_text::chain(error);
    let devices = devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    log::warn!(
        "the pool has no memory that is mapped for a device of the VM ({devices}); it is mapped while the guest \
         starts: {why}"
    );
    events::emit("vm", "prepinned-unavailable", &[("device", &devices), ("error", &why)]);
}

impl Wish {
    /// That of a machine with iommufd, devices given by path, and memory that cannot grow and of which all zones are of
    /// one pool.
    ///
    /// # Errors
    /// The memory configuration is invalid.
    fn of(config: &VmConfig, phys_bits: u8) -> Result<Option<Self>, MachineRamError> {
        if !matches!(Backend::of(config), Backend::Iommufd { given: None }) {
            return Ok(None);
        }
        let paths = config
            .devices
            .iter()
            .flatten()
            .filter_map(|device| device.path.clone().filter(|_| device.fd.is_none()));
        // Opening a device reports what is wrong with its path.
        let devices = paths.filter_map(|path| Some((address_of(&path)?, path)));
        let (devices, paths): (Vec<_>, Vec<_>) = devices.take(DEVICES_MAX).unzip();
        let Some((zones, socket)) = ram::zones_of_one_pool(&config.memory)? else {
            return Ok(None);
        };
        if devices.is_empty() {
            return Ok(None);
        }
        if zones.len() > ZONES_MAX {
            log::warn!(
                "memory of {} zones is mapped for devices while the guest starts, and a device that the pool holds cannot \
                 be opened: a pool maps {ZONES_MAX} zones at most in advance",
                zones.len()
            );
            return Ok(None);
        }
        // Making the memory reports what is wrong with its place.
        let layout = ram::layout_for(config, phys_bits);
        let Ok(places) = layout.place_zones(&zones) else { return Ok(None) };
        let region = |place: memory::Placement| PinnedRegion {
            zone: place.zone,
            gpa: place.gpa,
            len_bytes: place.bytes.end.saturating_sub(place.bytes.start),
            offset: place.bytes.start,
        };
        let wanted = |zone: &ZoneSpec| ZoneWanted {
            size_bytes: zone.size_bytes,
            pages: prezeroed::pages(zone),
            node: zone.host_numa_node,
        };
        let request = TakePinned {
            devices,
            zones: zones.iter().map(wanted).collect(),
            regions: places.into_iter().map(region).collect(),
        };
        Ok(Some(Self { request, paths, zones, socket }))
    }
}

impl PrepinnedSlot {
    /// Requests a slot from the pool, if the machine fits one: iommufd, devices given by path, and memory that cannot
    /// grow and of which all zones are of one pool. The slot is that of the first device for which the pool has one
    /// that fits; the pool holds none of the others then.
    ///
    /// # Errors
    /// The memory configuration is invalid.
    pub fn take(config: &VmConfig, phys_bits: u8) -> Result<SlotAnswer, MachineRamError> {
        let Some(Wish { request, paths, zones, socket }) = Wish::of(config, phys_bits)? else {
            return Ok(SlotAnswer::default());
        };
        let pool = match PoolConnection::open(&socket) {
            Ok(pool) => Arc::new(pool),
            Err(error) => {
                warn(&request.devices, &error);
                return Ok(SlotAnswer::default());
            }
        };
        let memory = match pool.take_pinned(&request) {
            Ok(memory) => memory,
            Err(error) => {
                warn(&request.devices, &error);
                // What is granted too late goes back with the connection.
                let is_answer =
                    matches!(error, PoolError::Refused { .. } | PoolError::Earlier { .. });
                return Ok(SlotAnswer { slot: None, pool: is_answer.then_some(pool) });
            }
        };
        let device = memory.grant.device;
        let mut places = request.devices.iter().zip(paths);
        let Some((_, path)) = places.find(|(address, _)| **address == device) else {
            return Ok(SlotAnswer::default());
        };
        let bytes: u64 = zones.iter().map(|zone| zone.size_bytes).fold(0, u64::saturating_add);
        let ids = zones.iter().map(|zone| zone.id.as_str()).collect::<Vec<_>>().join(",");
        let (bytes, name) = (bytes.to_string(), device.to_string());
        let properties = [("zone", ids.as_str()), ("bytes", &bytes), ("device", &name)];
        events::emit("vm", "prepinned-taken", &properties);
        let lease = Lease::new(pool.clone());
        let files = zones.iter().zip(memory.files);
        let given = files
            .map(|(zone, file)| ProvidedFile::prezeroed(&zone.id, Arc::new(file), lease.clone()));
        let slot = Self {
            given: given.collect(),
            iommufd: Some(memory.iommufd.into()),
            path,
            device: Some(memory.device.into()),
            attached: None,
            grant: memory.grant,
            mapped: BTreeMap::new(),
        };
        Ok(SlotAnswer { slot: Some(slot), pool: Some(pool) })
    }

    /// The files of the memory.
    pub fn memory(&self) -> Vec<ProvidedFile> {
        self.given.clone()
    }

    /// Whether the slot is that of this device.
    pub(super) fn is_for(&self, device: &DeviceConfig) -> bool {
        device.fd.is_none() && device.path.as_ref() == Some(&self.path)
    }

    /// Takes the address space, once.
    ///
    /// # Errors
    /// Its mappings do not match the machine's memory.
    pub(super) fn space(
        &mut self,
        context: &PciContext<'_>,
    ) -> Result<Arc<dyn DmaSpace>, VfioError> {
        self.mapped = mapped_pieces(context.ram, &self.grant)?;
        let iommufd =
            self.iommufd.take().ok_or_else(|| VfioError::OtherMemory("it is in use".to_owned()))?;
        let ram = Arc::clone(context.ram);
        Ok(Arc::new(IommufdSpace::prepinned(context.vm, ram, iommufd, &self.grant)?))
    }

    /// Takes the device, once.
    pub(super) fn take_device(&mut self) -> Option<HostPlace> {
        let path = self.path.clone();
        self.device.take().map(|node| HostPlace::Prepinned { path, node })
    }

    /// Keeps the device until [`take_attached`](Self::take_attached).
    pub(super) fn keep_attached(&mut self, function: VfioFunction) {
        self.attached = Some(function);
    }

    /// Takes the device out if it is this one, once.
    pub(super) fn take_attached(&mut self, device: &DeviceConfig) -> Option<VfioFunction> {
        if self.is_for(device) { self.attached.take() } else { None }
    }

    /// The mapping of all memory.
    pub(super) fn dma_map(self, target: Arc<dyn DmaSpace>, on_lost: OnLost) -> Arc<DmaMap> {
        let target: Arc<dyn DmaTarget> = target;
        DmaMap::prepinned(target, self.mapped, self.grant.piece_bytes, on_lost)
    }

    /// Logs why the machine does not use the slot. The device is closed on return.
    pub(super) fn refuse(self, error: &PassthroughError) {
        let device = self.grant.device.to_string();
        // Closes iommufd and device, unless the failed attempt has consumed them.
        drop(self);
        let why = error_text::chain(error);
        log::warn!("memory mapped by the pool is not used, and memory is mapped anew: {why}");
        events::emit("vm", "prepinned-unavailable", &[("device", &device), ("error", &why)]);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use arch::layout::HighHole;
    use memory::{RamHole, RamLayout};
    use prezero_pool_client::{MESSAGE_BYTES_MAX, PagesWanted, Refusal, Reply, Request};
    use serde_json::{Value, json};
    use vfio::HYPERTRANSPORT;
    use vmm_sys_util::tempdir::TempDir;

    use super::*;
    use crate::machine::passthrough::choose_high_hole;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    /// A pool uses the memory crate's default layout, with the hole that a device's IOMMU asks for.
    #[test]
    fn the_pool_and_the_machine_lay_memory_out_alike() {
        assert_eq!(ram::layout_of(52, HighHole::None), RamLayout::default());
        let hole = RamHole { start: *HYPERTRANSPORT.start(), end: HYPERTRANSPORT.end() + 1 };
        let split = RamLayout { high_hole: Some(hole), ..RamLayout::default() };
        assert_eq!(ram::layout_of(52, HighHole::AmdHyperTransport), split);
    }

    /// Devices in sysfs, behind an IOMMU of AMD's.
    fn sysfs(addresses: &[&str]) -> TempDir {
        let root = TempDir::new().unwrap();
        for address in addresses {
            let group = root.as_path().join(address).join("iommu_group");
            fs::create_dir_all(&group).unwrap();
            let kept = "0x000000fd00000000 0x000000ffffffffff reserved\n";
            fs::write(group.join("reserved_regions"), kept).unwrap();
        }
        root
    }

    fn config(root: &TempDir, devices: &[&str], memory: &Value, platform: &Value) -> VmConfig {
        let path = |device: &&str| json!({"path": root.as_path().join(device)});
        let devices: Vec<_> = devices.iter().map(path).collect();
        let config = json!({
            "payload": {"kernel": "/k"}, "memory": memory, "devices": devices, "platform": platform,
        });
        let mut config: VmConfig = serde_json::from_value(config).unwrap();
        choose_high_hole(&mut config);
        config
    }

    /// As a machine asks when it boots.
    fn wish(root: &TempDir, devices: &[&str], memory: &Value, platform: &Value) -> Option<Wish> {
        Wish::of(&config(root, devices, memory, platform), 48).unwrap()
    }

    fn huge(size_gib: u64) -> Value {
        json!({
            "size": size_gib * GIB, "hugepages": true, "hugepage_size": GIB, "prezeroed": "/run/pool",
        })
    }

    #[test]
    fn memory_of_terabytes_is_asked_for_where_the_machine_has_it() {
        let root = sysfs(&["0000:65:00.0"]);
        let iommufd = json!({"iommufd": true});
        for (size_gib, expected) in [
            (512, vec![(0, 3), (4, 509)]),
            (1011, vec![(0, 3), (4, 1008)]),
            (1012, vec![(0, 3), (4, 1008), (1024, 1)]),
            (1024, vec![(0, 3), (4, 1008), (1024, 13)]),
            (2048, vec![(0, 3), (4, 1008), (1024, 1037)]),
            (4096, vec![(0, 3), (4, 1008), (1024, 3085)]),
        ] {
            let wish = wish(&root, &["0000:65:00.0"], &huge(size_gib), &iommufd).unwrap();
            let in_gib = |region: &PinnedRegion| (region.gpa / GIB, region.len_bytes / GIB);
            let regions: Vec<_> = wish.request.regions.iter().map(in_gib).collect();
            assert_eq!(regions, expected, "{size_gib} GiB");
            let (pages, node) = (PagesWanted::Huge1Gib, None);
            let zone = ZoneWanted { size_bytes: size_gib * GIB, pages, node };
            assert_eq!(wish.request.zones, [zone]);
            // What is asked for can be sent, and says the same.
            let sent = TakePinned::decode(&wish.request.encode()).unwrap().unwrap().0;
            assert_eq!(sent, wish.request);
        }
    }

    #[test]
    fn all_zones_and_all_devices_are_asked_for() {
        let devices = ["0000:65:00.0", "0000:66:00.0", "0001:02:00.1"];
        let root = sysfs(&devices);
        let zone = |id: &str, node: u32| {
            json!({
                "id": id, "size": TIB, "hugepages": true, "hugepage_size": GIB,
                "host_numa_node": node, "prezeroed": "/run/pool",
            })
        };
        let iommufd = json!({"iommufd": true});
        let memory = json!({"size": 0, "zones": [zone("a", 0), zone("b", 1)]});
        let wish = |memory: &Value| wish(&root, &devices, memory, &iommufd);
        let Wish { request, paths, zones, socket } = wish(&memory).unwrap();
        assert_eq!(request.devices, devices.map(|device| device.parse().unwrap()));
        assert_eq!(paths, devices.map(|device| root.as_path().join(device)));
        assert_eq!(socket, Path::new("/run/pool"));
        assert_eq!(zones.iter().map(|zone| zone.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let nodes: Vec<_> = request.zones.iter().map(|zone| zone.node).collect();
        assert_eq!(nodes, [Some(0), Some(1)]);
        let of_zones: Vec<_> = request.regions.iter().map(|region| region.zone).collect();
        assert_eq!(of_zones, [0, 0, 0, 1]);
        assert_eq!(request.regions[3].gpa, TIB + 13 * GIB);

        let other = json!({"id": "c", "size": GIB, "prezeroed": "/run/other"});
        assert!(wish(&json!({"size": 0, "zones": [zone("a", 0), other]})).is_none(), "two pools");
        let own = json!({"id": "c", "size": GIB});
        assert!(wish(&json!({"size": 0, "zones": [zone("a", 0), own]})).is_none());
        let many: Vec<_> = (0..17).map(|at| zone(&format!("z{at}"), 0)).collect();
        assert!(wish(&json!({"size": 0, "zones": many})).is_none(), "more than a pool maps");
        let mut grows = huge(4);
        grows["hotplug_size"] = json!(4 * GIB);
        assert!(wish(&grows).is_none(), "it grows");
        assert!(wish(&huge(4)).is_some());
    }

    /// The pool leaves the devices alone while that connection is open, and lends the slot's memory over no other.
    #[test]
    fn a_machine_that_is_refused_keeps_its_connection_and_takes_memory_over_it() {
        let root = sysfs(&["0000:65:00.0"]);
        let socket = root.as_path().join("pool");
        let listener = UnixListener::bind(&socket).unwrap();
        let pool = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let requests = [(); 2].map(|()| {
                let mut bytes = vec![0; MESSAGE_BYTES_MAX];
                let len = stream.read(&mut bytes).unwrap();
                let request = Request::decode(&bytes[..len]).unwrap().unwrap().0;
                let refused = Reply::Refused { reason: Refusal::Empty, text: String::new() };
                stream.write_all(&refused.encode()).unwrap();
                request
            });
            (requests, stream.read(&mut [0]).unwrap())
        });
        let mut memory = huge(4);
        memory["prezeroed"] = json!(socket);
        let config = config(&root, &["0000:65:00.0"], &memory, &json!({"iommufd": true}));
        let answer = PrepinnedSlot::take(&config, 48).unwrap();
        assert!(answer.slot.is_none() && answer.pool.is_some());
        let (zones, socket) = ram::zones_of_one_pool(&config.memory).unwrap().unwrap();
        let given = prezeroed::take(&[(&zones[0], Some(socket.as_path()))], answer.pool.as_ref());
        assert!(given.is_empty());
        drop(answer);
        let (requests, len) = pool.join().unwrap();
        assert!(matches!(requests, [Request::TakePinned(_), Request::Take(_)]), "{requests:?}");
        assert_eq!(len, 0, "it was closed after that");
    }

    #[test]
    fn the_device_of_a_slot_is_taken_once_and_for_its_own_path() {
        let null = || OwnedFd::from(fs::File::open("/dev/null").unwrap());
        let grant = PinnedGrant {
            device: "0000:66:00.0".parse().unwrap(),
            zones: Vec::new(),
            piece_bytes: 4096,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: Vec::new(),
        };
        let mut slot = PrepinnedSlot {
            given: Vec::new(),
            iommufd: Some(null()),
            path: "/d/b".into(),
            device: Some(null()),
            attached: None,
            grant,
            mapped: BTreeMap::new(),
        };
        let at = |path: &str| DeviceConfig { path: Some(path.into()), ..DeviceConfig::default() };
        assert!(slot.is_for(&at("/d/b")) && !slot.is_for(&at("/d/a")));
        let taken = slot.take_device();
        assert!(
            matches!(taken, Some(HostPlace::Prepinned { path, .. }) if path == Path::new("/d/b"))
        );
        assert!(slot.take_device().is_none());
    }

    #[test]
    fn a_machine_without_iommufd_or_devices_asks_for_nothing() {
        let root = sysfs(&["0000:65:00.0"]);
        let wish = |devices: &[&str], iommufd| {
            wish(&root, devices, &huge(4), &json!({"iommufd": iommufd}))
        };
        assert!(wish(&["0000:65:00.0"], true).is_some());
        assert!(wish(&["0000:65:00.0"], false).is_none(), "type1");
        assert!(wish(&[], true).is_none());
        assert!(wish(&["0000:77:00.0"], true).is_none(), "there is none");
    }
}
