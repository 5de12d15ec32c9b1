// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether two connections come from one host, and whether one stays on this host.
//!
//! Owns these comparisons. The first is all that can be asked of a peer that shows no token. Must not be taken for
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

    /// Whether the peer is on this host, as far as addresses tell: one behind a proxy seems to be where that is.
    pub(crate) fn stays_on_this_host(&self) -> bool {
        if self.socket.peer_addr().is_ok_and(|address| address.is_unix()) {
            return true;
        }
        let own = self.socket.local_addr().ok().and_then(|address| address.as_socket());
        own.zip(self.peer_ip()).is_some_and(|(own, (peer, _))| is_own(own.ip(), peer))
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

/// Whether a peer at this address is on the host whose address here is `own`.
fn is_own(own: IpAddr, peer: IpAddr) -> bool {
    // What is sent to an address of this host has it as the sender's address as well.
    peer.to_canonical().is_loopback() || peer.to_canonical() == own.to_canonical()
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::cancel::Cancel;

    #[test]
    fn a_peer_on_this_host_is_told_from_others() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(is_own(ip("10.0.0.5"), ip("10.0.0.5")));
        assert!(is_own(ip("10.0.0.5"), ip("::ffff:10.0.0.5")), "the same in the newer form");
        assert!(
            is_own(ip("::ffff:127.0.0.1"), ip("::ffff:127.0.0.2")) && is_own(ip("::1"), ip("::1"))
        );
        assert!(!is_own(ip("10.0.0.5"), ip("10.0.0.6")));
        assert!(!is_own(ip("fe80::1"), ip("fe80::2")));
        let never = Cancel::new().unwrap();
        let limit = Duration::from_secs(20);
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(Connection::over(one, &never, limit).unwrap().stays_on_this_host());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        let connection = Connection::connect(&to, &never, limit, limit).unwrap();
        assert!(connection.stays_on_this_host());
    }
}
