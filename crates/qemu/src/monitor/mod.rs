//! QMP commands that limosa uses, as typed calls.
//!
//! Law: **only what limosa acts upon is typed; the rest is passed on.** Every answer keeps what QEMU said (`raw`),
//! states that this version of limosa does not know are carried by name, and what is changed in QEMU is recorded before
//! it is changed ([`Settings`]), so that exactly that is put back.
//!
//! Facts found by running QEMU 10.0.2, beyond its documentation, stand with the calls that depend on them.

mod descriptors;
mod devices;
mod disks;
mod graph;
mod machine;
mod migration;
mod networks;
mod ram_blocks;
mod settings;
mod state;
mod waiting;

pub use descriptors::DescriptorSet;
pub use devices::Device;
pub use disks::{Disk, DiskFile};
pub use graph::BlockJob;
pub use machine::{Cpu, FileBackend, MachineType, MemoryBackend};
pub use migration::{MigrationInfo, MigrationStatus, RamProgress};
pub use networks::{NetworkBackend, OutputFilter};
pub use ram_blocks::{RamBlockInfo, parse_ram_blocks};
pub use settings::{SettingChange, Settings};
pub use state::{RunState, VmStatus};
pub(crate) use waiting::WaitingQemu;

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError, Version};

const QOM_GET: &str = "qom-get";
const QOM_LIST: &str = "qom-list";
const HMP: &str = "human-monitor-command";

/// A command that changes nothing, with its arguments.
type Question = (&'static str, Value);

/// QEMU's answer to one of several commands.
type Answer = Result<Value, QmpError>;

/// A QEMU process, seen through its monitor. All methods take `&self` and may be called from several threads.
#[derive(Debug)]
pub struct Monitor {
    qmp: Qmp,
}

impl Monitor {
    /// Over a negotiated connection.
    #[must_use]
    pub fn new(qmp: Qmp) -> Self {
        Self { qmp }
    }

    /// The connection, for events and for commands that have no typed call.
    #[must_use]
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Gives the connection back.
    #[must_use]
    pub fn into_qmp(self) -> Qmp {
        self.qmp
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.qmp.version()
    }

    /// Executes a command for its effect.
    fn order(&self, command: &str, arguments: Value) -> Result<(), QmpError> {
        self.qmp.execute(command, arguments).map(|_| ())
    }

    /// A human monitor command and its text.
    ///
    /// # Errors
    /// The command's or the connection's.
    pub fn hmp(&self, line: &str) -> Result<String, QmpError> {
        let (command, arguments) = hmp_question(line);
        hmp_answer(self.qmp.execute(command, arguments)?)
    }

    /// Creates an object (`-object` on the command line). `properties` are merged with type and id.
    ///
    /// # Errors
    /// QEMU's, among others if there is an object of that id.
    pub fn object_add(&self, kind: &str, id: &str, properties: Value) -> Result<(), QmpError> {
        let mut arguments = match properties {
            Value::Object(map) => map,
            _ => serde_json::Map::new(),
        };
        arguments.insert("qom-type".to_owned(), kind.into());
        arguments.insert("id".to_owned(), id.into());
        self.order("object-add", Value::Object(arguments))
    }

    /// Removes an object.
    ///
    /// # Errors
    /// QEMU's, among others if no object has that id.
    pub fn object_del(&self, id: &str) -> Result<(), QmpError> {
        self.order("object-del", json!({ "id": id }))
    }

    /// A property of an object; `None` if there is no such object.
    ///
    /// # Errors
    /// QEMU's, among others if the object has no such property.
    pub fn qom_get(&self, path: &str, property: &str) -> Result<Option<Value>, QmpError> {
        property_of(self.qmp.execute(QOM_GET, json!({ "path": path, "property": property })))
    }

    /// Properties of an object, asked at once; `None` for those that QEMU refuses, because the object or the property
    /// does not exist.
    ///
    /// # Errors
    /// The connection's.
    pub fn qom_get_all<const N: usize>(
        &self,
        path: &str,
        properties: [&str; N],
    ) -> Result<[Option<Value>; N], QmpError> {
        let commands = properties.map(|property| (QOM_GET, json!({ "path": path, "property": property })));
        let mut failed = None;
        let values = self.qmp.execute_all(commands)?.map(|answer| match property_of(answer) {
            Ok(value) => value,
            Err(error) if error.is_refusal() => None,
            Err(error) => {
                failed.get_or_insert(error);
                None
            }
        });
        failed.map_or(Ok(values), Err)
    }

    /// Sets a property of an object.
    ///
    /// # Errors
    /// QEMU's.
    pub fn qom_set(&self, path: &str, property: &str, value: Value) -> Result<(), QmpError> {
        self.order("qom-set", json!({ "path": path, "property": property, "value": value }))
    }

    /// Names and types of an object's properties; empty if there is no such object.
    ///
    /// # Errors
    /// QEMU's or the connection's.
    pub fn qom_list(&self, path: &str) -> Result<Vec<(String, String)>, QmpError> {
        property_list(self.qmp.execute(QOM_LIST, json!({ "path": path })))
    }
}

/// The command that executes a human monitor command.
fn hmp_question(line: &str) -> Question {
    (HMP, json!({ "command-line": line }))
}

fn hmp_answer(answer: Value) -> Result<String, QmpError> {
    match answer {
        Value::String(text) => Ok(text),
        other => Err(QmpError::unexpected(HMP, "text", &other)),
    }
}

/// The answer to [`QOM_GET`]; `None`: there is no such object.
fn property_of(answer: Result<Value, QmpError>) -> Result<Option<Value>, QmpError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Command { class, .. }) if class == "DeviceNotFound" => Ok(None),
        Err(other) => Err(other),
    }
}

/// The answer to [`QOM_LIST`]; empty if there is no such object.
fn property_list(answer: Result<Value, QmpError>) -> Result<Vec<(String, String)>, QmpError> {
    let Some(answer) = property_of(answer)? else { return Ok(Vec::new()) };
    let list = answer.as_array().ok_or_else(|| QmpError::unexpected(QOM_LIST, "a list", &answer))?;
    let text = |item: &Value, key: &str| item.get(key).and_then(Value::as_str).map(str::to_owned);
    Ok(list.iter().filter_map(|item| Some((text(item, "name")?, text(item, "type")?))).collect())
}

/// A field of an answer that must be there.
fn need<'a>(command: &str, answer: &'a Value, key: &str) -> Result<&'a Value, QmpError> {
    answer.get(key).ok_or_else(|| QmpError::unexpected(command, format!("'{key}'"), answer))
}

/// A text field of an answer that must be there.
fn need_text<'a>(command: &str, answer: &'a Value, key: &str) -> Result<&'a str, QmpError> {
    need(command, answer, key)?
        .as_str()
        .ok_or_else(|| QmpError::unexpected(command, format!("text in '{key}'"), answer))
}

/// A list that an answer must be.
fn need_list<'a>(command: &str, answer: &'a Value) -> Result<&'a Vec<Value>, QmpError> {
    answer.as_array().ok_or_else(|| QmpError::unexpected(command, "a list", answer))
}

/// An enum of names that QEMU may extend: unknown names are kept.
macro_rules! named_states {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
            /// A name that this version of limosa does not know.
            Other(String),
        }

        impl $name {
            /// QEMU's name for it.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::Other(name) => name,
                }
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                match name {
                    $($text => Self::$variant,)*
                    other => Self::Other(other.to_owned()),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
use named_states;
