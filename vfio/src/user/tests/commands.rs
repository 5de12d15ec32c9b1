// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Commands of a server that asks for too much, or too often.

use super::*;

/// A function that has answered once, and what its server says then, while nothing is asked of it.
fn after_an_answer(
    then: impl Fn(&UnixStream) + Send + 'static,
) -> (Arc<UserFunction>, Server, Arc<VfioPciDevice>) {
    let tamper = once(command::REGION_READ, 2, move |reply, stream| {
        vfio_user_device::send(stream, &reply.bytes, &[]).unwrap();
        then(stream);
        Act::Keep
    });
    let (function, server) = opened(tamper);
    let (device, _slots) = plugged(&function);
    (function, server, device)
}

#[test]
fn a_server_that_goes_on_asking_waits_for_each_refusal() {
    const COMMANDS: u32 = 20;
    let (function, server, device) = after_an_answer(|stream| {
        (0..COMMANDS).for_each(|_| ask_for_memory(stream, 0));
    });
    let begun = Instant::now();
    let (_watch, heard) = watched(&function, &device);
    device.read_config(0, &mut [0; 4]);
    let refused = || server.device.lock().unwrap().refusals.len();
    until("all are refused", || refused() == COMMANDS as usize);
    // 32 a second.
    assert!(begun.elapsed() >= Duration::from_millis(31) * (COMMANDS - 1), "{:?}", begun.elapsed());
    assert!(heard.try_recv().is_err());
}

#[test]
fn a_command_that_is_too_long_ends_the_session_before_its_bytes_come() {
    // The header alone: nothing of what it announces is waited for.
    let (function, _server, device) = after_an_answer(|stream| {
        let len = vfio_user_device::HEADER + 64 + (1 << 20) + 1;
        let head = vfio_user_device::header(77, command::DMA_READ, len, 0, 0);
        vfio_user_device::send(stream, &head, &[]).unwrap();
    });
    let (_watch, heard) = watched(&function, &device);
    device.read_config(0, &mut [0; 4]);
    let why = heard.recv_timeout(PATIENCE).unwrap();
    assert!(why.contains("a command of 1048641 bytes"), "{why}");
}
