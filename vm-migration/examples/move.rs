// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Moves a fake guest over loopback TCP and prints both progress documents.
//!
//! `move [precopy|postcopy|idle] [MIB] [HOT_PERCENT] [CONNECTIONS]`; two threads write at full
//! speed, or the guest is idle (`idle`).

use std::sync::Arc;

use vm_migration::layout::{Backing, PAGE_BYTES};
use vm_migration::testing::{Builder, FakeMemory, FakeVm, Guest, Pace};
use vm_migration::{Cancel, MemoryMode, Progress, ReceiveOptions, SendOptions, Side};
use vm_migration::{destination::Listener, source::migrate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |index: usize, default: u64| -> Result<u64, std::num::ParseIntError> {
        arguments.get(index).map_or(Ok(default), |text| text.parse())
    };
    let postcopy = arguments.get(1).is_none_or(|mode| mode == "postcopy");
    let idle = arguments.get(1).is_some_and(|mode| mode == "idle");
    let pages = number(2, 256)? * 256;
    let (hot, connections) = (number(3, 90)?, number(4, 1)?);
    let new = || FakeMemory::new(&[(0, pages)], Backing::Shared, PAGE_BYTES);
    let (from, to) = (new().map_err(|error| error.to_string())?, new().map_err(|e| e.to_string())?);
    let guest = Guest::new(&from, 1);
    guest.fill(&from, 100);
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?)?;
    let mut options = SendOptions::new(listener.address().clone());
    options.memory_mode = if postcopy { MemoryMode::Postcopy } else { MemoryMode::Precopy };
    options.connections = u16::try_from(connections)?;
    let builder = Builder::new(&to, &guest).load(2, hot, Pace::Full);
    let receiver = std::thread::spawn(move || {
        let progress = Arc::new(Progress::new(Side::Destination));
        let options = ReceiveOptions::default();
        let cancel = Cancel::new().expect("an eventfd");
        let received = listener.receive(builder, &options, &progress, &cancel);
        let received = received.expect("the migration arrives");
        if let Some(faults) = received.faults {
            faults.wait().expect("every page arrives");
        }
        (received.vm, progress.snapshot())
    });
    let vm = FakeVm::new(&from, &guest).load(2, hot, Pace::Full);
    let vm = if idle { vm } else { vm.running() };
    let progress = Arc::new(Progress::new(Side::Source));
    let finished = migrate(vm, &options, &progress, &Cancel::new()?);
    let finished = finished.map_err(|failure| failure.error().to_string())?;
    let (mut vm, report) = receiver.join().map_err(|_| "the receiver panicked")?;
    vm.stop();
    println!("{}", serde_json::to_string_pretty(&finished.report)?);
    println!("{}", serde_json::to_string_pretty(&report)?);
    println!("wrong pages {}, errors {}", guest.wrong_pages(&to).len(), guest.errors());
    Ok(())
}
