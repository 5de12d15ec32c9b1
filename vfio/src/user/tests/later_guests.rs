// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that a server was given, and who may have it afterwards.

use super::*;

#[test]
fn memory_that_a_server_may_have_is_for_no_later_guest() {
    let keeps = |act: fn(&mut Reply) -> Act, number: u16, nth| {
        let (mut server, stream) = Server::start(once(number, nth, move |reply, _| act(reply)));
        let (ram, (config, layout)) = (ram(true), layout(true));
        assert!(ram.can_restart(&config, layout));
        let function = UserFunction::over("dev", stream, &ram, SHORT);
        let was_given = function.is_ok();
        assert!(!ram.can_restart(&config, layout) || function.is_err());
        if let Ok(function) = function {
            let _ = function.take_memory_back();
        }
        server.join();
        (was_given, ram.can_restart(&config, layout))
    };
    let refuse = |reply: &mut Reply| put_refusal(reply);
    assert_eq!(keeps(refuse, command::GET_INFO, 1), (false, true), "it was given none");
    assert_eq!(keeps(refuse, command::DMA_MAP, 1), (false, false));
    assert_eq!(keeps(refuse, command::DMA_MAP, 2), (false, false));
    assert_eq!(keeps(refuse, command::DMA_UNMAP, 2), (true, false));
    assert_eq!(keeps(|_| Act::Send, command::DMA_UNMAP, 2), (true, true));
}

fn put_refusal(reply: &mut Reply) -> Act {
    put(reply, 8, vfio_user_device::REFUSAL);
    Act::Send
}
