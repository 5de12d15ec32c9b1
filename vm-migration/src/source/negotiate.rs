// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connect and Negotiate: one connection, the capabilities of both sides, memory mapped at the other side,
//! and then all further connections.
//!
//! Owns the decision between the negotiated protocol and plain version 0. A peer that does not negotiate
//! gets plain version 0, or is refused with a reason when the options ask for more than that.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::counts::{accepted_connections, connections_with_room, for_any, threads_with_room};
use super::send_stream::Record;
use super::verdict::VerdictSender;
use super::{Connected, Context, PhaseFailure};
use crate::borders::Borders;
use crate::channel::{Channel, PositiveAnswer};
use crate::commit::usable;
use crate::document::Mode;
use crate::error::{Cause, Failure, Step};
use crate::layout::{Backing, Layout, PAGE_BYTES};
use crate::opening::Opening;
use crate::options::{CONNECTIONS_MAX, Compression, MemoryMode, SendOptions};
use crate::page_server::PageServerHandle;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::BlobInfo;
use crate::protocol::capabilities::{
    Accepted, FEATURE_BLOBS, FEATURE_COMING, FEATURE_CONFIRM, FEATURE_EARLY_MEMORY,
    FEATURE_FIGURES, FEATURE_LOCAL, FEATURE_MAPPING, FEATURE_PIECES, FEATURE_POSTCOPY,
    FEATURE_PREPARING, FEATURE_STALE, FEATURE_VERDICT, FEATURE_ZERO_PAGES, FEATURE_ZSTD, Offer,
    Prepared, TOKEN_BYTES, common, features, millis, software,
};
use crate::protocol::formats::Formats;
use crate::protocol::message::{Message, Role, VERSION};
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;
use crate::session::Session;
use crate::transport::{Address, Connection, TransportError};
use crate::vm::{PlainPeer, SourceVm};

/// The negotiated terms and all connections of a migration.
#[derive(Debug)]
pub(crate) struct Links {
    /// Extra connections for memory.
    pub memory: Vec<Channel>,
    /// Connections for requested pages (postcopy), until threads have them, and how many there are.
    pub urgent: Vec<Channel>,
    pub urgent_count: u16,
    pub terms: Terms,
    /// The token that extra connections send, and that proves after a loss that this is the same
    /// migration; `None` with plain version 0.
    pub token: Option<[u8; TOKEN_BYTES]>,
    /// Measurements of each connection for memory, the first one included.
    pub records: Vec<Record>,
    /// The shortest round trip.
    pub round_trip: Duration,
    /// The page server that will send the remaining pages of a postcopy, if any.
    pub page_server: Option<Box<dyn PageServerHandle>>,
    /// Parts of the state that are sent beside it.
    pub blobs: Vec<BlobInfo>,
    /// Threads that will serve pages: they wait for the stop.
    pub serving: Option<Session>,
}

impl Links {
    /// The shortest time in which any message was answered.
    pub(crate) fn fastest_answer(&self) -> Duration {
        let answers = self.records.iter().map(|record| record.fastest_answer);
        answers.fold(self.round_trip, Duration::min)
    }

    /// Why requests could not be served: a connection for them was lost while the guest ran.
    pub(super) fn lost_for_requests(&self) -> Option<Failure> {
        let fate = self.serving.as_ref()?.fate();
        let lost = || Failure::new("waiting for page requests", TransportError::Closed);
        fate.stop().is_cancelled().then(|| fate.take_failure().unwrap_or_else(lost))
    }

    /// True when some host pages of the destination are sent in pieces.
    pub(super) fn sends_pieces(&self) -> bool {
        let regions = match &self.terms {
            Terms::Plain { .. } => 0,
            Terms::Negotiated { layout, .. } => layout.regions().len(),
        };
        (0..regions).any(|region| self.piece_pages(region) < self.unit_pages(region))
    }

    /// How a destination in doubt is told which side has the guest, if it supports that.
    pub(super) fn teller(&self, context: Context<'_>) -> Option<VerdictSender> {
        let id = self.token.filter(|_| self.terms.hears_verdicts());
        id.map(|id| VerdictSender::new(context, id))
    }

    /// The unit of a region at the destination in pages of 4 KiB: its host page, because it can only make
    /// whole ones visible.
    pub(crate) fn unit_pages(&self, region: usize) -> u64 {
        match &self.terms {
            Terms::Plain { .. } => 1,
            Terms::Negotiated { layout, .. } => {
                layout.regions()[region].host_page_bytes / PAGE_BYTES
            }
        }
    }

    /// The least that is sent together in postcopy, in pages of 4 KiB: one where the destination assembles
    /// units from pieces, otherwise a unit.
    pub(crate) fn piece_pages(&self, region: usize) -> u64 {
        match &self.terms {
            Terms::Negotiated { pieces: true, layout, .. }
                if layout.regions()[region].backing == Backing::Shared =>
            {
                1
            }
            _ => self.unit_pages(region),
        }
    }
}

/// The negotiated protocol.
#[derive(Debug)]
pub(crate) enum Terms {
    /// Plain version 0.
    Plain {
        /// Set when the destination is another program: it takes exclusive resources with the state, and runs the guest
        /// before it answers the last message. A range of memory may have none of these borders inside.
        other: Option<Borders>,
    },
    /// The negotiated protocol.
    Negotiated {
        zero_pages: bool,
        /// The machine is built while memory is being sent.
        early_memory: bool,
        /// The destination receives the guest's memory as files.
        local: bool,
        /// Large host pages may be sent in pieces.
        pieces: bool,
        /// The destination wants announcements of memory.
        coming: bool,
        /// The destination discards outdated pages while the guest runs.
        stale: bool,
        /// The destination accepts Verdict on a connection of its own.
        verdicts: bool,
        /// The destination accepts figures with the last messages.
        figures: bool,
        /// The destination sends keep-alives while it prepares its machine.
        preparing: bool,
        /// The destination sends keep-alives while it maps memory, and while it discards outdated pages.
        mapping: bool,
        /// How long the destination keeps the machine after its acknowledgement.
        promise: Duration,
        /// The destination's memory layout, which determines the unit in which pages are sent.
        layout: Layout,
    },
}

impl Terms {
    pub(crate) fn zero_pages(&self) -> bool {
        matches!(self, Self::Negotiated { zero_pages: true, .. })
    }

    /// Whether the destination is another program.
    pub(super) fn is_other(&self) -> bool {
        self.borders().is_some()
    }

    /// The addresses that a range of memory that is sent may not have inside.
    pub(super) fn borders(&self) -> Option<&Borders> {
        match self {
            Self::Plain { other } => other.as_ref(),
            Self::Negotiated { .. } => None,
        }
    }

    pub(crate) fn local(&self) -> bool {
        matches!(self, Self::Negotiated { local: true, .. })
    }

    pub(crate) fn coming(&self) -> bool {
        matches!(self, Self::Negotiated { coming: true, .. })
    }

    pub(crate) fn stale(&self) -> bool {
        matches!(self, Self::Negotiated { stale: true, .. })
    }

    pub(super) fn hears_of_preparing(&self) -> bool {
        matches!(self, Self::Negotiated { preparing: true, .. })
    }

    pub(super) fn hears_of_mapping(&self) -> bool {
        matches!(self, Self::Negotiated { mapping: true, .. })
    }

    pub(super) fn takes_figures(&self) -> bool {
        matches!(self, Self::Negotiated { figures: true, .. })
    }

    pub(super) fn hears_verdicts(&self) -> bool {
        matches!(self, Self::Negotiated { verdicts: true, .. })
    }

    /// The greatest age of an acknowledgement with which the source may commit.
    pub(super) fn usable(&self) -> Duration {
        match self {
            // There is no acknowledgement: Complete hands the guest over.
            Self::Plain { .. } => Duration::MAX,
            Self::Negotiated { promise, .. } => usable(*promise),
        }
    }

    pub(crate) fn early_memory(&self) -> bool {
        matches!(self, Self::Negotiated { early_memory: true, .. })
    }
}

/// Connects. Invalid options fail here, before the peer is contacted.
pub(crate) fn connect<V: SourceVm>(
    vm: V,
    context: Context<'_>,
) -> Result<Connected<V>, PhaseFailure<V>> {
    let options = context.options;
    let limits = &options.limits;
    let connect = || {
        options.check().step("checking the options")?;
        Connection::connect_secured(
            &options.to,
            options.tls.as_ref(),
            context.cancel,
            limits.connect,
            limits.answer,
        )
        .step("connecting")
    };
    match connect() {
        Ok(connection) => Ok(Connected { vm, control: Channel::new(connection) }),
        Err(failure) => Err(PhaseFailure::Running(vm, None, failure)),
    }
}

/// Exchanges Start, Capabilities and Config, and opens the extra connections.
pub(crate) fn agree<V: SourceVm>(
    vm: &mut V,
    memory: &Arc<V::Memory>,
    control: &mut Channel,
    context: Context<'_>,
) -> Result<Links, Failure> {
    let total_bytes: u64 = memory.layout().regions().iter().map(|r| r.len_bytes).sum();
    let counters = &context.progress.counters;
    counters.total_bytes.set(total_bytes);
    let mode = Mode::of(context.options.mode(), context.options.local);
    context.progress.set_mode(mode);

    if context.options.local {
        check_files(&**memory)?;
    }
    let needed = vm.formats();
    let (wanted, mut serving) =
        threads_with_room(connections_with_room(context), control, context)?;
    let (token, round_trip) = offer(memory, needed, wanted, control, context)?;
    let plain_peer = match &token {
        None => vm.meet_plain().map_err(Cause::Vm).step("meeting a destination of version 0")?,
        Some(_) => PlainPeer::Own,
    };
    let other = match plain_peer {
        PlainPeer::Own => None,
        PlainPeer::Other(borders) => Some(borders),
    };
    if other.is_some() {
        check_other(context)?;
    } else {
        let known = token.as_ref().map_or_else(Formats::default, |(_, accepted)| accepted.formats);
        if let Some(what) = needed.beyond(known) {
            let what = format!("the guest needs {what}, at the destination");
            let remedy = "update the destination";
            return Err(Cause::Unsupported { what, remedy }).step("comparing versions");
        }
        vm.meet(known);
    }
    // A destination to which memory comes later takes the state at once.
    let apart = context.options.mode() == MemoryMode::Precopy
        && token.as_ref().is_some_and(|(features, _)| features.contains(FEATURE_BLOBS));
    let blobs = vm.blobs(apart).map_err(Cause::Vm).step("reading what the state consists of")?;
    let config = vm.config_json().map_err(Cause::Vm).step("reading the configuration")?;
    if context.options.local {
        give_files(&**memory, control, context)?;
    }
    let mapping = token.as_ref().is_some_and(|(features, _)| features.contains(FEATURE_MAPPING));
    let answer = ask_of_mapping(control, &Message::Config(config), mapping, context)
        .step("waiting for the destination to map the memory")?;
    let terms = match &token {
        None => Terms::Plain { other },
        Some((features, accepted)) => {
            let layout = compare_layouts(&**memory, &answer.payload, context)?;
            Terms::Negotiated {
                zero_pages: features.contains(FEATURE_ZERO_PAGES),
                early_memory: features.contains(FEATURE_EARLY_MEMORY),
                local: context.options.local,
                pieces: features.contains(FEATURE_PIECES),
                coming: features.contains(FEATURE_COMING),
                stale: features.contains(FEATURE_STALE),
                verdicts: features.contains(FEATURE_VERDICT),
                figures: features.contains(FEATURE_FIGURES),
                preparing: features.contains(FEATURE_PREPARING),
                mapping: features.contains(FEATURE_MAPPING),
                promise: accepted.promise(),
                layout,
            }
        }
    };
    let counts = accepted_connections(wanted, token.as_ref(), serving.as_mut(), context);
    let token = token.map(|(_, accepted)| accepted.token);
    let (memory, urgent) = open_further(control, token.as_ref(), counts, context)?;
    let page_server = vm.page_server().map_err(Cause::Vm).step("starting the page server")?;
    if let Some(page_server) = &page_server {
        context.progress.has_page_server(page_server.identity());
    }
    let records = Vec::new();
    let urgent_count = counts.1;
    Ok(Links {
        memory,
        urgent,
        urgent_count,
        terms,
        token,
        records,
        round_trip,
        page_server,
        blobs,
        serving,
    })
}

/// The destination's memory layout, which has to be the same for the guest.
fn compare_layouts(
    memory: &impl GuestMemoryMap,
    prepared: &[u8],
    context: Context<'_>,
) -> Result<Layout, Failure> {
    let prepared = Prepared::parse(prepared).step("reading its memory layout")?;
    let layout = Layout::new(prepared.regions)
        .map_err(ProtocolError::from)
        .step("reading its memory layout")?;
    memory
        .layout()
        .same_for_guest(&layout)
        .map_err(ProtocolError::from)
        .step("comparing memory layouts")?;
    if context.options.mode().may_postcopy() {
        runs::check_fits(&layout).step("comparing memory layouts")?;
    }
    Ok(layout)
}

/// Opens the connections for memory and those for requested pages.
fn open_further(
    control: &Channel,
    token: Option<&[u8; TOKEN_BYTES]>,
    (bulk_count, urgent_count): (u16, u16),
    context: Context<'_>,
) -> Result<(Vec<Channel>, Vec<Channel>), Failure> {
    let opening = Opening {
        to: &context.options.to,
        beside: &control.connection,
        token,
        cancel: context.cancel,
        limits: &context.options.limits,
    };
    let mut roles = vec![Role::Memory; bulk_count.into()];
    roles.resize(usize::from(bulk_count) + usize::from(urgent_count), Role::Fault);
    let mut memory = opening.all(&roles).step("opening further connections")?;
    let urgent = memory.split_off(bulk_count.into());
    Ok((memory, urgent))
}

/// Refuses what another program that speaks plain version 0 does not take.
fn check_other(context: Context<'_>) -> Result<(), Failure> {
    let options = context.options;
    if options.connections > 1 && !matches!(options.to, Address::Tcp { .. }) {
        let what = "the destination takes several connections over TCP only".to_owned();
        let remedy = "use tcp:, or leave connections out";
        return Err(Cause::Unsupported { what, remedy }).step("negotiating");
    }
    Ok(())
}

/// Refuses memory without a file to hand over.
pub(super) fn check_files(memory: &impl GuestMemoryMap) -> Result<(), Failure> {
    for (region, info) in memory.layout().regions().iter().enumerate() {
        if memory.file(region).is_none() {
            let what = format!(
                "local=on cannot hand over memory zone '{}', which is private memory",
                info.name
            );
            let remedy = "boot the VM with shared=on or hugepages=on, or leave local=on out";
            return Err(Cause::Unsupported { what, remedy }).step("handing memory over");
        }
    }
    Ok(())
}

/// Hands over the file of each zone once.
fn give_files<M: GuestMemoryMap>(
    memory: &M,
    control: &mut Channel,
    context: Context<'_>,
) -> Result<(), Failure> {
    const STEP: &str = "handing memory over";
    let mut given = BTreeSet::new();
    for ((region, slot), info) in (0..).zip(0u32..).zip(memory.layout().regions()) {
        if let Some(file) = memory.file(region).filter(|_| given.insert(info.name.as_str())) {
            control.give(&Message::MemoryFd { slot }, file).step(STEP)?;
            control.answer(context.options.limits.answer).step(STEP)?;
        }
    }
    Ok(())
}

/// Features and answer of a negotiating destination.
pub(super) type Taken = (BTreeSet<String>, Accepted);

/// Exchanges Start and Capabilities; a peer that knows only version 0 accepts nothing. Also returns how
/// long an answer took that costs the peer almost no work.
fn offer<M: GuestMemoryMap>(
    memory: &Arc<M>,
    formats: Formats,
    connections: (u16, u16),
    control: &mut Channel,
    context: Context<'_>,
) -> Result<(Option<Taken>, Duration), Failure> {
    let options = context.options;
    let limit = options.limits.answer;
    let start = Message::Start { version: VERSION, offer: true };
    let asked = Instant::now();
    let answer = control.ask(&start, limit).step("starting the protocol")?;
    let round_trip = asked.elapsed();
    if !answer.offer_taken {
        if options.mode().may_postcopy() {
            return Err(Failure::new(
                "negotiating",
                Cause::Unsupported {
                    what: "the destination speaks only version 0 of the protocol, which has no \
                           postcopy"
                        .to_string(),
                    remedy: "use memory_mode=precopy, or update the destination",
                },
            ));
        }
        log::info!(
            "the destination speaks plain version 0, which has no zero pages and no reasons"
        );
        if options.local || options.compression != Compression::None {
            return Err(Failure::new(
                "negotiating",
                Cause::Unsupported {
                    what: "the destination speaks only version 0 of the protocol, with which \
                           neither local=on nor compression works here"
                        .to_string(),
                    remedy: "leave them out, or update the destination",
                },
            ));
        }
        return Ok((None, round_trip));
    }
    let document = document(&**memory, formats, connections, options);
    let asked = Instant::now();
    let answer = control
        .ask(&Message::Capabilities(document.to_json()), limit)
        .step("negotiating capabilities")?;
    let round_trip = round_trip.min(asked.elapsed());
    let accepted = Accepted::parse(&answer.payload).step("negotiating capabilities")?;
    log::info!("the destination is {:?}", accepted.software);
    let features = common(&document.features, &accepted.features);
    match missing_features(options, &features).into_iter().next() {
        None => Ok((Some((features, accepted)), round_trip)),
        Some(missing) => Err(missing).step("negotiating capabilities"),
    }
}

/// What a migration begins with.
pub(super) fn document(
    memory: &impl GuestMemoryMap,
    formats: Formats,
    (bulk_connections, urgent_connections): (u16, u16),
    options: &SendOptions,
) -> Offer {
    Offer {
        software: software(),
        features: features(),
        memory_mode: options.mode(),
        bulk_connections,
        urgent_connections: for_any(urgent_connections),
        many_urgent_connections: Some(urgent_connections).filter(|many| *many > CONNECTIONS_MAX),
        vcpus: options.vcpus,
        local: options.local,
        recover_timeout_ms: Some(millis(options.recover_timeout)),
        regions: memory.layout().regions().to_vec(),
        formats,
    }
}

/// What the options need and is not among the features that both sides have.
pub(super) fn missing_features(options: &SendOptions, features: &BTreeSet<String>) -> Vec<Cause> {
    let mut needed = vec![FEATURE_CONFIRM];
    if options.mode().may_postcopy() {
        needed.push(FEATURE_POSTCOPY);
    }
    if options.compression == Compression::Zstd {
        needed.push(FEATURE_ZSTD);
    }
    if options.local {
        needed.push(FEATURE_LOCAL);
    }
    needed.retain(|feature| !features.contains(*feature));
    let lacks = |missing| Cause::Unsupported {
        what: format!("the destination lacks {missing}"),
        remedy: "update the destination",
    };
    needed.into_iter().map(lacks).collect()
}

/// Asks for what a destination may take long for: mapping memory, or discarding it. One that says that it
/// works on it (`mapping`) has the whole time. One that could say so and does not is given up soon, and one that cannot is
/// when it has had time for memory of that size.
pub(super) fn ask_of_mapping(
    control: &mut Channel,
    message: &Message,
    mapping: bool,
    context: Context<'_>,
) -> Result<PositiveAnswer, Cause> {
    let limits = &context.options.limits;
    if !mapping {
        return control.ask(message, context.silent_preparation());
    }
    let asked = Instant::now();
    control.tell(message)?;
    control.answer_of_busy_while(limits.answer, || {
        let waited = asked.elapsed();
        if waited >= limits.prepare {
            return Err(Cause::SlowPreparation { waited_s: waited.as_secs() });
        }
        Ok(())
    })
}
