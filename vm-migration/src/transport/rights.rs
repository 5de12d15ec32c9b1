// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that are sent along with bytes over a Unix socket (SCM_RIGHTS), one at a time.
//!
//! May contain `unsafe`: control messages. A received descriptor is owned at once, so none
//! can leak; more than one at a time is an error, and the kernel closes those for which there is no room.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Buffer for a control message with one descriptor, with the alignment that the kernel requires.
#[repr(C, align(8))]
struct Control([u8; SPACE_BYTES]);

const FD_BYTES: u32 = 4;
const _: () = assert!(size_of::<RawFd>() == 4);
// SAFETY: only computes a length.
const SPACE_BYTES: usize = unsafe { libc::CMSG_SPACE(FD_BYTES) } as usize;
// SAFETY: only computes a length.
const LEN_BYTES: usize = unsafe { libc::CMSG_LEN(FD_BYTES) } as usize;

fn message(piece: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: no name, no data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = std::ptr::from_mut(piece);
    message.msg_iovlen = 1;
    message.msg_control = std::ptr::from_mut(control).cast();
    message.msg_controllen = SPACE_BYTES;
    message
}

/// Sends at least one byte, with a descriptor; returns the number of bytes sent.
pub(super) fn send(socket: RawFd, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let mut control = Control([0; SPACE_BYTES]);
    let mut piece =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let message = message(&mut piece, &mut control);
    // SAFETY: `message` has a control buffer with room for one header and one descriptor, which is
    // what is written; the kernel reads the bytes and the control message, and both outlive the
    // call.
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = LEN_BYTES;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives bytes and, if one comes with them, a descriptor. 0 bytes mean the end of the stream.
pub(super) fn receive(socket: RawFd, buf: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut control = Control([0; SPACE_BYTES]);
    let mut piece = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let mut message = message(&mut piece, &mut control);
    // Without the padding, in which a second descriptor would fit.
    message.msg_controllen = LEN_BYTES;
    // SAFETY: the kernel writes at most `buf.len()` bytes into `buf` and SPACE_BYTES into `control`.
    let received = unsafe {
        libc::recvmsg(socket, &raw mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC)
    };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    let mut descriptor = None;
    // SAFETY: the kernel has set `msg_controllen` to what it wrote, and CMSG_FIRSTHDR looks at it;
    // a header of this level, type and length has one descriptor behind it, which is ours now.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len == LEN_BYTES
        {
            let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            descriptor = Some(OwnedFd::from_raw_fd(fd));
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::other("more than one descriptor came at once"));
    }
    Ok((received, descriptor))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    use super::*;

    #[test]
    fn a_descriptor_arrives_with_its_bytes_and_is_the_same_file() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"here").unwrap();
        assert_eq!(send(one.as_raw_fd(), b"abcd", file.as_fd()).unwrap(), 4);
        let mut buf = [0; 16];
        let (len, descriptor) = receive(other.as_raw_fd(), &mut buf).unwrap();
        assert_eq!(&buf[..len], b"abcd");
        let mut file = File::from(descriptor.unwrap());
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "here");
        (&one).write_all(b"x").unwrap();
        let (len, descriptor) = receive(other.as_raw_fd(), &mut buf).unwrap();
        assert!(len == 1 && descriptor.is_none());
        drop(one);
        assert_eq!(receive(other.as_raw_fd(), &mut buf).unwrap().0, 0);
    }

    #[test]
    fn two_descriptors_at_once_are_an_error_and_none_stays_open() {
        let (one, other) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let fds = [writer.as_raw_fd(), writer.as_raw_fd()];
        ScmSocket::send_with_fds(&one, &[&b"ab"[..]], &fds).unwrap();
        assert!(receive(other.as_raw_fd(), &mut [0; 16]).is_err());
        drop(writer);
        // The read ends only when no writing end is left.
        assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
    }
}
