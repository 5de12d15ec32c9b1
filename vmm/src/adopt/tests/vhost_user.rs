// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of other processes. No recording has one: the network of a recording is made one.

use cloud_hypervisor_state::VhostUser;

use super::*;

const PROTOCOL_FEATURES: u64 = 1 << 30;
const MTU: u64 = 1 << 3;

/// A machine whose network is served by a back end, with these positions of its two rings.
fn with_back_end(bases: Vec<u64>) -> Recorded {
    let mut recorded = all_devices();
    let (_, Virtio::Net(net)) = recorded.device("_net2").clone() else { panic!("a network") };
    recorded.device("_net2").1 = Virtio::VhostUserNet(VhostUser {
        avail_features: net.avail_features & !MTU,
        acked_features: net.acked_features & !MTU | PROTOCOL_FEATURES,
        config: net.config,
        acked_protocol_features: 1,
        vu_num_queues: 2,
        backend_req_support: false,
        vring_bases: Some(List::try_from(bases).ok().unwrap()),
        backend_state: None,
    });
    let options = recorded.config["net"][0].as_object_mut().unwrap();
    options.insert("vhost_user".to_owned(), json!(true));
    options.insert("vhost_socket".to_owned(), json!("/tmp/x/net"));
    for of_a_tap in ["tap", "host_mac", "ip", "mask"] {
        options.remove(of_a_tap);
    }
    recorded
}

#[test]
fn the_bit_between_a_vmm_and_its_back_end_is_not_the_guests() {
    let net = virtio(&with_back_end(vec![0, 0]).adopted(), "_net2");
    assert_ne!(net.common.driver_features, 0);
    assert_eq!(net.common.driver_features & PROTOCOL_FEATURES, 0);
}

#[test]
fn a_back_end_has_no_position_of_the_control_queue() {
    let net = virtio(&with_back_end(vec![0, 0]).adopted(), "_net2");
    assert_eq!(net.queues.len(), 3);
    assert!(net.queues.iter().all(|queue| queue.progress.is_some()));
    for bases in [vec![], vec![0], vec![0, 0, 0]] {
        let error = with_back_end(bases).refusal();
        assert!(error.contains("device-manager/_net2: vring_bases: "), "{error}");
        assert!(error.contains("and the back end has 2 rings"), "{error}");
    }
    let error = with_back_end(vec![0, 1 << 16]).refusal();
    assert!(error.contains("_net2: vring_bases[1]: no position of a ring"), "{error}");
}
