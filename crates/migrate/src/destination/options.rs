//! The settings of a destination, and its counters.

use std::time::Duration;

use limosa_channel::Counters;
use limosa_stream::devices::TAIL_LIMIT;

/// Longest silence inside the device sections. QEMU writes them from memory, and the VM is stopped meanwhile.
pub(super) const TAIL_TIMEOUT: Duration = Duration::from_secs(10);

/// The settings of a destination.
#[derive(Debug, Clone)]
pub struct DestinationOptions {
    /// Most bytes of device state to accept.
    pub max_device_state: u64,
    /// Longest silence of the source, which always sends something while a migration runs. Also the longest time for
    /// which it may leave an answer unread.
    pub answer_timeout: Option<Duration>,
    /// Silence after which an end of the device sections counts as the end of the stream. QEMU writes the whole tail at
    /// once, so the next piece of it is microseconds away; the VM is stopped meanwhile. The end is certain only after
    /// [`ReceivedStream::confirm_end`](crate::stored::ReceivedStream::confirm_end).
    pub end_of_stream_timeout: Duration,
    /// Whether the stream was recorded, so that no source listens. Requests for answers are ignored then, and the
    /// stream ends where the bytes end, however long they take.
    pub recorded: bool,
    /// Whether the source makes checkpoints (QEMU's capability `x-colo`). The stream is then the base of
    /// [checkpoints](crate::checkpoints), which come on the main channel alone. Nothing in a stream tells a base from
    /// another one (QEMU 11.1; 10.0 sends a command, which is refused without this option).
    pub colo: bool,
    /// The first bytes of the stream, if they were read before to see what it is. At most 1 MiB, the size of the
    /// receive buffer: a longer one is refused.
    pub first_bytes: Vec<u8>,
}

impl Default for DestinationOptions {
    fn default() -> Self {
        Self {
            max_device_state: TAIL_LIMIT,
            answer_timeout: Some(Duration::from_secs(60)),
            end_of_stream_timeout: Duration::from_millis(1),
            recorded: false,
            colo: false,
            first_bytes: Vec::new(),
        }
    }
}

/// The contents of a stream, by kind.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct DestinationStats {
    /// Pages with contents.
    pub normal_pages: u64,
    /// Pages that came as zero.
    pub zero_pages: u64,
    /// Of both, those for a page that had come before.
    pub resent_pages: u64,
    /// Bytes of device sections and their description.
    pub device_bytes: u64,
    /// From the first byte to the last.
    pub elapsed: Duration,
    /// From the first device section to the last byte: part of the VM's downtime.
    pub device_elapsed: Duration,
    /// Of all channels together.
    pub channel: Counters,
}
