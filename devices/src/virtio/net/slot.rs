// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The slot that holds a network device's tap, which can be released and reopened.
//!
//! A tap can be open in one process only, so it changes hands with the guest: the source of a
//! migration releases it, the destination opens it. The device's threads get it here whenever they
//! begin to work, and hold no reference while they are paused. They never open it.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::tap::{MacAddress, Tap, TapError};
use crate::{LogLimit, log_limited};

/// Configuration of a tap.
#[derive(Clone, Debug, Default)]
pub struct TapConfig {
    /// Name of the interface, which is created if it does not exist; without a name a new one is created.
    pub name: Option<String>,
    /// IP address of the host's side.
    pub ip: Option<IpAddr>,
    /// Netmask of the host's side.
    pub mask: Option<IpAddr>,
    /// MAC address of the host's side.
    pub host_mac: Option<MacAddress>,
    /// MTU of the host's side.
    pub mtu: Option<u16>,
    /// Number of queue pairs, each with a descriptor of the tap.
    pub queue_pairs: u16,
}

/// A tap, or the configuration to open it; a handle for the VMM while the transport owns the device.
pub struct TapSlot {
    config: TapConfig,
    log: LogLimit,
    /// Held while the tap is opened or closed, and for look-ups.
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    taps: Vec<Arc<Tap>>,
    settings: Settings,
    /// Whether the settings have been applied to the taps.
    is_applied: bool,
    /// Whether the descriptors were passed in, and so cannot be opened again.
    from_outside: bool,
    /// Whether the descriptors are duplicates of some that this process keeps open: closing them would not
    /// release the tap, and the guest could not continue here.
    kept: bool,
}

/// Settings of the driver, applied to each tap that is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    /// `TUN_F_*`.
    pub(crate) offloads: u32,
    pub(crate) active_pairs: u16,
}

impl TapSlot {
    pub(crate) fn new(config: TapConfig) -> Self {
        Self { config, log: LogLimit::default(), inner: Mutex::default() }
    }

    pub(super) fn with_fds(config: TapConfig, fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        let taps = fds.into_iter().map(Tap::from_fd).collect::<Result<Vec<_>, _>>()?;
        let slot = Self::with_taps(config, taps);
        slot.lock().kept = true;
        Ok(slot)
    }

    pub(crate) fn with_taps(config: TapConfig, taps: Vec<Tap>) -> Self {
        let taps = taps.into_iter().map(Arc::new).collect();
        let inner = Inner { taps, from_outside: true, ..Inner::default() };
        Self { config, log: LogLimit::default(), inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Opens and configures the tap, if it is not open.
    pub fn acquire(&self) -> Result<(), TapError> {
        let mut inner = self.lock();
        if !inner.taps.is_empty() || inner.from_outside {
            return Ok(());
        }
        let taps = Tap::open(self.config.name.as_deref(), self.config.queue_pairs)?;
        if let Some(tap) = taps.first() {
            self.configure(tap)?;
        }
        inner.taps = taps.into_iter().map(Arc::new).collect();
        // The guest does without what the host does not support.
        if let Err(error) = inner.apply() {
            self.complain(&error);
        }
        Ok(())
    }

    /// Whether the tap could be opened: driver, permission and kind. It does not matter whether another
    /// process has it open now.
    ///
    /// # Errors
    /// The reason why it cannot be opened.
    pub fn check(&self) -> Result<(), TapError> {
        let inner = self.lock();
        if !inner.taps.is_empty() || inner.from_outside {
            return Ok(());
        }
        match Tap::open(self.config.name.as_deref(), self.config.queue_pairs) {
            Ok(_) => Ok(()),
            Err(TapError::InUse { name }) if Tap::is_persistent(&name) => Ok(()),
            // It is removed when that process closes it, and is created again then.
            Err(TapError::InUse { name }) => match Tap::open(None, 1) {
                Ok(_) => Ok(()),
                Err(TapError::Missing { .. } | TapError::Permission { .. }) => {
                    Err(TapError::Missing { name })
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    fn configure(&self, tap: &Tap) -> Result<(), TapError> {
        let config = &self.config;
        if let Some(mac) = config.host_mac {
            tap.set_mac(mac)?;
        }
        if let Some(mtu) = config.mtu {
            tap.set_mtu(mtu)?;
        }
        if let (Some(ip), Some(mask)) = (config.ip, config.mask) {
            tap.set_ip(ip, mask)?;
        }
        tap.set_up()
    }

    /// Closes the tap. The device must be paused, or frames are lost until [`Self::acquire`]. Descriptors
    /// that were passed in stay open: their originals are open in this process as well, and a guest that
    /// continues here needs them.
    pub fn release(&self) {
        let mut inner = self.lock();
        if !inner.kept {
            inner.taps.clear();
        }
    }

    /// Whether the tap is open.
    pub fn is_open(&self) -> bool {
        !self.lock().taps.is_empty()
    }

    /// Name of the host's interface, while the tap is open.
    pub fn name(&self) -> Option<String> {
        self.lock().taps.first().map(|tap| tap.name().to_owned())
    }

    pub(super) fn pair(&self, pair: u16) -> Option<Arc<Tap>> {
        self.lock().taps.get(usize::from(pair)).cloned()
    }

    /// Applies driver settings to the tap, if it is open, and to any opened later.
    pub(super) fn set(&self, settings: Settings) -> Result<(), TapError> {
        let mut inner = self.lock();
        if inner.settings == settings && inner.is_applied {
            return Ok(());
        }
        inner.settings = settings;
        inner.apply()
    }

    /// Logs a setting that the tap has refused.
    pub(super) fn complain(&self, error: &TapError) {
        log_limited!(self.log, Warn, "{}", error_text::chain(error));
    }
}

impl Inner {
    /// Applies all settings; returns the first error.
    fn apply(&mut self) -> Result<(), TapError> {
        self.is_applied = true;
        let Some(first) = self.taps.first() else { return Ok(()) };
        // Offloads are per interface, whichever queue they are set through.
        let mut result = first.set_offloads(self.settings.offloads);
        let several = self.taps.len() > 1;
        for (index, tap) in self.taps.iter().enumerate().filter(|_| several) {
            let attached = index < usize::from(self.settings.active_pairs.max(1));
            // The kernel reports an error if nothing changes.
            match tap.set_attached(attached) {
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
                    result = result.and(Err(tap.failed("change the queues", error)));
                }
                _ => {}
            }
        }
        self.is_applied = result.is_ok();
        result
    }
}
