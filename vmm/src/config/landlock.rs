// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--landlock-rules`: paths that a process confined by Landlock may use beyond those of its configuration.
//!
//! Owns the family and the words for access. It must never look at a path.

use std::path::PathBuf;

use super::codec::{File, One, Text};
use super::error::ConfigError;
use super::family::option_family;

option_family! {
    /// A path that a VMM with `--landlock` may use beyond those that its configuration names.
    LandlockConfig "landlock-rules" {
        /// The path: a file, or a directory with all that is below it. It has to exist.
        path: PathBuf = PathBuf::new(), "path" as One<File>, required();
        /// `r` to read, `w` to write, create and remove, `rw` for both.
        access: String = String::new(), "access" as One<Text>, required();
    }
}

/// What a rule allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleAccess {
    /// Files and directories can be read.
    pub read: bool,
    /// Files can be written, created and removed.
    pub write: bool,
}

impl LandlockConfig {
    /// What its letters say.
    ///
    /// # Errors
    /// There is none, or another one than `r` and `w`.
    pub fn rule_access(&self) -> Result<RuleAccess, ConfigError> {
        let mut rule_access = RuleAccess::default();
        for letter in self.access.chars() {
            match letter {
                'r' => rule_access.read = true,
                'w' => rule_access.write = true,
                _ => return Err(self.wrong_access()),
            }
        }
        if rule_access == RuleAccess::default() {
            return Err(self.wrong_access());
        }
        Ok(rule_access)
    }

    fn wrong_access(&self) -> ConfigError {
        ConfigError::LandlockAccess { path: self.path.clone(), access: self.access.clone() }
    }

    /// Checks the rules within the family.
    ///
    /// # Errors
    /// No path, or access that is not made of `r` and `w`.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.path.as_os_str().is_empty() {
            return Err(ConfigError::LandlockPath);
        }
        self.rule_access().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_access(access: &str) -> LandlockConfig {
        LandlockConfig { path: "/images".into(), access: access.to_owned() }
    }

    #[test]
    fn access_is_made_of_two_letters() {
        let (read, write) = (true, true);
        for (letters, expected) in [
            ("r", RuleAccess { read, write: false }),
            ("w", RuleAccess { read: false, write }),
            ("rw", RuleAccess { read, write }),
            ("wr", RuleAccess { read, write }),
        ] {
            assert_eq!(with_access(letters).rule_access(), Ok(expected), "{letters}");
            assert_eq!(with_access(letters).validate(), Ok(()));
        }
        for wrong in ["", "x", "rx", "R", "r w"] {
            let error =
                ConfigError::LandlockAccess { path: "/images".into(), access: wrong.into() };
            assert_eq!(with_access(wrong).validate(), Err(error), "{wrong:?}");
        }
        let nowhere = LandlockConfig { path: PathBuf::new(), access: "r".into() };
        assert_eq!(nowhere.validate(), Err(ConfigError::LandlockPath));
    }
}
