// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Admission of clients: how many connections each user may have.
//!
//! Owns the numbers and the decision. Must never let users that are not trusted, however many there are, keep
//! root or the pool's own user from connecting.

/// Connections in all: below the usual limit of descriptors, together with the slots.
pub const CONNECTIONS_MAX: usize = 512;
/// Of these, connections that only root and the pool's own user can have.
pub const CONNECTIONS_RESERVED: usize = 64;
/// Connections of one user that is not trusted.
pub const CONNECTIONS_PER_USER_MAX: usize = 128;

/// A client that has connected.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// It is root or the pool's own user.
    pub is_trusted: bool,
    /// Its user may have memory or a device of the pool.
    pub may_ask: bool,
}

/// Connections that are open.
#[derive(Debug, Clone, Copy)]
pub struct Open {
    /// Of the client's user.
    pub of_user: usize,
    /// Of all users.
    pub of_all: usize,
}

/// Outcome for a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is kept.
    Admitted,
    /// Its user may have nothing: it is told so, and the connection is closed.
    Pointless,
    /// It is closed, as there are too many.
    TooMany,
}

/// Decides about a new connection.
pub fn admit(client: Client, open: Open) -> Admission {
    if !client.may_ask {
        return Admission::Pointless;
    }
    let most =
        if client.is_trusted { CONNECTIONS_MAX } else { CONNECTIONS_MAX - CONNECTIONS_RESERVED };
    if open.of_all >= most || (!client.is_trusted && open.of_user >= CONNECTIONS_PER_USER_MAX) {
        return Admission::TooMany;
    }
    Admission::Admitted
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: Client = Client { is_trusted: false, may_ask: true };
    const ROOT: Client = Client { is_trusted: true, may_ask: true };

    #[test]
    fn however_many_users_connect_root_still_can() {
        let mut open = 0;
        for _user in 0..100 {
            let mut of_user = 0;
            while admit(USER, Open { of_user, of_all: open }) == Admission::Admitted {
                (of_user, open) = (of_user + 1, open + 1);
            }
        }
        assert_eq!(open, CONNECTIONS_MAX - CONNECTIONS_RESERVED);
        let mut of_user = 0;
        while admit(ROOT, Open { of_user, of_all: open }) == Admission::Admitted {
            (of_user, open) = (of_user + 1, open + 1);
        }
        assert_eq!((of_user, open), (CONNECTIONS_RESERVED, CONNECTIONS_MAX));
    }

    #[test]
    fn a_user_that_may_have_nothing_has_no_connection_either() {
        let open = Open { of_user: 0, of_all: 0 };
        assert_eq!(admit(Client { may_ask: false, ..USER }, open), Admission::Pointless);
        // Root can be given a limit as well.
        assert_eq!(admit(Client { may_ask: false, ..ROOT }, open), Admission::Pointless);
    }
}
