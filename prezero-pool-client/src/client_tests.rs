// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the client makes of answers, good and bad, and of a pool that is of an earlier version or has gone.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixListener;

use super::*;
use crate::pages::PagesWanted;
use crate::pinned::{PinnedRegion, PinnedZone, ZoneWanted};

const REQUEST: Take = Take { size_bytes: 4096, pages: PagesWanted::Small, node: None };

/// A pool that answers one question like this.
fn answered(
    answer: impl FnOnce(&mut UnixStream) + Send + 'static,
) -> Result<PoolMemory, PoolError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let pool = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 32];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(Take::decode(&request), Ok(Some((REQUEST, 32))));
        answer(&mut stream);
    });
    let result = PoolConnection::open(&path).and_then(|pool| pool.take(&REQUEST));
    pool.join().unwrap();
    result
}

fn granted(size_bytes: u64, pages: SlotPages) -> Vec<u8> {
    Reply::Granted { size_bytes, pages }.encode()
}

#[test]
fn memory_comes_with_its_message_even_in_pieces() {
    let memory = answered(|stream| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let reply = granted(8192, SlotPages::Transparent);
        stream.send_with_fd(&reply[..5], file.as_raw_fd()).unwrap();
        stream.write_all(&reply[5..]).unwrap();
    })
    .unwrap();
    assert_eq!((memory.size_bytes, memory.pages), (8192, SlotPages::Transparent));
    assert_eq!(memory.file.metadata().unwrap().len(), 8192);
}

/// The first answer is too late, and would be taken for that to the second request.
#[test]
fn a_late_answer_is_none_to_another_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let connection = PoolConnection::open(&path).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let late = connection.ask(&REQUEST.encode(), Duration::from_millis(1));
    assert!(matches!(late, Err(PoolError::Io { .. })), "{late:?}");
    let file = tempfile::tempfile().unwrap();
    let reply = granted(8192, SlotPages::Small);
    stream.send_with_fd(&reply[..], file.as_raw_fd()).unwrap();
    let other = Take { size_bytes: 8192, ..REQUEST };
    let answer = connection.take(&other);
    assert!(matches!(answer, Err(PoolError::Unanswered { .. })), "{answer:?}");
    // With the connection goes what was granted late.
    drop(connection);
    let mut request = [0; 32];
    stream.read_exact(&mut request).unwrap();
    assert_eq!(stream.read(&mut request).unwrap_or(0), 0, "nothing more was asked");
}

#[test]
fn a_refusal_says_why() {
    let text = "none is ready";
    let reply = Reply::Refused { reason: Refusal::Empty, text: text.to_owned() }.encode();
    let error = answered(move |stream| stream.write_all(&reply).unwrap()).unwrap_err();
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn what_a_pool_must_not_do_is_an_error() {
    let with_file = |reply: Vec<u8>| {
        answered(move |stream| {
            let file = tempfile::tempfile().unwrap();
            stream.send_with_fd(&reply[..], file.as_raw_fd()).unwrap();
        })
    };
    let refused = Reply::Refused { reason: Refusal::Empty, text: String::new() };
    assert!(matches!(with_file(refused.encode()), Err(PoolError::Misbehaved { .. })));
    let small = granted(1, SlotPages::Small);
    assert!(matches!(with_file(small), Err(PoolError::Misbehaved { .. })));
    let huge = granted(1 << 30, SlotPages::Huge1Gib);
    assert!(matches!(with_file(huge), Err(PoolError::Misbehaved { .. })));
    let twice = [granted(4096, SlotPages::Small), granted(4096, SlotPages::Small)].concat();
    assert!(matches!(with_file(twice), Err(PoolError::Misbehaved { .. })));
    let nothing = answered(|stream| stream.write_all(&granted(4096, SlotPages::Small)).unwrap());
    assert!(matches!(nothing, Err(PoolError::Misbehaved { .. })));
    let rubbish = answered(|stream| stream.write_all(b"hello").unwrap());
    assert!(matches!(rubbish, Err(PoolError::Protocol { .. })));
    let gone = answered(|_| ());
    assert!(matches!(gone, Err(PoolError::Io { .. })), "{gone:?}");
}

/// The same for a device, answered with descriptors that come with the first bytes.
fn answered_pinned(
    answer: Vec<u8>,
    descriptors: usize,
) -> (TakePinned, Result<PinnedMemory, PoolError>) {
    let wanted = TakePinned {
        devices: vec!["0000:64:00.0".parse().unwrap(), "0000:65:00.0".parse().unwrap()],
        zones: vec![ZoneWanted { size_bytes: 8192, pages: PagesWanted::Small, node: None }; 2],
        regions: regions(),
    };
    let (asked, len) = (wanted.clone(), wanted.encode().len());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let pool = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = vec![0; len];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(TakePinned::decode(&request), Ok(Some((asked, len))));
        for (at, byte) in answer.iter().enumerate() {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096 * (at as u64 + 1)).unwrap();
            let sent = if at < descriptors {
                stream.send_with_fd(&[*byte][..], file.as_raw_fd()).is_ok()
            } else {
                stream.write_all(&[*byte]).is_ok()
            };
            // A client that has read enough hangs up.
            if !sent {
                break;
            }
        }
    });
    let result = PoolConnection::open(&path).and_then(|pool| pool.take_pinned(&wanted));
    let _ = pool.join();
    (wanted, result)
}

/// Two zones, the second of which is in two parts.
fn regions() -> Vec<PinnedRegion> {
    let region = |zone, gpa, offset, len_bytes| PinnedRegion { zone, gpa, len_bytes, offset };
    vec![region(0, 0, 0, 8192), region(1, 8192, 0, 4096), region(1, 1 << 20, 4096, 4096)]
}

#[test]
fn a_device_comes_with_its_memory_or_not_at_all() {
    let grant = PinnedGrant {
        device: "0000:65:00.0".parse().unwrap(),
        zones: vec![PinnedZone { size_bytes: 8192, pages: SlotPages::Small }; 2],
        piece_bytes: 4096,
        device_id: 1,
        space_id: 2,
        table_id: 3,
        regions: regions(),
    };
    let reply = Reply::GrantedPinned(grant.clone()).encode();
    let memory = answered_pinned(reply.clone(), 4).1.unwrap();
    assert_eq!(memory.grant, grant);
    let len = |file: &File| file.metadata().unwrap().len();
    assert_eq!(memory.files.iter().map(len).collect::<Vec<_>>(), [4096, 8192]);
    assert_eq!([&memory.iommufd, &memory.device].map(len), [12288, 16384]);
    for descriptors in [0, 3, 5, DESCRIPTORS_MAX + 1] {
        let result = answered_pinned(reply.clone(), descriptors).1;
        assert!(matches!(result, Err(PoolError::Misbehaved { .. })), "{descriptors}");
    }
    let changes: [fn(&mut PinnedGrant); 4] = [
        |grant| {
            grant.zones.pop();
            grant.regions.truncate(1);
        },
        |grant| grant.zones[1].pages = SlotPages::Huge2Mib,
        |grant| grant.regions[2].gpa += 4096,
        |grant| grant.device = "0000:66:00.0".parse().unwrap(),
    ];
    for change in changes {
        let mut other = grant.clone();
        change(&mut other);
        let descriptors = other.descriptors_count();
        let result = answered_pinned(Reply::GrantedPinned(other).encode(), descriptors).1;
        assert!(matches!(result, Err(PoolError::Misbehaved { .. })), "{result:?}");
    }
    let memory_only = granted(8192, SlotPages::Small);
    assert!(matches!(answered_pinned(memory_only, 1).1, Err(PoolError::Misbehaved { .. })));
    let refused = Reply::Refused { reason: Refusal::NotAllowed, text: String::new() };
    let reason = match answered_pinned(refused.encode(), 0).1 {
        Err(PoolError::Refused { reason, .. }) => Some(reason),
        _ => None,
    };
    assert_eq!(reason, Some(Refusal::NotAllowed));
}

fn devices() -> Vec<Bdf> {
    vec!["0000:64:00.0".parse().unwrap(), "0001:65:1f.7".parse().unwrap()]
}

fn wanted(devices: Vec<Bdf>) -> TakePinned {
    let zones = vec![ZoneWanted { size_bytes: 8192, pages: PagesWanted::Small, node: None }; 2];
    TakePinned { devices, zones, regions: regions() }
}

/// A pool that takes requests of one zone only, and cuts who asks otherwise: all connections that one request causes. It is
/// slow, and hears of all devices before it answers for one.
fn earlier_pool(listener: &UnixListener, expected: Vec<Bdf>) -> Vec<UnixStream> {
    SockRef::from(listener).set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (mut first, _) = listener.accept().unwrap();
    // It closes with the rest unread.
    first.read_exact(&mut [0; 16]).unwrap();
    drop(first);
    let mut streams = Vec::new();
    for device in expected {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 56];
        stream.read_exact(&mut request).unwrap();
        // Kind 4, 40 bytes: 4096 bytes of any node, without a hole.
        assert_eq!(request[..16], *b"GPZ1\x04\0\0\0\x28\0\0\0\0\0\0\0");
        assert_eq!(request[16..32], *b"\0\x10\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff");
        assert_eq!(Request::decode(&request), Ok(Some((Request::Release(device), request.len()))));
        streams.push(stream);
    }
    for stream in &mut streams {
        let refused = Reply::Refused { reason: Refusal::NoSuchSlot, text: String::new() };
        stream.write_all(&refused.encode()).unwrap();
    }
    streams
}

#[track_caller]
fn is_open(mut stream: &UnixStream) {
    stream.set_nonblocking(true).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_pool_of_an_earlier_version_releases_the_devices_and_is_asked_again_at_each_reboot() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let devices = devices();
    let expected = devices.clone();
    let pool = std::thread::spawn(move || {
        let mut first = earlier_pool(&listener, expected.clone());
        // What is silent for long is cut; memory was given over the last.
        let given = first.pop().unwrap();
        drop(first);
        let again = earlier_pool(&listener, expected.clone());
        // Also if none was cut.
        let last = earlier_pool(&listener, expected);
        let kept: Vec<_> = [given].into_iter().chain(again).chain(last).collect();
        kept
    });
    let wanted = wanted(devices);
    let connection = PoolConnection::open(&path).unwrap();
    let error = connection.take_pinned(&wanted).unwrap_err();
    assert!(matches!(error, PoolError::Earlier { .. }), "{error:?}");
    for _ in 0..2 {
        connection.renew().unwrap();
    }
    // A pool of this version that was started anew leaves the devices alone for as long as these are open.
    let kept = pool.join().unwrap();
    kept.iter().for_each(is_open);
    drop(kept);
    // The pool has ended.
    let error = connection.take_pinned(&wanted).unwrap_err();
    assert!(matches!(error, PoolError::Io { .. }), "{error:?}");
}

#[test]
fn a_device_that_cannot_be_released_keeps_no_other_from_it() {
    let (dir, devices) = (tempfile::tempdir().unwrap(), devices());
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let expected = devices.clone();
    let pool = std::thread::spawn(move || {
        drop(listener.accept().unwrap());
        let mut last = None;
        for device in expected {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 56];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(Request::decode(&request), Ok(Some((Request::Release(device), 56))));
            // All but the last are cut.
            last = Some(stream);
        }
        let mut last = last.unwrap();
        let refused = Reply::Refused { reason: Refusal::NoSuchSlot, text: String::new() };
        last.write_all(&refused.encode()).unwrap();
        last.read_exact(&mut [0; 32]).unwrap();
        last.write_all(&refused.encode()).unwrap();
    });
    let connection = PoolConnection::open(&path).unwrap();
    let error = connection.take_pinned(&wanted(devices)).unwrap_err();
    assert!(matches!(error, PoolError::Io { .. }), "{error:?}");
    // The last one was waited for.
    let error = connection.take(&REQUEST).unwrap_err();
    assert!(matches!(error, PoolError::Refused { .. }), "{error:?}");
    pool.join().unwrap();
}

/// What the next client asks, which is refused.
fn refuse(listener: &UnixListener) -> (UnixStream, TakePinned) {
    SockRef::from(listener).set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let len = stream.read(&mut bytes).unwrap();
    let (request, _) = TakePinned::decode(&bytes[..len]).unwrap().unwrap();
    let refused = Reply::Refused { reason: Refusal::NoSuchSlot, text: String::new() };
    stream.write_all(&refused.encode()).unwrap();
    (stream, request)
}

#[test]
fn a_pool_that_was_started_anew_is_told_of_the_devices() {
    let (dir, devices) = (tempfile::tempdir().unwrap(), devices());
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let connection = PoolConnection::open(&path).unwrap();
    std::thread::scope(|scope| {
        let pool = scope.spawn(|| refuse(&listener));
        let error = connection.take_pinned(&wanted(devices.clone())).unwrap_err();
        assert!(matches!(error, PoolError::Refused { .. }), "{error:?}");
        let (first, _) = pool.join().unwrap();
        // A connection that is open is left as it is.
        connection.renew().unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        listener.set_nonblocking(false).unwrap();
        drop(first);
        for _ in 0..2 {
            // Also of one that was made anew.
            let pool = scope.spawn(|| refuse(&listener));
            connection.renew().unwrap();
            let (again, request) = pool.join().unwrap();
            let (zones, regions) = (Vec::new(), Vec::new());
            assert_eq!(request, TakePinned { devices: devices.clone(), zones, regions });
            is_open(&again);
        }
    });
    drop(listener);
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(connection.renew(), Err(PoolError::Connect { .. })));
    // It is told of none that it was not asked for.
    let listener = UnixListener::bind(&path).unwrap();
    let other = PoolConnection::open(&path).unwrap();
    drop(listener);
    other.renew().unwrap();
}

#[test]
fn a_pool_whose_answer_is_late_is_asked_anew() {
    let (dir, devices) = (tempfile::tempdir().unwrap(), devices());
    let path = dir.path().join("pool");
    let listener = UnixListener::bind(&path).unwrap();
    let connection = PoolConnection::open(&path).unwrap();
    let (mut first, _) = listener.accept().unwrap();
    let late = connection.take_pinned_within(&wanted(devices.clone()), Duration::from_millis(1));
    assert!(matches!(late, Err(PoolError::Io { .. })), "{late:?}");
    let refused = Reply::Refused { reason: Refusal::NoSuchSlot, text: String::new() };
    first.write_all(&refused.encode()).unwrap();
    std::thread::scope(|scope| {
        let pool = scope.spawn(|| refuse(&listener));
        connection.renew().unwrap();
        assert_eq!(pool.join().unwrap().1.devices, devices);
    });
}

#[test]
fn a_pool_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none");
    let error = PoolConnection::open(&path).unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
    std::fs::write(&path, "").unwrap();
    assert!(matches!(PoolConnection::open(&path), Err(PoolError::Connect { .. })));
}
