// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzzing of the client: what a device server sends.
//!
//! Owns a server that answers as its input says: as usual, with other bytes, with bytes that are no message, or not at
//! all. Never used by a VMM.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
use pci::PciDevice as _;
use pci::fakes::FakeMsiSource;

use super::UserFunction;
use super::protocol::{Command, Fields, HEADER_LEN_BYTES, Header};
use crate::device::{VfioPciDevice, VfioWiring};
use crate::fakes::FakeSlots;
use crate::gate::DmaGate;

/// Longer than a server of this file takes.
const LIMIT: Duration = Duration::from_secs(20);
const REPLY: u32 = 1;
const REFUSAL: u32 = 1 | 1 << 5;
/// Length and flags in a header. With others the client waits for what does not come.
const FRAMING: std::ops::Range<usize> = 4..12;

/// How a message of the server comes to be, by a byte of the input.
mod kind {
    /// With other bytes behind the header, whose number is in the low bits; as usual below.
    pub const OTHER_FIRST: u8 = 0x80;
    /// The usual answer with one byte of it changed: where, and to what, follows.
    pub const CHANGED: u8 = 0xf0;
    /// A refusal with the error that follows.
    pub const REFUSED: u8 = 0xf1;
    /// A command of the server with the bytes of which the number follows, then the usual answer.
    pub const COMMAND: u8 = 0xf2;
    /// All that is left of the input, then the end. Others end the connection at once.
    pub const RAW: u8 = 0xf3;
}

fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, rest) = input.split_at(input.len().min(len));
    *input = rest;
    head
}

fn message(id: u16, command: u16, flags: u32, error: u32, payload: &[u8]) -> Vec<u8> {
    let len_bytes = u32::try_from(HEADER_LEN_BYTES + payload.len()).unwrap_or(u32::MAX);
    let head = [id.to_le_bytes(), command.to_le_bytes()].concat();
    let words: Vec<u8> = [len_bytes, flags, error].into_iter().flat_map(u32::to_le_bytes).collect();
    [head, words, payload.to_vec()].concat()
}

/// What a server of a device with one BAR and two MSI-X vectors answers.
fn usual(command: u16, request: &[u8]) -> Vec<u8> {
    let word = |at: usize| {
        let rest = request.get(at..).unwrap_or_default();
        Fields(rest).double_word().unwrap_or(0)
    };
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let is = |wanted: Command| command == wanted as u16;
    if is(Command::Version) {
        let text = br#"{"capabilities":{"max_msg_fds":1,"max_data_xfer_size":64}}"#;
        [&[0, 0, 1, 0][..], text, &[0]].concat()
    } else if is(Command::DeviceGetInfo) {
        words(&[16, 0b11, 9, 5])
    } else if is(Command::DeviceGetRegionInfo) {
        let len_bytes = match word(8) {
            0 => 0x1000,
            7 => 256,
            _ => 0,
        };
        words(&[32, 0b11, word(8), 0, len_bytes, 0, 0, 0])
    } else if is(Command::DeviceGetIrqInfo) {
        words(&[16, 0b111, word(8), if word(8) == 0 { 1 } else { 2 }])
    } else if is(Command::RegionRead) {
        let mut config = [0; 256];
        let mut put = |at: usize, bytes: &[u8]| {
            config.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
        };
        put(0, &[0x34, 0x12, 0x0d, 0x0d, 0, 0, 0x10]);
        put(0x34, &[0x40]);
        put(0x40, &[0x11, 0, 1, 0, 0, 0, 0, 0, 0, 8]);
        let at = usize::try_from(word(0)).unwrap_or(0);
        let mut data = vec![0; usize::try_from(word(12)).unwrap_or(0).min(64)];
        let from = config.get(at..).unwrap_or_default();
        data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        [request.get(..16).unwrap_or_default(), &data].concat()
    } else if is(Command::RegionWrite) {
        request.get(..16).unwrap_or_default().to_vec()
    } else {
        Vec::new()
    }
}

/// Answers the next command; `None` when that was the last.
fn serve_one(stream: &mut UnixStream, input: &mut &[u8]) -> Option<()> {
    let mut head = [0; HEADER_LEN_BYTES];
    stream.read_exact(&mut head).ok()?;
    let header = Header::parse(&head);
    let mut request = vec![0; header.payload_len_bytes()?];
    stream.read_exact(&mut request).ok()?;
    let (id, command) = (header.id, header.command);
    if header.kind() != Some(super::protocol::Kind::Command { wants_reply: true }) {
        // The answer to a command of this server.
        return Some(());
    }
    let byte = |input: &mut &[u8]| take(input, 1).first().copied();
    let answer = message(id, command, REPLY, 0, &usual(command, &request));
    // With nothing left all is as usual.
    let kind = byte(input).unwrap_or(0);
    let mut ends = false;
    let bytes = match kind {
        0..kind::OTHER_FIRST => answer,
        kind::OTHER_FIRST..kind::CHANGED => {
            let payload = take(input, usize::from(kind & 0x7f));
            message(id, command, REPLY, 0, payload)
        }
        kind::CHANGED => {
            let (at, value) = (byte(input)?, byte(input)?);
            let mut answer = answer;
            let len = answer.len();
            let at = usize::from(at) % len;
            if let Some(changed) = answer.get_mut(at) {
                *changed = value;
            }
            ends = FRAMING.contains(&at);
            answer
        }
        kind::REFUSED => message(id, command, REFUSAL, byte(input)?.into(), &[]),
        kind::COMMAND => {
            let len = usize::from(byte(input)?);
            [message(7, 12, 0, 0, take(input, len)), answer].concat()
        }
        kind::RAW => {
            stream.write_all(take(input, usize::MAX)).ok()?;
            return None;
        }
        _ => return None,
    };
    stream.write_all(&bytes).ok()?;
    (!ends).then_some(())
}

/// Returns whether the server made a device of it.
fn drive(function: &Arc<UserFunction>) -> bool {
    let slots = Arc::new(FakeSlots::default());
    let gate = Arc::new(DmaGate::default());
    gate.open();
    let wiring = VfioWiring {
        msi_source: &FakeMsiSource::new(4096),
        slots: slots.clone(),
        gate,
        intx: None,
        trapped_bars: Vec::new(),
        gpudirect_clique: None,
        has_ports: true,
        peers: None,
    };
    let host: Arc<dyn crate::HostFunction> = function.clone();
    let device = VfioPciDevice::new("fuzz".to_owned(), host, wiring);
    let is_made = device.is_ok();
    if let Ok(device) = device {
        let mut data = [0; 4];
        device.write_config(4, &[6, 0]);
        device.bar_moved(0, Some(0x1000_0000));
        device.write_config(0x42, &[1, 0x80]);
        for offset in [0, 4, 0x10, 0x40, 0xfc] {
            device.read_config(offset, &mut data);
            device.read_bar(0, offset.into(), &mut data);
            device.write_bar(0, offset.into(), &data);
        }
        device.write_config(0x42, &[1, 0]);
        device.stop_mapping();
        device.disarm();
        device.read_config(0, &mut data);
        assert_eq!(data, [0xff; 4]);
    }
    assert_eq!(slots.violations(), Vec::<String>::new());
    assert_eq!(slots.shown(), Vec::<std::ops::Range<u64>>::new());
    let taken = function.take_memory_back();
    assert!(function.lost().is_some(), "{taken:?}");
    is_made
}

/// Fuzzes what a device server sends: for each command of the client a byte says how it is answered. Returns whether that
/// was enough for a device.
pub fn fuzz_vfio_user(input: &[u8]) -> bool {
    let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
    let Ok(ram) = GuestRam::new(&RamConfig { zones }, RamLayout::default()) else {
        return false;
    };
    let ram = Arc::new(ram);
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return false };
    std::thread::scope(|scope| {
        let server = scope.spawn(move || {
            let mut input = input;
            while serve_one(&mut theirs, &mut input).is_some() {}
        });
        let function = UserFunction::over("fuzz", ours, &ram, LIMIT);
        let is_made = function.is_ok_and(|function| drive(&Arc::new(function)));
        // The scope alone does not wait for the end of the thread, which a look for leaks would find running.
        let _ = server.join();
        is_made
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_server_is_harmless(
            usual in 0_usize..40,
            bytes in prop::collection::vec(any::<u8>(), 0..256),
        ) {
            // What must hold of a device, and of one that is lost, is asserted there.
            let is_made = fuzz_vfio_user(&[vec![0; usual], bytes.clone()].concat());
            prop_assert!(is_made || !bytes.is_empty());
        }
    }

    #[test]
    fn a_usual_server_serves_to_the_end() {
        assert!(fuzz_vfio_user(&[]));
    }
}
