//! Back ends of network cards: `info network`, text for people that no QMP command replaces; and filters on them that
//! hold back what the VM sends.

use serde_json::{Value, json};

use super::{Monitor, hmp_answer, hmp_question};
use crate::qmp::QmpError;

/// Microseconds after which a filter lets packets out by itself: the longest that QEMU takes, 71 minutes. They begin
/// when the filter is switched on.
const FILTER_INTERVAL: u32 = u32::MAX;

/// More cards than any machine has; the rest is not read.
const MAX_CARDS: usize = 4096;

/// The back end of a network card.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetworkBackend {
    /// Its id.
    pub id: String,
    /// Its type, for example `stream`, `user` or `tap`.
    pub kind: String,
    /// Whether it is a port of a hub (`-net`), which other back ends and cards are behind.
    pub is_hub_port: bool,
}

/// An object of QEMU that holds the packets of a VM back while it is switched on (`filter-buffer`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFilter(String);

impl OutputFilter {
    /// The filter of this id, which may not exist yet.
    #[must_use]
    pub fn new(id: &str) -> Self {
        Self(id.to_owned())
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.0
    }

    fn switch(&self, on: bool) -> (&'static str, Value) {
        let status = if on { "on" } else { "off" };
        ("qom-set", json!({ "path": format!("/objects/{}", self.0), "property": "status", "value": status }))
    }
}

impl Monitor {
    /// Adds two filters to a network, switched off. What the VM sends passes through the second one first.
    ///
    /// # Errors
    /// QEMU's: the network has a vhost back end or several queues.
    pub fn add_output_filters(&self, network: &str, filters: [&OutputFilter; 2]) -> Result<(), QmpError> {
        let add = |filter: &OutputFilter| {
            let arguments = json!({
                "qom-type": "filter-buffer",
                "id": filter.id(),
                "netdev": network,
                // Of the back end: what it receives is what the VM sends.
                "queue": "rx",
                "interval": FILTER_INTERVAL,
                "status": "off",
            });
            ("object-add", arguments)
        };
        let [first, second] = self.qmp().execute_all(filters.map(add))?;
        first.and(second).map(drop)
    }

    /// Switches filters on or off, in this order and without time between. One that is switched off passes on what it
    /// has.
    ///
    /// # Errors
    /// QEMU's, or the connection's.
    pub fn switch_output_filters(&self, switches: [(&OutputFilter, bool); 2]) -> Result<(), QmpError> {
        let [first, second] = self.qmp().execute_all(switches.map(|(filter, on)| filter.switch(on)))?;
        first.and(second).map(drop)
    }

    /// Removes a filter, which passes on what it has. Its absence is no error.
    ///
    /// # Errors
    /// QEMU's, or the connection's.
    pub fn remove_output_filter(&self, id: &str) -> Result<(), QmpError> {
        match self.object_del(id) {
            Err(error) if error.is_refusal() && self.qom_get(&format!("/objects/{id}"), "type")?.is_none() => Ok(()),
            other => other,
        }
    }

    /// The back ends of all network cards.
    ///
    /// # Errors
    /// The connection's.
    pub fn network_backends(&self) -> Result<Vec<NetworkBackend>, QmpError> {
        let (command, arguments) = hmp_question("info network");
        Ok(parse(&hmp_answer(self.qmp().execute(command, arguments)?)?))
    }
}

/// Reads the lines of back ends behind a card: a backslash, the id and a colon, then properties.
fn parse(text: &str) -> Vec<NetworkBackend> {
    let backend = |line: &str| {
        let (id, properties) = line.trim().strip_prefix('\\')?.split_once(": ")?;
        let (first, _) = properties.split_once(',')?;
        let kind = properties.split(',').find_map(|property| property.trim().strip_prefix("type="))?;
        // The line of a port names what it is connected to, too.
        let is_hub_port = first.contains(": ");
        Some(NetworkBackend { id: id.trim().to_owned(), kind: kind.to_owned(), is_hub_port })
    };
    text.lines().filter_map(backend).filter(|backend| backend.kind != "nic").take(MAX_CARDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_ends_of_cards_are_found_and_those_without_a_card_are_not() {
        let text = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \\ n0: \
                    index=0,type=stream,connecting\r\ne1000.0: index=0,type=nic,model=e1000\r\n \\ n1: index=0,\
                    type=user,net=10.0.2.0,restrict=off\r\nn2: index=0,type=tap\r\nhub 0\r\n \\ hub0port1: #net140: \
                    index=0,type=user\r\n \\ hub0port0: e1000.1: index=0,type=nic,model=e1000\r\n";
        let found: Vec<_> = parse(text).into_iter().map(|one| (one.id, one.kind, one.is_hub_port)).collect();
        let expected = [("n0", "stream", false), ("n1", "user", false), ("hub0port1", "user", true)];
        assert_eq!(found, expected.map(|(id, kind, hub)| (id.to_owned(), kind.to_owned(), hub)));
        assert!(parse("").is_empty() && parse(" \\ n0\n\\: type").is_empty());
    }
}
