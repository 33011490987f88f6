//! Space that a new image has from the beginning.

use strum::{Display, EnumString};

/// The part of a new image, or of the added part of one that grows, that is allocated at once: `-o preallocation`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Display, EnumString)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownPreallocation, parse_err_fn = unknown)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// The tables of a qcow2 image, with a place for every cluster.
    Metadata,
    /// Tables, and space for all contents.
    Falloc,
    /// Tables, and contents of zeros that are written.
    Full,
}

impl Preallocation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Off, Self::Metadata, Self::Falloc, Self::Full];
}

/// A name that no preallocation has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} must be off, metadata, falloc or full")]
pub struct UnknownPreallocation(pub String);

fn unknown(name: &str) -> UnknownPreallocation {
    UnknownPreallocation(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preallocations_have_qemus_names() {
        for (name, preallocation) in [("off", Preallocation::Off), ("falloc", Preallocation::Falloc)] {
            assert_eq!((name.parse(), preallocation.to_string().as_str()), (Ok(preallocation), name));
        }
        let unknown = "some".parse::<Preallocation>().unwrap_err();
        assert_eq!(unknown.to_string(), r#""some" must be off, metadata, falloc or full"#);
    }
}
