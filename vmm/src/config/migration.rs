// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests that move a VM: send and receive a migration, restore, snapshot.
//!
//! Owns the option families, and the names of the choices in option strings. The choices themselves, their
//! defaults, the addresses, and the rules between options are those of [`vm_migration`]: a request is
//! converted to its options, which check themselves. Must never connect to anything.

use std::path::PathBuf;
use std::time::Duration;

use vm_migration::options;
use vm_migration::{
    Address, Compression, Convergence, DirtyClear, MemoryMode, SendOptions,
    TimeoutStrategy as EngineStrategy,
};

use super::codec::{Bytes, Choice, File, Int, JsonOnly, One, Opt, Text, Toggle};
use super::descriptor::{ConfigFd, Fd, NetFds, RestoredNetConfig, RestoredVfioConfig, VfioFds};
use super::enums::{option_enum, option_names};
use super::error::ConfigError;
use super::family::{Family as _, option_family};
use super::grant::{Grant, GrantList};
use super::option_string::OptionError;
use super::snapshot_format::SnapshotFormat;
use super::value::MacAddr;
use super::zone_update::{MemoryUpdates, VmMemoryZoneUpdateData, ZoneUpdates};

/// Maximum number of parallel connections of a migration.
const CONNECTIONS_MAX: u64 = options::CONNECTIONS_MAX as u64;
const PREEMPT_MAX: u64 = options::URGENT_CONNECTIONS_MAX as u64;

/// Maximum configurable downtime in milliseconds: a day.
const DOWNTIME_MAX_MS: u64 = 86_400_000;

/// Maximum configurable timeout in seconds: a year.
const TIMEOUT_MAX_S: u64 = 31_536_000;

option_names! {
    /// What happens when precopy has not converged at the timeout.
    TimeoutStrategy(EngineStrategy) = "cancel|ignore" {
        Cancel = "cancel",
        Ignore = "ignore",
    }
}

option_names! {
    /// When memory is sent.
    MigrationMode(MemoryMode) = "precopy|postcopy|auto" {
        Precopy = "precopy",
        Postcopy = "postcopy",
        Auto = "auto",
    }
}

option_names! {
    /// How precopy is made to converge when further rounds do not help.
    ConvergencePolicy(Convergence) = "none|throttle|raise-downtime|postcopy" {
        None = "none",
        Throttle = "throttle",
        RaiseDowntime = "raise-downtime",
        Postcopy = "postcopy",
    }
}

option_names! {
    /// Whether memory is compressed.
    MigrationCompression(Compression) = "none|zstd" {
        None = "none",
        Zstd = "zstd",
    }
}

option_names! {
    /// When dirty bits are cleared.
    DirtyClearing(DirtyClear) = "slice|round" {
        Slice = "slice",
        Round = "round",
    }
}

option_enum! {
    /// How memory is loaded from a snapshot.
    MemoryRestoreMode = "copy|ondemand|mapped", default Copy {
        /// All memory is read before the guest runs.
        Copy = "copy",
        /// Each page is read when the guest accesses it.
        OnDemand = "ondemand",
        /// Memory is a private mapping of the snapshot's file, which several VMs share until they write; its contents
        /// are not verified.
        Mapped = "mapped",
    }
}

option_enum! {
    /// How accesses to pages that have not arrived are caught in postcopy.
    FaultSourceChoice = "auto|exit|sigbus|uffd", default Auto {
        /// Fault exits if KVM has the patches, otherwise userfaultfd; SIGBUS mode only on a KVM that itself
        /// reports the address of a failed access.
        Auto = "auto",
        /// Fault exits: a vCPU leaves the guest, and its own thread resolves the fault; needs the patched
        /// KVM.
        Exit = "exit",
        /// The same with userfaultfd in SIGBUS mode, on any KVM; needs BPF without the patches.
        Sigbus = "sigbus",
        /// userfaultfd, with reader threads.
        Uffd = "uffd",
    }
}

option_family! {
    /// Where and how to send the VM.
    SendMigrationData "send-migration" {
        /// `tcp:<host>:<port>` or `unix:<path>`.
        destination_url: String = String::new(), "destination_url" as One<Text>, required();
        /// Hand memory over as descriptors instead of copying it; needs a unix address.
        local: bool = false, "local" as One<Toggle>;
        /// Downtime in milliseconds that precopy aims at.
        downtime_ms: u64 = options::DOWNTIME_DEFAULT_MS, "downtime_ms" as One<Int>,
            range(1, DOWNTIME_MAX_MS);
        /// Longest duration of precopy in seconds.
        timeout_s: u64 = options::TIMEOUT_DEFAULT.as_secs(), "timeout_s" as One<Int>,
            range(1, TIMEOUT_MAX_S);
        /// What happens when precopy has not converged within timeout_s.
        timeout_strategy: TimeoutStrategy = TimeoutStrategy::default(),
            "timeout_strategy" as One<Choice>;
        /// How precopy is made to converge when further rounds do not help: throttle slows the vCPUs
        /// down, raise-downtime allows a longer downtime, postcopy sends the rest by postcopy, as
        /// memory_mode=auto does.
        convergence: ConvergencePolicy = ConvergencePolicy::default(), "convergence" as One<Choice>;
        /// Longest downtime in milliseconds that convergence=raise-downtime may allow; ten times
        /// downtime_ms if not given.
        downtime_max_ms: Option<u64> = None, "downtime_max_ms" as Opt<Int>, range(1, DOWNTIME_MAX_MS);
        /// When dirty bits are cleared; for comparison.
        dirty_clear: DirtyClearing = DirtyClearing::default(), "dirty_clear" as One<Choice>;
        /// Whether memory is compressed; precopy only.
        compression: MigrationCompression = MigrationCompression::default(), "compression" as One<Choice>;
        /// Number of parallel connections.
        connections: u64 = 1, "connections" as One<Int>, range(1, CONNECTIONS_MAX);
        /// Use TLS for all connections: directory with ca-cert.pem, client-cert.pem and client-key.pem. Needs
        /// a tcp address whose host is named in the destination's certificate.
        tls_dir: Option<PathBuf> = None, "tls_dir" as Opt<File>;
        /// When memory is sent.
        memory_mode: MigrationMode = MigrationMode::default(), "memory_mode" as One<Choice>;
        /// Seconds of precopy after which memory_mode=auto switches to postcopy at the latest.
        postcopy_after_s: Option<u64> = None, "postcopy_after_s" as Opt<Int>, range(0, TIMEOUT_MAX_S);
        /// Connections reserved for pages that the guest waits for in postcopy; with 0 these pages share the
        /// other connections. By default chosen by the number of vCPUs.
        preempt: Option<u64> = None, "preempt" as Opt<Int>, range(0, PREEMPT_MAX);
        /// Bandwidth limit in bytes per second for memory that no fault waits for: all memory in
        /// precopy, before compression, and background pages in postcopy; 0 for no limit.
        bandwidth: u64 = 0, "bandwidth" as One<Bytes>;
        /// Seconds for which the source tries by itself to re-establish the lost connections of a postcopy
        /// migration, or to tell a destination in doubt which side owns the VM; after that, migration-recover
        /// does either.
        recover_timeout_s: u64 = options::RECOVER_TIMEOUT_DEFAULT.as_secs(),
            "recover_timeout_s" as One<Int>, range(0, TIMEOUT_MAX_S);
        /// In postcopy, send the last pages from a separate process, the page server, so that the VMM can
        /// exit as soon as the page server has taken over; needs shared memory.
        page_server: bool = false, "page_server" as One<Toggle>;
        /// API socket of the page server; by default the path of the VMM's API socket with .pages appended.
        page_server_socket: Option<PathBuf> = None, "page_server_socket" as Opt<File>;
    }
}

option_family! {
    /// How a postcopy migration that has lost its connections reconnects.
    MigrationRecoverData "migration-recover" {
        /// Another address for the source to connect to, or for the destination to listen on.
        url: Option<String> = None, "url" as Opt<Text>;
        /// At the source, the maximum number of connections of each kind; at most as many as the migration
        /// began with.
        connections: Option<u64> = None, "connections" as Opt<Int>, range(1, CONNECTIONS_MAX);
    }
}

option_family! {
    /// Whether to carry out a request even if it loses a guest, or has one run here that may run on another host.
    ForceData "force" {
        /// Carry out the request even then.
        force: bool = false, "force" as One<Toggle>;
    }
}

option_family! {
    /// Where and how to receive a VM.
    ReceiveMigrationData "receive-migration" {
        /// `tcp:<address>:<port>` or `unix:<path>`.
        receiver_url: String = String::new(), "receiver_url" as One<Text>, required();
        /// Require TLS, with certificates of one CA on both sides: directory with ca-cert.pem,
        /// server-cert.pem and server-key.pem. Needs a tcp address.
        tls_dir: Option<PathBuf> = None, "tls_dir" as Opt<File>;
        /// When memory is expected to arrive; a hint only, as the source decides.
        memory_mode: MigrationMode = MigrationMode::default(), "memory_mode" as One<Choice>;
        /// How accesses of vCPUs to pages that have not arrived are caught in postcopy.
        fault_source: FaultSourceChoice = FaultSourceChoice::Auto, "fault_source" as One<Choice>;
        /// Fill the stage-2 tables once all memory is resident, while the guest runs; skipped if KVM does not
        /// support it.
        prefault_stage2: bool = true, "prefault_stage2" as One<Toggle>;
        /// Rules for what the received configuration may name on this host, each `<root>:<kinds>`, like
        /// [/var/lib/vms:disk+console,vm*:tap]; kinds are disk, memory, pool, console, payload, rng, device
        /// and tap. If not given, everything is allowed.
        allow: Option<Vec<Grant>> = None, "allow" as Opt<GrantList>;
        /// New host NUMA nodes for memory zones.
        zone_updates: Option<Vec<VmMemoryZoneUpdateData>> = None,
            "zone_updates" as Opt<ZoneUpdates>;
        /// Socket of a prezero-pool of this host, which memory zones then take their memory from whatever their
        /// configuration says; `off`: from none.
        prezeroed: Option<PathBuf> = None, "prezeroed" as Opt<File>;
        /// Open tap descriptors for network devices, replacing those in the configuration.
        net_fds: Option<Vec<RestoredNetConfig>> = None, "net_fds" as Opt<NetFds>;
        /// Open descriptors for passed-through devices, replacing what the configuration has.
        vfio_fds: Option<Vec<RestoredVfioConfig>> = None, "vfio_fds" as Opt<VfioFds>;
        /// The open descriptor of /dev/iommu that vfio_fds are bound to.
        iommufd_fd: Option<ConfigFd> = None, "iommufd_fd" as Opt<Fd>;
    }
}

option_family! {
    /// Changes to a network device of a restored VM.
    VmNetUpdateData "net-update" {
        /// The device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// New name.
        new_id: Option<String> = None, "" as JsonOnly;
        /// New MAC address; the guest sees it when its driver next initializes the device.
        mac: Option<MacAddr> = None, "" as JsonOnly;
        /// New tap.
        tap: Option<String> = None, "" as JsonOnly;
    }
}

option_family! {
    /// Changes to a disk of a restored VM.
    VmDiskUpdateData "disk-update" {
        /// The device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// New name.
        new_id: Option<String> = None, "" as JsonOnly;
        /// New file, with the contents that the disk had when the VM was saved.
        path: Option<PathBuf> = None, "" as JsonOnly;
    }
}

option_enum! {
    /// Adjustment of the guest's clocks for the time spent in a snapshot.
    GuestClock = "catch-up|continue", default CatchUp {
        /// The clocks are advanced by the time that has passed.
        CatchUp = "catch-up",
        /// The clocks continue from where they stopped.
        Continue = "continue",
    }
}

option_family! {
    /// Where to restore a VM from.
    RestoreConfig "restore" {
        /// `file://<directory>` with the snapshot.
        source_url: String = String::new(), "source_url" as One<Text>, required();
        /// Populate all memory, also where the snapshot has only zeros: before the guest runs, or
        /// in the background with `memory_restore_mode=ondemand`.
        prefault: bool = false, "prefault" as One<Toggle>;
        /// Load memory before the guest runs, or on demand while it runs, or map the snapshot's file.
        memory_restore_mode: MemoryRestoreMode = MemoryRestoreMode::Copy,
            "memory_restore_mode" as One<Choice>;
        /// Fill the stage-2 tables once all memory is resident, while the guest runs; skipped if KVM does not
        /// support it.
        prefault_stage2: bool = true, "prefault_stage2" as One<Toggle>;
        /// Resume the VM after the restore.
        resume: bool = false, "resume" as One<Toggle>;
        /// Whether the guest's clocks are advanced by the time spent in the snapshot, as its wall clock
        /// needs, or continue from where they stopped.
        clock: GuestClock = GuestClock::CatchUp, "clock" as One<Choice>;
        /// New host NUMA nodes for memory zones.
        zone_updates: Option<Vec<VmMemoryZoneUpdateData>> = None,
            "zone_updates" as Opt<ZoneUpdates>;
        /// Socket of a prezero-pool of this host, which memory zones then take their memory from whatever their
        /// configuration says; `off`: from none.
        prezeroed: Option<PathBuf> = None, "prezeroed" as Opt<File>;
        /// New names, MAC addresses and taps for network devices.
        net_updates: Option<Vec<VmNetUpdateData>> = None, "" as JsonOnly;
        /// New names and files for disks.
        disk_updates: Option<Vec<VmDiskUpdateData>> = None, "" as JsonOnly;
        /// Open tap descriptors for network devices, replacing those in the configuration.
        net_fds: Option<Vec<RestoredNetConfig>> = None, "net_fds" as Opt<NetFds>;
        /// Open descriptors for passed-through devices, replacing what the configuration has.
        vfio_fds: Option<Vec<RestoredVfioConfig>> = None, "vfio_fds" as Opt<VfioFds>;
        /// The open descriptor of /dev/iommu that vfio_fds are bound to.
        iommufd_fd: Option<ConfigFd> = None, "iommufd_fd" as Opt<Fd>;
    }
}

option_family! {
    /// Where to save a VM.
    VmSnapshotConfig "snapshot" {
        /// `file://<directory>`; the directory must exist and contain no snapshot.
        destination_url: String = String::new(), "destination_url" as One<Text>, required_json();
        /// Which program restores it; that of cloud-hypervisor v53 can be written of a VM of its platform.
        format: SnapshotFormat = SnapshotFormat::Godwit, "format" as One<Choice>;
    }
}

option_family! {
    /// Where to dump the memory of a VM.
    VmCoredumpData "coredump" {
        /// `file://<path>` of a file that does not exist.
        destination_url: String = String::new(), "destination_url" as One<Text>, required_json();
    }
}

/// Parses the address of a migration.
fn address(url: &str) -> Result<Address, ConfigError> {
    Ok(url.parse()?)
}

/// A number of connections as `u16`; out of range saturates, so that validation refuses it.
fn connections(number: u64) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

/// The directory of a snapshot URL.
fn directory_of(url: &str) -> Result<PathBuf, ConfigError> {
    match url.strip_prefix("file://") {
        Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err(ConfigError::SnapshotUrl { url: url.to_owned() }),
    }
}

impl VmSnapshotConfig {
    /// The directory of the snapshot.
    ///
    /// # Errors
    /// The URL is not one of a directory.
    pub fn directory(&self) -> Result<PathBuf, ConfigError> {
        directory_of(&self.destination_url)
    }
}

impl VmCoredumpData {
    /// The path of the core file.
    ///
    /// # Errors
    /// The URL is not one of a file.
    pub fn file(&self) -> Result<PathBuf, ConfigError> {
        match self.destination_url.strip_prefix("file://") {
            Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
            _ => Err(ConfigError::CoreDumpUrl { url: self.destination_url.clone() }),
        }
    }
}

impl RestoreConfig {
    /// Where memory comes from on this host.
    pub fn memory_updates(&self) -> MemoryUpdates {
        MemoryUpdates::new(self.zone_updates.as_ref(), self.prezeroed.as_ref())
    }

    /// The directory of the snapshot.
    ///
    /// # Errors
    /// The URL is not one of a directory.
    pub fn directory(&self) -> Result<PathBuf, ConfigError> {
        directory_of(&self.source_url)
    }
}

/// Whether the text is a bare address rather than an option string.
fn is_bare_url(text: &str) -> bool {
    let scheme = ["tcp:", "unix:"].iter().any(|scheme| text.starts_with(scheme));
    // Text without a key can only be meant as an address, if perhaps an invalid one.
    (scheme && !text.contains(',')) || (!text.is_empty() && !text.contains('='))
}

impl SendMigrationData {
    /// Parses an option string or a bare address.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_or_url(text: &str) -> Result<Self, OptionError> {
        if is_bare_url(text) {
            return Ok(Self { destination_url: text.to_owned(), ..Self::default() });
        }
        Self::parse(text)
    }

    /// The validated options of the migration.
    ///
    /// # Errors
    /// The address is invalid, or the first violated rule between options.
    pub fn options(&self) -> Result<SendOptions, ConfigError> {
        let options = SendOptions {
            memory_mode: self.memory_mode.0,
            local: self.local,
            connections: connections(self.connections),
            urgent_connections: self.preempt.map(connections),
            postcopy_after: self.postcopy_after_s.map(Duration::from_secs),
            bandwidth_bytes_per_s: self.bandwidth,
            recover_timeout: Duration::from_secs(self.recover_timeout_s),
            downtime: Duration::from_millis(self.downtime_ms),
            timeout: Duration::from_secs(self.timeout_s),
            timeout_strategy: self.timeout_strategy.0,
            convergence: self.convergence.0,
            downtime_max: self.downtime_max_ms.map(Duration::from_millis),
            dirty_clear: self.dirty_clear.0,
            compression: self.compression.0,
            page_server: self.page_server,
            page_server_socket: self.page_server_socket.clone(),
            tls_dir: self.tls_dir.clone(),
            ..SendOptions::new(address(&self.destination_url)?)
        };
        options.check()?;
        Ok(options)
    }

    /// Validates the request.
    ///
    /// # Errors
    /// As [`Self::options`], or an unsupported option.
    pub fn validate(&self) -> Result<(), ConfigError> {
        super::refuse_unsupported(self)?;
        self.options().map(drop)
    }
}

impl MigrationRecoverData {
    /// Parses an option string or a bare address.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_or_url(text: &str) -> Result<Self, OptionError> {
        if is_bare_url(text) {
            return Ok(Self { url: Some(text.to_owned()), ..Self::default() });
        }
        Self::parse(text)
    }

    /// Validates the address.
    ///
    /// # Errors
    /// The address is invalid.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.url.as_deref().map_or(Ok(()), |url| address(url).map(drop))
    }
}

impl ReceiveMigrationData {
    /// Where memory comes from on this host.
    pub fn memory_updates(&self) -> MemoryUpdates {
        MemoryUpdates::new(self.zone_updates.as_ref(), self.prezeroed.as_ref())
    }

    /// Parses an option string or a bare address.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_or_url(text: &str) -> Result<Self, OptionError> {
        if is_bare_url(text) {
            return Ok(Self { receiver_url: text.to_owned(), ..Self::default() });
        }
        Self::parse(text)
    }

    /// Validates the request.
    ///
    /// # Errors
    /// The address is invalid, or an option is unsupported.
    pub fn validate(&self) -> Result<(), ConfigError> {
        super::refuse_unsupported(self)?;
        match address(&self.receiver_url)? {
            to @ Address::Unix(_) if self.tls_dir.is_some() => {
                Err(options::OptionsError::TlsUnix(to).into())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn bare_address_and_option_string_mean_the_same() {
        let bare = SendMigrationData::parse_or_url("tcp:127.0.0.1:4000").unwrap();
        let long = SendMigrationData::parse_or_url("destination_url=tcp:127.0.0.1:4000").unwrap();
        assert_eq!(bare, long);
        let full = SendMigrationData::parse_or_url(
            "destination_url=tcp:h:1,local=off,downtime_ms=5,timeout_s=6,timeout_strategy=ignore,\
             connections=8,memory_mode=postcopy",
        )
        .unwrap();
        assert_eq!(full.memory_mode.0, MemoryMode::Postcopy);
        assert_eq!((full.downtime_ms, full.timeout_s, full.connections), (5, 6, 8));
        assert!(full.validate().is_ok());
    }

    #[test]
    fn what_has_no_effect_is_refused_by_name() {
        let problem = |keys: &str| {
            let text = format!("destination_url=unix:/s,{keys}");
            let data = SendMigrationData::parse_or_url(&text).unwrap();
            data.validate().err().map(|error| error.to_string()).unwrap_or_default()
        };
        for keys in [
            "preempt=2",
            "postcopy_after_s=3",
            "memory_mode=postcopy,postcopy_after_s=3",
            "downtime_max_ms=900",
            "convergence=throttle,downtime_max_ms=900",
            "memory_mode=postcopy,convergence=throttle",
            "bandwidth=1000",
            "memory_mode=postcopy,bandwidth=1000",
            "local=on,bandwidth=10M",
            "local=on,connections=2",
        ] {
            let key = keys.rsplit(',').next().and_then(|pair| pair.split('=').next()).unwrap();
            assert!(problem(keys).contains(key), "{keys}: {}", problem(keys));
        }
        for keys in [
            "bandwidth=10M",
            "memory_mode=auto,preempt=2,postcopy_after_s=3,bandwidth=10M",
            "convergence=postcopy,preempt=2,postcopy_after_s=3",
            "memory_mode=postcopy,preempt=0,bandwidth=64K",
            "memory_mode=auto,convergence=raise-downtime,downtime_max_ms=900",
        ] {
            assert_eq!(problem(keys), "", "{keys}");
        }
    }

    #[test]
    fn rules() {
        let parse = |text: &str| SendMigrationData::parse_or_url(text).unwrap().validate();
        assert!(parse("destination_url=tcp:h:1,local=on").is_err());
        assert!(parse("destination_url=http://x").is_err());
        assert!(parse("destination_url=unix:/s,connections=2").is_ok());
        assert!(parse("destination_url=tcp:h:1,convergence=postcopy").is_ok());
        assert!(parse("destination_url=tcp:h:1,convergence=postcopy,page_server=on").is_ok());
        assert!(parse("destination_url=unix:/s,local=on,convergence=postcopy").is_err());
        assert!(parse("destination_url=tcp:h:1,page_server=on").is_err());
        assert!(parse("destination_url=tcp:h:1,tls_dir=/x").is_ok());
        for keys in ["tls_dir=/x", "local=on,tls_dir=/x"] {
            let refused = parse(&format!("destination_url=unix:/s,{keys}")).unwrap_err();
            assert!(refused.to_string().contains("tls_dir"), "{keys}: {refused}");
        }
        let receive = |text: &str| ReceiveMigrationData::parse_or_url(text).unwrap().validate();
        assert!(receive("receiver_url=tcp:h:1,tls_dir=/x").is_ok());
        let refused = receive("receiver_url=unix:/s,tls_dir=/x").unwrap_err();
        assert!(refused.to_string().contains("tls_dir needs a tcp: address"), "{refused}");
        assert!(
            SendMigrationData::parse_or_url("destination_url=tcp:h:1,connections=129").is_err()
        );
        assert!(ReceiveMigrationData::parse_or_url("memory_mode=postcopy").is_err());
    }

    #[test]
    fn every_option_reaches_the_migration() {
        let text = "destination_url=tcp:h:1,local=off,downtime_ms=5,timeout_s=6,\
                    timeout_strategy=ignore,convergence=raise-downtime,downtime_max_ms=7,\
                    dirty_clear=round,compression=zstd,connections=8,memory_mode=auto,\
                    postcopy_after_s=9,preempt=10,bandwidth=1M,recover_timeout_s=11,page_server=on,\
                    page_server_socket=/s";
        let expected = SendOptions {
            downtime: Duration::from_millis(5),
            timeout: Duration::from_secs(6),
            timeout_strategy: EngineStrategy::Ignore,
            convergence: Convergence::RaiseDowntime,
            downtime_max: Some(Duration::from_millis(7)),
            dirty_clear: DirtyClear::Round,
            compression: Compression::Zstd,
            connections: 8,
            memory_mode: MemoryMode::Auto,
            postcopy_after: Some(Duration::from_secs(9)),
            urgent_connections: Some(10),
            bandwidth_bytes_per_s: 1 << 20,
            recover_timeout: Duration::from_secs(11),
            page_server: true,
            page_server_socket: Some("/s".into()),
            ..SendOptions::new("tcp:h:1".parse().unwrap())
        };
        // Each migration has its own steering.
        let with = |sent: SendOptions| SendOptions { steering: expected.steering.clone(), ..sent };
        let sent = SendMigrationData::parse_or_url(text).unwrap().options().unwrap();
        assert_eq!(with(sent), expected);
        // Omitted options have the defaults of the migration crate.
        let plain = SendMigrationData::parse_or_url("tcp:h:1").unwrap().options().unwrap();
        let defaults = SendOptions::new("tcp:h:1".parse().unwrap());
        assert_eq!(with(plain), SendOptions { steering: expected.steering.clone(), ..defaults });
    }
}
