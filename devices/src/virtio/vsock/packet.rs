// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Headers of packets between guest and host (virtio 1.3, 5.10.6).
//!
//! Owns their layout. A header may lie across any number of buffers, as may what follows it, so it is
//! copied out of guest memory before it is read.

/// Length of a header in bytes.
pub(crate) const HEADER_BYTES: usize = 44;
/// Context ID of the host.
pub(crate) const HOST_CID: u64 = 2;
/// Type of stream packets, the only one supported.
pub(crate) const TYPE_STREAM: u16 = 1;
/// Maximum data of a packet, in either direction: that of Linux.
pub(crate) const DATA_BYTES_MAX: usize = 64 << 10;

/// The sender will receive no more.
pub(crate) const SHUTDOWN_RECEIVE: u32 = 1;
/// The sender will send no more.
pub(crate) const SHUTDOWN_SEND: u32 = 2;

/// Packet operations. Unknown values are handled like any unexpected packet.
pub(crate) mod op {
    /// Request a connection.
    pub(crate) const REQUEST: u16 = 1;
    /// Accept a connection.
    pub(crate) const RESPONSE: u16 = 2;
    /// Reset: there is no such connection, or no longer.
    pub(crate) const RST: u16 = 3;
    /// Shut down one or both directions.
    pub(crate) const SHUTDOWN: u16 = 4;
    /// Data.
    pub(crate) const RW: u16 = 5;
    /// Report the credit fields.
    pub(crate) const CREDIT_UPDATE: u16 = 6;
    /// Request the credit fields.
    pub(crate) const CREDIT_REQUEST: u16 = 7;
}

/// A packet header; untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) src_cid: u64,
    pub(crate) dst_cid: u64,
    pub(crate) src_port: u32,
    pub(crate) dst_port: u32,
    pub(crate) len_bytes: u32,
    pub(crate) kind: u16,
    pub(crate) op: u16,
    pub(crate) flags: u32,
    pub(crate) buf_alloc: u32,
    pub(crate) fwd_cnt: u32,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(field::<0, 8>(bytes)),
            dst_cid: u64::from_le_bytes(field::<8, 8>(bytes)),
            src_port: u32::from_le_bytes(field::<16, 4>(bytes)),
            dst_port: u32::from_le_bytes(field::<20, 4>(bytes)),
            len_bytes: u32::from_le_bytes(field::<24, 4>(bytes)),
            kind: u16::from_le_bytes(field::<28, 2>(bytes)),
            op: u16::from_le_bytes(field::<30, 2>(bytes)),
            flags: u32::from_le_bytes(field::<32, 4>(bytes)),
            buf_alloc: u32::from_le_bytes(field::<36, 4>(bytes)),
            fwd_cnt: u32::from_le_bytes(field::<40, 4>(bytes)),
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// Changes the length of the data in a header as it is in memory.
pub(crate) fn set_len_bytes(header: &mut [u8; HEADER_BYTES], len_bytes: u32) {
    header[24..28].copy_from_slice(&len_bytes.to_le_bytes());
}

/// The field of `LEN` bytes at `AT`.
fn field<const AT: usize, const LEN: usize>(bytes: &[u8; HEADER_BYTES]) -> [u8; LEN] {
    const { assert!(AT + LEN <= HEADER_BYTES) };
    bytes.get(AT..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; LEN])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let mut bytes = [0; HEADER_BYTES];
        for (byte, value) in bytes.iter_mut().zip(0..) {
            *byte = value;
        }
        let header = Header::parse(&bytes);
        assert_eq!(header.src_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.dst_cid, 0x0f0e_0d0c_0b0a_0908);
        assert_eq!((header.src_port, header.dst_port), (0x1312_1110, 0x1716_1514));
        assert_eq!((header.len_bytes, header.kind, header.op), (0x1b1a_1918, 0x1d1c, 0x1f1e));
        assert_eq!(header.flags, 0x2322_2120);
        assert_eq!((header.buf_alloc, header.fwd_cnt), (0x2726_2524, 0x2b2a_2928));
        assert_eq!(header.to_bytes(), bytes);
        let longer = Header { len_bytes: 7, ..header };
        set_len_bytes(&mut bytes, 7);
        assert_eq!(longer.to_bytes(), bytes);
    }
}
