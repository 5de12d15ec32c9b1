// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether two connections come from one host.
//!
//! Owns this comparison, which is all that can be asked of a peer that shows no token. Must not be taken for
//! authentication: another user of that host, or a host that can take its address, passes.

use std::net::IpAddr;

use super::socket::Connection;

impl Connection {
    /// Whether the peer of this connection is on the host of the other one's: over TCP it has the same IP address. Who may
    /// connect to a Unix socket is said by its mode.
    ///
    /// An address that cannot be found out is that of another host.
    pub(crate) fn is_from_the_host_of(&self, other: &Self) -> bool {
        if self.is_unix() && other.is_unix() {
            return true;
        }
        self.peer_ip().is_some_and(|address| other.peer_ip() == Some(address))
    }

    fn peer_ip(&self) -> Option<IpAddr> {
        let address = self.socket.peer_addr().ok()?.as_socket()?;
        // A listener for both families shows an address of the older one as one of the newer.
        Some(address.ip().to_canonical())
    }
}
