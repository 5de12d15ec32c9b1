// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of devices of vhost-user of which the VMM knows nothing.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::mpsc::Receiver;

use vm_memory::GuestAddressSpace as _;

use super::scripted::{
    Answer, GET_CONFIG, GET_PROTOCOL_FEATURES, PROTOCOL_FEATURES, Request, back_end,
};
use super::session::Session;
use super::tests::{PATIENT, config, losses, ram};
use super::*;
use crate::virtio::VirtioDevice as _;
use crate::virtio::test_driver::Driver;

const SET_CONFIG: u32 = 25;

fn kind() -> VhostUserKind {
    VhostUserKind::Generic { device_id: 18, queue_sizes: vec![16, 64] }
}

fn generic(
    answer: impl FnMut(&Request) -> Answer + Send + 'static,
) -> (VhostUser, Receiver<String>) {
    let session = Session::over(back_end(answer).unwrap(), kind().needs(0), PATIENT).unwrap();
    let (on_lost, lost) = losses();
    let config = VhostUserConfig { kind: kind(), num_queues: 0, ..config(1) };
    let ram = ram(1, true);
    let device = VhostUser::over(session, config, &ram.guest_memory().memory(), on_lost).unwrap();
    (device, lost)
}

/// A back end with eight bytes of configuration that can be written.
fn with_config() -> impl FnMut(&Request) -> Answer + Send + 'static {
    let mut config = [1, 2, 3, 4, 5, 6, 7, 8_u8];
    move |request| {
        if request.number != GET_CONFIG && request.number != SET_CONFIG {
            return request.usual();
        }
        let word = |at: usize| {
            u32::from_le_bytes(request.payload[at..at + 4].try_into().unwrap()) as usize
        };
        let Some(place) = config.get_mut(word(0)..word(0) + word(4)) else {
            let mut none = request.payload[..12].to_vec();
            none[4..8].fill(0);
            let refused =
                if request.number == SET_CONFIG { 1_u64.to_le_bytes().to_vec() } else { none };
            return request.reply(&refused);
        };
        if request.number == SET_CONFIG {
            place.copy_from_slice(&request.payload[12..]);
            return request.reply(&0_u64.to_le_bytes());
        }
        request.reply(&[&request.payload[..12], place].concat())
    }
}

#[test]
fn what_the_guest_sees_is_the_back_ends() {
    let (device, _) = generic(Request::usual);
    assert_eq!((device.device_id(), device.queue_sizes_max()), (18, &[16, 64][..]));
    let all = kind().features(u64::MAX, 0, None);
    assert_eq!(all & 0xff_ffff, 0xff_ffff);
    let transport = (1 << 50) - (1 << 24);
    assert_eq!(all & transport, crate::virtio::RING_FEATURES);
    assert_eq!(kind().features(0, 0, None), 0);
}

#[test]
fn its_configuration_is_read_and_written_where_it_is() {
    let (mut device, lost) = generic(with_config());
    let read = |device: &VhostUser, offset: u64, len: usize| {
        let mut data = vec![0xff; len];
        device.read_config(offset, &mut data);
        data
    };
    assert_eq!(read(&device, 2, 4), [3, 4, 5, 6]);
    device.write_config(4, &[9, 9]);
    assert_eq!(read(&device, 0, 8), [1, 2, 3, 4, 9, 9, 7, 8]);
    // What it does not have, and what the protocol cannot say.
    assert_eq!(read(&device, 6, 4), [0; 4]);
    device.write_config(6, &[7; 4]);
    for offset in [253, 1 << 32, u64::MAX] {
        assert_eq!(read(&device, offset, 4), [0; 4]);
        device.write_config(offset, &[7; 4]);
    }
    assert_eq!(read(&device, 0, 8), [1, 2, 3, 4, 9, 9, 7, 8]);
    assert!(lost.try_recv().is_err(), "the back end is there");
    let ram = ram(1, true);
    let driver = Driver::over(ram.guest_memory(), 2, 16);
    driver.activate_all(&mut device);
    assert_eq!(read(&device, 0, 1), [1]);
    device.reset();
    assert!(!driver.interrupt.is_broken());
}

#[test]
fn a_back_end_without_configuration_is_not_asked() {
    let answer = |request: &Request| match request.number {
        GET_PROTOCOL_FEATURES => request.reply(&(PROTOCOL_FEATURES & !(1 << 9)).to_le_bytes()),
        GET_CONFIG | SET_CONFIG => Answer::Close,
        _ => request.usual(),
    };
    let (mut device, lost) = generic(answer);
    let mut data = [7];
    device.read_config(0, &mut data);
    device.write_config(0, &data);
    assert_eq!(data, [0]);
    assert!(lost.try_recv().is_err());
}

#[test]
fn a_back_end_that_ends_at_an_access_is_lost_once() {
    let answer = |request: &Request| match request.number {
        GET_CONFIG => Answer::Close,
        _ => request.usual(),
    };
    let (mut device, lost) = generic(answer);
    let mut data = [7];
    device.read_config(0, &mut data);
    device.read_config(0, &mut data);
    device.write_config(0, &data);
    assert_eq!(data, [0]);
    assert!(lost.recv_timeout(PATIENT).unwrap().contains("GET_CONFIG"));
    assert!(lost.try_recv().is_err());
}
