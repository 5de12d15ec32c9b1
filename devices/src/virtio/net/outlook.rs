// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a tap could be opened and configured, known without opening it.
//!
//! Owns the rules by which the kernel and [`TapSlot::acquire`](super::TapSlot::acquire) decide, applied to what sysfs says
//! of an interface. Must never open /dev/net/tun: a tap that does not exist would be made.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::slot::TapConfig;
use super::tap::{self, TapError};

// As `tun_flags` in sysfs has them, of linux/if_tun.h.
const IS_TAP: u32 = 0x0002;
const IS_MULTI_QUEUE: u32 = 0x0100;
const IS_PERSISTENT: u32 = tap::PERSISTENT;
/// IFF_UP in `flags`.
const IS_UP: u32 = 0x0001;

/// What decides about the taps of a process.
#[derive(Clone, Debug)]
pub struct TapOutlook {
    /// The folder of interfaces, /sys/class/net.
    pub interfaces: PathBuf,
    /// Error number with which /dev/net/tun cannot be opened.
    pub refusal: Option<i32>,
    /// Whether the process has CAP_NET_ADMIN.
    pub may_administer: bool,
    /// Its effective user.
    pub user: u32,
    /// Its groups.
    pub groups: Vec<u32>,
}

impl TapOutlook {
    /// Whether the taps of a configuration could be opened and configured now.
    ///
    /// # Errors
    /// As [`TapSlot::acquire`](super::TapSlot::acquire).
    pub fn check(&self, config: &TapConfig) -> Result<(), TapError> {
        let name = config.name.as_deref().unwrap_or(tap::NAME_PATTERN);
        tap::request(name)?;
        if let Some(errno) = self.refusal {
            return Err(TapError::Driver(io::Error::from_raw_os_error(errno)));
        }
        let interface = self.interfaces.join(name);
        if !interface.exists() {
            return if self.may_administer {
                Ok(())
            } else {
                Err(TapError::Missing { name: name.to_owned() })
            };
        }
        self.check_existing(name, &interface, config)
    }

    fn check_existing(
        &self,
        name: &str,
        interface: &Path,
        config: &TapConfig,
    ) -> Result<(), TapError> {
        let name = || name.to_owned();
        let multi_queue = config.queue_pairs > 1;
        let flags = hexadecimal(&interface.join("tun_flags")).unwrap_or(0);
        if flags & IS_TAP == 0 || (flags & IS_MULTI_QUEUE != 0) != multi_queue {
            return Err(TapError::Kind { name: name(), multi_queue });
        }
        let id = |file| text(&interface.join(file)).and_then(|text| text.parse::<u32>().ok());
        // -1, which is no such number, stands for none.
        let is_others = id("owner").is_some_and(|owner| owner != self.user)
            || id("group").is_some_and(|group| !self.groups.contains(&group));
        if is_others && !self.may_administer {
            return Err(TapError::Permission { name: name() });
        }
        // A process that has it open is its carrier, and keeps it there if nothing else does. One with several queues
        // takes more of them.
        let has_carrier = text(&interface.join("carrier")).as_deref() == Some("1");
        if !multi_queue && (has_carrier || flags & IS_PERSISTENT == 0) {
            return Err(TapError::InUse { name: name() });
        }
        let refused = [
            (config.host_mac.is_some(), "set the MAC address"),
            (config.mtu.is_some_and(|mtu| id("mtu") != Some(mtu.into())), "set the MTU"),
            (config.ip.is_some() && config.mask.is_some(), "set the IP address"),
            (
                hexadecimal(&interface.join("flags")).is_some_and(|flags| flags & IS_UP == 0),
                "switch on the interface",
            ),
        ];
        match refused.into_iter().find(|(is_to_be, _)| *is_to_be && !self.may_administer) {
            Some((_, what)) => {
                let source = io::Error::from_raw_os_error(libc::EPERM);
                Err(TapError::Configure { what, name: name(), source })
            }
            None => Ok(()),
        }
    }
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn hexadecimal(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.trim_start_matches("0x"), 16).ok()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use proptest::prelude::*;

    use super::*;

    fn interface(root: &Path, name: &str, files: &[(&str, &str)]) {
        let folder = root.join(name);
        fs::create_dir_all(&folder).unwrap();
        for (file, text) in files {
            fs::write(folder.join(file), text).unwrap();
        }
    }

    fn outlook(root: &Path) -> TapOutlook {
        let interfaces = root.to_owned();
        TapOutlook { interfaces, refusal: None, may_administer: false, user: 7, groups: vec![8] }
    }

    fn named(name: &str) -> TapConfig {
        TapConfig { name: Some(name.to_owned()), queue_pairs: 1, ..TapConfig::default() }
    }

    const OURS: [(&str, &str); 5] = [
        ("tun_flags", "0x5802\n"),
        ("owner", "7\n"),
        ("group", "-1\n"),
        ("flags", "0x1003\n"),
        ("mtu", "1500\n"),
    ];

    #[test]
    fn a_tap_that_is_not_there_takes_the_right_to_make_it() {
        let root = tempfile::tempdir().unwrap();
        let outlook = outlook(root.path());
        let missing = outlook.check(&named("lan")).unwrap_err();
        assert!(matches!(missing, TapError::Missing { name } if name == "lan"));
        let unnamed = TapConfig { queue_pairs: 1, ..TapConfig::default() };
        assert!(matches!(outlook.check(&unnamed), Err(TapError::Missing { .. })));
        let root = TapOutlook { may_administer: true, ..outlook.clone() };
        root.check(&named("lan")).unwrap();
        assert!(matches!(root.check(&named("a/b")), Err(TapError::Name { .. })));
        let no_driver = TapOutlook { refusal: Some(libc::ENOENT), ..root };
        assert!(matches!(no_driver.check(&named("lan")), Err(TapError::Driver(_))));
    }

    #[test]
    fn a_tap_of_this_user_needs_no_capability_and_another_does() {
        let root = tempfile::tempdir().unwrap();
        let outlook = outlook(root.path());
        interface(root.path(), "lan", &OURS);
        outlook.check(&named("lan")).unwrap();
        outlook.check(&TapConfig { mtu: Some(1500), ..named("lan") }).unwrap();
        let refused = |config: TapConfig| match outlook.check(&config) {
            Err(TapError::Configure { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(TapConfig { mtu: Some(9000), ..named("lan") }), "set the MTU");
        interface(root.path(), "lan", &[("flags", "0x1002\n")]);
        assert_eq!(refused(named("lan")), "switch on the interface");
        interface(root.path(), "lan", &[("flags", "0x1003\n"), ("group", "9\n")]);
        assert!(matches!(outlook.check(&named("lan")), Err(TapError::Permission { .. })));
        interface(root.path(), "lan", &[("group", "8\n"), ("owner", "0\n")]);
        assert!(matches!(outlook.check(&named("lan")), Err(TapError::Permission { .. })));
        let root = TapOutlook { may_administer: true, ..outlook };
        root.check(&named("lan")).unwrap();
    }

    #[test]
    fn what_is_no_tap_or_has_other_queues_or_a_user_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let outlook = TapOutlook { may_administer: true, ..outlook(root.path()) };
        interface(root.path(), "eth0", &[("flags", "0x1003")]);
        interface(root.path(), "many", &[("tun_flags", "0x5902")]);
        interface(root.path(), "used", &OURS);
        interface(root.path(), "used", &[("carrier", "1\n")]);
        let two = TapConfig { queue_pairs: 2, ..named("many") };
        outlook.check(&two).unwrap();
        for config in [named("eth0"), named("many"), TapConfig { queue_pairs: 2, ..named("used") }]
        {
            assert!(matches!(outlook.check(&config), Err(TapError::Kind { .. })), "{config:?}");
        }
        assert!(matches!(outlook.check(&named("used")), Err(TapError::InUse { .. })));
        interface(root.path(), "held", &[("tun_flags", "0x5002")]);
        assert!(matches!(outlook.check(&named("held")), Err(TapError::InUse { .. })));
    }

    proptest! {
        #[test]
        fn odd_texts_are_harmless(texts in prop::collection::vec("[0-9a-fx \\-\n]{0,40}", 5)) {
            let root = tempfile::tempdir().unwrap();
            for (file, text) in ["tun_flags", "owner", "group", "flags", "carrier"].into_iter().zip(&texts) {
                interface(root.path(), "lan", &[(file, text)]);
            }
            let _ = outlook(root.path()).check(&named("lan"));
        }
    }
}
