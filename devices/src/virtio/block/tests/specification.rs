// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Points of the specification that drivers rarely look at: what a device may do to an image, what its
//! cache begins as, how much of a buffer was used.

use std::process::Command;

use super::*;

/// A block device whose sectors are those of an image, as long as this lives.
pub(in crate::virtio::block) struct Loop {
    pub(in crate::virtio::block) path: String,
    image: NamedTempFile,
}

impl Loop {
    /// `None` where there are no loop devices.
    pub(in crate::virtio::block) fn over(image: NamedTempFile) -> Option<Self> {
        let found = Command::new("losetup").args(["--find", "--show"]).arg(image.path()).output();
        let path = String::from_utf8(found.ok()?.stdout).unwrap().trim().to_owned();
        (!path.is_empty()).then_some(Self { path, image })
    }

    /// Gives the device another size.
    pub(super) fn grow(&self, len_bytes: u64) {
        self.image.as_file().set_len(len_bytes).unwrap();
        let done = Command::new("losetup").args(["--set-capacity", &self.path]).status();
        assert!(done.unwrap().success());
    }

    /// Discards that the device has done (Documentation/block/stat.rst).
    fn discards(&self) -> u64 {
        let name = self.path.trim_start_matches("/dev/");
        let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        stat.split_whitespace().nth(11).unwrap().parse().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

#[test]
fn a_discard_on_a_block_device_is_a_discard() {
    let Some(device) = Loop::over(image()) else {
        test_skip::skip!("no loop devices here");
        return;
    };
    let before = device.discards();
    let path = device.path.clone().into();
    let block = Block::new(BlockConfig { path, ..config(&device.image) }).unwrap();
    let mut fixture = Fixture::with(block, image());
    let status = fixture.ranges(abi::VIRTIO_BLK_T_DISCARD, &[(8, 0, 0), (16, 16, 0)]);
    assert_eq!((status, device.discards() - before), (OK, 1));
    drop(fixture);
}

#[test]
fn an_image_that_is_not_sparse_is_not_punched() {
    let mut fixture = Fixture::new(|config| config.sparse = false);
    assert_eq!(fixture.device.features() & 1 << abi::VIRTIO_BLK_F_DISCARD, 0);
    assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_DISCARD, &[(8, 16, 0)]), UNSUPPORTED);
    assert_eq!(fixture.on_disk(8, 1), pattern(8));
}

#[test]
fn the_cache_of_a_driver_that_cannot_flush_begins_off() {
    let image = image();
    let mut device = Block::new(config(&image)).unwrap();
    let writeback = |device: &Block| {
        let mut byte = [0xee];
        device.read_config(32, &mut byte);
        byte[0]
    };
    let all = device.features();
    assert_eq!(writeback(&device), 1);
    device.acknowledge_features(all & !(1 << abi::VIRTIO_BLK_F_FLUSH));
    assert_eq!(writeback(&device), 0);
    device.write_config(32, &[1]);
    assert_eq!(writeback(&device), 1, "it may be switched on");
    let saved = device.save();
    device.reset();
    device.acknowledge_features(all & !(1 << abi::VIRTIO_BLK_F_FLUSH));
    device.restore(&saved).unwrap();
    assert_eq!(writeback(&device), 1, "what the driver chose");
    device.reset();
    device.acknowledge_features(all);
    assert_eq!(writeback(&device), 1);
}

#[test]
fn a_read_that_failed_has_filled_nothing() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        let read = [writable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, SECTORS, &read), (IO_ERROR, 0));
        // The image is shorter than it was.
        fixture.image.as_file().set_len(512).unwrap();
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 7, &read), (IO_ERROR, 0));
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &read), (OK, 513));
        // The answer is the first byte of what is there.
        let write = [readable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS, &write), (IO_ERROR, 1));
        // Serial strings have 20 bytes, and the answer is behind the whole buffer.
        let long = [writable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_GET_ID, 0, &long), (OK, 20));
    });
}
