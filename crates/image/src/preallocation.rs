//! How much of a new image is there from the beginning.

use std::fmt;
use std::str::FromStr;

/// What of a new image, or of the new part of one that grows, is allocated at once: `-o preallocation`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Tables that say where everything will lie; not for raw images.
    Metadata,
    /// Those, and space for everything.
    Falloc,
    /// Those, and zeros that have been written everywhere.
    Full,
}

impl Preallocation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Off, Self::Metadata, Self::Falloc, Self::Full];

    /// As `-o preallocation` has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for Preallocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preallocation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|preallocation| preallocation.name() == name);
        found.ok_or_else(|| format!("{name:?} must be off, metadata, falloc or full"))
    }
}
