// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command lines of the binaries.
//!
//! - [`launch`]: `cloud-hypervisor`, from arguments to what the VMM is started with.
//! - [`remote`]: `ch-remote`, from arguments to one request and its output.
//! - [`chart`]: the report of a migration as a picture.
//! - [`exit`]: exit codes, and how an error is printed.
//! - [`interrupt`]: what is said when SIGINT comes.
//! - [`logger`]: where log messages go.
//! - [`log_format`]: how a log line is put together.
//! - [`manual`]: the keys of an option as `--help` shows them.
//! - [`options`]: the options of `cloud-hypervisor`, as its help shows them.
//! - [`pool`]: `prezero-pool`, from arguments to the daemon.
//! - [`terminal`]: how large the terminal is.
//! - [`top`]: what a VM does, again and again.
//! - [`upgrade`]: another program takes the place of a VMM.

pub mod chart;
pub mod exit;
pub mod interrupt;
pub mod launch;
pub mod log_format;
pub mod logger;
pub mod manual;
pub mod options;
pub mod pool;
pub mod remote;
pub mod terminal;
pub mod top;
pub mod upgrade;
pub mod watch;

/// Writes to stdout; returns whether its reader is still there.
///
/// # Errors
/// It cannot be written, as on a full disk.
pub fn write_out(text: &str) -> std::io::Result<bool> {
    use std::io::Write;
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
        Ok(()) => Ok(true),
    }
}

/// Prints a line on stdout. An error is ignored, as the reader may have left; the exit code still reports
/// the result.
pub fn print_line(line: &str) {
    use std::io::Write;
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    //! Documents of migrations for the tests of this module.
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::{Value, json};
    use vmm::api::{MigrationReport, ProgressDocument};

    /// Merges the values of one object into another, recursively.
    fn put(into: &mut Value, values: Value) {
        match (into, values) {
            (Value::Object(into), Value::Object(values)) => {
                for (key, value) in values {
                    put(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, value) => *into = value,
        }
    }

    /// A progress document of version 1 without any values.
    fn empty() -> Value {
        json!({
            "version": 1, "side": "source", "phase": "idle", "postcopy": false, "elapsed_ms": 0,
            "zero_pages": 0,
            "compression":
                {"raw_bytes": 0, "frame_bytes": 0, "connections_on": 0, "decisions": 0},
            "faults": {
                "urgent_pages": 0, "bulk_pages": 0, "prefetched_pages": 0, "bulk_bytes_per_s": 0,
                "urgent_bytes_per_s": 0,
            },
            "recovery": {"losses": 0, "recoveries": 0},
        })
    }

    /// A progress document with these values.
    pub fn progress(values: Value) -> ProgressDocument {
        let mut document = empty();
        put(&mut document, values);
        serde_json::from_value(document).unwrap()
    }

    /// A report with these values.
    pub fn report(values: Value) -> MigrationReport {
        let mut report = json!({
            "progress": empty(), "phases": [], "timeline": [], "rounds": [], "latency": [],
            "threads": [],
        });
        put(&mut report, values);
        serde_json::from_value(report).unwrap()
    }
}
