// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks the host resources that an incoming configuration names against the rules of `receive-migration`.
//!
//! Owns the list of everything in a configuration that is a name of the host's, and what a rule means
//! for it. Nothing is opened: paths are followed, and what they lead to is compared.

use std::io;
use std::path::{Component, Path, PathBuf};

use crate::config::grant::{Grant, GrantKind};
use crate::config::{ConsoleMode, VmConfig};

/// The entropy source that needs no rule.
const RNG_SOURCE: &str = "/dev/urandom";

/// Name that the host gives to a tap without a configured name.
const UNNAMED_TAP: &str = "vmtap";

/// Why a received configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum NotGranted {
    /// No rule allows the name.
    #[error(
        "the received configuration names {name:?} as the {what}, and no rule of this \
         receive-migration allows that (allow=<root>:{kind})"
    )]
    Refused {
        /// What the configuration uses it for.
        what: String,
        /// The name.
        name: String,
        /// The kind of rule that would allow it.
        kind: &'static str,
    },
    /// The target of the path cannot be resolved.
    #[error(
        "the received configuration names {name:?} as the {what}, which cannot be resolved on \
         this host: {why}"
    )]
    Unclear {
        /// What the configuration uses it for.
        what: String,
        /// The name.
        name: String,
        /// The cause.
        why: String,
    },
}

enum Name<'a> {
    Path(GrantKind, &'a Path),
    Tap(&'a str),
    Terminal,
}

struct Named<'a> {
    what: String,
    name: Name<'a>,
}

fn path(what: impl Into<String>, kind: GrantKind, path: &Path) -> Named<'_> {
    Named { what: what.into(), name: Name::Path(kind, path) }
}

/// All files and devices of the host that a configuration names.
fn names(config: &VmConfig) -> Vec<Named<'_>> {
    let mut all = Vec::new();
    let payload = &config.payload;
    for (what, file) in [
        ("kernel", &payload.kernel),
        ("initramfs", &payload.initramfs),
        ("firmware", &payload.firmware),
        ("IGVM file", &payload.igvm),
    ] {
        all.extend(file.iter().map(|file| path(what, GrantKind::Payload, file)));
    }
    let memory = &config.memory;
    all.extend(memory.prezeroed.iter().map(|pool| path("pool of memory", GrantKind::Pool, pool)));
    for zone in memory.zones.iter().flatten() {
        let what = |what: &str| format!("{what} of memory zone {:?}", zone.id);
        all.extend(zone.file.iter().map(|file| path(what("file"), GrantKind::Memory, file)));
        all.extend(zone.prezeroed.iter().map(|pool| path(what("pool"), GrantKind::Pool, pool)));
    }
    for disk in config.disks.iter().flatten() {
        let what = format!("image of disk {:?}", disk.id.as_deref().unwrap_or_default());
        all.extend(disk.path.iter().map(|image| path(what.clone(), GrantKind::Disk, image)));
    }
    for pmem in config.pmem.iter().flatten() {
        let what =
            format!("file of persistent memory {:?}", pmem.id.as_deref().unwrap_or_default());
        all.push(path(what, GrantKind::Disk, &pmem.file));
    }
    // A device with passed descriptors names nothing on this host.
    for net in config.net.iter().flatten().filter(|net| net.fds.is_none() && !net.vhost_user) {
        let what = format!("tap of network device {:?}", net.id.as_deref().unwrap_or_default());
        let name = Name::Tap(net.tap.as_deref().unwrap_or(UNNAMED_TAP));
        all.push(Named { what, name });
    }
    for net in config.net.iter().flatten() {
        let what = format!("socket of network device {:?}", net.id.as_deref().unwrap_or_default());
        let socket = net.vhost_socket.iter();
        all.extend(socket.map(|it| path(what.clone(), GrantKind::Console, Path::new(it))));
    }
    if config.rng.src != Path::new(RNG_SOURCE) {
        all.push(path("source of random numbers", GrantKind::Rng, &config.rng.src));
    }
    for device in config.devices.iter().flatten() {
        let what = format!("device {:?}", device.id.as_deref().unwrap_or_default());
        all.extend(device.path.iter().map(|dir| path(what.clone(), GrantKind::Device, dir)));
    }
    for vdpa in config.vdpa.iter().flatten() {
        let what = format!("device {:?}", vdpa.id.as_deref().unwrap_or_default());
        all.push(path(what, GrantKind::Device, &vdpa.path));
    }
    for fs in config.fs.iter().flatten() {
        let what = format!("socket of file system {:?}", fs.id.as_deref().unwrap_or_default());
        all.push(path(what, GrantKind::Console, &fs.socket));
    }
    for device in config.generic_vhost_user.iter().flatten() {
        let what = format!("socket of device {:?}", device.id.as_deref().unwrap_or_default());
        all.push(path(what, GrantKind::Console, &device.socket));
    }
    for device in config.user_devices.iter().flatten() {
        let what = format!("socket of device {:?}", device.id.as_deref().unwrap_or_default());
        all.push(path(what, GrantKind::Console, &device.socket));
    }
    // The sockets next to it, with a port appended, belong to the guest as well.
    let vsock = config.vsock.iter();
    all.extend(vsock.map(|vsock| path("vsock socket", GrantKind::Console, &vsock.socket)));
    let tpm = config.tpm.iter();
    all.extend(tpm.map(|tpm| path("socket of the TPM", GrantKind::Console, &tpm.socket)));
    let VmConfig { serial, console, debug_console, .. } = config;
    for (what, mode, file, socket) in [
        ("serial console", serial.mode, &serial.file, &serial.socket),
        ("console", console.mode, &console.file, &console.socket),
        ("debug console", debug_console.mode, &debug_console.file, &None),
    ] {
        match mode {
            ConsoleMode::File => {
                all.extend(file.iter().map(|file| path(what, GrantKind::Console, file)));
            }
            ConsoleMode::Socket => {
                all.extend(socket.iter().map(|socket| path(what, GrantKind::Console, socket)));
            }
            ConsoleMode::Tty => all.push(Named { what: what.into(), name: Name::Terminal }),
            // These are created here; a path in the configuration is that of the source.
            ConsoleMode::Pty | ConsoleMode::Off | ConsoleMode::Null => {}
        }
    }
    all
}

/// Checks a configuration against rules; without rules everything is allowed.
///
/// # Errors
/// Names the first item that no rule allows.
pub fn check(rules: Option<&[Grant]>, config: &VmConfig) -> Result<(), NotGranted> {
    rules.map_or(Ok(()), |rules| check_names(rules, names(config)))
}

/// Compares the files that images of disks have behind them, by the ids of the disks, with rules: they are what the
/// configuration leads to, and no less the guest's than what it names.
///
/// # Errors
/// Naming the first one that no rule allows.
pub fn check_behind<'a>(
    rules: Option<&[Grant]>,
    files: impl IntoIterator<Item = (&'a str, PathBuf)>,
) -> Result<(), NotGranted> {
    let Some(rules) = rules else { return Ok(()) };
    for (id, file) in files {
        let what = format!("backing file of disk {id:?}");
        check_names(rules, vec![path(what, GrantKind::Disk, &file)])?;
    }
    Ok(())
}

/// Everything that no rule allows.
pub fn refused(rules: Option<&[Grant]>, config: &VmConfig) -> Vec<NotGranted> {
    let Some(rules) = rules else { return Vec::new() };
    names(config).into_iter().filter_map(|named| check_name(rules, named).err()).collect()
}

fn check_names(rules: &[Grant], names: Vec<Named<'_>>) -> Result<(), NotGranted> {
    names.into_iter().try_for_each(|named| check_name(rules, named))
}

fn check_name(rules: &[Grant], Named { what, name }: Named<'_>) -> Result<(), NotGranted> {
    let (granted, kind, name) = match name {
        Name::Tap(name) => {
            let granted = rules.iter().any(|rule| rule.is_of_tap(name));
            (granted, GrantKind::Tap, name.to_owned())
        }
        Name::Terminal => {
            let granted = rules.iter().any(Grant::is_of_terminal);
            (granted, GrantKind::Console, "the terminal".to_owned())
        }
        Name::Path(kind, path) => {
            let name = path.display().to_string();
            match is_below_a_root(rules, kind, path) {
                Ok(granted) => (granted, kind, name),
                Err(why) => return Err(NotGranted::Unclear { what, name, why }),
            }
        }
    };
    if !granted {
        return Err(NotGranted::Refused { what, name, kind: kind.name() });
    }
    Ok(())
}

fn is_below_a_root(rules: &[Grant], kind: GrantKind, path: &Path) -> Result<bool, String> {
    let roots: Vec<_> = rules.iter().filter_map(|rule| rule.path(kind)).collect();
    if roots.is_empty() {
        return Ok(false);
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err("it has to be a path without '..'".to_owned());
    }
    // The path as the VMM would look it up.
    let path = &std::path::absolute(path).map_err(|error| error.to_string())?;
    if kind == GrantKind::Device {
        // Only the kernel creates links in sysfs, and they lead all over it.
        return Ok(roots.iter().any(|root| path.starts_with(root)));
    }
    let whole = resolve(path)?;
    Ok(roots.iter().filter_map(|root| resolve(root).ok()).any(|root| whole.starts_with(root)))
}

/// Resolves a path, whose last component need not exist.
fn resolve(path: &Path) -> Result<PathBuf, String> {
    match path.canonicalize() {
        Ok(whole) => return Ok(whole),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.to_string()),
    }
    if path.symlink_metadata().is_ok() {
        return Err("it is a dangling symbolic link".to_owned());
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err("it is not the name of a file".to_owned());
    };
    Ok(parent.canonicalize().map_err(|error| error.to_string())?.join(name))
}

#[cfg(test)]
#[path = "grants_tests.rs"]
mod tests;
