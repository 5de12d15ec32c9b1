// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the devices of a VM are made of: images, files, sockets, nodes, and what it boots.
//!
//! Owns what is asked of each. Must never connect to a socket: a server may serve one client only, and end with it.

use std::error::Error;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use ::memory::GuestRam;
use devices::virtio::block::DiskError;
use rustix::fs::Access;

use super::definitions as of;
use super::finding::{Check, Finding, Lack};
use crate::config::console::ConsoleMode;
use crate::config::net::VhostMode;
use crate::config::{DiskConfig, PayloadConfig, PmemConfig, VmConfig};
use crate::machine::{MachineError, ahead};

/// What was found of a device.
#[derive(Clone, Debug)]
pub struct Asked {
    pub check: &'static Check,
    /// Its id, or what it is.
    pub about: String,
    pub path: PathBuf,
    pub outcome: Result<(), (&'static Lack, String)>,
}

/// What is known of the devices of a VM.
#[derive(Clone, Debug, Default)]
pub struct DeviceFacts {
    pub asked: Vec<Asked>,
}

impl DeviceFacts {
    pub fn read(config: &VmConfig, ram: Option<&GuestRam>) -> Self {
        let mut asked = payload(config, ram);
        asked.extend(disks(config, ahead::disk));
        asked.extend(pmems(config, ahead::pmem));
        asked.extend(others(config));
        Self { asked }
    }

    /// Those of a VM that arrives: its images may be in use by its source, and are read when that has written them back.
    pub fn of_arrival(config: &VmConfig) -> Self {
        let mut asked: Vec<_> = disks(config, ahead::arriving_disk).collect();
        asked.extend(pmems(config, ahead::arriving_pmem));
        asked.extend(others(config));
        Self { asked }
    }
}

/// What is neither an image nor booted.
fn others(config: &VmConfig) -> Vec<Asked> {
    let path = config.rng.src.clone();
    let outcome = ahead::rng(config).map_err(|error| (&of::RNG_FAILED, error_text::chain(&error)));
    let about = config.rng.id.clone().unwrap_or_default();
    let mut asked = vec![Asked { check: &of::RNG, about, path, outcome }];
    asked.extend(back_ends(config));
    asked.extend(outputs(config));
    asked
}

/// What is lacking for the devices.
pub fn findings(facts: &DeviceFacts) -> Vec<Finding> {
    let of_each = |asked: &Asked| {
        let path = asked.path.display().to_string();
        let finding = match &asked.outcome {
            Ok(()) => Finding::ok(asked.check, format!("{path} can be used")),
            Err((lack, found)) => Finding::lack(lack, found).with("PATH", &path),
        };
        finding.about(&asked.about)
    };
    facts.asked.iter().map(of_each).collect()
}

fn payload(config: &VmConfig, ram: Option<&GuestRam>) -> Vec<Asked> {
    let PayloadConfig { kernel, firmware, .. } = &config.payload;
    let given = firmware.as_ref().map(|path| ("firmware", path));
    let given = given.or(kernel.as_ref().map(|path| ("kernel", path)));
    // Without memory its zones are lacking.
    let (Some((what, path)), Some(ram)) = (given, ram) else { return Vec::new() };
    let failed = |error: MachineError| (&of::PAYLOAD_FAILED, error_text::chain(&error));
    let outcome = ahead::payload(config, ram).map_err(failed);
    let (about, path) = (what.to_owned(), path.clone());
    vec![Asked { check: &of::PAYLOAD, about, path, outcome }]
}

fn disks(
    config: &VmConfig,
    ask: fn(&DiskConfig, &VmConfig) -> Result<(), MachineError>,
) -> impl Iterator<Item = Asked> + '_ {
    let own = config.disks.iter().flatten().filter(|disk| !disk.vhost_user);
    own.map(move |disk| {
        let about = disk.id.clone().unwrap_or_default();
        let path = disk.path.clone().unwrap_or_default();
        let failed = |error: MachineError| (lack_of_disk(&error), error_text::chain(&error));
        let outcome = ask(disk, config).map_err(failed);
        Asked { check: &of::DISK, about, path, outcome }
    })
}

fn pmems(
    config: &VmConfig,
    ask: fn(&PmemConfig) -> Result<(), MachineError>,
) -> impl Iterator<Item = Asked> + '_ {
    config.pmem.iter().flatten().map(move |pmem| {
        let about = pmem.id.clone().unwrap_or_default();
        let failed = |error: MachineError| (&of::PMEM_FAILED, error_text::chain(&error));
        let outcome = ask(pmem).map_err(failed);
        Asked { check: &of::PMEM, about, path: pmem.file.clone(), outcome }
    })
}

fn lack_of_disk(error: &(dyn Error + 'static)) -> &'static Lack {
    let layers = || std::iter::successors(Some(error), |error| (*error).source());
    let is_locked = |layer: &(dyn Error + 'static)| {
        matches!(layer.downcast_ref(), Some(DiskError::InUse { .. }))
    };
    if layers().any(is_locked) {
        return &of::DISK_IN_USE;
    }
    let kind = layers().find_map(|layer| Some(layer.downcast_ref::<io::Error>()?.kind()));
    match kind {
        Some(io::ErrorKind::NotFound) => &of::DISK_MISSING,
        Some(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => {
            &of::DISK_DENIED
        }
        _ => &of::DISK_FAILED,
    }
}

/// What another process or the kernel serves.
struct BackEnd {
    about: String,
    path: PathBuf,
    is_node: bool,
}

fn back_ends(config: &VmConfig) -> Vec<Asked> {
    let socket = |id: &Option<String>, path: &Path| BackEnd {
        about: id.clone().unwrap_or_default(),
        path: path.to_owned(),
        is_node: false,
    };
    let disks = config.disks.iter().flatten().filter(|disk| disk.vhost_user);
    let disks =
        disks.filter_map(|disk| Some(socket(&disk.id, Path::new(disk.vhost_socket.as_ref()?))));
    let nets = config.net.iter().flatten();
    let nets = nets.filter(|net| net.vhost_user && net.vhost_mode == VhostMode::Client);
    let nets = nets.filter_map(|net| Some(socket(&net.id, Path::new(net.vhost_socket.as_ref()?))));
    let fs = config.fs.iter().flatten().map(|fs| socket(&fs.id, &fs.socket));
    let generic = config.generic_vhost_user.iter().flatten();
    let generic = generic.map(|device| socket(&device.id, &device.socket));
    let users = config.user_devices.iter().flatten();
    let users = users.map(|device| socket(&device.id, &device.socket));
    let tpm = config.tpm.iter().map(|tpm| socket(&Some("tpm".to_owned()), &tpm.socket));
    let vdpas = config.vdpa.iter().flatten();
    let vdpas = vdpas.map(|vdpa| BackEnd { is_node: true, ..socket(&vdpa.id, &vdpa.path) });
    let all = disks.chain(nets).chain(fs).chain(generic).chain(users).chain(tpm).chain(vdpas);
    let asked = |BackEnd { about, path, is_node }| {
        let outcome = back_end(&path, is_node);
        Asked { check: &of::BACK_END, about, path, outcome }
    };
    all.map(asked).collect()
}

fn back_end(path: &Path, is_node: bool) -> Result<(), (&'static Lack, String)> {
    let shown = path.display();
    let there = path.metadata().map_err(|error| {
        let lack = match error.kind() {
            io::ErrorKind::PermissionDenied => &of::BACK_END_DENIED,
            _ => &of::BACK_END_MISSING,
        };
        (lack, format!("{shown}: {error}"))
    })?;
    let kind = there.file_type();
    if is_node && !kind.is_char_device() || !is_node && !kind.is_socket() {
        let wanted = if is_node { "character device" } else { "socket" };
        return Err((&of::BACK_END_KIND, format!("{shown} is not a {wanted}")));
    }
    match ahead::refusal(path, Access::READ_OK | Access::WRITE_OK) {
        None => Ok(()),
        Some(errno) => {
            let why = io::Error::from_raw_os_error(errno);
            Err((&of::BACK_END_DENIED, format!("{shown}: {why}")))
        }
    }
}

fn outputs(config: &VmConfig) -> Vec<Asked> {
    let VmConfig { serial, console, debug_console, .. } = config;
    let files = [
        ("serial", serial.mode, &serial.file, &serial.socket),
        ("console", console.mode, &console.file, &console.socket),
        ("debug-console", debug_console.mode, &debug_console.file, &None),
    ];
    let consoles = files.into_iter().filter_map(|(about, mode, file, socket)| match mode {
        ConsoleMode::File => Some((about.to_owned(), file.clone()?, true)),
        ConsoleMode::Socket => Some((about.to_owned(), socket.clone()?, false)),
        _ => None,
    });
    let vsock = config.vsock.iter();
    let vsock =
        vsock.map(|vsock| (vsock.id.clone().unwrap_or_default(), vsock.socket.clone(), false));
    let nets = config.net.iter().flatten();
    let servers = nets.filter(|net| net.vhost_user && net.vhost_mode == VhostMode::Server);
    let servers = servers.filter_map(|net| {
        let path = PathBuf::from(net.vhost_socket.as_ref()?);
        Some((net.id.clone().unwrap_or_default(), path, false))
    });
    let asked = |(about, path, is_file): (String, PathBuf, bool)| {
        let (path, outcome) = output(path, is_file);
        Asked { check: &of::OUTPUT, about, path, outcome }
    };
    consoles.chain(vsock).chain(servers).map(asked).collect()
}

/// Whether a file could be written, or made, or a socket made; with the path that this depends on.
fn output(path: PathBuf, is_file: bool) -> (PathBuf, Result<(), (&'static Lack, String)>) {
    let denied = |path: &Path, errno: i32| {
        let why = io::Error::from_raw_os_error(errno);
        Err((&of::OUTPUT_DENIED, format!("{}: {why}", path.display())))
    };
    if is_file && path.exists() {
        let outcome =
            ahead::refusal(&path, Access::WRITE_OK).map_or(Ok(()), |errno| denied(&path, errno));
        return (path, outcome);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new(".")).to_owned();
    let outcome = match folder.metadata() {
        Ok(there) if there.is_dir() => {
            let wanted = Access::WRITE_OK | Access::EXEC_OK;
            ahead::refusal(&folder, wanted).map_or(Ok(()), |errno| denied(&folder, errno))
        }
        Ok(_) => Err((&of::OUTPUT_FOLDER, format!("{} is no folder", folder.display()))),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err((&of::OUTPUT_DENIED, format!("{}: {error}", folder.display())))
        }
        Err(error) => Err((&of::OUTPUT_FOLDER, format!("{}: {error}", folder.display()))),
    };
    if outcome.is_ok() { (path, outcome) } else { (folder, outcome) }
}
