// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! TLS handshake messages after the handshake: the peer's key updates, and session tickets, which are not used.
//!
//! Owns their framing. Record boundaries may split them anywhere, except that nothing follows a key update in
//! its record. They come from a peer that has shown its certificate, but are checked nevertheless.

use rustls::{Error, InvalidMessage, PeerMisbehaved};

/// Handshake type of a server's session ticket.
const NEW_SESSION_TICKET: u8 = 4;

/// Handshake type of the message after which the peer uses new keys.
const KEY_UPDATE: u8 = 24;

/// Longest message: a ticket has some hundred bytes.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// Bytes of type and length.
const HEADER_BYTES: usize = 4;

/// Request of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// The peer's next record uses new keys; with `true` this side must change its keys as well.
    KeyUpdate(bool),
}

/// The received part of a message.
#[derive(Debug, Default)]
pub(super) struct Messages(Vec<u8>);

impl Messages {
    /// Takes the contents of a record; returns the requests that are complete.
    ///
    /// # Errors
    /// When the peer violates the protocol.
    pub(super) fn take(
        &mut self,
        contents: &[u8],
        is_client: bool,
    ) -> Result<Option<Control>, Error> {
        self.0.extend_from_slice(contents);
        let mut at = 0;
        let mut control = None;
        while let Some(([kind, length @ ..], rest)) =
            self.0[at..].split_first_chunk::<HEADER_BYTES>()
        {
            let [high, mid, low] = length.map(usize::from);
            let len = (high << 16) | (mid << 8) | low;
            if len > MESSAGE_BYTES_MAX {
                return Err(InvalidMessage::HandshakePayloadTooLarge.into());
            }
            let Some(body) = rest.get(..len) else { break };
            match (*kind, body) {
                (NEW_SESSION_TICKET, _) if is_client => {}
                (KEY_UPDATE, [requested @ 0..=1]) => {
                    control = Some(Control::KeyUpdate(*requested == 1));
                }
                (KEY_UPDATE, _) => return Err(InvalidMessage::InvalidKeyUpdate.into()),
                _ => return Err(InvalidMessage::UnexpectedMessage("after the handshake").into()),
            }
            at += HEADER_BYTES + len;
            if control.is_some() && at < self.0.len() {
                return Err(PeerMisbehaved::KeyEpochWithPendingFragment.into());
            }
        }
        self.0.drain(..at);
        Ok(control)
    }

    /// True in the middle of a message, where no other record may follow.
    pub(super) fn is_partial(&self) -> bool {
        !self.0.is_empty()
    }
}

/// The message that announces new keys for the next record.
pub(super) const OUR_KEY_UPDATE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_may_be_cut_anywhere() {
        let ticket = [&[NEW_SESSION_TICKET, 0, 1, 0][..], &[7; 256]].concat();
        let asked = [KEY_UPDATE, 0, 0, 1, 1];
        let all = [&ticket[..], &asked].concat();
        for cut in 0..=all.len() {
            let mut messages = Messages::default();
            let first = messages.take(&all[..cut], true).unwrap();
            let second = messages.take(&all[cut..], true).unwrap();
            let heard: Vec<_> = first.into_iter().chain(second).collect();
            assert_eq!(heard, [Control::KeyUpdate(true)], "{cut}");
            assert!(!messages.is_partial());
        }
        let ours = Messages::default().take(&OUR_KEY_UPDATE, false).unwrap();
        assert_eq!(ours, Some(Control::KeyUpdate(false)));
    }

    #[test]
    fn what_does_not_belong_there_is_refused() {
        for (bytes, is_client) in [
            (&[NEW_SESSION_TICKET, 0, 0, 0][..], false),
            (&[13, 0, 0, 0], true),
            (&[KEY_UPDATE, 0, 0, 1, 2], true),
            (&[KEY_UPDATE, 0, 0, 2, 0, 0], true),
            (&[KEY_UPDATE, 0, 0, 1, 0, NEW_SESSION_TICKET], true),
            (&[NEW_SESSION_TICKET, 1, 0, 0], true),
        ] {
            assert!(Messages::default().take(bytes, is_client).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused(
            records in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            is_client: bool,
        ) {
            let mut messages = Messages::default();
            let whole = Messages::default().take(&records.concat(), is_client);
            let in_parts = records.iter().try_fold(None, |last, record| {
                messages.take(record, is_client).map(|control| control.or(last))
            });
            if whole.is_ok() {
                // What is valid in one record is valid in several.
                prop_assert!(in_parts.is_ok());
                prop_assert_eq!(in_parts.unwrap(), whole.unwrap());
            }
        }
    }
}
