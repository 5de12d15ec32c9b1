// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every seed is a valid input: mutations of what is refused at once would not get far.
//!
//! Accesses to PCI and rings have no outcome to look at here; the crates' own tests cover those.

use std::io::{Seek, Write};

use arch::{BootError, BootSpec};
use cloud_hypervisor_state::{ConfigMessage, Document};
use devices::virtio::block::{Block, BlockConfig, DiskFormat};
use memory::GuestMemory;
use prezero_pool_client::{Reply, Request};
use vm_memory::GuestAddress;
use vm_migration::page_server::{ServedMemory, TakeoverRequest};
use vm_migration::protocol::message::{Answer, Message, Role};
use vmm::config::{self, Family, VmConfig};

use crate::seeds::{Seed, all};

fn seeds_of(target: &str) -> Vec<Seed> {
    let seeds: Vec<Seed> = all().into_iter().filter(|seed| seed.target == target).collect();
    assert!(!seeds.is_empty(), "no seed for {target}");
    seeds
}

fn parses<T: Family>(text: &str) -> Result<(), String> {
    T::parse(text).map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn option_strings_parse() {
    let mut refused = Vec::new();
    for seed in seeds_of("option_string") {
        let text = String::from_utf8(seed.contents).unwrap();
        let (family, text) = text.split_once('\n').unwrap();
        let result = match family {
            "cpus" => {
                config::CpusConfig::parse_cpus(text).map(|_| ()).map_err(|error| error.to_string())
            }
            "memory" => parses::<config::MemoryConfig>(text),
            "memory-zone" => parses::<config::MemoryZoneConfig>(text),
            "platform" => parses::<config::PlatformConfig>(text),
            "disk" => parses::<config::DiskConfig>(text),
            "net" => parses::<config::NetConfig>(text),
            "fs" => parses::<config::FsConfig>(text),
            "generic-vhost-user" => parses::<config::GenericVhostUserConfig>(text),
            "user-device" => parses::<config::UserDeviceConfig>(text),
            "vdpa" => parses::<config::VdpaConfig>(text),
            "vsock" => parses::<config::VsockConfig>(text),
            "tpm" => parses::<config::tpm::TpmConfig>(text),
            "rng" => parses::<config::RngConfig>(text),
            "balloon" => parses::<config::BalloonConfig>(text),
            "console" => parses::<config::ConsoleConfig>(text),
            "serial" => parses::<config::SerialConfig>(text),
            "debug-console" => parses::<config::DebugConsoleConfig>(text),
            "numa" => parses::<config::numa::NumaConfig>(text),
            "pci-segment" => parses::<config::platform::PciSegmentConfig>(text),
            "device" => parses::<config::DeviceConfig>(text),
            "send-migration" => config::SendMigrationData::parse_or_url(text)
                .map(|_| ())
                .map_err(|error| error.to_string()),
            "receive-migration" => config::ReceiveMigrationData::parse_or_url(text)
                .map(|_| ())
                .map_err(|error| error.to_string()),
            "rate-limit-group" => parses::<config::rate_limiter::RateLimitGroupConfig>(text),
            _ => Err("no such family".to_owned()),
        };
        if let Err(error) = result {
            refused.push(format!("{family} {text}: {error}"));
        }
    }
    assert_eq!(refused, Vec::<String>::new());
}

#[test]
fn bodies_parse() {
    let mut wrong = Vec::new();
    for Seed { name, contents, .. } in seeds_of("machine_document") {
        assert!(vmm::migration::document::MachineDocument::read(&contents).is_ok(), "{name}");
    }
    for Seed { name, contents, .. } in seeds_of("api_json") {
        let result = match name.split('-').next().unwrap() {
            "send" => serde_json::from_slice::<config::SendMigrationData>(&contents)
                .map_err(|error| error.to_string())
                .and_then(|data| data.validate().map_err(|error| error.to_string())),
            "receive" => serde_json::from_slice::<config::ReceiveMigrationData>(&contents)
                .map_err(|error| error.to_string())
                .and_then(|data| data.validate().map_err(|error| error.to_string())),
            _ => serde_json::from_slice::<VmConfig>(&contents)
                .map_err(|error| error.to_string())
                .and_then(|config| config.complete().map_err(|error| error.to_string()))
                .map(|_| ()),
        };
        if result.is_ok() == name.starts_with("refused") {
            wrong.push(format!("{name}: {result:?}"));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn documents_of_cloud_hypervisor_are_read() {
    for Seed { name, contents, .. } in seeds_of("cloud_hypervisor_document") {
        let (kind, contents) = contents.split_first().unwrap();
        let refused = match kind {
            b'c' => ConfigMessage::read(contents).err(),
            _ => Document::read(contents).err(),
        };
        assert!(refused.is_none(), "{name}: {refused:?}");
    }
}

#[test]
fn kernels_load() {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap();
    let spec = BootSpec {
        cmdline: "console=hvc0",
        rsdp_gpa: arch::layout::RSDP_GPA,
        reserved: &[],
        later: &[],
        ram_is_zero: true,
    };
    for Seed { name, contents, .. } in seeds_of("kernel_image") {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&contents).unwrap();
        file.rewind().unwrap();
        let result = arch::load_kernel(&memory, &mut file, None, &spec);
        let without_entry = matches!(result, Err(BootError::NoPvhNote));
        assert!(result.is_ok() || name == "elf-without-notes", "{name}: {result:?}");
        assert_eq!(without_entry, name == "elf-without-notes", "{name}: {result:?}");
    }
}

#[test]
fn streams_are_messages_to_the_end() {
    for Seed { name, contents, .. } in seeds_of("migration_stream") {
        let mut from = contents.as_slice();
        match name.as_str() {
            "answers" => while Answer::read(&mut from).is_ok() {},
            "role" => {
                assert!(Role::read(&mut from).is_ok());
                from = &[];
            }
            _ => while Message::read(&mut from).is_ok() {},
        }
        assert!(from.is_empty(), "{name}: {} bytes are no message", from.len());
    }
}

#[test]
fn steps_of_tls_get_through_the_handshake() {
    for Seed { name, contents, .. } in seeds_of("tls_records") {
        let outcome = vm_migration::tls_records_outcome(&contents);
        let [source, destination] = outcome.sent.map(|(_, len)| len);
        match name.split('-').next().unwrap() {
            // The rest of the handshake is still to come.
            "hello" => assert!(!outcome.has_failed[1] && destination > 90, "{name}: {outcome:?}"),
            "answer" => assert!(!outcome.has_failed[0] && source > 90, "{name}: {outcome:?}"),
            _ => assert_eq!(outcome.is_secured, [true; 2], "{name}"),
        }
        let heard_bytes = match name.split('-').next().unwrap() {
            "talk" => [0x9000, 0x100],
            "keys" => [109, 0xa000],
            "ticket" => [3, 0],
            _ => continue,
        };
        assert_eq!(outcome.heard_bytes, heard_bytes, "{name}");
    }
}

#[test]
fn messages_of_the_pool_are_understood() {
    for Seed { name, contents, .. } in seeds_of("pool_protocol") {
        let mut rest = contents.as_slice();
        while let Ok(Some((_, len))) = Request::decode(rest) {
            rest = &rest[len..];
        }
        while let Ok(Some((_, len))) = Reply::decode(rest) {
            rest = &rest[len..];
        }
        assert!(rest.is_empty(), "{name}: {} bytes are no message", rest.len());
    }
}

#[test]
fn orders_to_a_page_server_are_understood() {
    for Seed { name, contents, .. } in seeds_of("page_server_orders") {
        let mut rest = contents.as_slice();
        let mut layout = None;
        while let Some((header, after)) = rest.split_at_checked(16) {
            let len = u64::from_le_bytes(header[8..].try_into().unwrap()) as usize;
            let (payload, next) = after.split_at(len);
            match header[0] {
                1 => layout = Some(ServedMemory::parse(payload).unwrap().layout().unwrap()),
                2 => assert_eq!(len, 4, "{name}"),
                _ => drop(TakeoverRequest::parse(payload, layout.as_ref().unwrap()).unwrap()),
            }
            rest = next;
        }
        assert!(rest.is_empty() && layout.is_some(), "{name}");
    }
}

#[test]
fn disk_images_are_opened() {
    for seed in seeds_of("disk_image") {
        let (choice, image) = seed.contents.split_last().unwrap();
        // Only the entry point makes an image of these.
        if choice & 4 != 0 {
            continue;
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(image).unwrap();
        let format = if choice & 1 == 0 { DiskFormat::Qcow2 } else { DiskFormat::FixedVhd };
        let path = file.path().to_owned();
        let device = Block::new(BlockConfig { path, format, ..BlockConfig::default() }).unwrap();
        let lock = device.lock();
        lock.lock().unwrap();
        lock.load().unwrap_or_else(|error| panic!("{}: {error:?}", seed.name));
    }
}

#[test]
fn each_target_has_seeds() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/targets");
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        seeds_of(path.file_stem().unwrap().to_str().unwrap());
    }
}

/// Each saved state is taken by one of the devices, and only by one.
#[test]
fn states_of_the_platform_are_taken() {
    use devices::Snapshot;
    use devices::legacy as of;
    let (cpus, memory) = (of::CpuHotplug::new(4, Box::new(|| ())), of::MemoryHotplug::new(None));
    let pci = |last| {
        of::PciHotplug::new(
            last,
            of::OnEject { hide: Box::new(|_, _| ()), notify: Box::new(|| ()) },
        )
    };
    let (one, two, timer) = (pci(0), pci(1), of::PmTimer::new());
    let (clock, id) =
        (of::Cmos::new(0, 0, Box::new(of::HostClock)), of::GenerationId::new(0xe_f000));
    let line = || vmm_sys_util::eventfd::EventFd::new(0).unwrap();
    let ged = of::GedDevice::new(line());
    let endpoint = devices::endpoint::ConsoleEndpoint::null().unwrap();
    let serial = of::Serial::new(endpoint.into(), line()).unwrap();
    let all: [&dyn Snapshot; 9] = [&cpus, &memory, &one, &two, &timer, &clock, &id, &ged, &serial];
    for Seed { name, contents, .. } in seeds_of("platform_registers") {
        let Some((0xff, json)) = contents.split_first() else { continue };
        let state = serde_json::from_slice(json).unwrap();
        let taken = all.iter().filter(|device| device.restore(&state).is_ok()).count();
        assert_eq!(taken, 1, "{name}");
    }
}
