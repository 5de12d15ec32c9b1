// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The programs, with what their man pages say besides options, keys and exit codes.
//!
//! Text has the marks of Markdown for code and links.

use clap::Command;
use godwit::cli::{options, pool, remote};
use vmm::config::family::FamilyInfo;

/// The keys of an option or argument, by its name; `None` if its value is no option string.
pub type Keys = fn(&str) -> Option<FamilyInfo>;

/// Of what takes no option string.
pub fn no_keys(_: &str) -> Option<FamilyInfo> {
    None
}

/// An exit code, and its meaning if `docs/exit-codes.md` has none for this program.
pub type Exit = (u8, Option<&'static str>);

/// What a man page says besides.
pub struct Texts {
    /// What the program is for, without a capital letter and a full stop.
    pub summary: &'static str,
    pub synopsis: &'static [&'static str],
    /// Paragraphs.
    pub description: &'static [&'static str],
    /// A whole configuration file.
    pub configuration: Option<&'static str>,
    /// Paths, and what is there.
    pub files: &'static [(&'static str, &'static str)],
    pub exit_codes: &'static [Exit],
    /// What it does, and the commands.
    pub examples: &'static [(&'static str, &'static str)],
    pub see_also: &'static str,
}

/// A program.
pub struct Program {
    pub name: &'static str,
    pub command: Command,
    /// Keys of its own options.
    pub option_keys: Keys,
    /// Keys of what its subcommands take.
    pub argument_keys: Keys,
    pub texts: Texts,
}

/// All of them.
pub fn all() -> [Program; 3] {
    [
        Program {
            name: "cloud-hypervisor",
            command: options::command(true),
            option_keys: options::keys,
            argument_keys: no_keys,
            texts: CLOUD_HYPERVISOR,
        },
        Program {
            name: "ch-remote",
            command: remote::command(),
            option_keys: no_keys,
            argument_keys: remote::keys,
            texts: CH_REMOTE,
        },
        Program {
            name: "prezero-pool",
            command: pool::command(),
            option_keys: no_keys,
            argument_keys: no_keys,
            texts: Texts { configuration: pool_configuration(), ..PREZERO_POOL },
        },
    ]
}

const CLOUD_HYPERVISOR: Texts = Texts {
    summary: "run a virtual machine on KVM",
    synopsis: &[
        "`cloud-hypervisor` [OPTION]... `--kernel` PATH [OPTION]...",
        "`cloud-hypervisor` [OPTION]... `--firmware` PATH [OPTION]...",
        "`cloud-hypervisor` [OPTION]... `--restore` OPTIONS",
        "`cloud-hypervisor` [OPTION]... `--api-socket` PATH",
    ],
    description: &[
        "`cloud-hypervisor` runs one virtual machine. The command line describes it, or names a snapshot that it \
         continues from, or only a socket of the HTTP API: then the virtual machine is described by the API, or arrives \
         by migration. This is Godwit's, a drop-in replacement for cloud-hypervisor.",
        "An option string (OPTIONS) is a list `key=value,key=value`. Lists are enclosed in brackets, values with commas in \
         double quotes. What this version does not support is refused by name; nothing is ignored silently.",
        "The process restricts itself to the system calls and capabilities that it needs, and with `--landlock` to the \
         files of its virtual machine. It needs no root: access to `/dev/kvm` is enough for a virtual machine with disks \
         in files.",
    ],
    configuration: None,
    files: &[
        ("/dev/kvm", "KVM. Every virtual machine needs it."),
        ("/dev/userfaultfd", "For postcopy migrations, and snapshots that are restored on demand."),
        ("/dev/net/tun", "For networks of taps that are named."),
        (
            "/dev/vfio, /dev/iommu",
            "For passed-through devices, which are bound to `vfio-pci` beforehand.",
        ),
        (
            "/etc/cloud-hypervisor/NAME.conf",
            "Options of the virtual machine that the systemd unit `cloud-hypervisor@NAME.service` runs.",
        ),
        (
            "/usr/share/doc/godwit",
            "The documents: `docs/usage.md`, `docs/options.md`, `docs/migration.md`, `docs/sandbox.md` and others, and \
             the description of the API, `docs/openapi.json`.",
        ),
    ],
    exit_codes: &[(0, None), (1, None), (2, None), (6, None), (101, None), (102, None)],
    examples: &[
        (
            "A virtual machine with two vCPUs, a disk and a network, with its console on this terminal:",
            "cloud-hypervisor --api-socket /run/vm.sock \\\n\
             \x20   --kernel vmlinux --cmdline \"console=hvc0 root=/dev/vda rw\" \\\n\
             \x20   --cpus boot=2 --memory size=2G,shared=on \\\n\
             \x20   --disk path=root.img,image_type=raw \\\n\
             \x20   --net tap=tap0,mac=52:54:00:12:34:56 \\\n\
             \x20   --serial off --console tty",
        ),
        (
            "A process that waits for a virtual machine from another host (see `ch-remote`(1)):",
            "cloud-hypervisor --api-socket /run/vm.sock",
        ),
        (
            "A virtual machine that continues from a snapshot:",
            "cloud-hypervisor --restore source_url=file:///var/snapshots/a",
        ),
    ],
    see_also: "`ch-remote`(1), `prezero-pool`(1)",
};

const CH_REMOTE: Texts = Texts {
    summary: "control a virtual machine of cloud-hypervisor",
    synopsis: &["`ch-remote` `--api-socket` PATH [OPTION]... COMMAND [ARGUMENT]..."],
    description: &[
        "`ch-remote` sends one request to the HTTP API of a running `cloud-hypervisor`(1) and prints its answer on \
         standard output: JSON on one line. A request that is refused is explained by one line on standard error.",
        "An option string is a list `key=value,key=value`. Lists are enclosed in brackets, values with commas in double \
         quotes.",
        "Ctrl-C ends `--wait` and `--watch`, but not the migration.",
    ],
    configuration: None,
    files: &[(
        "/usr/share/doc/godwit",
        "The documents: `docs/usage.md`, `docs/migration.md`, `docs/snapshot.md` and others.",
    )],
    exit_codes: &[(0, None), (1, None), (2, None), (3, None), (4, None), (5, None), (7, None)],
    examples: &[
        (
            "Configuration and state of a virtual machine, and a disk that is added to it:",
            "ch-remote --pretty --api-socket /run/vm.sock info\n\
             ch-remote --api-socket /run/vm.sock add-disk path=data.img,image_type=raw,id=data",
        ),
        (
            "A migration to another host, where a `cloud-hypervisor` waits:",
            "host-b$ ch-remote --api-socket /run/vm.sock receive-migration \\\n\
             \x20   receiver_url=tcp:0.0.0.0:6000,memory_mode=auto\n\
             host-a$ ch-remote --api-socket /run/vm.sock send-migration --watch \\\n\
             \x20   destination_url=tcp:host-b:6000,memory_mode=auto",
        ),
        (
            "A snapshot:",
            "ch-remote --api-socket /run/vm.sock pause\n\
             ch-remote --api-socket /run/vm.sock snapshot file:///var/snapshots/a",
        ),
    ],
    see_also: "`cloud-hypervisor`(1)",
};

const PREZERO_POOL: Texts = Texts {
    summary: "keep zeroed memory ready for virtual machines",
    synopsis: &["`prezero-pool` COMMAND [OPTION]..."],
    description: &[
        "`prezero-pool` is a daemon that zeroes guest memory in advance. It keeps memory of the sizes that its \
         configuration names, hands it to the virtual machines of `cloud-hypervisor`(1) that ask for it (`--memory \
         prezeroed=SOCKET`), and replaces or clears it when they have ended. Memory of one virtual machine is never seen by \
         another.",
        "It stays in the foreground, logs to standard error, and ends on SIGTERM. The configuration is read once, at the \
         start.",
    ],
    configuration: None,
    files: &[
        ("/etc/prezero-pool.toml", "The configuration."),
        (
            "/run/prezero-pool/pool.sock",
            "Where virtual machines ask, as the configuration of the package says. Who may, its group and mode decide.",
        ),
        ("/run/prezero-pool/stats.sock", "Statistics in the text format of Prometheus."),
        (
            "/usr/share/doc/prezero-pool/prezero-pool.md",
            "What each setting does, and what the pool guarantees.",
        ),
    ],
    exit_codes: &[
        (0, Some("success. The daemon ends by a signal (SIGTERM), and has no code then")),
        (
            1,
            Some(
                "failure: the configuration is not valid, the pool cannot be served, or there are no statistics",
            ),
        ),
        (2, Some("invalid command line: nothing was started")),
        (102, None),
    ],
    examples: &[
        (
            "Whether the configuration is valid, and what the pool has at present:",
            "prezero-pool check\nprezero-pool stats",
        ),
        (
            "A virtual machine with memory of the pool:",
            "cloud-hypervisor --memory size=64G,prezeroed=/run/prezero-pool/pool.sock ...",
        ),
    ],
    see_also: "`cloud-hypervisor`(1)",
};

/// The configuration with all of its keys, as its document has it.
fn pool_configuration() -> Option<&'static str> {
    const DOCUMENT: &str = include_str!("../../../docs/prezero-pool.md");
    let (_, rest) = DOCUMENT.split_once("```toml\n")?;
    rest.split_once("\n```").map(|(text, _)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_of_the_pool_is_found() {
        let text = pool_configuration().expect("the document has a configuration");
        assert!(text.starts_with("socket = ") && text.contains("[[device_slots]]"), "{text}");
    }

    #[test]
    fn a_summary_is_what_whatis_shows() {
        for program in all() {
            let summary = program.texts.summary;
            assert!(summary.starts_with(|first: char| first.is_lowercase()), "{summary}");
            assert!(!summary.ends_with('.') && summary.len() < 60, "{summary}");
        }
    }
}
