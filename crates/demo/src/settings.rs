//! Settings of a demonstration: one value that both ends get.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use crate::guest::{GuestKind, LogKind};
use clap::ValueEnum;
use limosa_channel::{ChannelError, Tls, ZeroCopy};
use limosa_migrate::MigrationParams;
use limosa_migrate::live::{RecordWriteMode, SharedMemoryMode, TimeoutStrategy, ZeroCheck};
use limosa_page::ZeroMethod;
use limosa_stream::multifd::Compression;
use serde::{Deserialize, Serialize};

/// How the ends reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// TCP over the loopback device
    Tcp,
    /// A unix socket
    Unix,
}

/// When the guest runs at the destination before its memory is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Postcopy {
    /// Never.
    Off,
    /// After this number of rounds.
    AfterRounds(u32),
    /// At once.
    AtOnce,
}

/// Settings that are enumerations of the libraries travel by their names.
mod named {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The parts of the guest.
    pub guest: GuestKind,
    /// The dirty log.
    pub log: LogKind,
    /// Bytes of guest memory.
    pub memory: u64,
    /// Bytes of memory that the guest writes a second, in whole pages.
    pub dirty_rate: u64,
    /// How the ends reach each other.
    pub transport: Transport,
    /// Multifd channels; 0: none.
    pub channels: u8,
    /// How pages are compressed on them.
    #[serde(with = "named")]
    pub compression: Compression,
    /// How they leave there.
    #[serde(with = "named")]
    pub zero_copy: ZeroCopy,
    /// When the guest runs at the destination before its memory is there.
    pub postcopy: Postcopy,
    /// Requested pages have their own channel.
    pub preempt: bool,
    /// No page is copied: the destination gets the memory's descriptors.
    pub same_host: bool,
    /// `downtime-limit`, in milliseconds.
    pub downtime_limit_ms: u64,
    /// `max-bandwidth`, in bytes a second.
    pub max_bandwidth: Option<NonZeroU64>,
    /// When pages are looked at.
    #[serde(with = "named")]
    pub zero_check: ZeroCheck,
    /// How they are looked at, by [`ZeroMethod`]'s names; the best that there is if nothing is said.
    pub zero_method: Option<String>,
    /// Page records on the main channel are gathered, and not copied into a buffer.
    pub vectors: bool,
    /// The destination's memory is populated ahead of arriving pages.
    pub populate: bool,
    /// Half of the memory is a heap, and the guest is asked which of it is free: that is not sent.
    pub hints: bool,
    /// How long the first round may wait for the guest's list, in milliseconds.
    pub hint_wait_ms: u64,
    /// Pages of a later round from which on the guest is asked again.
    pub hint_pages: u64,
    /// How long it may take until the switchover, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// The action at the timeout.
    #[serde(with = "named")]
    pub give_up: TimeoutStrategy,
    /// How long an end waits for an answer that the other owes, in milliseconds.
    pub answer_timeout_ms: u64,
    /// The folder with both ends' certificates and keys, if the connections are encrypted.
    pub tls_creds: Option<PathBuf>,
    /// Whom the destination's certificate names.
    pub tls_hostname: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            guest: GuestKind::Threads,
            log: LogKind::WpAsync,
            memory: 256 << 20,
            dirty_rate: 50 << 20,
            transport: Transport::Tcp,
            channels: 0,
            compression: Compression::None,
            zero_copy: ZeroCopy::Auto,
            postcopy: Postcopy::Off,
            preempt: false,
            same_host: false,
            downtime_limit_ms: 300,
            max_bandwidth: None,
            zero_check: ZeroCheck::Always,
            zero_method: None,
            vectors: true,
            populate: true,
            hints: false,
            hint_wait_ms: 0,
            hint_pages: MigrationParams::default().hint_pages,
            timeout_ms: None,
            give_up: TimeoutStrategy::Cancel,
            answer_timeout_ms: 10_000,
            tls_creds: None,
            tls_hostname: None,
        }
    }
}

impl Settings {
    /// The log that a guest has if nothing is said.
    pub fn usual_log(guest: GuestKind) -> LogKind {
        match guest {
            GuestKind::Threads => LogKind::WpAsync,
            GuestKind::Kvm => LogKind::KvmLog,
        }
    }

    /// Returns the conflict between settings, in one line.
    pub fn contradiction(&self) -> Option<&'static str> {
        let kvm_log = matches!(self.log, LogKind::KvmLog | LogKind::KvmRing);
        if kvm_log && self.guest == GuestKind::Threads {
            Some("--log kvm-log and kvm-ring need --guest kvm: with --guest threads use wp-async or wp-thread")
        } else if self.memory < 1 << 20 || !self.memory.is_multiple_of(4096) {
            Some("--memory must be at least 1M and a multiple of 4096 bytes")
        } else if self.preempt && self.postcopy == Postcopy::Off && self.give_up != TimeoutStrategy::Postcopy {
            Some("--preempt needs --postcopy or --give-up postcopy")
        } else if self.channels > 0 && self.postcopy != Postcopy::Off {
            Some("--channels cannot be combined with --postcopy: postcopy does not use multifd channels")
        } else if self.demands_zero_copy() && self.channels == 0 {
            Some(
                "--zero-copy msg and splice need --channels: pages of the main channel lie between headers and are copied",
            )
        } else if self.demands_zero_copy() && self.compression != Compression::None {
            Some("--zero-copy msg and splice cannot be combined with --compression: they send pages uncompressed")
        } else if self.zero_copy == ZeroCopy::Msg && self.transport == Transport::Unix {
            Some("--zero-copy msg needs --transport tcp; over a unix socket use splice")
        } else if self.zero_method.is_some() && self.zero_method().is_none() {
            Some("--zero-method is not supported by this processor (plain and portable always are)")
        } else if self.same_host && (self.postcopy != Postcopy::Off || self.channels > 0) {
            Some("--same-host cannot be combined with --postcopy or --channels: it sends no pages")
        } else if self.same_host && self.transport == Transport::Tcp {
            Some("--same-host needs --transport unix: it passes file descriptors")
        } else if self.hints && self.same_host {
            Some("--same-host cannot be combined with --hints: it sends no pages")
        } else if self.hints && self.postcopy == Postcopy::AtOnce && self.hint_wait_ms == 0 {
            Some("--hints with --postcopy at-once needs --hint-wait: the guest stops before it can list its free pages")
        } else if self.hint_wait_ms > 0 && !self.hints {
            Some("--hint-wait needs --hints on")
        } else if self.tls_creds.is_some() && self.demands_zero_copy() {
            Some("--zero-copy msg and splice cannot be combined with --tls-creds: they send pages unencrypted")
        } else if self.tls_creds.is_some() && self.same_host {
            Some(
                "--same-host cannot be combined with --tls-creds: an encrypted connection does not pass file descriptors",
            )
        } else if self.tls_creds.is_some() && self.transport == Transport::Unix && self.tls_hostname.is_none() {
            Some("--tls-creds over a unix socket needs --tls-hostname: a path names no host")
        } else if self.tls_hostname.is_some() && self.tls_creds.is_none() {
            Some("--tls-hostname needs --tls-creds")
        } else {
            None
        }
    }

    /// The method that checks pages for zeros, if one was chosen and this processor has it.
    fn zero_method(&self) -> Option<ZeroMethod> {
        let named: Option<ZeroMethod> = self.zero_method.as_ref().and_then(|name| name.parse().ok());
        named.filter(|method| method.is_available())
    }

    fn demands_zero_copy(&self) -> bool {
        matches!(self.zero_copy, ZeroCopy::Msg | ZeroCopy::Splice)
    }

    /// The credentials of the end that connects.
    ///
    /// # Errors
    /// They are missing, or of no use.
    pub fn client_tls(&self) -> Result<Option<Tls>, ChannelError> {
        self.tls_creds.as_ref().map(|folder| Tls::client(folder, self.tls_hostname.as_deref())).transpose()
    }

    /// The credentials of the end that listens.
    ///
    /// # Errors
    /// As [`client_tls`](Self::client_tls).
    pub fn server_tls(&self) -> Result<Option<Tls>, ChannelError> {
        self.tls_creds.as_ref().map(|folder| Tls::server(folder, true)).transpose()
    }

    /// Returns the parameters of the engine.
    pub fn params(&self) -> MigrationParams {
        MigrationParams::default()
            .downtime_limit(Duration::from_millis(self.downtime_limit_ms))
            .max_bandwidth(self.max_bandwidth)
            .zero_check(self.zero_check)
            .zero_method(self.zero_method().unwrap_or_else(ZeroMethod::best))
            .record_write(if self.vectors { RecordWriteMode::Vectored } else { RecordWriteMode::Buffered })
            .timeout(self.timeout_ms.map(Duration::from_millis))
            .timeout_strategy(self.give_up)
            .hint_wait(Duration::from_millis(self.hint_wait_ms))
            .hint_pages(self.hint_pages)
            .answer_timeout(Duration::from_millis(self.answer_timeout_ms))
    }

    /// Returns how the guest's memory is moved.
    pub fn shared_memory(&self) -> SharedMemoryMode {
        if self.same_host { SharedMemoryMode::Passed } else { SharedMemoryMode::Sent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_travel_as_json_and_come_back() {
        let settings =
            Settings { postcopy: Postcopy::AfterRounds(3), max_bandwidth: NonZeroU64::new(7), ..Settings::default() };
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings, "{text}");
    }

    #[test]
    fn what_cannot_be_combined_is_refused_before_anything_starts() {
        let usual = Settings::default;
        assert_eq!(usual().contradiction(), None);
        let waits = Settings { hints: true, hint_wait_ms: 1, postcopy: Postcopy::AtOnce, ..usual() };
        assert_eq!(waits.contradiction(), None);
        for wrong in [
            Settings { log: LogKind::KvmRing, ..usual() },
            Settings { memory: 5000, ..usual() },
            Settings { hint_wait_ms: 1, ..usual() },
            Settings { hints: true, postcopy: Postcopy::AtOnce, ..usual() },
            Settings { hints: true, same_host: true, transport: Transport::Unix, ..usual() },
            Settings { preempt: true, ..usual() },
            Settings { channels: 2, postcopy: Postcopy::AtOnce, ..usual() },
            Settings { same_host: true, ..usual() },
            Settings { zero_copy: ZeroCopy::Splice, ..usual() },
            Settings { zero_method: Some("sse3".into()), ..usual() },
            Settings { zero_copy: ZeroCopy::Msg, channels: 1, compression: Compression::Zstd, ..usual() },
            Settings { zero_copy: ZeroCopy::Msg, channels: 1, transport: Transport::Unix, ..usual() },
            Settings { same_host: true, transport: Transport::Unix, tls_creds: Some("x".into()), ..usual() },
            Settings { transport: Transport::Unix, tls_creds: Some("x".into()), ..usual() },
            Settings { tls_hostname: Some("x".into()), ..usual() },
            Settings { zero_copy: ZeroCopy::Splice, channels: 1, tls_creds: Some("x".into()), ..usual() },
        ] {
            assert!(wrong.contradiction().is_some(), "{wrong:?}");
        }
    }
}
