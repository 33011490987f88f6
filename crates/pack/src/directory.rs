//! The snapshots of a directory: which of them stand on which, and how one is taken out.
//!
//! Law: **an increment is readable at every moment**, also after a kill or a power cut. A snapshot that others stand on
//! is replaced by one of the same contents in three steps: each of them gets the digest of the new file beside that of
//! the old one, then the new file gets the name, then the old digest is dropped. The new digest stays behind if only
//! the last step is missing.
//!
//! Who changes a snapshot holds its exclusive lock, and looks for those that stand on it only then: a new one would
//! have to take the lock of a server first ([`Base::open`]).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use limosa_image::luks::Passphrase;
use limosa_migrate::Handle;
use limosa_page::{PAGE_SIZE, error_with_causes};
use limosa_snapshot::{HeldSnapshot, Snapshot, SnapshotError, UnnamedFile};
use uuid::Uuid;

use crate::base::Base;
use crate::chain::{Level, is_image};
use crate::error::PackError;
use crate::open::{open_file, open_snapshot};
use crate::pack::{PackEncryption, PackOptions, Packed, write};
use crate::record::{BaseRecord, Record};

/// A directory with snapshots.
#[derive(Debug)]
pub struct SnapshotDirectory {
    path: PathBuf,
    passphrase: Option<Passphrase>,
}

/// A snapshot of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotEntry {
    /// The file's name.
    pub name: OsString,
    /// The snapshot's id, if it can be read.
    pub id: Option<Uuid>,
    /// The VM: its uuid, else its name, else nothing.
    pub vm: String,
    /// When it was saved, in seconds since 1970; when the file was written, if that is not recorded.
    pub saved: u64,
    /// Bytes that the file takes on the disk.
    pub allocated: u64,
    /// Bytes of pages that it stores, those of its bases included.
    pub page_bytes: u64,
    /// Whether it is packed.
    pub is_packed: bool,
    /// Whether it is encrypted.
    pub is_encrypted: bool,
    /// The name of the file that it stands on.
    pub base: Option<OsString>,
    /// Why it cannot be restored, if it cannot be read.
    pub fault: Option<String>,
}

impl SnapshotDirectory {
    /// A directory whose encrypted snapshots are opened with this passphrase.
    #[must_use]
    pub fn new(path: &Path, passphrase: Option<Passphrase>) -> Self {
        Self { path: path.to_path_buf(), passphrase }
    }

    /// The directory of a snapshot.
    ///
    /// # Errors
    /// It has no name, or is a symbolic link.
    pub fn of(snapshot: &Path, passphrase: Option<Passphrase>) -> Result<(Self, OsString), PackError> {
        let refused = |why: &str| {
            PackError::Snapshot(SnapshotError::Target { path: snapshot.to_path_buf(), why: why.to_owned() })
        };
        let name = snapshot.file_name().ok_or_else(|| refused("is not the name of a file"))?;
        let parent = snapshot.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if snapshot.is_symlink() {
            return Err(refused("is a symbolic link; name the file that it leads to"));
        }
        Ok((Self::new(parent, passphrase), name.to_os_string()))
    }

    /// The path of one of its files.
    #[must_use]
    pub fn path_of(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// Returns its snapshots in the order of their time. Other files are left out.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<SnapshotEntry>, PackError> {
        let entries = self.names()?.into_iter().filter_map(|name| self.entry(name).transpose());
        let mut entries = entries.collect::<Result<Vec<_>, _>>()?;
        entries.sort_by(|a, b| (a.saved, &a.name).cmp(&(b.saved, &b.name)));
        Ok(entries)
    }

    /// The names of its regular files that are not hidden.
    fn names(&self) -> Result<Vec<OsString>, PackError> {
        let read = std::fs::read_dir(&self.path).map_err(PackError::io("read it", &self.path))?;
        let mut names = Vec::new();
        for entry in read {
            let entry = entry.map_err(PackError::io("read it", &self.path))?;
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            if is_file && !entry.file_name().as_encoded_bytes().starts_with(b".") {
                names.push(entry.file_name());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Looks at a file; `None`: it is no snapshot.
    fn entry(&self, name: OsString) -> Result<Option<SnapshotEntry>, PackError> {
        let path = self.path_of(&name);
        let file = match open_file(&path) {
            Ok(file) => file,
            // Removed meanwhile, or not for this user.
            Err(_) => return Ok(None),
        };
        let metadata = file.metadata().map_err(PackError::io("look at it", &path))?;
        let is_packed = is_image(&file);
        let mut entry = SnapshotEntry {
            name,
            id: None,
            vm: String::new(),
            saved: u64::try_from(metadata.mtime()).unwrap_or(0),
            allocated: metadata.blocks().saturating_mul(512),
            page_bytes: 0,
            is_packed,
            is_encrypted: false,
            base: None,
            fault: None,
        };
        if is_packed {
            match Level::open(file, &path, self.passphrase.as_ref()) {
                Ok(level) => {
                    entry.base = level.base_name().map(OsStr::to_os_string);
                    entry.is_encrypted = level.is_encrypted;
                    entry.id = level.record().map(|record| record.id);
                }
                Err(error) => {
                    entry.is_encrypted = matches!(error, PackError::NoPassphrase { .. });
                    entry.fault = Some(error_with_causes(&error));
                    return Ok(Some(entry));
                }
            }
        }
        match open_snapshot(&path, self.passphrase.as_ref()) {
            Ok(snapshot) => entry.fill(&snapshot),
            Err(error) => {
                // A disk image, or no snapshot at all.
                if entry.id.is_none() && !is_cut_snapshot(&error) {
                    return Ok(None);
                }
                entry.fault = Some(error_with_causes(&error));
            }
        }
        Ok(Some(entry))
    }

    /// Returns the names of the files that stand on one.
    ///
    /// # Errors
    /// It cannot be known, because one cannot be opened.
    pub fn dependents(&self, name: &OsStr) -> Result<Vec<OsString>, PackError> {
        let mut dependents = Vec::new();
        for other in self.names()?.into_iter().filter(|other| other != name) {
            let path = self.path_of(&other);
            let Ok(file) = open_file(&path) else { continue };
            if !is_image(&file) {
                continue;
            }
            let level = match Level::open(file, &path, self.passphrase.as_ref()) {
                Ok(level) => level,
                Err(error) if error.is_about_passphrase() => {
                    return Err(PackError::Base {
                        path,
                        base: name.display().to_string(),
                        what: "it may be one, and the image cannot be opened without its passphrase".to_owned(),
                    });
                }
                // Some other image, or one that is damaged and has to be repaired from a copy.
                Err(_) => continue,
            };
            if level.base_name() == Some(name) {
                dependents.push(other);
            }
        }
        Ok(dependents)
    }

    /// Removes a snapshot that no other one stands on.
    ///
    /// # Errors
    /// One does; it is served; the kernel's.
    pub fn remove(&self, name: &OsStr) -> Result<(), PackError> {
        let path = self.path_of(name);
        let held = HeldSnapshot::lock(&path)?;
        let dependents = self.dependents(name)?;
        if let Some(first) = dependents.first() {
            let more = match dependents.len() {
                1 => String::new(),
                count => format!(" and {} more", count - 1),
            };
            return Err(PackError::Needed { path, by: format!("{}{more}", first.display()) });
        }
        Ok(held.remove()?)
    }

    /// Has a snapshot stand on another base of the directory, or on none, without changing what it holds. What stands
    /// on it stays.
    ///
    /// # Errors
    /// It is served, or one that stands on it is; the base stands on it, or cannot be one; it cannot be read or
    /// written.
    pub fn rebase(
        &self,
        name: &OsStr,
        base: Option<&OsStr>,
        options: &PackOptions,
        handle: &Handle,
    ) -> Result<Packed, PackError> {
        let path = self.path_of(name);
        let passphrase = self.passphrase.as_ref();
        let file = open_file(&path)?;
        if !is_image(&file) {
            let what = "a snapshot that is not packed stands on nothing".to_owned();
            return Err(PackError::Unsupported { path, what });
        }
        let is_encrypted = Level::open(file, &path, passphrase)?.is_encrypted;
        let base = base.map(|base| Base::open_unlocked(&self.path_of(base), passphrase)).transpose()?;
        if let Some(base) = &base
            && base.stands_on(&path)
        {
            let (base, what) = (base.name().display().to_string(), "stands on it already".to_owned());
            return Err(PackError::Base { path, base, what });
        }
        let pending = UnnamedFile::create(&path, true)?;
        base.as_ref().map_or(Ok(()), Base::lock)?;
        let mut options = options.clone();
        if let (true, None, Some(key)) = (is_encrypted, &options.encryption, passphrase) {
            options.encryption = Some(PackEncryption::new(key.clone()));
        }
        let snapshot = open_snapshot(&path, passphrase)?;
        let mut dependents = Dependents::hold(self, name)?;
        let (mut packed, tables) = write(&snapshot, &pending, base.as_ref(), &options, handle)?;
        drop(snapshot);
        dependents.announce(tables)?;
        packed.path = pending.publish(options.durability)?;
        dependents.settle(tables)?;
        Ok(packed)
    }

    /// Takes a snapshot out of its chain: what stands on it stands on its base then, or on none, and it is removed.
    ///
    /// # Errors
    /// As [`rebase`](Self::rebase); nothing stands on it. What was done before an error stays done, and a repetition
    /// continues there.
    pub fn merge(&self, name: &OsStr, options: &PackOptions, handle: &Handle) -> Result<Vec<Packed>, PackError> {
        let path = self.path_of(name);
        let dependents = self.dependents(name)?;
        if dependents.is_empty() {
            let what = "no snapshot stands on it, so there is nothing that it could be merged into".to_owned();
            return Err(PackError::Unsupported { path, what });
        }
        let base = Level::open(open_file(&path)?, &path, self.passphrase.as_ref())?;
        let base = base.base_name().map(OsStr::to_os_string);
        let rebase = |dependent: &OsString| self.rebase(dependent, base.as_deref(), options, handle);
        let packed = dependents.iter().map(rebase).collect::<Result<Vec<_>, _>>()?;
        self.remove(name)?;
        Ok(packed)
    }
}

impl SnapshotEntry {
    fn fill(&mut self, snapshot: &Snapshot) {
        self.id = Some(snapshot.id());
        self.page_bytes = snapshot.stored_pages().saturating_mul(PAGE_SIZE);
        if let Some(manifest) = snapshot.manifest() {
            let uuid = manifest.vm_uuid.map(|uuid| uuid.to_string());
            self.vm = uuid.or_else(|| manifest.vm_name.clone()).unwrap_or_default();
            if manifest.finished > 0 {
                self.saved = manifest.finished;
            }
        }
    }
}

/// Whether a file was a snapshot once.
fn is_cut_snapshot(error: &PackError) -> bool {
    matches!(error, PackError::Snapshot(SnapshotError::Structure { .. }) | PackError::Base { .. })
}

/// The snapshots that stand on one which is replaced, locked.
#[derive(Debug)]
struct Dependents(Vec<(HeldSnapshot, Level, Record, BaseRecord)>);

impl Dependents {
    fn hold(directory: &SnapshotDirectory, name: &OsStr) -> Result<Self, PackError> {
        let mut held = Vec::new();
        for dependent in directory.dependents(name)? {
            let path = directory.path_of(&dependent);
            let lock = HeldSnapshot::lock(&path)?;
            let file = File::options().read(true).write(true).open(&path).map_err(PackError::io("open it", &path))?;
            let level = Level::open_to_change(file, &path, directory.passphrase.as_ref())?;
            // Of one without a record nothing has to change: another program made it, and it is not read.
            if let Some((record, base)) = level.record().and_then(|record| Some((record, record.base?))) {
                held.push((lock, level, record, base));
            }
        }
        Ok(Self(held))
    }

    /// Lets them stand on the new file, too.
    fn announce(&mut self, tables: [u8; 32]) -> Result<(), PackError> {
        for (_, level, record, base) in &mut self.0 {
            base.next_tables = Some(tables);
            record.base = Some(*base);
            level.change_record(*record)?;
        }
        Ok(())
    }

    /// Lets them stand on the new file alone.
    fn settle(&mut self, tables: [u8; 32]) -> Result<(), PackError> {
        for next_tables in [Some(tables), None] {
            for (_, level, record, base) in &mut self.0 {
                *base = BaseRecord { tables, next_tables, ..*base };
                record.base = Some(*base);
                level.change_record(*record)?;
            }
        }
        Ok(())
    }
}
