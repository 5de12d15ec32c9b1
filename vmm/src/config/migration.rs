// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests that move a VM: send and receive a migration, restore, snapshot.
//!
//! Owns the families and the two kinds of address (`tcp:host:port`, `unix:path`). It must never
//! connect to anything.

use std::path::PathBuf;

use super::codec::{Bytes, Choice, File, Int, JsonOnly, One, Opt, Text, Toggle};
use super::descriptor::{ConfigFd, Fd, NetFds, RestoredNetConfig, RestoredVfioConfig, VfioFds};
use super::error::ConfigError;
use super::family::{Family as _, option_enum, option_family};
use super::grant::{Grant, GrantList};
use super::option_string::OptionError;
use super::value::MacAddr;

/// Least limit of a precopy: with less the other side would take the silence for a loss.
const BANDWIDTH_MIN: u64 = 64 << 10;

/// Most parallel connections of a migration.
pub const MAX_CONNECTIONS: u64 = 128;

option_enum! {
    /// What happens to a migration that does not get done in time.
    TimeoutStrategy = "cancel|ignore", default Cancel {
        /// It is given up, and the guest goes on here.
        Cancel = "cancel",
        /// The guest is moved, however long it stands still.
        Ignore = "ignore",
    }
}

option_enum! {
    /// When memory travels.
    MigrationMode = "precopy|postcopy|auto", default Precopy {
        /// Before the guest runs at its destination.
        Precopy = "precopy",
        /// After the guest has been started there, on demand and in the background.
        Postcopy = "postcopy",
        /// Before, and what is left when that no longer helps, after.
        Auto = "auto",
    }
}

option_enum! {
    /// What is done when rounds of precopy no longer help.
    ConvergencePolicy = "none|throttle|raise-downtime|postcopy", default None {
        /// Nothing; the guest may calm down.
        None = "none",
        /// The vCPUs are kept out of the guest for a share of the time: 20 %, then 10 % more at a
        /// time, up to 99 %.
        Throttle = "throttle",
        /// The allowed downtime is doubled at a time, up to `downtime_max_ms`.
        RaiseDowntime = "raise-downtime",
        /// The rest of memory follows the guest: the same as `memory_mode=auto`.
        Postcopy = "postcopy",
    }
}

option_enum! {
    /// Whether memory is compressed on its way.
    MigrationCompression = "none|zstd", default None {
        /// Never.
        None = "none",
        /// With zstd, on each connection as long as more memory arrives that way.
        Zstd = "zstd",
    }
}

option_enum! {
    /// When dirty bits are cleared.
    DirtyClearing = "slice|round", default Slice {
        /// Just before each slice of memory is copied.
        Slice = "slice",
        /// For all memory when a round begins; for comparison.
        Round = "round",
    }
}

option_enum! {
    /// How memory is brought in from a snapshot.
    MemoryRestoreMode = "copy|ondemand", default Copy {
        /// All of it before the guest runs.
        Copy = "copy",
        /// When the guest touches it.
        OnDemand = "ondemand",
    }
}

option_enum! {
    /// How accesses to pages that have not arrived are caught in postcopy.
    FaultSourceChoice = "auto|exit|sigbus|uffd", default Auto {
        /// The patched KVM's exits where they are, else userfaultfd; SIGBUS mode only on a KVM that
        /// says itself where a vCPU was refused a page.
        Auto = "auto",
        /// A vCPU leaves the guest and brings its page itself; needs the patched KVM.
        Exit = "exit",
        /// The same with userfaultfd in SIGBUS mode, on any KVM; needs BPF without the patches.
        Sigbus = "sigbus",
        /// userfaultfd, with reader threads.
        Uffd = "uffd",
    }
}

option_family! {
    /// Another host NUMA node for a memory zone.
    VmMemoryZoneUpdateData "zone-update" {
        /// The zone.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// The node.
        host_numa_node: u32 = 0, "" as JsonOnly, required_json();
    }
}

option_family! {
    /// Where and how to send the VM.
    SendMigrationData "send-migration" {
        /// `tcp:<host>:<port>` or `unix:<path>`.
        destination_url: String = String::new(), "destination_url" as One<Text>, required();
        /// Hand memory over as descriptors instead of copying it; needs a unix address.
        local: bool = false, "local" as One<Toggle>;
        /// Longest time in milliseconds that the guest should stand still.
        downtime_ms: u64 = 300, "downtime_ms" as One<Int>, range(1, 86_400_000);
        /// Longest time in seconds that the migration may take.
        timeout_s: u64 = 3600, "timeout_s" as One<Int>, range(1, 31_536_000);
        /// What happens then.
        timeout_strategy: TimeoutStrategy = TimeoutStrategy::Cancel,
            "timeout_strategy" as One<Choice>;
        /// What is done when copying again what was written no longer helps.
        convergence: ConvergencePolicy = ConvergencePolicy::None, "convergence" as One<Choice>;
        /// Longest downtime in milliseconds that convergence=raise-downtime may allow; ten times
        /// downtime_ms if not given.
        downtime_max_ms: Option<u64> = None, "downtime_max_ms" as Opt<Int>, range(1, 86_400_000);
        /// When dirty bits are cleared; for comparison.
        dirty_clear: DirtyClearing = DirtyClearing::Slice, "dirty_clear" as One<Choice>;
        /// Whether memory is compressed on its way; precopy only.
        compression: MigrationCompression = MigrationCompression::None,
            "compression" as One<Choice>;
        /// Number of parallel connections.
        connections: u64 = 1, "connections" as One<Int>, range(1, MAX_CONNECTIONS);
        /// Directory with certificates and key.
        tls_dir: Option<PathBuf> = None, "tls_dir" as Opt<File>, unsupported();
        /// When memory travels.
        memory_mode: MigrationMode = MigrationMode::Precopy, "memory_mode" as One<Choice>;
        /// With memory_mode=auto, seconds after which the rest of memory follows the guest.
        postcopy_after_s: Option<u64> = None, "postcopy_after_s" as Opt<Int>, range(0, 31_536_000);
        /// Connections that carry only pages which the guest waits for in postcopy; from the number
        /// of vCPUs if not given, with 0 they share the others.
        preempt: Option<u64> = None, "preempt" as Opt<Int>, range(0, MAX_CONNECTIONS);
        /// Most bytes per second for memory that no fault waits for: all of it in precopy, before it is
        /// compressed, and in postcopy what is not requested; 0 for no limit.
        bandwidth: u64 = 0, "bandwidth" as One<Bytes>;
        /// Longest time in seconds for which a postcopy that lost its connections connects again by
        /// itself, and a destination in doubt is told which side has the VM; migration-recover does
        /// so later.
        recover_timeout_s: u64 = 600, "recover_timeout_s" as One<Int>, range(0, 31_536_000);
        /// In postcopy, let a process of its own send the last pages, so that this one ends as soon
        /// as that has taken over; for shared memory.
        page_server: bool = false, "page_server" as One<Toggle>;
        /// Where that process takes requests; the path of the API socket with .pages behind it if
        /// not given.
        page_server_socket: Option<PathBuf> = None, "page_server_socket" as Opt<File>;
    }
}

option_family! {
    /// How a postcopy migration that has lost its connections goes on.
    MigrationRecoverData "migration-recover" {
        /// Another address: at the source where to connect, at the destination where to listen.
        url: Option<String> = None, "url" as Opt<Text>;
        /// Most connections of each kind to make, of at most as many as the migration began with; at
        /// the source.
        connections: Option<u64> = None, "connections" as Opt<Int>, range(1, MAX_CONNECTIONS);
    }
}

option_family! {
    /// Whether something is done although a guest elsewhere is lost by it.
    ForceData "force" {
        /// It is done.
        force: bool = false, "force" as One<Toggle>;
    }
}

option_family! {
    /// Where to wait for a VM.
    ReceiveMigrationData "receive-migration" {
        /// `tcp:<address>:<port>` or `unix:<path>`.
        receiver_url: String = String::new(), "receiver_url" as One<Text>, required();
        /// Directory with certificates and key.
        tls_dir: Option<PathBuf> = None, "tls_dir" as Opt<File>, unsupported();
        /// When memory travels.
        memory_mode: MigrationMode = MigrationMode::Precopy, "memory_mode" as One<Choice>;
        /// How accesses of vCPUs to pages that have not arrived are caught in postcopy.
        fault_source: FaultSourceChoice = FaultSourceChoice::Auto, "fault_source" as One<Choice>;
        /// Fill the second-stage tables of the vCPUs when all memory is here, while the guest runs;
        /// skipped where KVM cannot do it.
        prefault_stage2: bool = true, "prefault_stage2" as One<Toggle>;
        /// Rules of what the arriving configuration may name on this host, each `<root>:<kinds>`, like
        /// [/var/lib/vms:disk+console,vm*:tap]; kinds are disk, memory, pool, console, payload, rng,
        /// device and tap. Anything if not given.
        allow: Option<Vec<Grant>> = None, "allow" as Opt<GrantList>;
        /// Other host NUMA nodes for memory zones.
        zone_updates: Option<Vec<VmMemoryZoneUpdateData>> = None, "" as JsonOnly, unsupported();
        /// Open tap descriptors for network devices, in place of those that they had.
        net_fds: Option<Vec<RestoredNetConfig>> = None, "net_fds" as Opt<NetFds>;
        /// Open descriptors for passed-through devices, in place of what they had.
        vfio_fds: Option<Vec<RestoredVfioConfig>> = None, "vfio_fds" as Opt<VfioFds>;
        /// The open descriptor of /dev/iommu that vfio_fds are bound to.
        iommufd_fd: Option<ConfigFd> = None, "iommufd_fd" as Opt<Fd>;
    }
}

option_family! {
    /// What a network device of a restored VM has in place of what was saved.
    VmNetUpdateData "net-update" {
        /// The device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// Another name.
        new_id: Option<String> = None, "" as JsonOnly;
        /// Another MAC address; the guest finds it when its driver starts anew.
        mac: Option<MacAddr> = None, "" as JsonOnly;
        /// Another tap.
        tap: Option<String> = None, "" as JsonOnly;
    }
}

option_family! {
    /// What a disk of a restored VM has in place of what was saved.
    VmDiskUpdateData "disk-update" {
        /// The device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// Another name.
        new_id: Option<String> = None, "" as JsonOnly;
        /// Another file, with the contents that the disk had when the VM was saved.
        path: Option<PathBuf> = None, "" as JsonOnly;
    }
}

option_enum! {
    /// What becomes of a guest's clocks while it is in a snapshot.
    GuestClock = "catch-up|continue", default CatchUp {
        /// They move on by the time that has passed.
        CatchUp = "catch-up",
        /// They go on where they stood.
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
        /// Bring memory in before the guest runs, or while it runs.
        memory_restore_mode: MemoryRestoreMode = MemoryRestoreMode::Copy,
            "memory_restore_mode" as One<Choice>;
        /// Fill the second-stage tables of the vCPUs when all memory is here, while the guest runs;
        /// skipped where KVM cannot do it.
        prefault_stage2: bool = true, "prefault_stage2" as One<Toggle>;
        /// Let the guest run afterwards.
        resume: bool = false, "resume" as One<Toggle>;
        /// Whether the guest's clocks have moved on when it runs, as its wall clock needs, or go on where
        /// they stood.
        clock: GuestClock = GuestClock::CatchUp, "clock" as One<Choice>;
        /// Other host NUMA nodes for memory zones.
        zone_updates: Option<Vec<VmMemoryZoneUpdateData>> = None, "" as JsonOnly;
        /// Other names, MAC addresses and taps for network devices.
        net_updates: Option<Vec<VmNetUpdateData>> = None, "" as JsonOnly;
        /// Other names and files for disks.
        disk_updates: Option<Vec<VmDiskUpdateData>> = None, "" as JsonOnly;
        /// Open tap descriptors for network devices, in place of those that they had.
        net_fds: Option<Vec<RestoredNetConfig>> = None, "net_fds" as Opt<NetFds>;
        /// Open descriptors for passed-through devices, in place of what they had.
        vfio_fds: Option<Vec<RestoredVfioConfig>> = None, "vfio_fds" as Opt<VfioFds>;
        /// The open descriptor of /dev/iommu that vfio_fds are bound to.
        iommufd_fd: Option<ConfigFd> = None, "iommufd_fd" as Opt<Fd>;
    }
}

option_family! {
    /// Where to save a VM.
    VmSnapshotConfig "snapshot" {
        /// `file://<directory>`, an existing one without a snapshot.
        destination_url: String = String::new(), "destination_url" as One<Text>, required_json();
    }
}

/// The address of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationUrl {
    /// `tcp:<host>:<port>`; the host may be a name, or an IPv6 address in brackets.
    Tcp {
        /// Host name or address, without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// `unix:<path>`.
    Unix(PathBuf),
}

impl std::str::FromStr for MigrationUrl {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let bad = || ConfigError::MigrationUrl { url: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(bad()) } else { Ok(Self::Unix(PathBuf::from(path))) };
        }
        let (host, port) =
            text.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':')).ok_or_else(bad)?;
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = match bare {
            Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_ok() => v6,
            None if !host.is_empty() && !host.contains([':', '[', ']', '/', ' ']) => host,
            _ => return Err(bad()),
        };
        Ok(Self::Tcp { host: host.to_owned(), port: port.parse().map_err(|_| bad())? })
    }
}

/// The directory of a snapshot's address.
fn directory_of(url: &str) -> Result<PathBuf, ConfigError> {
    match url.strip_prefix("file://") {
        Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err(ConfigError::SnapshotUrl { url: url.to_owned() }),
    }
}

impl VmSnapshotConfig {
    /// The directory.
    ///
    /// # Errors
    /// The address is not that of one.
    pub fn directory(&self) -> Result<PathBuf, ConfigError> {
        directory_of(&self.destination_url)
    }
}

impl RestoreConfig {
    /// The directory.
    ///
    /// # Errors
    /// The address is not that of one.
    pub fn directory(&self) -> Result<PathBuf, ConfigError> {
        directory_of(&self.source_url)
    }
}

/// Whether the text is an address by itself rather than an option string.
fn is_bare_url(text: &str) -> bool {
    let scheme = ["tcp:", "unix:"].iter().any(|scheme| text.starts_with(scheme));
    // Without a key it can only be meant as an address, a wrong one perhaps.
    (scheme && !text.contains(',')) || (!text.is_empty() && !text.contains('='))
}

impl SendMigrationData {
    /// Reads an option string or an address alone.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_or_url(text: &str) -> Result<Self, OptionError> {
        if is_bare_url(text) {
            return Ok(Self { destination_url: text.to_owned(), ..Self::default() });
        }
        Self::parse(text)
    }

    /// The address.
    ///
    /// # Errors
    /// The text is not an address.
    pub fn url(&self) -> Result<MigrationUrl, ConfigError> {
        self.destination_url.parse()
    }

    /// Checks the rules within the family.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), ConfigError> {
        super::refuse_unsupported(self)?;
        let url = self.url()?;
        let unix = matches!(url, MigrationUrl::Unix(_));
        let refuse = |problem: &str| {
            Err(ConfigError::Device {
                what: "send-migration",
                id: String::new(),
                problem: problem.to_owned(),
            })
        };
        if self.local && !unix {
            return refuse("local needs a unix address");
        }
        let may_postcopy = self.memory_mode != MigrationMode::Precopy
            || self.convergence == ConvergencePolicy::Postcopy;
        let postcopy = self.memory_mode == MigrationMode::Postcopy;
        if postcopy && self.compression != MigrationCompression::None {
            return refuse("compression works with memory_mode=precopy only");
        }
        if self.downtime_max_ms.is_some_and(|max| max < self.downtime_ms) {
            return refuse("downtime_max_ms is less than downtime_ms");
        }
        if self.page_server && !may_postcopy {
            return refuse("page_server works with memory_mode=postcopy or auto only");
        }
        if self.page_server_socket.is_some() && !self.page_server {
            return refuse("page_server_socket has no meaning without page_server=on");
        }
        if self.preempt.is_some() && !may_postcopy {
            return refuse(
                "preempt has no effect in precopy: it works with memory_mode=postcopy or auto only",
            );
        }
        if self.postcopy_after_s.is_some() && (!may_postcopy || postcopy) {
            return refuse("postcopy_after_s works with memory_mode=auto only");
        }
        if self.downtime_max_ms.is_some() && self.convergence != ConvergencePolicy::RaiseDowntime {
            return refuse("downtime_max_ms has no effect without convergence=raise-downtime");
        }
        let calms = [ConvergencePolicy::Throttle, ConvergencePolicy::RaiseDowntime];
        if postcopy && calms.contains(&self.convergence) {
            return refuse(
                "convergence has no effect with memory_mode=postcopy, which has no rounds",
            );
        }
        if (1..BANDWIDTH_MIN).contains(&self.bandwidth) {
            return refuse(
                "bandwidth is less than 64K bytes per second, at which nothing gets done",
            );
        }
        if self.local && self.bandwidth > 0 {
            return refuse("local and bandwidth exclude each other: nothing is copied");
        }
        if self.local && self.connections > 1 {
            return refuse("local and connections exclude each other: nothing is copied");
        }
        if self.local && may_postcopy {
            return refuse("local and postcopy exclude each other");
        }
        if self.local && self.compression != MigrationCompression::None {
            return refuse("local and compression exclude each other");
        }
        Ok(())
    }
}

impl MigrationRecoverData {
    /// Reads an option string or an address alone.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_or_url(text: &str) -> Result<Self, OptionError> {
        if is_bare_url(text) {
            return Ok(Self { url: Some(text.to_owned()), ..Self::default() });
        }
        Self::parse(text)
    }

    /// Checks the address.
    ///
    /// # Errors
    /// The text is not an address.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.url.as_ref().map_or(Ok(()), |url| url.parse::<MigrationUrl>().map(drop))
    }
}

impl ReceiveMigrationData {
    /// Reads an option string or an address alone.
    ///
    /// # Errors
    /// As [`super::family::Family::parse`].
    pub fn parse_or_url(text: &str) -> Result<Self, OptionError> {
        if is_bare_url(text) {
            return Ok(Self { receiver_url: text.to_owned(), ..Self::default() });
        }
        Self::parse(text)
    }

    /// The address.
    ///
    /// # Errors
    /// The text is not an address.
    pub fn url(&self) -> Result<MigrationUrl, ConfigError> {
        self.receiver_url.parse()
    }

    /// Checks the rules within the family.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), ConfigError> {
        super::refuse_unsupported(self)?;
        self.url().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn addresses() {
        let tcp = |host: &str, port| MigrationUrl::Tcp { host: host.to_owned(), port };
        assert_eq!("tcp:10.0.0.1:49000".parse::<MigrationUrl>().unwrap(), tcp("10.0.0.1", 49000));
        assert_eq!("tcp:[2001:db8::1]:4".parse::<MigrationUrl>().unwrap(), tcp("2001:db8::1", 4));
        assert_eq!("tcp:host.local:4".parse::<MigrationUrl>().unwrap(), tcp("host.local", 4));
        assert_eq!("unix:/a:b".parse::<MigrationUrl>().unwrap(), MigrationUrl::Unix("/a:b".into()));
        for bad in
            ["", "tcp:", "tcp:1", "tcp::1", "tcp:h:99999", "tcp:::1:1", "unix:", "http://x:1"]
        {
            assert!(bad.parse::<MigrationUrl>().is_err(), "{bad}");
        }
    }

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
        assert_eq!(full.memory_mode, MigrationMode::Postcopy);
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
        assert!(parse("destination_url=unix:/s,connections=2").is_ok());
        assert!(parse("destination_url=tcp:h:1,convergence=postcopy").is_ok());
        assert!(parse("destination_url=tcp:h:1,convergence=postcopy,page_server=on").is_ok());
        assert!(parse("destination_url=unix:/s,local=on,convergence=postcopy").is_err());
        assert!(parse("destination_url=tcp:h:1,compression=zstd,memory_mode=postcopy").is_err());
        let raise = "destination_url=tcp:h:1,convergence=raise-downtime";
        let raised = |keys: &str| parse(&format!("{raise},{keys}"));
        assert!(raised("downtime_ms=9,downtime_max_ms=8").is_err());
        assert!(raised("downtime_ms=9,downtime_max_ms=90").is_ok());
        let served = "destination_url=tcp:h:1,memory_mode=postcopy,page_server=on";
        assert!(parse(served).is_ok());
        let socket = format!("{served},page_server_socket=/s");
        assert!(SendMigrationData::parse_or_url(&socket).unwrap().validate().is_ok());
        assert!(parse("destination_url=tcp:h:1,page_server=on").is_err());
        assert!(parse("destination_url=tcp:h:1,memory_mode=auto,page_server_socket=/s").is_err());
        assert!(matches!(
            parse("destination_url=tcp:h:1,tls_dir=/x"),
            Err(ConfigError::Unsupported { .. })
        ));
        assert!(
            SendMigrationData::parse_or_url("destination_url=tcp:h:1,connections=129").is_err()
        );
        assert!(ReceiveMigrationData::parse_or_url("memory_mode=postcopy").is_err());
    }
}
