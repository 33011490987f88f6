//! Conflicts that rule a job out, typed for a program that names them by its own options.

/// The conflict behind a refused job ([`JobError::Refused`](crate::JobError)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Conflict {
    /// Two options exclude each other.
    Options(JobOption, JobOption),
    /// The job needs an option that is not set.
    Missing(JobOption),
    /// QEMU, the host or the snapshot does not support what this option asks for.
    Unsupported(JobOption),
    /// QEMU's command line has an option that limosa adds itself or does not support.
    CommandLine(&'static str),
    /// QEMU or limosa lacks a right.
    Permission(MissingPermission),
    /// QEMU and limosa have no socket at which both can meet.
    Rendezvous(RendezvousConflict),
    /// Memory and a disk would not be consistent.
    Disk(DiskConflict),
    /// The VM or its QEMU is not in the state that the job needs.
    State(StateConflict),
}

/// An option of a save or a restore, with the value that conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JobOption {
    /// [`SaveOptions::background`](crate::SaveOptions).
    Background,
    /// Multifd channels.
    Channels,
    /// Compression on the multifd channels.
    Compression,
    /// [`TransportChoice::File`](crate::TransportChoice).
    FileTransport,
    /// [`SaveOptions::hint_wait`](crate::SaveOptions).
    HintWait,
    /// [`RestoreMode::Lazy`](crate::RestoreMode).
    LazyMode,
    /// The address at which QEMU and limosa meet.
    Listen,
    /// [`RestoreMode::Mapped`](crate::RestoreMode).
    MappedMode,
    /// A bandwidth limit.
    MaxBandwidth,
    /// [`SaveOptions::overlay_dir`](crate::SaveOptions).
    OverlayDirectory,
    /// [`DiskPolicy::Overlay`](crate::DiskPolicy).
    Overlays,
    /// [`OnTimeout::Pause`](crate::OnTimeout).
    PauseOnTimeout,
    /// [`SaveOptions::stop`](crate::SaveOptions).
    Stop,
    /// A zero-copy method.
    ZeroCopy,
    /// Zero page detection on the multifd channels.
    ZeroPageDetection,
}

/// A right that QEMU or limosa lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingPermission {
    /// QEMU may not open files in the overlays' directory.
    OverlayDirectory,
    /// limosa may not give QEMU's user a private directory for sockets.
    SocketDirectory,
    /// QEMU may not use userfaultfd, which a lazy restore needs.
    Userfaultfd,
    /// QEMU may not use userfaultfd with write protection for all of the VM's memory, which a background save needs.
    WriteProtection,
}

/// The reason why QEMU and limosa cannot meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RendezvousConflict {
    /// QEMU does not take this kind of address.
    Address,
    /// QEMU runs in a container or a chroot and does not see limosa's files.
    Container,
    /// The monitor is reached over TCP, so QEMU may run on another host.
    RemoteMonitor,
}

/// The reason why memory and a disk would not be consistent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskConflict {
    /// The disk has changed since the VM was saved.
    Changed,
    /// The VM continues to write to its disks after it is saved.
    StillWritten,
    /// The disk's state cannot be recorded or frozen.
    NotFreezable,
    /// The disk is served by another process, whose control socket is not known.
    Served,
    /// Two disks of the VM write to one file.
    SharedFile,
    /// The last writes of a protection that is over are in overlays.
    Unmerged,
}

/// The state that rules the job out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateConflict {
    /// A lazy restore into this QEMU was interrupted and can be recovered.
    RestoreInterrupted,
    /// No lazy restore into this QEMU was interrupted.
    NothingToRecover,
    /// A save of this VM was interrupted.
    SaveInterrupted,
    /// Another process still serves the VM's memory.
    AlreadyServed,
    /// The VM was stopped by an earlier save or migration and may run elsewhere.
    HandedOver,
}
