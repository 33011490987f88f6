//! Back ends of network cards: `info network`, text for people that no QMP command replaces.

use super::{Monitor, hmp_answer, hmp_question};
use crate::qmp::QmpError;

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
}

impl Monitor {
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
        let kind = properties.split(',').find_map(|property| property.trim().strip_prefix("type="))?;
        Some(NetworkBackend { id: id.trim().to_owned(), kind: kind.to_owned() })
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
                    type=user,net=10.0.2.0,restrict=off\r\nn2: index=0,type=tap\r\n";
        let found: Vec<_> = parse(text).into_iter().map(|backend| (backend.id, backend.kind)).collect();
        let expected = [("n0", "stream"), ("n1", "user")].map(|(id, kind)| (id.to_owned(), kind.to_owned()));
        assert_eq!(found, expected);
        assert!(parse("").is_empty() && parse(" \\ n0\n\\: type").is_empty());
    }
}
