//! The name and the uuid of a libvirt domain, out of its XML.
//!
//! Both are children of the root element, so this is as much of an XML reader as finds these: it follows tags,
//! comments, CDATA and quoted attributes, and nothing else of the document matters. A document type, which could define
//! entities, is refused.
//!
//! Law of this module: work in proportion to the text, memory in proportion to its depth, which is bounded.

use uuid::Uuid;

/// Deepest nesting; a domain's is below 12.
const DEPTH_LIMIT: usize = 256;
/// Longest name, in bytes.
const NAME_LIMIT: usize = 1024;

/// The identity of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Identity {
    pub(super) name: Option<String>,
    pub(super) uuid: Option<Uuid>,
}

/// One piece of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece<'a> {
    /// `<name ...>`.
    Open(&'a str),
    /// `<name ... />`.
    Empty(&'a str),
    /// `</name>`.
    Close(&'a str),
    /// Text; `true` if it has entities to be resolved.
    Text(&'a str, bool),
}

/// Finds name and uuid.
pub(super) fn identity(xml: &str) -> Result<Identity, String> {
    let mut pieces = Pieces { rest: xml };
    let mut open: Vec<&str> = Vec::new();
    let mut found = Identity::default();
    let mut text = String::new();
    let mut seen_root = false;
    while let Some(piece) = pieces.next()? {
        match piece {
            Piece::Open(name) | Piece::Empty(name) if open.is_empty() => {
                if seen_root || name != "domain" {
                    return Err(format!("expected one <domain>, found <{}>", shortened(name)));
                }
                seen_root = true;
                if matches!(piece, Piece::Open(_)) {
                    open.push(name);
                }
            }
            Piece::Open(name) => {
                if open.len() >= DEPTH_LIMIT {
                    return Err(format!("elements inside each other more than {DEPTH_LIMIT} deep"));
                }
                open.push(name);
                text.clear();
            }
            Piece::Empty(_) => {}
            Piece::Text(piece, entities) => {
                if let ["domain", "name" | "uuid"] = open.as_slice()
                    && text.len().saturating_add(piece.len()) <= NAME_LIMIT
                {
                    if entities { resolve(piece, &mut text)? } else { text.push_str(piece) }
                }
            }
            Piece::Close(name) => {
                match open.as_slice() {
                    ["domain", "name"] if found.name.is_none() => found.name = Some(printable(&text)?),
                    ["domain", "uuid"] if found.uuid.is_none() => {
                        let uuid = text.trim().parse();
                        found.uuid = Some(uuid.map_err(|_| format!("{:?} is no uuid", shortened(text.trim())))?);
                    }
                    _ => {}
                }
                if open.pop() != Some(name) {
                    return Err(format!("</{}> ends what it did not begin", shortened(name)));
                }
            }
        }
    }
    match open.last() {
        Some(name) => Err(format!("<{}> has no end", shortened(name))),
        None if !seen_root => Err("there is no <domain> in it".to_owned()),
        None => Ok(found),
    }
}

/// Returns the beginning of a text, for a message.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

/// The domain's name: it is shown on terminals.
fn printable(text: &str) -> Result<String, String> {
    if text.chars().any(char::is_control) {
        return Err(format!("the domain's name {:?} has control characters", shortened(text)));
    }
    Ok(text.to_owned())
}

/// Replaces predefined and numbered entities by their characters.
fn resolve(mut text: &str, out: &mut String) -> Result<(), String> {
    while let Some((before, rest)) = text.split_once('&') {
        out.push_str(before);
        let unknown = || format!("&{}: no known entity", shortened(rest));
        let (entity, behind) = rest.split_once(';').ok_or_else(unknown)?;
        let number = |digits: &str, radix| u32::from_str_radix(digits, radix).ok().and_then(char::from_u32);
        out.push(match entity {
            "lt" => '<',
            "gt" => '>',
            "amp" => '&',
            "quot" => '"',
            "apos" => '\'',
            _ => match (entity.strip_prefix("#x"), entity.strip_prefix('#')) {
                (Some(digits), _) => number(digits, 16).ok_or_else(unknown)?,
                (None, Some(digits)) => number(digits, 10).ok_or_else(unknown)?,
                (None, None) => return Err(unknown()),
            },
        });
        text = behind;
    }
    out.push_str(text);
    Ok(())
}

/// The unread rest of a document.
struct Pieces<'a> {
    rest: &'a str,
}

impl<'a> Pieces<'a> {
    /// The next piece; `None` at the end.
    fn next(&mut self) -> Result<Option<Piece<'a>>, String> {
        loop {
            let Some(at) = self.rest.find('<') else {
                let text = std::mem::take(&mut self.rest);
                return Ok((!text.is_empty()).then_some(Piece::Text(text, true)));
            };
            if at > 0 {
                let (text, rest) = self.rest.split_at(at);
                self.rest = rest;
                return Ok(Some(Piece::Text(text, true)));
            }
            if let Some(comment) = self.rest.strip_prefix("<!--") {
                self.skip(comment, "-->", "a comment")?;
            } else if let Some(instruction) = self.rest.strip_prefix("<?") {
                self.skip(instruction, "?>", "a processing instruction")?;
            } else if let Some(data) = self.rest.strip_prefix("<![CDATA[") {
                let text = self.skip(data, "]]>", "a CDATA section")?;
                return Ok(Some(Piece::Text(text, false)));
            } else if self.rest.starts_with("<!") {
                return Err("a document type, which a domain has not".to_owned());
            } else {
                return self.tag().map(Some);
            }
        }
    }

    /// Continues behind `end`; returns the text before it.
    fn skip(&mut self, inside: &'a str, end: &str, what: &str) -> Result<&'a str, String> {
        let (text, rest) = inside.split_once(end).ok_or_else(|| format!("{what} has no end"))?;
        self.rest = rest;
        Ok(text)
    }

    /// A tag from its `<` on. A `>` in a quoted attribute does not end it.
    fn tag(&mut self) -> Result<Piece<'a>, String> {
        let inside = &self.rest[1..];
        let mut quote = None;
        let end = inside.find(|character: char| {
            match (quote, character) {
                (None, '>') => return true,
                (None, '"' | '\'') => quote = Some(character),
                (Some(open), _) if open == character => quote = None,
                _ => {}
            }
            false
        });
        let (tag, rest) = match end {
            Some(end) => (&inside[..end], &inside[end + 1..]),
            None => return Err(format!("<{} has no end", shortened(inside))),
        };
        self.rest = rest;
        let name_of = |text: &'a str| {
            let name = text.split(|character: char| character.is_ascii_whitespace()).next().unwrap_or(text);
            if name.is_empty() || name.contains(['<', '/', '"', '\'', '=']) {
                return Err(format!("<{}> is no tag", shortened(text)));
            }
            Ok(name)
        };
        match (tag.strip_prefix('/'), tag.strip_suffix('/')) {
            (Some(closing), _) => name_of(closing).map(Piece::Close),
            (None, Some(empty)) => name_of(empty).map(Piece::Empty),
            (None, None) => name_of(tag).map(Piece::Open),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn name_and_uuid_are_children_of_the_root_and_of_nothing_else() {
        let xml = "<?xml version='1.0'?>\n<!-- <name>no</name> --><domain type='a>b' id=\"1\">\n <metadata><name>no</name>\
            <x y='>'/></metadata><name>db &amp; &#x77;eb<![CDATA[&1]]></name><devices><uuid>no</uuid></devices>\
            <uuid> 3f2504e0-4f89-41d3-9a0c-0305e82c3301 </uuid><name>second</name></domain>\n";
        let found = identity(xml).unwrap();
        assert_eq!(found.name.as_deref(), Some("db & web&1"));
        assert_eq!(found.uuid, Some("3f2504e0-4f89-41d3-9a0c-0305e82c3301".parse().unwrap()));
        assert_eq!(identity("<domain/>").unwrap(), Identity::default());
    }

    #[test]
    fn what_is_no_domain_is_refused_with_a_reason() {
        let deep = format!("<domain>{}", "<a>".repeat(DEPTH_LIMIT));
        for (xml, why) in [
            ("", "no <domain>"),
            ("<network/>", "<network>"),
            ("<domain/><domain/>", "one <domain>"),
            ("<domain><name>a</domain>", "</domain>"),
            ("<domain>", "no end"),
            ("<domain", "no end"),
            ("<domain a='>", "no end"),
            ("<!-- ", "comment"),
            ("<!DOCTYPE domain [<!ENTITY a 'b'>]><domain/>", "document type"),
            ("<domain><uuid>7</uuid></domain>", "no uuid"),
            ("<domain><name>&a;</name></domain>", "entity"),
            ("<domain><name>&#27;[2J</name></domain>", "control"),
            (deep.as_str(), "deep"),
        ] {
            let said = identity(xml).unwrap_err();
            assert!(said.contains(why), "{xml:.60}: {said}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(xml in "(<|>|/|'|\"|!|--|\\?|\\[CDATA\\[|\\]\\]>|&|;|#|name|domain|uuid| |é|[a-z]){0,60}") {
            let _ = identity(&xml);
        }

        #[test]
        fn a_name_comes_back_as_it_was(name in "[ -~é]{1,40}") {
            let escaped = name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let found = identity(&format!("<domain><name>{escaped}</name></domain>")).unwrap();
            prop_assert_eq!(found.name, Some(name));
        }
    }
}
