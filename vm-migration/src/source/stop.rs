// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Stop: the guest is paused, and the remaining memory is sent (precopy) or noted (postcopy).
//!
//! Owns the order in which no write is missed: first the machine with all its devices stops, then the
//! dirty log is read for the last time.

use std::sync::Arc;
use std::time::Instant;

use page_bitmap::PageBitmap;

use super::negotiate::Links;
use super::page_maps::{add_dirty, in_units};
use super::peers::Peers;
use super::precopy::{Copied, RemainingMemory};
use super::round::{Pass, RoundKind, send_round};
use super::serve::{Grain, Server};
use super::switch::Switch;
use super::{Context, PhaseFailure, check_cancel};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::PAGE_BYTES;
use crate::vm::{DirtyLog, SourceVm, Throttle};

const PAUSING: &str = "pausing the guest";

/// The guest is stopped, and only the state is left to send before it can run at the destination.
pub(crate) struct Stopped<V: SourceVm> {
    pub vm: V::Paused,
    pub control: Channel,
    pub links: Links,
    pub later: Option<Arc<Server<V::Memory>>>,
    /// The dirty log, which has been read for the last time. It is dropped once the guest does not
    /// wait for that any more, because the kernel then walks all of its page tables.
    pub log: Option<V::Log>,
    /// When the pause began.
    pub since: Instant,
}

impl<V: SourceVm> Copied<V> {
    /// Pauses the guest and handles the last dirty pages.
    pub(crate) fn stop(self, context: Context<'_>) -> Result<Stopped<V>, PhaseFailure<V>> {
        let Self { vm, memory, mut control, mut links, remaining, gate } = self;
        if let (RemainingMemory::Later(..), Some(failure)) = (&remaining, links.lost_for_requests())
        {
            return Err(PhaseFailure::Running(vm, Some(Peers::new(control, links)), failure));
        }
        if !matches!(remaining, RemainingMemory::Later(..)) {
            gate.stay_shut();
        }
        let since = Instant::now();
        let vm = match vm.pause() {
            Ok(paused) => paused,
            Err((vm, reason)) => {
                let failure = match check_cancel(context.cancel, PAUSING) {
                    // What was being done then may say of a device that it is lost.
                    Err(cancelled) => {
                        log::warn!("{PAUSING}: {}", error_text::chain(&*reason));
                        cancelled
                    }
                    Ok(()) => Failure::new(PAUSING, Cause::Vm(reason)),
                };
                return Err(PhaseFailure::Running(vm, Some(Peers::new(control, links)), failure));
            }
        };
        let (log, goes) = match remaining {
            RemainingMemory::Shared => (None, StopTransfer::Nothing),
            RemainingMemory::Rest(log, throttle) => {
                (Some(log), StopTransfer::BeforeHandover(throttle))
            }
            RemainingMemory::Later(log, pages, told) => {
                (Some(log), StopTransfer::AfterHandover(pages, told))
            }
        };
        let rest = |log: Option<&V::Log>| -> Result<Option<Arc<Server<V::Memory>>>, Failure> {
            let begin_round =
                |log: &V::Log| log.begin_round().map_err(Cause::Vm).step("reading the dirty log");
            let Some(log) = log else { return Ok(None) };
            match goes {
                StopTransfer::Nothing => Ok(None),
                StopTransfer::BeforeHandover(throttle) => {
                    let dirty = begin_round(log)?;
                    drop(throttle);
                    let remaining = &context.progress.counters.remaining_bytes;
                    remaining.set(dirty * PAGE_BYTES);
                    let never = Switch::never();
                    let pass = Pass {
                        kind: RoundKind::Dirty,
                        switch: &never,
                        hints: None,
                        announce: false,
                    };
                    send_round(&*memory, log, pass, &mut control, &mut links, context)?;
                    if links.blobs.is_empty() {
                        // The destination takes the end of these connections for the end of their work.
                        links.memory.clear();
                    }
                    Ok(None)
                }
                StopTransfer::AfterHandover(pages, told) => {
                    begin_round(log)?;
                    add_dirty(&*memory, log, &pages)?;
                    let pending = in_units(&pages, &links);
                    let progress = Arc::clone(context.progress);
                    let options = context.options;
                    let grain =
                        |region| Grain::new(links.piece_pages(region), links.unit_pages(region));
                    let grains = (0..pending.len()).map(grain).collect();
                    let mut server =
                        Server::new(Arc::clone(&memory), pending, grains, options, progress);
                    if let Some(told) = &told {
                        server.has_told(told);
                    }
                    let server = Arc::new(server);
                    gate.open(&server);
                    Ok(Some(server))
                }
            }
        };
        match rest(log.as_ref()) {
            Ok(later) => Ok(Stopped { vm, control, links, later, log, since }),
            Err(failure) => {
                let peers = Peers::new(control, links);
                let (retraction, given) = (None, None);
                Err(PhaseFailure::Paused { vm, peers, failure, retraction, given, log })
            }
        }
    }
}

/// What is sent of memory, and when.
enum StopTransfer {
    /// Nothing: the destination has it already.
    Nothing,
    /// The dirty pages, now; holds the throttle of the guest until then.
    BeforeHandover(Option<Box<dyn Throttle>>),
    /// These pages and the dirty ones, after the guest; the destination knows the second ones already.
    AfterHandover(Vec<PageBitmap>, Option<Vec<PageBitmap>>),
}
