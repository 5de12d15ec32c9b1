// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether two connections come from one host.
//!
//! Owns this comparison, which is all that can be asked of a peer that shows no token. Must not be taken for
//! authentication: another user of that host, or a host that can take its address, passes.

use std::net::{IpAddr, SocketAddr};

use super::socket::Connection;

impl Connection {
    /// Whether the peer of this connection is on the host of the other one's: over TCP it has the same IP address. Who may
    /// connect to a Unix socket is said by its mode.
    ///
    /// An address that cannot be found out is that of another host.
    pub(crate) fn is_from_the_host_of(&self, other: &Self) -> bool {
        let is_unix = |it: &Self| it.socket.peer_addr().is_ok_and(|address| address.is_unix());
        if is_unix(self) && is_unix(other) {
            return true;
        }
        self.peer_ip().is_some_and(|address| other.peer_ip() == Some(address))
    }

    /// Its address and, as the same one may stand for a host on each link, the link of a local one.
    fn peer_ip(&self) -> Option<(IpAddr, u32)> {
        let address = self.socket.peer_addr().ok()?.as_socket()?;
        // A listener for both families shows an address of the older one as one of the newer.
        let link = match address {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(address) => address.scope_id(),
        };
        Some((address.ip().to_canonical(), link))
    }
}
