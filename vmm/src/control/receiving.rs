// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM arrives: the thread that takes it, and what comes of it.
//!
//! Owns the listening end while it waits. In postcopy the thread stays until the last page is here.

use std::sync::Arc;

use vm_migration::destination::{Faulting, Listener};
use vm_migration::{Address, Cancel, Progress, ReceiveOptions, Side};

use super::inbox::{Mailer, Message};
use super::observer::Herald;
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::events;
use crate::machine::{EventSink, Host, Machine};
use crate::migration::destination::ArrivingBuilder;
use crate::migration::memory::MigratingRam;

/// How a migration to here ended.
pub struct Arrival {
    /// The machine, or why there is none.
    pub machine: Result<Box<Machine>, ApiError>,
    /// Whether pages still arrive.
    pub pages_missing: bool,
    /// Whoever asked.
    pub responder: Responder,
}

/// A migration that is awaited or under way.
pub struct Receiving {
    /// How far it is.
    pub progress: Arc<Progress>,
    /// Ends it.
    pub cancel: Cancel,
}

/// What a receiving thread works with.
pub struct Reception {
    /// This host.
    pub host: Arc<Host>,
    /// Takes events of the guest.
    pub sink: EventSink,
    /// The way back.
    pub mailer: Mailer,
}

/// Binds the address, so that a wrong one is told at once.
///
/// # Errors
/// When it is taken, not ours, or not an address.
pub fn bind(url: &str) -> Result<Listener, ApiError> {
    let address: Address =
        url.parse().map_err(|error| ApiError::from_error(ApiErrorKind::BadRequest, &error))?;
    Listener::bind(&address).map_err(|error| ApiError::from_error(ApiErrorKind::Failed, &error))
}

fn wait_for_pages(faults: Faulting<MigratingRam>, mailer: &Mailer) {
    let result = match faults.wait() {
        Ok(_report) => Ok(()),
        Err(paused) => {
            let reason = ApiError::from_error(ApiErrorKind::Failed, &paused.error).to_string();
            mailer.send(Message::PagesComplete(Err(reason)));
            // The guest waits where it needs a missing page. Letting go would show it zeros, so
            // this thread holds on for as long as the process lives.
            loop {
                std::thread::park();
                log::debug!("{} pages are still missing", paused.missing_pages());
            }
        }
    };
    mailer.send(Message::PagesComplete(result));
}

/// Starts to wait for a machine.
///
/// # Errors
/// The host gives no thread or descriptor; the responder comes back.
pub fn start(
    listener: Listener,
    reception: Reception,
    responder: Responder,
) -> Result<Receiving, (Responder, std::io::Error)> {
    let cancel = match Cancel::new() {
        Ok(cancel) => cancel,
        Err(error) => return Err((responder, error)),
    };
    let progress = Arc::new(Progress::observed(Side::Destination, Box::new(Herald)));
    let address = listener.address().to_string();
    log::info!("waiting for a migration at {address}");
    let slot = Arc::new(std::sync::Mutex::new(Some(responder)));
    let spawned = {
        let (slot, progress, cancel) = (Arc::clone(&slot), Arc::clone(&progress), cancel.clone());
        let Reception { host, sink, mailer } = reception;
        std::thread::Builder::new().name("migration-recv".to_owned()).spawn(move || {
            let taken = slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            let Some(responder) = taken else { return };
            let builder = ArrivingBuilder::new(host, sink);
            let received =
                listener.receive(builder, &ReceiveOptions::default(), &progress, &cancel);
            let (machine, faults) = match received {
                Ok(received) => (Ok(Box::new(received.vm)), received.faults),
                Err(failure) => {
                    let error = ApiError::from_error(ApiErrorKind::Failed, &failure.error);
                    (Err(error), None)
                }
            };
            let arrival = Arrival { machine, pages_missing: faults.is_some(), responder };
            mailer.send(Message::Arrived(Box::new(arrival)));
            if let Some(faults) = faults {
                wait_for_pages(faults, &mailer);
            }
        })
    };
    match spawned {
        Ok(_detached) => {
            events::emit("vm", "migration-receive-ready", &[("address", &address)]);
            Ok(Receiving { progress, cancel })
        }
        Err(error) => {
            let back = slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            match back {
                Some(responder) => Err((responder, error)),
                // Only the thread takes it, and there is none.
                None => unreachable!("no thread was made"),
            }
        }
    }
}
