//! The VM's name, uuid, machine type and memory backends.

use serde_json::{Value, json};

use super::{Answer, Monitor, QOM_GET, QOM_LIST, Question, need, need_list, need_text, property_list, property_of};
use crate::qmp::QmpError;

/// A memory backend object of the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBackend {
    /// Its id.
    pub id: String,
    /// Its type: `memory-backend-ram`, `memory-backend-file`, `memory-backend-memfd`.
    pub kind: String,
    /// Bytes.
    pub size: u64,
    /// Whether it is mapped shared. Postcopy cannot fill private memory of a file on disk.
    pub share: bool,
}

impl MemoryBackend {
    /// Whether it maps a file of a name.
    #[must_use]
    pub fn maps_file(&self) -> bool {
        self.kind == "memory-backend-file"
    }
}

/// A memory backend that maps a file of a name (`memory-backend-file`).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileBackend {
    /// Its id.
    pub id: String,
    /// The file, as QEMU was given it; relative to QEMU's working directory.
    pub path: String,
    /// Bytes that it maps.
    pub size: u64,
    /// Where in the file they begin; none in a QEMU before 8.1, which maps files from their beginning.
    pub offset: Option<u64>,
    /// Whether it is mapped shared: what the guest writes reaches the file.
    pub share: bool,
    /// Whether the file is open for reading only. The memory may be written all the same, where it is not shared
    /// (`rom=off`, QEMU 8.2).
    pub readonly: bool,
    /// Whether it is writable memory over a file that is only read (`rom=off`).
    pub has_rom_off: bool,
}

/// A machine type that a QEMU can be started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineType {
    /// Its name, as the stream has it.
    pub name: String,
    /// Whether a later version is to drop it.
    pub deprecated: bool,
}

/// A vCPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub index: u64,
    /// Its object.
    pub path: String,
    /// The id of its thread, as QEMU sees it (its pid namespace).
    pub thread: Option<u64>,
}

impl Monitor {
    /// Whether KVM runs the VM.
    ///
    /// # Errors
    /// QEMU's or the connection's.
    pub fn has_kvm(&self) -> Result<bool, QmpError> {
        const COMMAND: &str = "query-kvm";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let enabled = need(COMMAND, &answer, "enabled")?.as_bool();
        enabled.ok_or_else(|| QmpError::unexpected(COMMAND, "a boolean in 'enabled'", &answer))
    }

    /// The machine types that this QEMU can be started with.
    ///
    /// # Errors
    /// The connection's.
    pub fn machines(&self) -> Result<Vec<MachineType>, QmpError> {
        const COMMAND: &str = "query-machines";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let machines = need_list(COMMAND, &answer)?.iter().filter_map(|entry| {
            Some(MachineType {
                name: entry.get("name")?.as_str()?.to_owned(),
                deprecated: entry.get("deprecated").and_then(Value::as_bool).unwrap_or_default(),
            })
        });
        Ok(machines.collect())
    }

    /// The vCPUs.
    ///
    /// # Errors
    /// The connection's.
    pub fn cpus(&self) -> Result<Vec<Cpu>, QmpError> {
        const COMMAND: &str = "query-cpus-fast";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let cpus = need_list(COMMAND, &answer)?.iter().filter_map(|entry| {
            Some(Cpu {
                index: entry.get("cpu-index")?.as_u64()?,
                path: entry.get("qom-path")?.as_str()?.to_owned(),
                thread: entry.get("thread-id").and_then(Value::as_u64),
            })
        });
        Ok(cpus.collect())
    }

    /// The machine type as the stream names it, for example `pc-q35-10.0`.
    ///
    /// # Errors
    /// The connection's.
    pub fn machine(&self) -> Result<String, QmpError> {
        let (command, arguments) = type_question();
        type_answer(self.qmp().execute(command, arguments))
    }

    /// The name given with `-name`.
    ///
    /// # Errors
    /// The connection's.
    pub fn vm_name(&self) -> Result<Option<String>, QmpError> {
        let answer = self.qmp().execute("query-name", Value::Null)?;
        Ok(answer.get("name").and_then(Value::as_str).map(str::to_owned))
    }

    /// The uuid given with `-uuid`; `None` if there was none (QEMU then says it is all zeros).
    ///
    /// # Errors
    /// The connection's.
    pub fn uuid(&self) -> Result<Option<uuid::Uuid>, QmpError> {
        const COMMAND: &str = "query-uuid";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let uuid = need_text(COMMAND, &answer, "UUID")?;
        let uuid = uuid::Uuid::parse_str(uuid).map_err(|_| QmpError::unexpected(COMMAND, "a uuid", &answer))?;
        Ok(Some(uuid).filter(|uuid| !uuid.is_nil()))
    }

    /// The memory backends that map files.
    ///
    /// # Errors
    /// The connection's.
    pub fn file_backends(&self) -> Result<Vec<FileBackend>, QmpError> {
        self.file_backends_among(&self.memory_backends()?)
    }

    /// Those of these memory backends that map files.
    pub(super) fn file_backends_among(&self, backends: &[MemoryBackend]) -> Result<Vec<FileBackend>, QmpError> {
        let mut found = Vec::new();
        for backend in backends.iter().filter(|backend| backend.maps_file()) {
            let object = format!("/objects/{}", backend.id);
            // A version of QEMU may not have all of them.
            let properties = ["mem-path", "offset", "rom", "readonly"];
            let [path, offset, rom, readonly] = self.qom_get_all(&object, properties)?;
            found.push(FileBackend {
                path: path.and_then(|path| path.as_str().map(str::to_owned)).unwrap_or_default(),
                size: backend.size,
                offset: offset.and_then(|offset| offset.as_u64()),
                share: backend.share,
                has_rom_off: rom.is_some_and(|rom| rom == "off"),
                readonly: readonly.and_then(|readonly| readonly.as_bool()).unwrap_or_default(),
                id: backend.id.clone(),
            });
        }
        Ok(found)
    }

    /// The RAM blocks that memory backends make, by name.
    ///
    /// # Errors
    /// The connection's.
    pub fn guest_memory(&self) -> Result<Vec<String>, QmpError> {
        let backends = self.memory_backends()?;
        // Machine types of old name the block by the object's whole path.
        let is_of = |block: &str, id: &str| block == id || block.strip_prefix("/objects/") == Some(id);
        let blocks = self.ram_blocks()?.into_iter();
        let names = blocks.map(|block| block.name);
        Ok(names.filter(|name| backends.iter().any(|backend| is_of(name, &backend.id))).collect())
    }

    /// The memory backends.
    ///
    /// # Errors
    /// The connection's.
    pub fn memory_backends(&self) -> Result<Vec<MemoryBackend>, QmpError> {
        let [kinds, backends] = self.qmp().execute_all(backends_questions())?;
        backends_answers(kinds, backends)
    }
}

pub(super) fn type_question() -> Question {
    (QOM_GET, json!({ "path": "/machine", "property": "type" }))
}

pub(super) fn type_answer(answer: Answer) -> Result<String, QmpError> {
    let kind = property_of(answer)?.unwrap_or(Value::Null);
    // The type of the machine object is the name of the machine class with this suffix, aliases resolved.
    let name = kind.as_str().and_then(|kind| kind.strip_suffix("-machine"));
    name.map(str::to_owned).ok_or_else(|| QmpError::unexpected(QOM_GET, "the machine's type", &kind))
}

const QUERY_MEMDEV: &str = "query-memdev";

/// The objects of the VM, and its memory backends.
pub(super) fn backends_questions() -> [Question; 2] {
    [(QOM_LIST, json!({ "path": "/objects" })), (QUERY_MEMDEV, Value::Null)]
}

pub(super) fn backends_answers(kinds: Answer, backends: Answer) -> Result<Vec<MemoryBackend>, QmpError> {
    let (kinds, answer) = (property_list(kinds)?, backends?);
    let mut backends = Vec::new();
    for entry in need_list(QUERY_MEMDEV, &answer)? {
        let id = entry.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
        let kind = kinds.iter().find(|(name, _)| *name == id).and_then(|(_, kind)| {
            kind.strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')).map(str::to_owned)
        });
        backends.push(MemoryBackend {
            kind: kind.unwrap_or_default(),
            size: entry.get("size").and_then(Value::as_u64).unwrap_or_default(),
            share: entry.get("share").and_then(Value::as_bool).unwrap_or_default(),
            id,
        });
    }
    Ok(backends)
}
