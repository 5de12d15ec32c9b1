// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's HTTP API, spoken by hand, so that malformed requests can be made too.
//!
//! Owns one connection per request. Must never share code with the VMM: it judges it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

/// A request that is not answered within this has failed; receiving a migration takes long.
const READ_LIMIT: Duration = Duration::from_secs(100);

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Body as text.
    pub body: String,
}

impl Answer {
    /// Panics unless it is a success.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!((200..300).contains(&self.status), "refused: {self:?}");
        self
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A way to the API of one VMM.
#[derive(Clone, Debug)]
pub struct Api {
    socket: PathBuf,
}

impl Api {
    /// The API that listens at `socket`.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// A bare connection.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(READ_LIMIT))?;
        stream.set_write_timeout(Some(READ_LIMIT))?;
        Ok(stream)
    }

    /// Sends a request and reads the answer.
    pub fn request(&self, method: &str, name: &str, body: Option<&str>) -> io::Result<Answer> {
        let body = body.unwrap_or("");
        let text = format!(
            "{method} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.raw(text.as_bytes())
    }

    /// Sends bytes and reads the answer.
    pub fn raw(&self, bytes: &[u8]) -> io::Result<Answer> {
        let mut stream = self.connect()?;
        // A server may refuse before it has read everything; its answer still counts.
        let sent = stream.write_all(bytes);
        match read_answer(&mut stream) {
            Ok(answer) => Ok(answer),
            Err(error) => sent.and(Err(error)),
        }
    }

    /// GET, which must reach the VMM.
    #[track_caller]
    pub fn get(&self, name: &str) -> Answer {
        self.request("GET", name, None).unwrap_or_else(|error| panic!("GET {name}: {error}"))
    }

    /// PUT, which must reach the VMM.
    #[track_caller]
    pub fn put(&self, name: &str, body: &str) -> Answer {
        let body = (!body.is_empty()).then_some(body);
        self.request("PUT", name, body).unwrap_or_else(|error| panic!("PUT {name}: {error}"))
    }

    /// State of the VM, as `vm.info` has it; empty when there is none.
    pub fn state(&self) -> String {
        match self.request("GET", "vm.info", None) {
            Ok(answer) if answer.status == 200 => {
                answer.json()["state"].as_str().unwrap_or_default().to_owned()
            }
            _ => String::new(),
        }
    }
}

/// Reads one answer: head, then as many bytes as it announces.
pub fn read_answer(stream: &mut UnixStream) -> io::Result<Answer> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 65536];
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        let count = stream.read(&mut chunk)?;
        if count == 0 {
            return Err(bad("the connection was closed without an answer"));
        }
        bytes.extend_from_slice(chunk.get(..count).unwrap_or_default());
    };
    let head = String::from_utf8_lossy(bytes.get(..head_end).unwrap_or_default()).into_owned();
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse().ok())
        .ok_or_else(|| bad("no status in the answer"))?;
    let length = head
        .lines()
        .find_map(|line| line.to_lowercase().strip_prefix("content-length:").map(str::to_owned))
        .and_then(|value| value.trim().parse::<usize>().ok())
        .unwrap_or(0);
    while bytes.len() < head_end + length {
        let count = stream.read(&mut chunk)?;
        if count == 0 {
            return Err(bad("the answer breaks off"));
        }
        bytes.extend_from_slice(chunk.get(..count).unwrap_or_default());
    }
    let body = String::from_utf8_lossy(bytes.get(head_end..).unwrap_or_default()).into_owned();
    Ok(Answer { status, body })
}
