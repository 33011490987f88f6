//! The parameters of a live migration, by QEMU's names where QEMU has them.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use limosa_page::ZeroMethod;
use thiserror::Error as ThisError;

/// When to look if a page is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroCheck {
    /// Every page, in every round.
    #[default]
    Always,
    /// In the first round only: a page that was written is rarely zero.
    Bulk,
    /// Never.
    Off,
}

impl ZeroCheck {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Always, Self::Bulk, Self::Off];

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Bulk => "bulk",
            Self::Off => "off",
        }
    }
}

/// How records of pages get from guest memory into the main channel. The bytes are the same; multifd channels always
/// gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RecordWriteMode {
    /// From where they live: one call sends hundreds of pages, each behind its header.
    #[default]
    Vectored,
    /// Copied into a buffer of 16 KiB, which is written whenever it is full: for comparison.
    Buffered,
}

/// The treatment of a migration that does not converge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimeoutStrategy {
    /// Cancel: the VM continues at the source.
    #[default]
    Cancel,
    /// Switch over however long the pause gets.
    Pause,
    /// Switch to postcopy.
    Postcopy,
}

impl TimeoutStrategy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Cancel, Self::Pause, Self::Postcopy];

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Pause => "pause",
            Self::Postcopy => "postcopy",
        }
    }
}

/// A name that no value of a setting has.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("{name:?}: expected {expected}")]
pub struct UnknownSettingName {
    /// The name.
    pub name: String,
    /// The names that there are.
    pub expected: &'static str,
}

impl fmt::Display for ZeroCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ZeroCheck {
    type Err = UnknownSettingName;

    fn from_str(name: &str) -> Result<Self, UnknownSettingName> {
        let found = Self::ALL.into_iter().find(|value| value.name() == name);
        found.ok_or_else(|| UnknownSettingName { name: name.to_owned(), expected: "always, bulk or off" })
    }
}

impl fmt::Display for TimeoutStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TimeoutStrategy {
    type Err = UnknownSettingName;

    fn from_str(name: &str) -> Result<Self, UnknownSettingName> {
        let found = Self::ALL.into_iter().find(|value| value.name() == name);
        found.ok_or_else(|| UnknownSettingName { name: name.to_owned(), expected: "cancel, pause or postcopy" })
    }
}

/// The parameters of a migration, by QEMU's names where QEMU has them. The fields can be read; a method of the
/// same name sets each.
///
/// ```
/// use std::time::Duration;
///
/// use limosa_migrate::MigrationParams;
///
/// let params = MigrationParams::default().downtime_limit(Duration::from_millis(50)).auto_converge(true);
/// assert!(params.auto_converge && params.max_bandwidth.is_none());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrationParams {
    /// `downtime-limit`: how long the VM may be stopped for the rest of its memory.
    pub downtime_limit: Duration,
    /// `max-bandwidth`: bytes per second while it runs; `None`: no limit.
    pub max_bandwidth: Option<NonZeroU64>,
    /// `avail-switchover-bandwidth`: bytes per second to reckon with at the switchover; `None`: what was measured.
    pub avail_switchover_bandwidth: Option<NonZeroU64>,
    /// `max-postcopy-bandwidth`: bytes per second of pages that were not requested; `None`: no limit.
    pub max_postcopy_bandwidth: Option<NonZeroU64>,
    /// `auto-converge` (a capability): slow the vCPUs down if rounds do not get shorter.
    pub auto_converge: bool,
    /// `cpu-throttle-initial`, percent.
    pub cpu_throttle_initial: u8,
    /// `cpu-throttle-increment`, percent.
    pub cpu_throttle_increment: u8,
    /// `max-cpu-throttle`, percent.
    pub max_cpu_throttle: u8,
    /// `throttle-trigger-threshold`: percent of what was sent in a round that has to get dirty meanwhile, twice.
    pub throttle_trigger_threshold: u8,
    /// When pages are compared with zero.
    pub zero_check: ZeroCheck,
    /// How zero pages are detected. The default is the fastest method that the processor supports.
    pub zero_method: ZeroMethod,
    /// How page records are written until the switchover, and in the pause.
    pub record_write: RecordWriteMode,
    /// How long it may take until the switchover; `None`: as long as it takes.
    pub timeout: Option<Duration>,
    /// Rounds that may follow each other without the rest getting smaller; `None`: any number.
    pub stalled_rounds: Option<u32>,
    /// The treatment of the migration after that time or those rounds.
    pub timeout_strategy: TimeoutStrategy,
    /// How long the first round may wait for the guest's list of [free pages](crate::LiveSource::hint_free_pages);
    /// zero, and the list takes pages out while the round is sent; [`Duration::MAX`], as long as the list takes.
    pub hint_wait: Duration,
    /// Pages of a later round from which on the guest is asked again. A list takes a guest of 8 GiB 20 ms (measured),
    /// which is what 16,384 pages take at 3 GB a second: a shorter round would be over before its list.
    pub hint_pages: u64,
    /// How long the destination may be silent when it owes an answer.
    pub answer_timeout: Duration,
}

impl Default for MigrationParams {
    /// QEMU's defaults, without a bandwidth limit.
    fn default() -> Self {
        Self {
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            avail_switchover_bandwidth: None,
            max_postcopy_bandwidth: None,
            auto_converge: false,
            cpu_throttle_initial: 20,
            cpu_throttle_increment: 10,
            max_cpu_throttle: 99,
            throttle_trigger_threshold: 50,
            zero_check: ZeroCheck::Always,
            zero_method: ZeroMethod::best(),
            record_write: RecordWriteMode::Vectored,
            timeout: None,
            stalled_rounds: None,
            timeout_strategy: TimeoutStrategy::Cancel,
            hint_wait: Duration::ZERO,
            hint_pages: 16_384,
            answer_timeout: Duration::from_secs(30),
        }
    }
}

/// Writes a method for each field that sets it.
macro_rules! setters {
    ($($name:ident: $type:ty,)*) => {
        impl MigrationParams {
            $(
                /// Sets the field of this name.
                #[must_use]
                pub fn $name(mut self, $name: $type) -> Self {
                    self.$name = $name;
                    self
                }
            )*
        }
    };
}

setters! {
    downtime_limit: Duration,
    max_bandwidth: Option<NonZeroU64>,
    avail_switchover_bandwidth: Option<NonZeroU64>,
    max_postcopy_bandwidth: Option<NonZeroU64>,
    auto_converge: bool,
    cpu_throttle_initial: u8,
    cpu_throttle_increment: u8,
    max_cpu_throttle: u8,
    throttle_trigger_threshold: u8,
    zero_check: ZeroCheck,
    zero_method: ZeroMethod,
    record_write: RecordWriteMode,
    timeout: Option<Duration>,
    stalled_rounds: Option<u32>,
    timeout_strategy: TimeoutStrategy,
    hint_wait: Duration,
    hint_pages: u64,
    answer_timeout: Duration,
}
