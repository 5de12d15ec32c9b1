// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Taking over, refusing and removing the socket file.

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;

use super::*;

fn bind(path: PathBuf) -> Result<ApiListener, SocketError> {
    ApiListener::bind(ApiSocket::Path(path))
}

#[test]
fn a_stale_socket_is_replaced_and_only_ours_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = bind(path.clone()).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(UnixStream::connect(&path).is_ok());
    drop(listener);
    assert!(!path.exists());
    // Another process's socket at the same path survives.
    let listener = bind(path.clone()).unwrap();
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn a_live_socket_is_refused_even_if_its_queue_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let live = UnixListener::bind(&path).unwrap();
    assert!(matches!(bind(path.clone()), Err(SocketError::Live { .. })));
    // SAFETY: the descriptor is a listening socket that lives as long as `live`.
    assert_eq!(unsafe { libc::listen(live.as_raw_fd(), 0) }, 0);
    // The connection of the first attempt waits in the queue, which is now full: connecting in
    // the ordinary way would block.
    assert!(matches!(bind(path.clone()), Err(SocketError::Live { .. })));
    assert!(path.exists());
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(bind(path.clone()), Err(SocketError::NotASocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert!(matches!(bind(dir.path().join("no/dir")), Err(SocketError::Bind { .. })));
    assert!(matches!(bind(dir.path().join("x".repeat(200))), Err(SocketError::Bind { .. })));
}

#[test]
fn descriptors_must_listen() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let listener = UnixListener::bind(&path).unwrap();
    // The parsed socket owns the descriptor, so this end releases it.
    let fd = std::os::fd::IntoRawFd::into_raw_fd(listener);
    let listener = ApiListener::bind(ApiSocket::parse(&format!("fd={fd}")).unwrap()).unwrap();
    assert!(UnixStream::connect(&path).is_ok());
    drop(listener);
    assert!(path.exists(), "an inherited socket is not ours to remove");
    let (pair, _other) = UnixStream::pair().unwrap();
    for text in [format!("fd={}", pair.as_raw_fd()), "fd=1".into(), "fd=99999".into()] {
        assert!(matches!(ApiSocket::parse(&text), Err(SocketError::BadFd { .. })), "{text}");
    }
    for text in ["", "path=", "fd=x"] {
        assert!(matches!(ApiSocket::parse(text), Err(SocketError::Syntax { .. })), "{text}");
    }
    assert!(matches!(ApiSocket::parse("/a/b"), Ok(ApiSocket::Path(p)) if p.ends_with("b")));
}
