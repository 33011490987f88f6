//! The first bytes of every stream: file header and configuration record.
//!
//! Facts: QEMU docs, migration framework; magic `QEVM`, version 3, then the configuration record with the machine type
//! and up to three subsections. Both ends must agree on the *validated* capabilities (`mapped-ram`,
//! `x-ignore-shared`); a missing subsection means that they are off.

use limosa_page::to_u64;

use crate::cursor::{Cursor, Stop, put_name};
use crate::error::{EncodeError, ErrorKind, StreamError};
use crate::section::{CONFIGURATION, SUBSECTION};

/// The four bytes every stream begins with.
pub const MAGIC: [u8; 4] = *b"QEVM";
/// The version of the file header.
pub const VERSION: u32 = 3;
/// Name of the capability that makes a stream a mapped-ram file.
pub const MAPPED_RAM: &str = "mapped-ram";
/// Name of the capability that leaves shared memory out and adds addresses to the RAM block list.
pub const IGNORE_SHARED: &str = "x-ignore-shared";
/// Longest machine name in bytes; QEMU's own are below 40.
pub const MACHINE_LIMIT: u32 = 255;
/// Most capabilities that a configuration record may list.
pub const CAPABILITIES_LIMIT: u32 = 64;

const TARGET_PAGE_BITS: &str = "configuration/target-page-bits";
const CAPABILITIES: &str = "configuration/capabilities";
const UUID: &str = "configuration/uuid";

/// The configuration section: properties of the whole VM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configuration {
    /// Canonical machine type, e.g. `pc-i440fx-10.0`.
    pub machine: String,
    /// Validated capabilities that are on.
    pub capabilities: Vec<String>,
    /// The VM's UUID, if the source has `validate-uuid` on.
    pub uuid: Option<[u8; 16]>,
    /// log2 of the target page size, where it is above the CPU family's minimum (never on x86).
    pub target_page_bits: Option<u32>,
}

/// Rules of multifd streams that depend on the machine type. The default is that of current types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct MultifdRules {
    /// Machine types up to 8.0: every EOS of a RAM section is a join point, that of START included, and the word 0x200
    /// is unknown. Otherwise the word 0x200 is the join point.
    pub sync_at_every_section: bool,
    /// Machine types up to 8.2: zero pages travel as records of the main channel, and packets of none.
    pub zero_pages_on_main: bool,
}

impl MultifdRules {
    /// Those of machine types of this version, major and minor, and of all types in a QEMU of this version.
    pub const fn of_version(major: u32, minor: u32) -> Self {
        Self {
            sync_at_every_section: major < 8 || (major == 8 && minor == 0),
            zero_pages_on_main: major < 8 || (major == 8 && minor <= 2),
        }
    }

    /// The older of each rule: for an end that may follow either.
    #[must_use]
    pub const fn or_older(self, other: Self) -> Self {
        Self {
            sync_at_every_section: self.sync_at_every_section || other.sync_at_every_section,
            zero_pages_on_main: self.zero_pages_on_main || other.zero_pages_on_main,
        }
    }
}

impl Configuration {
    /// A configuration of `machine` and nothing else.
    pub fn new(machine: impl Into<String>) -> Self {
        Self { machine: machine.into(), ..Self::default() }
    }

    /// Whether the validated capability `name` is on.
    pub fn has_capability(&self, name: &str) -> bool {
        self.capabilities.iter().any(|capability| capability == name)
    }

    /// This configuration with the capability `mapped-ram` on, once.
    pub fn with_mapped_ram(mut self) -> Self {
        if !self.has_capability(MAPPED_RAM) {
            self.capabilities.push(MAPPED_RAM.to_owned());
        }
        self
    }

    /// This configuration with the capability `x-ignore-shared` on, once: memory that both ends share is not sent.
    pub fn with_ignore_shared(mut self) -> Self {
        if !self.has_capability(IGNORE_SHARED) {
            self.capabilities.push(IGNORE_SHARED.to_owned());
        }
        self
    }

    /// This configuration with the capability `mapped-ram` off: for the same VM over a socket.
    pub fn without_mapped_ram(mut self) -> Self {
        self.capabilities.retain(|capability| capability != MAPPED_RAM);
        self
    }

    /// How a QEMU of this machine type uses multifd: QEMU does not negotiate it, both ends go by the type.
    ///
    /// A name without a version (`microvm`) counts as current: what its QEMU does depends on that QEMU's own version
    /// ([`MultifdRules::of_version`]). A reader need not guess: see
    /// [`Event::MultifdFlush`](crate::Event::MultifdFlush).
    pub fn multifd_rules(&self) -> MultifdRules {
        self.version().map_or_else(MultifdRules::default, |(major, minor)| MultifdRules::of_version(major, minor))
    }

    /// Whether QEMU's streams of this machine type have neither a configuration record nor section footers: types up to
    /// 2.3. They cannot be read here.
    pub fn is_before_configuration(&self) -> bool {
        self.version().is_some_and(|version| version <= (2, 3))
    }

    /// The version of QEMU that the machine type is of, by its name.
    fn version(&self) -> Option<(u32, u32)> {
        self.machine.split('-').find_map(|part| numbers(part).or_else(|| of_ubuntu(part)).or_else(|| of_rhel(part)))
    }

    /// Appends file header and configuration record.
    ///
    /// # Errors
    /// A machine or capability name that does not fit, or too many capabilities. `out` is then as before.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let begin = out.len();
        let encoded = self.encode_record(out);
        if encoded.is_err() {
            out.truncate(begin);
        }
        encoded
    }

    fn encode_record(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.push(CONFIGURATION);
        let length = u32::try_from(self.machine.len()).ok().filter(|length| (1..=MACHINE_LIMIT).contains(length));
        let length =
            length.ok_or_else(|| EncodeError::Name { what: "machine", name: self.machine.clone(), limit: 255 })?;
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(self.machine.as_bytes());
        if let Some(bits) = self.target_page_bits {
            begin_subsection(TARGET_PAGE_BITS, out)?;
            out.extend_from_slice(&bits.to_be_bytes());
        }
        if !self.capabilities.is_empty() {
            begin_subsection(CAPABILITIES, out)?;
            let count = u32::try_from(self.capabilities.len()).ok().filter(|count| *count <= CAPABILITIES_LIMIT);
            let count = count.ok_or(EncodeError::Number {
                what: "number of capabilities",
                value: to_u64(self.capabilities.len()),
                rule: "at most 64",
            })?;
            out.extend_from_slice(&count.to_be_bytes());
            for capability in &self.capabilities {
                put_name("capability", capability, out)?;
            }
        }
        if let Some(uuid) = &self.uuid {
            begin_subsection(UUID, out)?;
            out.extend_from_slice(uuid);
        }
        Ok(())
    }

    /// Reads file header and configuration record from the beginning of a stream: the configuration and its length in
    /// bytes, or `None` if `input` ends before the byte that follows the record (only that byte shows that no further
    /// subsection comes).
    ///
    /// # Errors
    /// Anything that is not a stream of version 3 with a configuration that limosa knows.
    pub fn decode(input: &[u8]) -> Result<Option<(Self, usize)>, StreamError> {
        let mut cursor = Cursor::new(input);
        match Self::read(&mut cursor) {
            Ok(configuration) => Ok(Some((configuration, cursor.at()))),
            Err(Stop::Need(_)) => Ok(None),
            Err(stop) => Err(stop.into_error(0, "file header and configuration", input.len())),
        }
    }

    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Result<Self, Stop> {
        let found = cursor.array::<4>()?;
        if found != MAGIC {
            let error_kind = ErrorKind::expected(
                "the magic \"QEVM\" of a migration stream",
                format_args!("\"{}\"", found.escape_ascii()),
            );
            return Err(Stop::Fail { at: 0, error_kind });
        }
        let version = cursor.be32()?;
        if version != VERSION {
            return Err(Stop::Fail { at: 4, error_kind: ErrorKind::expected("stream version 3", version) });
        }
        let kind = cursor.u8()?;
        if kind != CONFIGURATION {
            let wanted = "a configuration record (0x07), which machine types up to 2.3 do not send";
            let error_kind = ErrorKind::expected(wanted, format_args!("{kind:#04x}"));
            return Err(Stop::Fail { at: 8, error_kind });
        }
        let length = cursor.be32()?;
        if length == 0 || length > MACHINE_LIMIT {
            let error_kind = ErrorKind::TooLarge {
                what: "length of the machine name",
                value: length.into(),
                limit: MACHINE_LIMIT.into(),
            };
            return Err(Stop::Fail { at: 9, error_kind });
        }
        let length = length as usize;
        let machine = std::str::from_utf8(cursor.take(length)?).map_err(|_| Stop::Fail {
            at: 13,
            error_kind: ErrorKind::expected("a machine name", "bytes that are not UTF-8"),
        })?;
        let mut configuration = Self::new(machine);
        while cursor.peek()? == SUBSECTION {
            configuration.read_subsection(cursor)?;
        }
        Ok(configuration)
    }

    fn read_subsection(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Stop> {
        let begin = cursor.at();
        cursor.u8()?;
        let name = cursor.name("a configuration subsection")?;
        let version = cursor.be32()?;
        if version != 1 {
            let error_kind = ErrorKind::expected(format!("version 1 of configuration subsection {name:?}"), version);
            return Err(Stop::Fail { at: begin, error_kind });
        }
        let again = match name {
            TARGET_PAGE_BITS => self.target_page_bits.replace(cursor.be32()?).is_some(),
            UUID => self.uuid.replace(cursor.array()?).is_some(),
            CAPABILITIES => {
                let count = cursor.be32()?;
                if count == 0 || count > CAPABILITIES_LIMIT {
                    let limit = CAPABILITIES_LIMIT.into();
                    let error_kind = ErrorKind::TooLarge { what: "number of capabilities", value: count.into(), limit };
                    return Err(Stop::Fail { at: begin, error_kind });
                }
                let again = !self.capabilities.is_empty();
                for _ in 0..count {
                    self.capabilities.push(cursor.name("a capability name")?.to_owned());
                }
                again
            }
            other => {
                let error_kind = ErrorKind::expected("a known configuration subsection", format_args!("{other:?}"));
                return Err(Stop::Fail { at: begin, error_kind });
            }
        };
        if again {
            let error_kind = ErrorKind::expected("each configuration subsection once", format_args!("{name:?} again"));
            return Err(Stop::Fail { at: begin, error_kind });
        }
        Ok(())
    }
}

fn begin_subsection(name: &str, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    out.push(SUBSECTION);
    put_name("configuration subsection", name, out)?;
    out.extend_from_slice(&1u32.to_be_bytes());
    Ok(())
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    let mut number = || parts.next()?.parse::<u32>().ok();
    Some((number()?, number()?))
}

/// The version of QEMU in a release of Ubuntu, whose machine types have its name (`pc-q35-noble`,
/// `pc-i440fx-jammy-hpb`; `q35` is an alias of them there).
fn of_ubuntu(release: &str) -> Option<(u32, u32)> {
    Some(match release {
        "trusty" => (2, 0),
        "utopic" => (2, 1),
        "vivid" => (2, 2),
        "wily" => (2, 3),
        "xenial" => (2, 5),
        "yakkety" => (2, 6),
        "zesty" => (2, 8),
        "artful" => (2, 10),
        "bionic" => (2, 11),
        "cosmic" => (2, 12),
        "disco" => (3, 1),
        "eoan" => (4, 0),
        "focal" => (4, 2),
        "groovy" => (5, 0),
        "hirsute" => (5, 2),
        "impish" => (6, 0),
        "jammy" => (6, 2),
        "kinetic" => (7, 0),
        "lunar" => (7, 2),
        "mantic" => (8, 0),
        "noble" => (8, 2),
        "oracular" => (9, 0),
        "plucky" => (9, 2),
        "questing" => (10, 1),
        _ => return None,
    })
}

/// The newest version of QEMU that machine types of a release of Red Hat Enterprise Linux (`pc-q35-rhel9.4.0`) are as
/// old as.
fn of_rhel(release: &str) -> Option<(u32, u32)> {
    Some(match numbers(release.strip_prefix("rhel")?)? {
        (..=7, _) => (2, 12),
        (8, _) => (6, 2),
        (9, ..=2) => (7, 2),
        (9, 3) => (8, 0),
        (9, 4) => (8, 2),
        (9, 5) => (9, 0),
        _ => (9, 1),
    })
}
