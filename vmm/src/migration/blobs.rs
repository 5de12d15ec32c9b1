// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hardware states of passed-through devices as what `vm-migration` sends beside the state.
//!
//! Owns what the destination is told of each before its bytes: the hardware that it is of. It must never keep bytes of a
//! state, which only pass through.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vfio::StateWriter;
use vfio::migration::Hardware;
use vm_migration::VmError;
use vm_migration::vm::{BlobInfo, BlobSink, BlobSource};

use crate::machine::{DeviceStateReader, Machine, StateApart};

/// What the destination has to know of a device.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    hardware: Hardware,
}

/// Why a state that is announced cannot be taken.
#[derive(Debug, thiserror::Error)]
#[error("the source does not say of which hardware the state of '{name}' is")]
struct UnknownHardware {
    name: String,
    #[source]
    source: serde_json::Error,
}

/// What was sent is not what was announced.
#[derive(Debug, thiserror::Error)]
#[error("the states of {sent} devices were sent, and those of {announced} were announced")]
struct OtherNumber {
    sent: usize,
    announced: usize,
}

struct Source(DeviceStateReader);

impl BlobSource for Source {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError> {
        Ok(self.0.read(buffer)?)
    }
}

struct Sink(StateWriter);

impl BlobSink for Sink {
    fn begin(&self) -> Result<(), VmError> {
        Ok(self.0.begin()?)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        Ok(self.0.write(bytes)?)
    }

    fn leave(&self) -> String {
        self.0.device().leave()
    }
}

/// What the destination is told of the devices of a machine.
pub fn announce(machine: &Machine) -> Result<Vec<BlobInfo>, VmError> {
    let info = |state: StateApart| {
        let StateApart { id, hardware, len_bytes_max, .. } = state;
        let about = serde_json::to_value(About { hardware })?;
        Ok(BlobInfo { name: id, len_bytes_max, about })
    };
    machine.states_apart()?.into_iter().map(info).collect()
}

/// Prepares to read the states of the devices with these names.
pub fn sources(machine: &Machine, names: &[String]) -> Result<Vec<Box<dyn BlobSource>>, VmError> {
    let readers = machine.read_states(names)?;
    Ok(readers.into_iter().map(|reader| Box::new(Source(reader)) as Box<dyn BlobSource>).collect())
}

/// The lengths of what was sent, by the names of the devices; none if no device is sent like that.
pub fn lengths<'a>(names: &'a [String], sent: &[u64]) -> Result<BTreeMap<&'a str, u64>, VmError> {
    let (sent_count, announced) = (sent.len(), names.len());
    let lengths: BTreeMap<_, _> =
        names.iter().map(String::as_str).zip(sent.iter().copied()).collect();
    // Also of two with one name there would be a state too few.
    if sent_count != announced || lengths.len() != announced {
        return Err(OtherNumber { sent: sent_count.min(lengths.len()), announced }.into());
    }
    Ok(lengths)
}

/// Prepares the devices of a machine for states that were announced.
pub fn sinks(machine: &Machine, blobs: &[BlobInfo]) -> Result<Vec<Box<dyn BlobSink>>, VmError> {
    let mut states = Vec::with_capacity(blobs.len());
    for BlobInfo { name, about, .. } in blobs {
        let About { hardware } = About::deserialize(about)
            .map_err(|source| UnknownHardware { name: name.clone(), source })?;
        states.push((name.as_str(), hardware));
    }
    let writers = machine.write_states(&states)?;
    Ok(writers.into_iter().map(|writer| Box::new(Sink(writer)) as Box<dyn BlobSink>).collect())
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn another_number_of_states_than_of_devices_is_an_error() {
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let two = names(&["one", "two"]);
        assert_eq!(lengths(&two, &[5, 0]).unwrap(), BTreeMap::from([("one", 5), ("two", 0)]));
        assert!(lengths(&[], &[]).unwrap().is_empty());
        for (names, sent) in [
            (&two, &[5][..]),
            (&two, &[5, 6, 7]),
            (&two, &[]),
            (&names(&[]), &[5]),
            (&names(&["one", "one"]), &[5, 6]),
        ] {
            let error = lengths(names, sent).unwrap_err().to_string();
            assert!(error.contains("were announced"), "{error}");
        }
    }
}
