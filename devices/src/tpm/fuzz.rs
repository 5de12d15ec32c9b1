// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entry point of a fuzz target: what an emulator answers, and accesses of a guest.
//!
//! Must return for any bytes.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::crb::Crb;
use super::emulator::{ANSWER_WITHIN, Emulator};
use super::state::{FORMAT, SavedTpm};
use crate::state::DeviceSnapshot;

/// The first byte says how many of the others (in units of 16) are answers on the control socket; the rest are accesses
/// of ten bytes each: what, an offset, and a value.
pub fn fuzz(data: &[u8]) {
    let Some((split, rest)) = data.split_first() else { return };
    let (answers, accesses) = rest.split_at(rest.len().min(16 * usize::from(*split)));
    if let Err(error) = answer(answers) {
        log::debug!("{error}");
    }
    access(accesses);
}

/// What is taken of a saved state before the emulator gets its part.
pub fn fuzz_state(state: &DeviceSnapshot) {
    let saved = FORMAT.decode::<SavedTpm>(state).and_then(SavedTpm::into_parts);
    if let Ok((registers, _blobs)) = saved {
        let mut crb = Crb::new(0xfed4_0000);
        crb.restore(&registers);
        let taken = crb.save();
        crb.restore(&taken);
        assert_eq!(crb.save(), taken, "registers that were taken are others");
    }
}

fn answer(answers: &[u8]) -> std::io::Result<()> {
    let (ours, mut theirs) = UnixStream::pair()?;
    // At most 4080 bytes, which a socket takes without a reader.
    theirs.write_all(answers)?;
    theirs.shutdown(Shutdown::Write)?;
    let Ok((mut emulator, _data)) = Emulator::over(ours, ANSWER_WITHIN, &|| false) else {
        return Ok(());
    };
    if emulator.power_on().is_ok()
        && let Ok(blobs) = emulator.state()
    {
        let _ = emulator.restore(&blobs);
    }
    Ok(())
}

fn access(accesses: &[u8]) {
    let mut crb = Crb::new(0xfed4_0000);
    for access in accesses.chunks_exact(10) {
        let [what, offset, value @ ..] = access else { return };
        let mut bytes = [0; 8];
        bytes.copy_from_slice(value);
        let len = usize::from(what & 0xf).min(8);
        // Registers, and now and then the buffer and what follows it.
        let offset = u64::from(*offset) << if what & 0x20 == 0 { 0 } else { 5 };
        if what & 0x10 == 0 {
            crb.read(offset, &mut bytes[..len]);
            continue;
        }
        match crb.write(offset, &bytes[..len]) {
            Some(command) if what & 0x40 == 0 => crb.finish(&command),
            Some(_) if what & 0x80 == 0 => crb.fail(),
            _ => {}
        }
        let saved = crb.save();
        crb.restore(&saved);
    }
}
