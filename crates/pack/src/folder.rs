//! The snapshots of a folder of an object store: listed, and removed.
//!
//! Law: a snapshot is removed only if it is known of every object of the folder that it does not stand on it; an object
//! that cannot be looked into may. Nothing is packed again, so nothing is ever half done: a prune removes whole objects
//! that no other one needs. Objects have no locks: whether one is being read is not known, nor whether another limosa
//! makes an increment of it at this moment, which finds that out when it is done.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use limosa_image::reference::{ObjectEntry, ObjectStores, OpenObject};
use limosa_page::error_with_causes;
use limosa_storage::{Storage, StorageError};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::entry::{SnapshotEntry, SnapshotFile, fill, is_cut_snapshot};
use crate::error::PackError;
use crate::head::{Head, may_name, starts_as_image};
use crate::open::{Access, open_snapshot};

/// How often a folder is looked at again that others change.
const TRIES: usize = 5;

/// Objects that are kept open: those of a chain are looked into several times.
const OPEN_MOST: usize = 32;

/// A folder of an object store with snapshots.
#[derive(Debug)]
pub struct SnapshotFolder {
    /// Its URL, with a slash at its end.
    url: String,
    access: Access,
    ignored: BTreeSet<OsString>,
    /// Opens objects, and keeps some of them open.
    kept: Access,
    /// The heads of objects that were looked into, by their URLs and tags.
    known: Mutex<HashMap<(String, String), ObjectHead>>,
}

/// The part of an object's head that a list needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ObjectHead {
    is_packed: bool,
    is_encrypted: bool,
    base: Option<OsString>,
    /// The snapshot that the base must hold.
    base_id: Option<Uuid>,
    id: Option<Uuid>,
}

impl SnapshotFolder {
    /// The folder of this URL.
    #[must_use]
    pub fn new(url: &str, access: &Access) -> Self {
        let stores = ObjectStores::new(Arc::new(Kept { stores: access.stores.clone(), open: Mutex::default() }));
        let (access, kept) = (access.clone(), access.clone().stores(stores));
        let url = format!("{}/", url.trim_end_matches('/'));
        Self { url, access, ignored: BTreeSet::new(), kept, known: Mutex::default() }
    }

    /// The folder of a snapshot, and its name there; `None`: it has none.
    #[must_use]
    pub fn of(snapshot: &str, access: &Access) -> Option<(Self, OsString)> {
        let (folder, name) = snapshot.rsplit_once('/').filter(|(folder, _)| !folder.ends_with('/'))?;
        (!name.is_empty()).then(|| (Self::new(folder, access), name.into()))
    }

    /// Leaves objects out of everything: they are said to stand on no snapshot. For objects that cannot be looked into.
    #[must_use]
    pub fn ignoring(mut self, names: impl IntoIterator<Item = OsString>) -> Self {
        self.ignored.extend(names);
        self
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The URL of one of its objects.
    #[must_use]
    pub fn path_of(&self, name: &OsStr) -> PathBuf {
        let mut url = OsString::from(&self.url);
        url.push(name);
        url.into()
    }

    /// Returns its snapshots in the order of their time. Other objects are left out, unless they cannot be looked into.
    ///
    /// # Errors
    /// The store's.
    pub fn list(&self) -> Result<Vec<SnapshotEntry>, PackError> {
        let mut entries: Vec<_> = self.objects()?.into_iter().filter_map(|object| self.entry(&object)).collect();
        entries.sort_by(|a, b| (a.saved, a.written, &a.name).cmp(&(b.saved, b.written, &b.name)));
        Ok(entries)
    }

    /// Removes a snapshot that no other object stands on.
    ///
    /// # Errors
    /// One does, or cannot be looked into; it is not a snapshot; the store's.
    pub fn remove(&self, name: &OsStr) -> Result<(), PackError> {
        self.remove_if(name, None)
    }

    /// Removes a snapshot of a plan, if it is still the one that the plan was made for.
    ///
    /// # Errors
    /// As [`remove`](Self::remove); another snapshot has its name now.
    pub fn remove_planned(&self, planned: &SnapshotFile) -> Result<(), PackError> {
        self.remove_if(&planned.name, Some(planned))
    }

    fn remove_if(&self, name: &OsStr, planned: Option<&SnapshotFile>) -> Result<(), PackError> {
        let path = self.path_of(name);
        let url = path.to_str().ok_or_else(|| PackError::Foreign { path: path.clone() })?;
        let mut objects = self.objects()?;
        for _ in 0..TRIES {
            self.check_removable(name, url, &objects, planned)?;
            // Looking into all of them may have taken minutes.
            let now = self.objects()?;
            if now == objects {
                return self.access.stores.remove(url).map_err(PackError::storage);
            }
            objects = now;
        }
        let what = "the folder is changed all the time".to_owned();
        Err(PackError::Refused { path, what })
    }

    /// Fails unless an object is a snapshot that no other one of these stands on.
    fn check_removable(
        &self,
        name: &OsStr,
        url: &str,
        objects: &[ObjectEntry],
        planned: Option<&SnapshotFile>,
    ) -> Result<(), PackError> {
        let path = PathBuf::from(url);
        let (mut found, mut others) = (None, Vec::new());
        for object in objects {
            let head = self.head_of(object);
            if object.url == url {
                found = Some(head?);
                continue;
            }
            let path = PathBuf::from(&object.url);
            let head = head.map_err(|source| PackError::Unknown { path, source: Box::new(source) })?;
            others.push((object, head));
        }
        let head = found.ok_or_else(|| {
            let what = if self.ignored.contains(name) { "it is ignored" } else { "there is no such object" };
            PackError::Refused { path: path.clone(), what: what.to_owned() }
        })?;
        let foreign = || PackError::Foreign { path: path.clone() };
        let id = match head.id {
            Some(id) => id,
            // What is in it shows whether it is a snapshot.
            None => match open_snapshot(&path, &self.access) {
                Ok(snapshot) => snapshot.id(),
                Err(error) if error.is_unreadable() => return Err(error),
                Err(_) => return Err(foreign()),
            },
        };
        let stands = |head: &ObjectHead| {
            // The name of its base may be another object's now. Then this is what would repair it.
            let has_another = || {
                let is_base = |(other, it): &(&ObjectEntry, ObjectHead)| {
                    it.id == head.base_id && head.leads_to(OsStr::new(self.name_of(other)), &other.url)
                };
                others.iter().any(is_base)
            };
            head.leads_to(name, url) || (head.base_id == Some(id) && !has_another())
        };
        let by: Vec<_> = others.iter().filter(|(_, head)| stands(head)).map(|(object, _)| &object.url).collect();
        if planned.is_some_and(|planned| planned.id != Some(id)) {
            let what = "another snapshot has its name now than when this was planned".to_owned();
            return Err(PackError::Refused { path, what });
        }
        if let Some(first) = by.first() {
            let more = if by.len() > 1 { format!(" and {} more", by.len() - 1) } else { String::new() };
            return Err(PackError::Needed { path, by: format!("{first}{more}") });
        }
        Ok(())
    }

    /// Its objects, without those to be ignored.
    fn objects(&self) -> Result<Vec<ObjectEntry>, PackError> {
        let mut objects = self.access.stores.list(&self.url).map_err(PackError::storage)?;
        // Some programs make an empty object with the name of the folder itself.
        objects.retain(|object| {
            let name = object.url.strip_prefix(&self.url).unwrap_or_default();
            !name.is_empty() && !self.ignored.contains(OsStr::new(name))
        });
        Ok(objects)
    }

    fn name_of<'a>(&self, object: &'a ObjectEntry) -> &'a str {
        object.url.strip_prefix(&self.url).unwrap_or(&object.url)
    }

    /// Looks at an object; `None`: it is no snapshot.
    fn entry(&self, object: &ObjectEntry) -> Option<SnapshotEntry> {
        let mut entry = SnapshotEntry::new(self.name_of(object).into());
        entry.written = object.modified;
        entry.saved = object.modified.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        entry.allocated = object.length;
        match self.head_of(object) {
            Ok(ObjectHead { is_packed, is_encrypted, base, id, .. }) => {
                (entry.is_packed, entry.is_encrypted, entry.base, entry.id) = (is_packed, is_encrypted, base, id);
            }
            Err(error) => {
                entry.fault = Some(error_with_causes(&error));
                return Some(entry);
            }
        }
        entry.is_base_known = true;
        match open_snapshot(Path::new(&object.url), &self.kept) {
            Ok(snapshot) => fill(&mut entry, &snapshot),
            // A disk image, or no snapshot at all.
            Err(error) if entry.id.is_none() && !is_cut_snapshot(&error) && !error.is_unreadable() => return None,
            Err(error) => entry.fault = Some(error_with_causes(&error)),
        }
        Some(entry)
    }

    fn head_of(&self, object: &ObjectEntry) -> Result<ObjectHead, PackError> {
        let key = object.tag.clone().map(|tag| (object.url.clone(), tag));
        if let Some(known) = key.as_ref().and_then(|key| self.known.lock().get(key).cloned()) {
            return Ok(known);
        }
        // Not one that is kept open: it may have been replaced since.
        let storage = self.access.stores.open(&object.url).map_err(PackError::storage)?;
        let mut known = ObjectHead { is_packed: starts_as_image(&*storage)?, ..ObjectHead::default() };
        if known.is_packed {
            let head = Head::read(storage, Path::new(&object.url), self.access.passphrase.as_ref())?;
            if let Some(head) = head {
                known.is_encrypted = head.is_encrypted;
                known.base = head.base_name().map(OsStr::to_os_string);
                known.base_id = head.record.as_ref().and_then(|record| record.base).map(|base| base.id);
                known.id = head.record.map(|record| record.id);
            }
        }
        if let Some(key) = key {
            self.known.lock().insert(key, known.clone());
        }
        Ok(known)
    }
}

impl ObjectHead {
    /// Whether its base may be the object of this name and URL.
    fn leads_to(&self, name: &OsStr, url: &str) -> bool {
        self.base.as_ref().is_some_and(|base| base == url || may_name(base, name))
    }
}

/// A client that keeps some objects open.
struct Kept {
    stores: ObjectStores,
    open: Mutex<HashMap<String, Arc<dyn Storage>>>,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kept").field(&self.stores).finish()
    }
}

impl OpenObject for Kept {
    fn open(&self, url: &str) -> Result<Arc<dyn Storage>, StorageError> {
        if let Some(open) = self.open.lock().get(url) {
            return Ok(Arc::clone(open));
        }
        let opened = self.stores.open(url)?;
        let mut open = self.open.lock();
        if open.len() >= OPEN_MOST {
            open.clear();
        }
        open.insert(url.to_owned(), Arc::clone(&opened));
        Ok(opened)
    }

    fn list(&self, folder: &str) -> Result<Vec<ObjectEntry>, StorageError> {
        self.stores.list(folder)
    }

    fn remove(&self, url: &str) -> Result<(), StorageError> {
        self.open.lock().remove(url);
        self.stores.remove(url)
    }
}
