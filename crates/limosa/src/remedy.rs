//! Remedies for the engines' failures. The libraries say what is wrong; this says which option helps.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use anyhow::anyhow;
use limosa_balloon::StatisticsError;
use limosa_channel::{ChannelError, Operation, TlsAlert, TlsFailure};
use limosa_clone::CloneError;
use limosa_console::error_line;
use limosa_image::ImageError;
use limosa_image::luks::LuksError;
use limosa_image::reference::is_object;
use limosa_migrate::MigrateError;
use limosa_nbd::NbdError;
use limosa_pack::PackError;
use limosa_protect::ProtectError;
use limosa_qemu::qmp::QmpError;
use limosa_qemu::takeover::Outcome;
use limosa_qemu::{
    Conflict, DiskConflict, JobError, JobOption, JobRecordError, MappedVmError, MissingPermission, NotMapping,
    RendezvousConflict, ResumeError, StateConflict, WatchdogAdvice,
};
use limosa_snapshot::{ForeignError, SnapshotError};
use limosa_storage::{LockHolders, OpenError, StorageError};
use limosa_stream::{StreamError, UnsupportedFeature};
use limosa_vhost::ServerError;

use crate::holder::Holder;

/// Returns the remedy, to be appended to the message of the error; empty if no option helps.
pub(crate) fn of(error: &MigrateError) -> String {
    match error {
        MigrateError::MainEnded { channels, .. } => {
            format!("; if the source has another number of channels than {channels}, set the same")
        }
        MigrateError::SwitchedToPostcopy { .. } => {
            "; migrate with the capability postcopy-ram off, or without migrate-start-postcopy".into()
        }
        MigrateError::NoReturnPath { .. } => {
            "; turn the source's capability return-path off, or connect both directions".into()
        }
        MigrateError::Stream(error) => of_stream(error).into(),
        MigrateError::Channel(error) => of_channel(error),
        MigrateError::Multifd { source, .. } => of(source),
        MigrateError::Sink(error) => error.downcast_ref().and_then(of_snapshot).unwrap_or_default(),
        MigrateError::WantsTls { .. } => "; both ends have to use TLS (--tls-creds, and tls-creds in QEMU)".into(),
        _ => String::new(),
    }
}

fn of_stream(error: &StreamError) -> &'static str {
    error.kind().feature().map_or("", of_feature)
}

fn of_feature(feature: &UnsupportedFeature) -> &'static str {
    match feature {
        UnsupportedFeature::Multifd => {
            "; receive it with --channels, as many as the source's multifd-channels, or turn the capability multifd off at \
             the source"
        }
        UnsupportedFeature::MultifdCompression { .. } => {
            "; set multifd-compression to none, zlib or zstd at the source"
        }
        UnsupportedFeature::Xbzrle => "; turn the capability xbzrle off at the source",
        UnsupportedFeature::CompressedPage => "; turn the capability compress off at the source",
        UnsupportedFeature::DirtyBitmaps => "; turn the capability dirty-bitmaps off at the source",
        _ => "",
    }
}

fn of_channel(error: &ChannelError) -> String {
    match error {
        ChannelError::Tls { failure, .. } => of_tls(failure).into(),
        ChannelError::MemoryLock { least, .. } => {
            let least = least.div_ceil(1024);
            format!("; raise it (ulimit -l {least}, LimitMEMLOCK={least}K), or grant CAP_IPC_LOCK")
        }
        ChannelError::Refused { .. } => "; nothing listens there: start the destination first".into(),
        ChannelError::Io { operation: Operation::Listen, source, peer, .. }
            if peer.starts_with("tcp:") && source.kind() == io::ErrorKind::AddrInUse =>
        {
            "; choose another port, or end what uses this one".into()
        }
        ChannelError::Io { operation: Operation::Listen, source, .. } => of_listen(source).into(),
        _ => String::new(),
    }
}

/// The remedy for an address at which a socket cannot listen.
fn of_listen(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; choose another address, end what uses this one, or remove a file that has its name"
        }
        io::ErrorKind::AddrNotAvailable => "; use an address of this host, or 0.0.0.0 for all of them",
        io::ErrorKind::InvalidFilename => "; the path of a socket has at most 107 bytes",
        io::ErrorKind::NotFound => "; the directory must exist",
        _ => "",
    }
}

/// The failure of a control socket, with its remedy.
pub(crate) fn without_control(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("--control: cannot listen on {}: {error}{}", path.display(), of_listen(error))
}

fn of_tls(failure: &TlsFailure) -> &'static str {
    match failure {
        TlsFailure::UnknownAuthority { .. } | TlsFailure::Refused(TlsAlert::Unverifiable) => {
            "; both ends need certificates of the same CA"
        }
        TlsFailure::Expired { .. } | TlsFailure::Revoked => "; it needs a new one",
        TlsFailure::NotYetValid { .. } => "; check the clocks of both machines",
        TlsFailure::WrongName { .. } => "; if that name is correct, set --tls-hostname (tls-hostname in QEMU)",
        TlsFailure::NoHostName => "; set --tls-hostname",
        TlsFailure::NoCertificate => "; it needs client-cert.pem and client-key.pem of this end's authority",
        TlsFailure::Refused(TlsAlert::CertificateRequired) => {
            "; put client-cert.pem and client-key.pem next to ca-cert.pem"
        }
        TlsFailure::NotTls => "; enable TLS there as well (tls-creds)",
        TlsFailure::HandshakeClosed
        | TlsFailure::Truncated { before_first_byte: true }
        | TlsFailure::Reset { before_first_byte: true } => "; the log of the other end says why",
        _ => "",
    }
}

fn of_storage(error: &StorageError) -> &'static str {
    match error.open_error() {
        Some(OpenError::UringUnavailable(_)) => "; use threads (-i threads)",
        Some(OpenError::DirectIoUnsupported) => "; use another cache mode (writeback)",
        Some(OpenError::Locked { read_only: true, holders, .. }) if *holders != LockHolders::ThisProcess => {
            "; use -U to read it anyway; contents may be inconsistent"
        }
        None if matches!(nbd_error(error), Some(NbdError::TlsRequired(_))) => {
            "; give --object tls-creds-x509,id=t,dir=FOLDER and --image-opts \
             driver=nbd,server.type=inet,server.host=HOST,server.port=PORT,export=NAME,tls-creds=t"
        }
        _ => "",
    }
}

/// The reason of a failure of an NBD export, if it is one of its connection.
fn nbd_error(error: &StorageError) -> Option<&NbdError> {
    error.source.get_ref()?.downcast_ref()
}

/// The options that open the encrypted image of this name, in the form of its format.
fn of_encryption(image: &str) -> &'static str {
    let mut magic = [0; 4];
    let read = File::open(image).and_then(|mut file| file.read_exact(&mut magic));
    match (read.is_ok(), &magic) {
        (true, b"QFI\xfb") => {
            "; give one: --object secret,id=s,file=FILE --image-opts \
             driver=qcow2,encrypt.key-secret=s,file.filename=IMAGE"
        }
        _ => "; give one: --object secret,id=s,file=FILE --image-opts driver=luks,key-secret=s,file.filename=IMAGE",
    }
}

/// Returns the options or commands that resolve a conflict.
pub(crate) fn of_conflict(conflict: &Conflict) -> String {
    match conflict {
        Conflict::Options(JobOption::FileTransport, other) => {
            format!("; leave {} out, or use --via socket", name_of(*other))
        }
        Conflict::Options(JobOption::LazyMode | JobOption::MappedMode, other) => {
            format!("; leave {} out, or use --memory eager", name_of(*other))
        }
        Conflict::Options(JobOption::Background, JobOption::PauseOnTimeout) => "; use --on-timeout cancel".into(),
        Conflict::Options(first, second) => format!("; leave {} or {} out", name_of(*first), name_of(*second)),
        Conflict::Missing(option) => format!("; add {}", name_of(*option)),
        Conflict::Unsupported(JobOption::FileTransport) => "; use --via socket".into(),
        Conflict::Unsupported(JobOption::LazyMode) => "; use --memory eager".into(),
        Conflict::Unsupported(JobOption::MappedMode) => {
            "; limosa inspect SNAPSHOT --qemu-args prints the options for QEMU; or use --memory eager".into()
        }
        Conflict::Unsupported(option) => format!("; leave {} out", name_of(*option)),
        Conflict::CommandLine("-incoming") => {
            "; leave it out, or start that QEMU yourself and use limosa restore".into()
        }
        Conflict::CommandLine("-daemonize") => {
            "; leave it out and put limosa run in the background, or use limosa restore --detach".into()
        }
        Conflict::Permission(permission) => of_permission(*permission).into(),
        Conflict::Rendezvous(RendezvousConflict::Address) => {
            "; --listen takes unix:PATH or tcp:HOST:PORT with a port of its own".into()
        }
        Conflict::Rendezvous(RendezvousConflict::Container) => {
            "; say where to meet: --listen unix:PATH in a directory that both have at the same path, or tcp:HOST:PORT"
                .into()
        }
        Conflict::Rendezvous(RendezvousConflict::RemoteMonitor) => {
            "; say with --listen tcp:HOST:PORT where to meet".into()
        }
        Conflict::Disk(disk) => of_disk(*disk).into(),
        Conflict::State(state) => of_state(*state).into(),
        _ => String::new(),
    }
}

/// Returns an option of a job as it is written on the command line.
fn name_of(option: JobOption) -> &'static str {
    match option {
        JobOption::Background => "--background",
        JobOption::Channels => "--channels",
        JobOption::Compression => "--compression",
        JobOption::FileTransport => "--via file",
        JobOption::HintWait => "--hint-wait",
        JobOption::LazyMode => "--memory lazy",
        JobOption::Listen => "--listen",
        JobOption::MappedMode => "--memory mapped",
        JobOption::MaxBandwidth => "--max-bandwidth",
        JobOption::OverlayDirectory => "--overlay-dir DIR",
        JobOption::Overlays => "--disks overlay",
        JobOption::PauseOnTimeout => "--on-timeout pause",
        JobOption::Stop => "--stop",
        JobOption::ZeroCopy => "--zero-copy",
        JobOption::ZeroPageDetection => "--zero-page-detection",
        _ => "that option",
    }
}

fn of_permission(permission: MissingPermission) -> &'static str {
    match permission {
        MissingPermission::OverlayDirectory => {
            "; the VM is untouched; choose with --overlay-dir a folder in which QEMU may open files"
        }
        MissingPermission::SocketDirectory => {
            "; run limosa as that user or as root, or say with --listen where to meet"
        }
        MissingPermission::Userfaultfd => {
            "; let QEMU use userfaultfd (/dev/userfaultfd for its user, or vm.unprivileged_userfaultfd=1), or use --memory \
             eager"
        }
        MissingPermission::WriteProtection => {
            "; it takes userfaultfd with write protection for all of the VM's memory (docs/operating.md); or save without \
             --background"
        }
        _ => "",
    }
}

fn of_disk(conflict: DiskConflict) -> &'static str {
    match conflict {
        DiskConflict::Changed => {
            "; memory and disk would be of different instants; put the disk back, or say --disks ignore"
        }
        DiskConflict::StillWritten => {
            "; save it with --stop or --disks overlay, or say --disks ignore if the disks are snapshotted by other means"
        }
        DiskConflict::NotFreezable => "; say --disks ignore if it is kept consistent by other means",
        DiskConflict::Served => {
            "; save or restore it with --disk-server SOCK, the control socket of its limosa serve, or say --disks ignore \
             if it is kept consistent by other means"
        }
        DiskConflict::SharedFile => {
            "; with overlays they would no longer see each other's writes; say --disks ignore if that file is kept \
             consistent by other means"
        }
        DiskConflict::Unmerged => {
            "; limosa protect merge DIR, with the directory of its checkpoints, brings all that the VM wrote to the image"
        }
        _ => "",
    }
}

fn of_state(conflict: StateConflict) -> &'static str {
    match conflict {
        StateConflict::RestoreInterrupted => "; finish it with limosa restore --recover",
        StateConflict::NothingToRecover => "; restore without --recover, into a QEMU started with -incoming defer",
        StateConflict::SaveInterrupted => "; run limosa resume",
        StateConflict::AlreadyServed => "; end the limosa that does, or try again",
        StateConflict::HandedOver => "; if it runs nowhere else, continue it first: limosa resume --force",
        _ => "",
    }
}

/// Advice in the messages of the watchdog.
pub(crate) const WATCHDOG: WatchdogAdvice = WatchdogAdvice { conflict: of_conflict, outcome: after_outcome };

/// Describes the state of a VM whose job was interrupted, with the command that remains to be run.
pub(crate) fn of_outcome(outcome: Outcome) -> String {
    format!("{outcome}{}", after_outcome(outcome))
}

/// Returns the command that remains to be run for a VM in this state.
pub(crate) fn after_outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Undecided => ": run 'limosa resume' if it does not, or end this QEMU if it does",
        Outcome::NeedsRecovery => ": run 'limosa restore --recover SNAPSHOT --qmp SOCK'",
        Outcome::GaveUp => "; run 'limosa resume' later",
        Outcome::DiskLost => ": fail it over, or run 'limosa resume' to continue it without that disk",
        _ => "",
    }
}

fn of_job(error: &JobError) -> Option<String> {
    Some(match error {
        JobError::Migrate(error) => of(error),
        JobError::Refused { conflict, .. } => of_conflict(conflict.as_ref()?),
        // Shown as the errors of those, which are not in the chain by themselves.
        JobError::Snapshot(error) => of_snapshot(error)?,
        JobError::Record(error) => of_record(error)?,
        JobError::Channel(error) => of_channel(error),
        JobError::AfterPublish { source, .. } => of_job(source)?,
        JobError::FileNotWritten { reason, .. } if reason.contains("No space left") || reason.contains("quota") => {
            ROOM.into()
        }
        JobError::Qmp(error) => of_qmp(error)?,
        JobError::TimedOut { .. } => "; give it more time, more bandwidth, or --on-timeout pause".into(),
        _ => return None,
    })
}

/// The remedies of errors that a protection shows as its own, which are then not in the chain.
fn of_protect(error: &ProtectError) -> Option<String> {
    match error {
        // Its options are other ones than those of a save.
        ProtectError::Job(JobError::Refused {
            conflict: Some(Conflict::Permission(MissingPermission::WriteProtection)),
            ..
        }) => {
            Some("; it takes userfaultfd with write protection for all of the VM's memory (docs/operating.md)".into())
        }
        ProtectError::Job(JobError::Refused {
            conflict: Some(Conflict::Disk(DiskConflict::StillWritten)), ..
        }) => Some("; if it is a file that QEMU opens itself, add --disks overlays".into()),
        ProtectError::Job(JobError::Refused {
            conflict: Some(Conflict::Disk(DiskConflict::NotFreezable)), ..
        }) => Some(
            "; if limosa serve serves it, add --disk-server SOCK; say --disks ignore if the disks are kept consistent by \
             other means"
                .into(),
        ),
        ProtectError::ColoUnusable(_) => Some("; or protect it with --via background, every few seconds".into()),
        ProtectError::WritableDisks { .. } => Some(
            "; have them belong to its checkpoints with --disks overlays if QEMU opens them itself, or with --disk-server \
             SOCK if limosa serve serves them; say --disks ignore if they are kept consistent by other means"
                .into(),
        ),
        ProtectError::Job(error) => of_job(error),
        ProtectError::Qmp(error) => of_qmp(error),
        ProtectError::Record(error) => of_record(error),
        ProtectError::Snapshot(error) => of_snapshot(error),
        ProtectError::Channel(error) => Some(of_channel(error)),
        ProtectError::Migrate(error) => Some(of(error)),
        _ => None,
    }
}

fn of_clone(error: &CloneError) -> Option<String> {
    Some(match error {
        CloneError::Running { .. } => "; end it with limosa clone stop, or give --force".into(),
        CloneError::NotMappable { .. } => {
            "; make it so with limosa snapshot seal, or use --memory auto, which gives each clone a copy".into()
        }
        CloneError::Memory { .. } => "; use --memory auto, which gives each clone a copy".into(),
        CloneError::NotFound { .. } => "; limosa clone list shows those that there are".into(),
        CloneError::Job(error) => of_job(error)?,
        CloneError::Snapshot(error) => of_snapshot(error)?,
        _ => return None,
    })
}

fn of_record(error: &JobRecordError) -> Option<String> {
    Some(match error {
        JobRecordError::Elsewhere(_) => "; if it is gone, run 'limosa resume --force'".into(),
        JobRecordError::LeftOver(_) => ": run 'limosa resume' first".into(),
        _ => return None,
    })
}

fn of_resume(error: &ResumeError) -> Option<String> {
    Some(match error {
        ResumeError::Record(error) => of_record(error)?,
        ResumeError::Elsewhere { .. } => ": if it does not, --force continues it here".into(),
        ResumeError::NotOurs { .. } => ": use --force to continue it all the same".into(),
        _ => return None,
    })
}

/// The remedy for a monitor at whose address nothing answers.
fn of_qmp(error: &QmpError) -> Option<String> {
    match error {
        QmpError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            Some("; run limosa as root or as QEMU's user".into())
        }
        QmpError::Busy { monitor, .. } => {
            let holders = monitor.parse().map(|monitor| Holder::of(&monitor)).unwrap_or_default();
            Some(match holders.as_slice() {
                [] => "; close that client, or give QEMU a second -qmp".into(),
                [Holder { watchdog, .. }, ..] => {
                    format!("; it is limosa's watchdog (process {watchdog}), which completes a job: wait until it ends")
                }
            })
        }
        QmpError::Connect { .. } => Some("; is its QEMU running, with -qmp unix:PATH,server=on,wait=off?".into()),
        _ => None,
    }
}

/// The remedies of errors that show another as their own, which is then not in the chain.
fn of_mapped_vm(error: &MappedVmError) -> Option<String> {
    match error {
        MappedVmError::Qmp(error) => of_qmp(error),
        MappedVmError::NotMapping(error) => of_not_mapping(error),
        _ => None,
    }
}

/// The remedy for a process that cannot be asked which pages of a snapshot it has.
fn of_not_mapping(error: &NotMapping) -> Option<String> {
    match error {
        NotMapping::Unseen { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            Some("; run limosa as root or as that process's user".into())
        }
        NotMapping::AnotherFile { .. } => {
            Some("; limosa inspect SNAPSHOT lists the processes that map a snapshot".into())
        }
        _ => None,
    }
}

/// The remedy for a full disk.
const ROOM: &str = "; free some space or choose another directory";

fn of_snapshot(error: &SnapshotError) -> Option<String> {
    match error {
        SnapshotError::Exists { .. } => Some("; choose another name, or give --force to replace it".into()),
        SnapshotError::Full { .. } => Some(ROOM.into()),
        SnapshotError::RecordedStream { .. } => Some("; limosa import makes a snapshot of a recorded stream".into()),
        SnapshotError::Structure { feature: Some(feature), .. } => Some(of_feature(feature).into()),
        SnapshotError::Target { path, .. } => of_scheme(path),
        SnapshotError::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => of_scheme(path),
        _ => None,
    }
}

fn of_foreign(error: &ForeignError) -> Option<String> {
    match error {
        ForeignError::Snapshot(error) => of_snapshot(error),
        _ => None,
    }
}

fn of_pack(error: &PackError) -> Option<String> {
    match error {
        error if error.is_about_passphrase() => {
            Some("; give the one of that file: --object secret,id=s,file=FILE --key-secret s".into())
        }
        // A snapshot that is packed again stays in its directory.
        PackError::Snapshot(SnapshotError::Full { .. }) => Some("; free some space".into()),
        PackError::Snapshot(error) => of_snapshot(error),
        PackError::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => of_scheme(path),
        PackError::Unencrypted { .. } => Some("; add --encrypt".into()),
        PackError::Needed { path, .. } if !is_object(path) => {
            Some("; limosa snapshot merge has it take over what it needs".into())
        }
        PackError::Unknown { .. } => Some("; if it stands on none, leave it out: --ignore NAME".into()),
        _ => None,
    }
}

/// The remedy for a name with a scheme that no store has: it was taken for the name of a file.
fn of_scheme(name: &Path) -> Option<String> {
    let (scheme, rest) = name.to_str()?.split_once(":/")?;
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if !is_scheme || Path::new(&format!("{scheme}:")).exists() {
        return None;
    }
    if is_object(Path::new(&format!("{scheme}://"))) {
        return Some(format!("; a URL has two slashes: {scheme}://{rest}"));
    }
    Some(format!("; {scheme}: is not the scheme of a store, which is s3, gs, az, http or https"))
}

/// The remedy for the library's failure that is the cause of `error`, if one is.
pub(crate) fn of_cause(error: &anyhow::Error) -> String {
    let of_one = |cause: &'_ (dyn std::error::Error + 'static)| {
        let job = cause.downcast_ref().and_then(of_job);
        let record = || cause.downcast_ref().and_then(of_record);
        let resume = || cause.downcast_ref().and_then(of_resume);
        let snapshot = || cause.downcast_ref().and_then(of_snapshot);
        let foreign = || cause.downcast_ref().and_then(of_foreign);
        let protect = || cause.downcast_ref().and_then(of_protect);
        let clone = || cause.downcast_ref().and_then(of_clone);
        let qmp = || cause.downcast_ref().and_then(of_qmp);
        let mapping = || cause.downcast_ref().and_then(of_not_mapping);
        let mapped_vm = || cause.downcast_ref().and_then(of_mapped_vm);
        let pack = || cause.downcast_ref().and_then(of_pack);
        let found = job
            .or_else(protect)
            .or_else(clone)
            .or_else(record)
            .or_else(resume)
            .or_else(snapshot)
            .or_else(foreign)
            .or_else(qmp)
            .or_else(mapping)
            .or_else(mapped_vm)
            .or_else(pack);
        if found.is_some() {
            return found;
        }
        // An image's error shows its storage's error as its own: only here it is found in the chain.
        if let Some(ImageError::Storage(error)) = cause.downcast_ref() {
            return Some(of_storage(error).into());
        }
        if let Some(ImageError::Refused { untrusted: true, .. }) = cause.downcast_ref() {
            return Some(
                "; open it without --untrusted if it is, or name that file: --image-opts \
                 driver=qcow2,file.filename=IMAGE,backing.driver=FMT,backing.file.filename=FILE"
                    .into(),
            );
        }
        if let Some(ImageError::Unreplayed { .. }) = cause.downcast_ref() {
            return Some(
                "; `limosa serve` brings them to it, without --read-only: start it once and end it. To do without them, \
                 remove the journal"
                    .into(),
            );
        }
        if let Some(ImageError::Encryption { image, source: LuksError::NoSecret }) = cause.downcast_ref() {
            return Some(of_encryption(image).into());
        }
        if let Some(remedy) = cause.downcast_ref().and_then(crate::serve::remedy::of) {
            return Some(remedy.into());
        }
        if let Some(ServerError::Listen { source, .. }) = cause.downcast_ref() {
            return Some(of_listen(source).into());
        }
        let migrate = cause.downcast_ref().map(of);
        let channel = || cause.downcast_ref().map(of_channel);
        let stream = || cause.downcast_ref().map(|error| of_stream(error).into());
        let storage = || cause.downcast_ref().map(|error| of_storage(error).into());
        migrate.or_else(channel).or_else(stream).or_else(storage)
    };
    error.chain().find_map(of_one).unwrap_or_default()
}

/// The failure of a listener that expects `channels` multifd channels, with a remedy where they did not come together.
pub(crate) fn with_channels(error: MigrateError, channels: u8) -> anyhow::Error {
    match &error {
        MigrateError::MissingChannels { refused: Some(why), .. } if !of(why).is_empty() => {
            anyhow!("{}{}", error_line(&error), of(why))
        }
        MigrateError::Channels(_) | MigrateError::MissingChannels { .. } if channels == 0 => {
            anyhow!("{}; start it at the source, to this address", error_line(&error))
        }
        MigrateError::Channels(_) | MigrateError::MissingChannels { .. } => {
            anyhow!(
                "{}; set multifd on and multifd-channels to {channels} at the source, and start its migration",
                error_line(&error)
            )
        }
        _ => error.into(),
    }
}

/// The failure of a request for statistics, with a remedy if there is one.
pub(crate) fn with_statistics(error: StatisticsError) -> String {
    match error {
        StatisticsError::NoDriver => format!("{error}: load virtio_balloon there"),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use limosa_stream::ErrorKind;

    use super::*;

    #[test]
    fn what_is_in_a_jobs_error_has_its_remedy() {
        let cause = |error: JobError| of_cause(&anyhow::Error::from(error));
        let exists = SnapshotError::Exists { path: "vm.snapshot".into() };
        assert!(cause(exists.into()).contains("--force"));
        let refused = |conflict| JobError::Refused { why: "blocked; remove what blocks it".into(), conflict };
        assert_eq!(refused(None).to_string(), "blocked; remove what blocks it");
        assert_eq!(cause(refused(None)), "");
        for (conflict, remedy) in [
            (Conflict::Missing(JobOption::OverlayDirectory), "; add --overlay-dir DIR"),
            (Conflict::Options(JobOption::Background, JobOption::Stop), "; leave --background or --stop out"),
            (
                Conflict::Options(JobOption::FileTransport, JobOption::Compression),
                "; leave --compression out, or use --via socket",
            ),
            (
                Conflict::Options(JobOption::LazyMode, JobOption::Channels),
                "; leave --channels out, or use --memory eager",
            ),
            (Conflict::State(StateConflict::SaveInterrupted), "; run limosa resume"),
        ] {
            assert_eq!(cause(refused(Some(conflict))), remedy);
        }
        assert!(of_outcome(Outcome::GaveUp).ends_with("; run 'limosa resume' later"));
    }

    #[test]
    fn a_stream_with_multifd_channels_is_to_be_received_with_them() {
        let error = StreamError::new(7, "section \"ram\"", ErrorKind::Unsupported(UnsupportedFeature::Multifd));
        assert!(of(&MigrateError::Stream(error)).contains("--channels"));
    }

    #[test]
    fn features_of_the_source_that_are_not_supported_can_be_turned_off() {
        for (feature, remedy) in [
            (UnsupportedFeature::Xbzrle, "xbzrle off"),
            (UnsupportedFeature::CompressedPage, "compress off"),
            (UnsupportedFeature::DirtyBitmaps, "dirty-bitmaps off"),
            (UnsupportedFeature::MultifdCompression { method: "qpl" }, "none, zlib or zstd"),
        ] {
            let error = StreamError::new(7, "section \"ram\"", ErrorKind::Unsupported(feature));
            let feature = error.kind().feature().cloned();
            let file = SnapshotError::Structure { path: "vm.snapshot".into(), offset: 7, what: "it".into(), feature };
            assert!(of_cause(&error.into()).contains(remedy), "{remedy}");
            assert!(of_cause(&file.into()).contains(remedy), "{remedy}");
        }
    }

    #[test]
    fn channels_that_were_refused_have_the_remedy_of_that() {
        let refused = MigrateError::WantsTls { peer: "tcp:a:1".into() };
        let what = format!("no main channel (1 other connections were turned away: {refused})");
        let missing =
            |refused| with_channels(MigrateError::MissingChannels { what: what.clone(), refused }, 2).to_string();
        assert!(missing(Some(Box::new(refused))).ends_with("(--tls-creds, and tls-creds in QEMU)"));
        assert!(missing(None).ends_with("start its migration"));
    }

    #[test]
    fn a_failed_tls_handshake_has_a_remedy_by_its_reason() {
        let tls = |failure| ChannelError::Tls {
            operation: Operation::Connect,
            peer: "tcp:a:1".into(),
            offset: None,
            failure: Box::new(failure),
        };
        for (failure, remedy) in [
            (TlsFailure::Expired { ago: Duration::from_secs(1) }, "it needs a new one"),
            (TlsFailure::NotYetValid { ahead: Duration::from_secs(1) }, "check the clocks"),
            (TlsFailure::WrongName { expected: "b".into(), presented: vec![] }, "--tls-hostname"),
            (TlsFailure::NoCertificate, "client-cert.pem and client-key.pem"),
            (TlsFailure::Refused(TlsAlert::CertificateRequired), "next to ca-cert.pem"),
            (TlsFailure::Refused(TlsAlert::Unverifiable), "certificates of the same CA"),
            (TlsFailure::NotTls, "tls-creds"),
            (TlsFailure::HandshakeClosed, "the log of the other end"),
        ] {
            let error = MigrateError::Multifd { id: 1, source: Box::new(tls(failure).into()) };
            assert!(of(&error).contains(remedy), "{error}: {}", of(&error));
        }
        assert_eq!(of_cause(&tls(TlsFailure::BadRecord).into()), "");
    }

    #[test]
    fn an_address_that_cannot_be_used_has_the_remedy_of_its_reason() {
        for (reason, remedy) in [
            (io::ErrorKind::AddrInUse, "choose another"),
            (io::ErrorKind::AddrNotAvailable, "of this host"),
            (io::ErrorKind::InvalidFilename, "107 bytes"),
            (io::ErrorKind::NotFound, "the directory must exist"),
        ] {
            let (operation, peer) = (Operation::Listen, "unix:a".into());
            let channel = ChannelError::Io { operation, peer, offset: None, source: reason.into() };
            let server = ServerError::Listen { path: "a".into(), source: reason.into() };
            assert!(of_cause(&channel.into()).contains(remedy), "{reason}");
            assert!(of_cause(&anyhow::Error::from(server).context("--vhost-user")).contains(remedy), "{reason}");
        }
        let said = without_control(Path::new("a/b"), &io::ErrorKind::AddrInUse.into()).to_string();
        let (operation, peer) = (Operation::Listen, "tcp:a:1".into());
        let source = io::ErrorKind::AddrInUse.into();
        let tcp = of_cause(&ChannelError::Io { operation, peer, offset: None, source }.into());
        assert!(tcp.contains("another port") && !tcp.contains("file"), "{tcp}");
        assert!(said.starts_with("--control: cannot listen on a/b: ") && said.contains("choose another"), "{said}");
    }

    #[test]
    fn a_limit_of_locked_memory_can_be_raised_to_what_a_channel_needs() {
        let (operation, peer) = (Operation::Configure, "tcp:a:1".into());
        let error = ChannelError::MemoryLock { operation, peer, limit: 65_536, least: 1_064_960 };
        assert_eq!(of_cause(&error.into()), "; raise it (ulimit -l 1040, LimitMEMLOCK=1040K), or grant CAP_IPC_LOCK");
    }

    #[test]
    fn a_file_that_another_process_writes_can_be_read_without_a_lock() {
        let locked = |read_only| {
            let holders = LockHolders::NoneVisible;
            let reason = OpenError::Locked { conflict: "locked".into(), holders, read_only };
            StorageError::for_storage(limosa_storage::Operation::Lock, &Arc::from("disk"), reason)
        };
        for error in [locked(true).into(), anyhow::Error::from(ImageError::from(locked(true))).context("not opened")] {
            assert!(of_cause(&error).starts_with("; use -U to read it anyway"), "{error:?}");
        }
        assert_eq!(of_cause(&ImageError::from(locked(false)).into()), "");
    }

    #[test]
    fn what_the_kernel_or_the_filesystem_lacks_is_replaced_by_an_option() {
        let remedy = |reason| {
            of_cause(&StorageError::for_storage(limosa_storage::Operation::Open, &Arc::from("disk"), reason).into())
        };
        assert!(remedy(OpenError::UringUnavailable("not built in".into())).contains("threads"));
        assert!(remedy(OpenError::DirectIoUnsupported).contains("writeback"));
    }

    #[test]
    fn the_remedy_is_found_behind_contexts_and_jobs() {
        let switched = || MigrateError::SwitchedToPostcopy { offset: 7 };
        let context = anyhow::Error::from(JobError::Migrate(switched())).context("not saved");
        for error in [anyhow::Error::from(switched()), context] {
            assert!(of_cause(&error).contains("postcopy-ram off"), "{error:?}");
        }
        assert_eq!(of_cause(&anyhow::anyhow!("something else")), "");
    }
}
