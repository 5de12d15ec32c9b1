// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a command line of `cloud-hypervisor` requests.
//!
//! Owns which of its options go together, and how they become the arguments of a VMM or of a page server. The options
//! themselves are in `options`. It must never start anything.

use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use clap::ArgMatches;
use thiserror::Error;
use vmm::api::socket::parse_metrics;
use vmm::api::successor::SuccessorArgs;
use vmm::api::types::{BUILD_VERSION, COMPATIBLE_VERSION};
use vmm::api::{ApiSocket, SocketError};
use vmm::config::family::Family as _;
use vmm::config::migration::RestoreConfig;
use vmm::config::option_string::OptionError;
use vmm::config::{ConfigError, VmParams};
use vmm::events::{EventError, EventTarget};
use vmm::options::{ChildLogging, SeccompMode, VmmOptions};
use vmm::preflight::Severity;

use super::exit;
use super::options::{ELSEWHERE, VM_OPTIONS, command};

/// The action that the command line requests.
#[derive(Debug)]
pub enum Launch {
    /// Print this text and exit.
    Print(String),
    /// Report what the host lacks for a VM, and exit.
    Check(Box<CheckArgs>),
    /// Print what the hosts of these reports have in common, and exit.
    CpuBaseline(Vec<PathBuf>),
    /// Run a VMM.
    Run(Box<RunArgs>),
    /// Run as the page server of a VMM.
    ServePages(PageServerArgs),
}

/// Arguments of `--check`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CheckArgs {
    /// The VM, which need not have anything to boot.
    pub vm: VmParams,
    /// Value of `--seccomp`.
    pub seccomp: SeccompMode,
    /// Whether the report is to be JSON.
    pub is_json: bool,
}

impl CheckArgs {
    /// The report, and the exit code.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn report(self) -> Result<(String, u8), LaunchError> {
        let config = self.vm.into_config_to_check().map_err(LaunchError::Config)?;
        let report = vmm::preflight::run(config, self.seccomp);
        let code = if report.verdict == Severity::Fails { exit::LACKING } else { exit::OK };
        Ok((if self.is_json { report.json() } else { report.text() }, code))
    }
}

/// Arguments of a page server, given by the VMM that starts it.
#[derive(Debug, PartialEq, Eq)]
pub struct PageServerArgs {
    /// Number of `-v` options.
    pub verbosity: u8,
    /// Value of `--event-monitor`.
    pub event_monitor: Option<String>,
    /// Value of `--log-format`.
    pub log_format: Option<String>,
    /// Path of its API socket.
    pub socket: PathBuf,
    /// Uptime of the VMM, which the page server continues.
    pub uptime: Duration,
    /// Value of `--seccomp`.
    pub seccomp: SeccompMode,
}

/// Arguments of a VMM. Descriptors and sockets are kept as text, and opened once, later.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RunArgs {
    /// Number of `-v` options.
    pub verbosity: u8,
    /// Value of `--log-file`.
    pub log_file: Option<PathBuf>,
    /// Value of `--log-format`.
    pub log_format: Option<String>,
    /// Value of `--event-monitor`.
    pub event_monitor: Option<String>,
    /// Value of `--api-socket`.
    pub api_socket: Option<String>,
    /// Value of `--metrics`.
    pub metrics: Option<String>,
    /// Value of `--seccomp`.
    pub seccomp: SeccompMode,
    /// Whether `--no-shutdown` is given.
    pub no_shutdown: bool,
    /// `--landlock`, but no VM is described that it could confine.
    pub confines_nothing: bool,
    /// The VM, if the command line describes one.
    pub vm: Option<VmParams>,
    /// Value of `--restore`.
    pub restore: Option<String>,
    /// Value of `--successor`.
    pub successor: Option<String>,
}

/// Errors in a command line that clap accepts.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The VM configuration is invalid.
    #[error("the configuration is not valid")]
    Config(#[source] ConfigError),
    /// `--api-socket` is invalid.
    #[error("the API socket cannot be opened")]
    ApiSocket(#[source] SocketError),
    /// `--metrics` is invalid.
    #[error("metrics cannot be served")]
    Metrics(#[source] SocketError),
    /// `--restore` cannot be parsed.
    #[error("the value of --restore cannot be parsed")]
    Restore(#[source] OptionError),
    /// The URL of `--restore` is invalid.
    #[error("--restore cannot be used")]
    RestoreUrl(#[source] ConfigError),
    /// `--event-monitor` is invalid.
    #[error("the event monitor cannot be opened")]
    Events(#[source] EventError),
    /// `--restore` is combined with an option of the VM configuration.
    #[error(
        "--restore takes the configuration from the snapshot, so --{option} cannot be given with it"
    )]
    TwoVms {
        /// The option.
        option: String,
    },
    /// An option of the VM configuration is given without a boot payload.
    #[error(
        "--{option} is part of a VM's configuration, but neither --kernel nor --firmware is given"
    )]
    NoKernel {
        /// The option.
        option: String,
    },
    /// The option exists in other builds of cloud-hypervisor only.
    #[error("--{option} is not supported by this version")]
    Unsupported {
        /// The option.
        option: String,
    },
    /// `--successor` is invalid.
    #[error("no place of another process can be taken")]
    Successor(#[source] SocketError),
    /// `--successor` with a VM of the command line, or without a socket of its own.
    #[error(
        "--successor takes a VM that comes over the API: it needs --api-socket path=PATH, and no other VM"
    )]
    SuccessorOfNothing,
    /// `--check` looks at a VM of the command line only.
    #[error("--check takes the VM from the command line, so --restore cannot be given with it")]
    CheckOfSnapshot,
    /// The command line requests nothing.
    #[error("nothing to do: give a VM (--kernel) or an API socket (--api-socket)")]
    Nothing,
}

impl RunArgs {
    /// The other end of the starter's socket, if there is one.
    pub fn starter(&self) -> Option<UnixStream> {
        self.successor.as_deref().and_then(SuccessorArgs::starter)
    }

    /// Opens inherited descriptors and parses the configuration.
    ///
    /// # Errors
    /// The command line is invalid.
    pub fn into_options(self) -> Result<(VmmOptions, Option<EventTarget>), LaunchError> {
        let initial_vm =
            self.vm.map(VmParams::into_config).transpose().map_err(LaunchError::Config)?;
        let api_socket = self
            .api_socket
            .map(|text| ApiSocket::parse(&text))
            .transpose()
            .map_err(LaunchError::ApiSocket)?;
        let events = self
            .event_monitor
            .map(|text| EventTarget::parse(&text))
            .transpose()
            .map_err(LaunchError::Events)?;
        let metrics = self
            .metrics
            .map(|text| parse_metrics(&text))
            .transpose()
            .map_err(LaunchError::Metrics)?;
        let restore = self
            .restore
            .map(|text| RestoreConfig::parse(&text))
            .transpose()
            .map_err(LaunchError::Restore)?;
        if let Some(restore) = &restore {
            restore.directory().map_err(LaunchError::RestoreUrl)?;
        }
        let successor = self
            .successor
            .map(|text| SuccessorArgs::parse(&text))
            .transpose()
            .map_err(LaunchError::Successor)?;
        let (seccomp, no_shutdown) = (self.seccomp, self.no_shutdown);
        let (verbosity, log_format) = (self.verbosity, self.log_format);
        let child_logging = ChildLogging { verbosity, log_format, log: None };
        let options = VmmOptions {
            api_socket,
            metrics,
            initial_vm,
            restore,
            seccomp,
            no_shutdown,
            child_logging,
            successor,
        };
        Ok((options, events))
    }
}

/// Parses a command line; the first argument is the program.
///
/// # Errors
/// clap's error, or its help text.
pub fn parse<I>(args: I) -> Result<Result<Launch, LaunchError>, clap::Error>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    // Building the help texts costs more than the rest of parsing, and is rarely needed.
    let with_help = args.len() == 1 || args.iter().any(|arg| arg == "--help" || arg == "-h");
    let matches = command(with_help).try_get_matches_from(args)?;
    Ok(read(&matches))
}

fn read(matches: &ArgMatches) -> Result<Launch, LaunchError> {
    if matches.get_flag("version") {
        return Ok(Launch::Print(format!(
            "cloud-hypervisor v{COMPATIBLE_VERSION}\n{BUILD_VERSION}"
        )));
    }
    if matches.get_flag("print-openapi") {
        let text = vmm::api::openapi::document_json();
        return Ok(Launch::Print(text.trim_end().to_owned()));
    }
    let one = |name: &str| matches.get_one::<String>(name).cloned();
    let seccomp = SeccompMode::parse(one("seccomp").as_deref().unwrap_or_default());
    if let Some(uptime_us) = matches.get_one::<u64>("page-server") {
        return Ok(Launch::ServePages(PageServerArgs {
            seccomp,
            verbosity: matches.get_count("v"),
            event_monitor: one("event-monitor"),
            log_format: one("log-format"),
            socket: one("api-socket").map(PathBuf::from).unwrap_or_default(),
            uptime: Duration::from_micros(*uptime_us),
        }));
    }
    if let Some(option) = ELSEWHERE.iter().find(|name| matches.contains_id(name)) {
        return Err(LaunchError::Unsupported { option: (*option).to_owned() });
    }
    if let Some(reports) = matches.get_many::<PathBuf>("cpu-baseline") {
        return Ok(Launch::CpuBaseline(reports.cloned().collect()));
    }
    if let Some(form) = one("check") {
        if matches.contains_id("restore") {
            return Err(LaunchError::CheckOfSnapshot);
        }
        let (vm, is_json) = (params(matches), form == "json");
        return Ok(Launch::Check(Box::new(CheckArgs { vm, seccomp, is_json })));
    }
    const PAYLOAD: [&str; 3] = ["kernel", "firmware", "igvm"];
    if matches.contains_id("restore")
        && let Some(option) = PAYLOAD.iter().chain(&VM_OPTIONS).find(|name| given(matches, name))
    {
        return Err(LaunchError::TwoVms { option: (*option).to_owned() });
    }
    let payload = PAYLOAD.iter().any(|name| matches.contains_id(name));
    let vm = if payload {
        Some(params(matches))
    } else if let Some(option) = VM_OPTIONS.iter().find(|name| given(matches, name)) {
        return Err(LaunchError::NoKernel { option: (*option).to_owned() });
    } else {
        None
    };
    let run = RunArgs {
        verbosity: matches.get_count("v"),
        log_file: one("log-file").map(PathBuf::from),
        log_format: one("log-format"),
        event_monitor: one("event-monitor"),
        api_socket: one("api-socket"),
        metrics: one("metrics"),
        seccomp,
        no_shutdown: matches.get_flag("no-shutdown"),
        confines_nothing: vm.is_none() && matches.get_flag("landlock"),
        vm,
        restore: one("restore"),
        successor: one("successor"),
    };
    if run.vm.is_none() && run.restore.is_none() && run.api_socket.is_none() {
        return Err(LaunchError::Nothing);
    }
    let has_path = run.api_socket.as_ref().is_some_and(|socket| !socket.starts_with("fd="));
    if run.successor.is_some() && (run.vm.is_some() || run.restore.is_some() || !has_path) {
        return Err(LaunchError::SuccessorOfNothing);
    }
    Ok(Launch::Run(Box::new(run)))
}

fn given(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine)
}

fn params(matches: &ArgMatches) -> VmParams {
    let one = |name: &str| matches.get_one::<String>(name).cloned();
    let many = |name: &str| -> Vec<String> {
        matches.get_many::<String>(name).into_iter().flatten().cloned().collect()
    };
    VmParams {
        cpus: one("cpus"),
        memory: one("memory"),
        memory_zones: many("memory-zone"),
        firmware: one("firmware"),
        kernel: one("kernel"),
        initramfs: one("initramfs"),
        cmdline: one("cmdline"),
        igvm: one("igvm"),
        host_data: one("host-data"),
        rate_limit_groups: many("rate-limit-group"),
        disks: many("disk"),
        net: many("net"),
        rng: one("rng"),
        rtc: one("rtc"),
        balloon: one("balloon"),
        fs: many("fs"),
        generic_vhost_user: many("generic-vhost-user"),
        pmem: many("pmem"),
        serial: one("serial"),
        console: one("console"),
        debug_console: one("debug-console"),
        devices: many("device"),
        user_devices: many("user-device"),
        vdpa: many("vdpa"),
        vsock: one("vsock"),
        numa: many("numa"),
        pci_segments: many("pci-segment"),
        platform: one("platform"),
        tpm: one("tpm"),
        watchdog: matches.get_flag("watchdog"),
        pvpanic: matches.get_flag("pvpanic"),
        landlock: matches.get_flag("landlock"),
        landlock_rules: many("landlock-rules"),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    fn run(args: &str) -> RunArgs {
        let args = std::iter::once("cloud-hypervisor").chain(args.split(' '));
        match parse(args).unwrap().unwrap() {
            Launch::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    fn error(args: &str) -> LaunchError {
        let args = std::iter::once("cloud-hypervisor").chain(args.split(' '));
        parse(args).unwrap().unwrap_err()
    }

    #[test]
    fn several_values_may_follow_one_option() {
        let vm = run("--kernel k --disk path=a path=b --disk path=c --net tap=t -vv").vm.unwrap();
        assert_eq!(vm.disks, ["path=a", "path=b", "path=c"]);
        assert_eq!(vm.net, ["tap=t"]);
        assert_eq!(run("--kernel k -vvv").verbosity, 3);
        assert!(run("--api-socket /s --landlock").confines_nothing);
        let confined = run("--kernel k --landlock");
        assert!(!confined.confines_nothing && confined.vm.unwrap().landlock);
    }

    #[test]
    fn the_command_line_of_everyday_use() {
        let run = run("--api-socket /s --cpus boot=2 --memory size=1G --kernel /k --initramfs /i \
                       --cmdline x --serial tty --console off --rng src=/dev/urandom \
                       --seccomp log --event-monitor path=/e --log-file /l");
        assert_eq!(run.api_socket.as_deref(), Some("/s"));
        assert_eq!(run.seccomp, SeccompMode::Log);
        let (options, events) = run.into_options().unwrap();
        assert!(matches!(events, Some(EventTarget::Path(_))));
        assert_eq!(options.initial_vm.unwrap().cpus.boot_vcpus, 2);
        assert!(matches!(options.api_socket, Some(ApiSocket::Path(_))));
    }

    #[test]
    fn metrics_have_a_socket_with_a_path() {
        let path = |line: &str| run(line).into_options().map(|(options, _)| options.metrics);
        assert_eq!(path("--kernel k --metrics unix:/m").unwrap(), Some("/m".into()));
        assert_eq!(path("--kernel k").unwrap(), None);
        for bad in ["/m", "unix:", "tcp:127.0.0.1:1", "path=/m"] {
            let refused = path(&format!("--kernel k --metrics {bad}")).unwrap_err();
            let text = error_text::chain(&refused);
            assert!(text.ends_with(&format!("'{bad}' is not unix:<path>")), "{text}");
        }
        // By itself it is nothing to do.
        assert!(matches!(error("--metrics unix:/m"), LaunchError::Nothing));
    }

    #[test]
    fn a_clock_needs_no_value() {
        let clock = |line: &str| {
            let (options, _) = run(line).into_options().unwrap();
            options.initial_vm.unwrap().rtc.and_then(|rtc| rtc.id)
        };
        assert_eq!(clock("--kernel /k"), None);
        assert_eq!(clock("--rtc --kernel /k").as_deref(), Some("__rtc"));
        assert_eq!(clock("--kernel /k --rtc").as_deref(), Some("__rtc"));
        assert_eq!(clock("--kernel /k --rtc id=clock").as_deref(), Some("clock"));
    }

    #[test]
    fn a_check_needs_nothing_to_boot_and_takes_the_options_of_a_vm() {
        let check = |line: &str| {
            let line = std::iter::once("cloud-hypervisor").chain(line.split(' '));
            match parse(line).unwrap().unwrap() {
                Launch::Check(args) => *args,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(check("--check"), CheckArgs { vm: VmParams::default(), ..CheckArgs::default() });
        let args = check("--check=json --memory size=1G --device path=/d --seccomp false");
        assert!(args.is_json && args.seccomp == SeccompMode::Off);
        assert_eq!(args.vm.devices, ["path=/d"]);
        assert!(!check("--check --kernel /k").is_json);
        let bad = check("--check --memory size=0").report().unwrap_err();
        assert!(matches!(bad, LaunchError::Config(_)), "{bad:?}");
        let snapshot = error("--check --restore source_url=file:///x");
        assert!(matches!(snapshot, LaunchError::CheckOfSnapshot));
        assert!(parse(["cloud-hypervisor", "--check=xml"]).is_err());
    }

    #[test]
    fn a_baseline_is_made_of_files() {
        match parse("cloud-hypervisor --cpu-baseline a b".split(' ')).unwrap().unwrap() {
            Launch::CpuBaseline(paths) => assert_eq!(paths, [PathBuf::from("a"), "b".into()]),
            other => panic!("{other:?}"),
        }
        assert!(parse(["cloud-hypervisor", "--cpu-baseline"]).is_err());
        assert!(parse("cloud-hypervisor --cpu-baseline a --kernel /k".split(' ')).is_err());
    }

    #[test]
    fn a_page_server_is_known_by_its_option() {
        let line = "cloud-hypervisor --page-server 1500 --api-socket /s -v --event-monitor fd=1 \
                    --log-format {msg} --seccomp errno";
        let wanted = PageServerArgs {
            verbosity: 1,
            event_monitor: Some("fd=1".to_owned()),
            log_format: Some("{msg}".to_owned()),
            seccomp: SeccompMode::Errno,
            socket: "/s".into(),
            uptime: Duration::from_micros(1500),
        };
        match parse(line.split(' ')).unwrap().unwrap() {
            Launch::ServePages(args) => assert_eq!(args, wanted),
            other => panic!("{other:?}"),
        }
        assert!(parse(["cloud-hypervisor", "--page-server", "1"]).is_err());
        let help = command(true).render_long_help().to_string();
        assert!(!help.contains("page-server"), "only VMMs start them");
        assert!(!help.contains("--successor"), "only ch-remote starts them");
    }

    #[test]
    fn a_successor_has_a_socket_of_its_own_and_no_vm() {
        let own = run("--api-socket path=/s --successor fd=3,suffix=.x -v --seccomp log");
        assert_eq!(own.successor.as_deref(), Some("fd=3,suffix=.x"));
        for line in [
            "--api-socket fd=4 --successor fd=3,suffix=.x",
            "--api-socket /s --successor fd=3,suffix=.x --kernel /k",
            "--api-socket /s --successor fd=3,suffix=.x --restore source_url=file:///x",
        ] {
            assert!(matches!(error(line), LaunchError::SuccessorOfNothing), "{line}");
        }
        let bad = run("--api-socket /s --successor fd=99999,suffix=.x").into_options().unwrap_err();
        assert!(matches!(bad, LaunchError::Successor(_)), "{bad}");
    }

    #[test]
    fn mistakes() {
        assert!(matches!(error("--api-socket /s --disk path=a"), LaunchError::NoKernel { .. }));
        let rules = error("--api-socket /s --landlock-rules path=/p,access=r");
        assert!(matches!(rules, LaunchError::NoKernel { option } if option == "landlock-rules"));
        assert!(matches!(error("-v"), LaunchError::Nothing));
        let both = error("--restore source_url=file:///x --kernel k");
        assert!(matches!(both, LaunchError::TwoVms { option } if option == "kernel"));
        let both = error("--restore source_url=file:///x --cpus boot=2");
        assert!(matches!(both, LaunchError::TwoVms { option } if option == "cpus"));
        for bad in ["--restore source_url=x", "--restore source=file:///x", "--restore resume=on"] {
            assert!(run(bad).into_options().is_err(), "{bad}");
        }
        let args = ["cloud-hypervisor", "--kernal", "k"];
        let message = parse(args).unwrap_err().to_string();
        assert!(message.contains("--kernel"), "a suggestion is missing: {message}");
        assert!(parse(["cloud-hypervisor", "--seccomp", "maybe"]).is_err());
        let config = run("--kernel k --disk pth=/a").into_options().unwrap_err();
        assert!(error_text::chain(&config).ends_with("did you mean 'path'?"));
    }

    /// The options of cloud-hypervisor v53, with values, and whether they are refused here.
    fn upstream() -> Vec<(String, Option<String>, bool)> {
        let text = include_str!("../../vmm/src/api/compat.json");
        let list: serde_json::Value = serde_json::from_str(text).unwrap();
        let mut options = Vec::new();
        for (name, option) in list["options"].as_object().unwrap() {
            for value in option["values"].as_array().unwrap() {
                let value = value.as_str().map(str::to_owned);
                options.push((name.clone(), value, option["no"].is_string()));
            }
        }
        assert!(options.len() > 40, "{options:?}");
        options
    }

    #[test]
    fn each_option_of_upstream_is_taken_or_refused_by_name() {
        for (name, value, is_refused) in upstream() {
            let name = name.as_str();
            let dashes = if name.len() == 1 { "-" } else { "--" };
            let mut line = format!("cloud-hypervisor {dashes}{name}");
            if let Some(value) = value {
                line = format!("{line} {value}");
            }
            if !["kernel", "firmware", "igvm", "restore"].contains(&name) {
                line.push_str(" --kernel /k");
            }
            if name == "memory-zone" {
                line.push_str(" --memory size=0");
            }
            if ["fs", "generic-vhost-user", "user-device"].contains(&name) {
                line.push_str(" --memory size=512M,shared=on");
            }
            let launch = match parse(line.split(' ')) {
                Ok(launch) => launch,
                Err(error) => panic!("{line}: {error}"),
            };
            let refusal = match launch {
                Ok(Launch::Run(run)) => run.into_options().err(),
                Ok(other) => panic!("{line}: {other:?}"),
                Err(error) => Some(error),
            };
            assert_eq!(refusal.is_some(), is_refused, "{line}: {refusal:?}");
            let Some(refusal) = refusal else { continue };
            let text = error_text::chain(&refusal);
            let field = name.replace('-', "_");
            let named = [name, &field, field.trim_end_matches("_config")];
            assert!(named.iter().any(|name| text.contains(name)), "{line}: {text}");
            assert!(text.contains("not supported"), "{line}: {text}");
        }
    }

    #[test]
    fn the_version_can_be_read_by_tools() {
        let Launch::Print(text) = parse(["cloud-hypervisor", "--version"]).unwrap().unwrap() else {
            panic!("nothing is printed");
        };
        assert_eq!(text.lines().next(), Some("cloud-hypervisor v53.0.0"));
    }
}
