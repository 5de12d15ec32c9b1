// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What guests were told of their taps.

use super::*;

/// The network of a recorded machine, whose guest has accepted an MTU.
fn network(recorded: &mut Recorded) -> &mut cloud_hypervisor_state::Net {
    let Virtio::Net(net) = &mut recorded.device("_net2").1 else { panic!("a network") };
    net
}

#[test]
fn a_tap_has_the_mtu_that_its_guest_was_told() {
    let mtu = |recorded: &Recorded| recorded.adopted().config.net.unwrap()[0].mtu;
    let mut recorded = all_devices();
    assert_eq!(mtu(&recorded), Some(1500), "no option said it");
    network(&mut recorded).config.mtu = 9000;
    assert_eq!(mtu(&recorded), Some(9000));
    network(&mut recorded).config.mtu = 1279;
    let error = recorded.refusal();
    assert!(error.contains("mtu") && error.contains("1280"), "{error}");
    let net = network(&mut recorded);
    net.avail_features &= !(1 << 3);
    net.acked_features &= !(1 << 3);
    assert_eq!(mtu(&recorded), None, "it was told none");
}
