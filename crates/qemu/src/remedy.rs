//! Remedies for a refused job.

use std::borrow::Cow;

/// A remedy for a refused job ([`JobError::Refused`](crate::JobError)), in terms of this crate's options. A program
/// translates it into its own options.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Something that is done to QEMU, the VM or the host, in words; the error shows it.
    Outside(Cow<'static, str>),
    /// A lazy restore has one channel: set no multifd channels, or restore eagerly.
    OneChannelOrEager,
    /// Allow QEMU the use of userfaultfd, or restore eagerly.
    UserfaultfdOrEager,
    /// Restore eagerly, or leave the choice to limosa.
    Eager,
    /// Have the destination map the snapshot with its memory backends, or leave the choice to limosa.
    MapBackends,
    /// Finish the interrupted restore ([`recover`](crate::recover)).
    Recover,
    /// Give a path, or a host with a port, for QEMU to listen at.
    ListenWithPort,
    /// Set no bandwidth limit, or restore through a socket ([`Route::Socket`](crate::Route)).
    UnlimitedOrSocket,
    /// Do not compress, or restore through a socket.
    UncompressedOrSocket,
    /// Do not check pages for zeros, or restore through a socket.
    NoZeroChecksOrSocket,
    /// Choose no zero-copy method, or restore through a socket.
    NoZeroCopyOrSocket,
    /// Go through a socket.
    Socket,
    /// Restore again, into a QEMU that waits for a VM, instead of recovering.
    Restore,
    /// Resume the VM ([`resume`](crate::resume)).
    Resume,
    /// End this QEMU, start one that waits for a VM, and restore into it.
    NewQemuAndRestore,
    /// End the process that serves the memory, or try again.
    EndServer,
    /// Memory and disk would be of different instants: put the disk back, or ignore disks.
    PutBackOrIgnore,
    /// Give a TCP address at which both can meet.
    ListenTcp,
    /// Give a socket in a directory that both have at the same path, or a TCP address.
    ListenShared,
    /// Run as QEMU's user or as root, or give an address at which both can meet.
    UserOrListen,
    /// If the VM runs nowhere else, continue it ([`ResumeOptions::force`](crate::ResumeOptions)).
    ResumeForced,
    /// Stop the VM, cover its disks with overlays, or ignore disks that are snapshotted by other means.
    StopOverlayOrIgnore,
    /// Ignore the disk, if it is kept consistent by other means.
    IgnoreDisk,
    /// Run on the VM's host, with a unix socket as monitor.
    RunThere,
    /// Under overlays the disks would not see each other's writes: ignore the file, if it is kept consistent by other
    /// means.
    IgnoreSharedFile,
    /// Name a folder for the overlays.
    OverlayFolder,
    /// The VM is untouched: name a folder for the overlays in which QEMU may open files.
    OverlayFolderForQemu,
    /// Do not save in the background.
    Foreground,
    /// A background save needs userfaultfd with write protection for all of the VM's memory; else do not save in the
    /// background.
    WriteProtectionOrForeground,
    /// Give a path, or a host and a port, for QEMU to connect to.
    ListenAddress,
    /// Do not save in the background, or let the VM continue.
    BackgroundOrStop,
    /// Do not save in the background, or do not wait for hints.
    BackgroundOrHintWait,
    /// Set multifd channels, too.
    Channels,
    /// Do not save in the background, or set no multifd channels.
    BackgroundOrChannels,
    /// Cover the disks with overlays ([`DiskPolicy::Overlay`](crate::DiskPolicy)).
    Overlays,
    /// Make no overlays, or let the VM continue.
    OverlaysOrStop,
    /// Make no overlays, or do not save in the background.
    OverlaysOrBackground,
    /// Cancel at the timeout ([`OnTimeout::Cancel`](crate::OnTimeout)).
    CancelOnTimeout,
    /// Save in the background through a socket.
    BackgroundBySocket,
    /// Compress through a socket.
    CompressionBySocket,
    /// Set no address, or save through a socket.
    FileOrListen,
    /// Give a TCP address for QEMU to connect to.
    ConnectTcp,
    /// Leave `-incoming` out of the command line, or restore into a QEMU that was started otherwise.
    NoIncoming,
    /// Leave `-daemonize` out of the command line, or restore into a QEMU that was started otherwise.
    NoDaemon,
    /// If the VM does not run elsewhere, resume it; else end this QEMU.
    ResumeOrEnd,
    /// Recover the restore from the snapshot ([`recover`](crate::recover)).
    RecoverSnapshot,
    /// Resume the VM later.
    ResumeLater,
}

impl From<&'static str> for Remedy {
    fn from(words: &'static str) -> Self {
        Self::Outside(words.into())
    }
}

impl From<String> for Remedy {
    fn from(words: String) -> Self {
        Self::Outside(words.into())
    }
}

impl Remedy {
    /// Returns the text that the error shows.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Outside(words) => format!("; {words}"),
            _ => String::new(),
        }
    }
}
