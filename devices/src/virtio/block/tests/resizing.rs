// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks that get another size while their device is in use.

use super::specification::Loop;
use super::*;
use crate::virtio::block::{DiskFormat, ResizeDiskError};

/// Capacity in the configuration space, in sectors.
fn capacity(device: &Block) -> u64 {
    let mut bytes = [0; 8];
    device.read_config(0, &mut bytes);
    u64::from_le_bytes(bytes)
}

#[test]
fn a_driver_is_told_of_a_larger_disk_and_uses_it() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        fixture.device.lock().lock().unwrap();
        let resizer = fixture.device.resizer();
        let write = [readable(BUFFER, 512)];
        let beyond = fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS + 3, &write);
        assert_eq!(beyond.0, IO_ERROR);
        resizer.resize(2 * SECTORS * 512).unwrap();
        assert_eq!(
            (capacity(&fixture.device), fixture.driver.interrupt.config_changes()),
            (2 * SECTORS, 1)
        );
        fixture.driver.write(BUFFER, &[0x77; 512]);
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS + 3, &write), (OK, 1));
        assert_eq!(fixture.on_disk(SECTORS + 3, 1), [0x77; 512]);
        assert_eq!(fixture.on_disk(SECTORS + 4, 1), [0; 512]);
        assert_eq!(fixture.on_disk(3, 1), pattern(3));
        // The same size is no change.
        resizer.resize(2 * SECTORS * 512).unwrap();
        assert_eq!(fixture.driver.interrupt.config_changes(), 1);
    });
}

#[test]
fn what_is_cut_off_is_neither_read_nor_written() {
    let mut fixture = Fixture::new(|_| {});
    fixture.device.lock().lock().unwrap();
    let resizer = fixture.device.resizer();
    assert!(resizer.cuts((SECTORS - 8) * 512) && !resizer.cuts(SECTORS * 512));
    fixture.device.pause();
    resizer.resize((SECTORS - 8) * 512).unwrap();
    fixture.device.resume();
    assert_eq!(capacity(&fixture.device), SECTORS - 8);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, SECTORS - 9, &[writable(BUFFER, 512)]).0, OK);
    for kind in [abi::VIRTIO_BLK_T_IN, abi::VIRTIO_BLK_T_OUT] {
        let buffer = if kind == abi::VIRTIO_BLK_T_IN {
            writable(BUFFER, 512)
        } else {
            readable(BUFFER, 512)
        };
        assert_eq!(fixture.request(kind, SECTORS - 8, &[buffer]).0, IO_ERROR);
    }
    assert_eq!(fixture.image.as_file().metadata().unwrap().len(), (SECTORS - 8) * 512);
}

#[test]
fn the_lock_is_of_the_disk_as_it_is() {
    let image = image();
    // Another host's, of the same size at first.
    let other = Block::new(config(&image)).unwrap().lock();
    let device = Block::new(config(&image)).unwrap();
    let (lock, resizer) = (device.lock(), device.resizer());
    lock.lock().unwrap();
    resizer.resize(2 * SECTORS * 512).unwrap();
    let larger = Block::new(config(&image)).unwrap().lock();
    assert!(matches!(larger.lock(), Err(DiskError::InUse { .. })));
    resizer.resize(SECTORS * 256).unwrap();
    assert!(matches!(other.lock(), Err(DiskError::InUse { .. })));
    lock.unlock().unwrap();
    larger.lock().unwrap();
    larger.unlock().unwrap();
    other.lock().unwrap();
}

#[test]
fn a_size_that_a_disk_cannot_have_is_refused() {
    let image = image();
    let resizer = |config: BlockConfig| {
        let device = Block::new(config).unwrap();
        device.lock().lock().unwrap();
        device.resizer()
    };
    for size_bytes in [0, 513, u64::MAX] {
        let error = resizer(config(&image)).resize(size_bytes).unwrap_err();
        assert!(matches!(error, ResizeDiskError::Size { .. }), "{error}");
    }
    // A multiple of the block size that no file has.
    let error = resizer(config(&image)).resize(u64::MAX / 512 * 512).unwrap_err();
    assert!(matches!(error, ResizeDiskError::Host(_)), "{error}");
    let readonly = BlockConfig { readonly: true, ..config(&image) };
    assert!(matches!(resizer(readonly).resize(512), Err(ResizeDiskError::ReadOnly)));
    assert_eq!(image.as_file().metadata().unwrap().len(), SECTORS * 512);

    let qcow2 = NamedTempFile::new().unwrap();
    std::fs::write(qcow2.path(), crate::virtio::block::Qcow2Sample::default().image()).unwrap();
    let qcow2 = BlockConfig { format: DiskFormat::Qcow2, ..config(&qcow2) };
    let error = resizer(qcow2).resize(1 << 30).unwrap_err();
    assert!(matches!(error, ResizeDiskError::Format(DiskFormat::Qcow2)), "{error}");
}

#[test]
fn a_block_device_has_the_size_that_the_host_gives_it() {
    let Some(device) = Loop::over(image()) else {
        test_skip::skip!("no loop devices here");
        return;
    };
    let path = device.path.clone().into();
    let block = Block::new(BlockConfig { path, ..BlockConfig::default() }).unwrap();
    let resizer = block.resizer();
    assert!(matches!(resizer.resize(512), Err(ResizeDiskError::NotLocked)));
    block.lock().lock().unwrap();
    let error = resizer.resize(2 * SECTORS * 512).unwrap_err();
    assert!(matches!(error, ResizeDiskError::Device { .. }), "{error}");
    device.grow(2 * SECTORS * 512);
    resizer.resize(2 * SECTORS * 512).unwrap();
    assert_eq!(capacity(&block), 2 * SECTORS);
}

#[test]
fn a_driver_that_was_not_there_is_told_when_its_device_works_again() {
    let image = image();
    let mut device = Block::new(config(&image)).unwrap();
    device.lock().lock().unwrap();
    // As of a guest that is restored and not yet resumed.
    device.resizer().resize(2 * SECTORS * 512).unwrap();
    let driver = Driver::new(1, 64);
    driver.activate_all(&mut device);
    assert_eq!(driver.interrupt.config_changes(), 1);
    device.reset();
    driver.activate_all(&mut device);
    assert_eq!(driver.interrupt.config_changes(), 1, "once, and not after a reset");
}
