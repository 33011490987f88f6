//! The state of a handshake, without I/O: an option goes in, replies and the next step come out.
//!
//! Laws: what was negotiated before TLS is forgotten after it. Where TLS is required, a client without it learns
//! nothing about exports. Metadata contexts count only for the export that they were chosen for.

use std::sync::Arc;

use super::context::Contexts;
use crate::export::Export;
use crate::exports::Exports;
use crate::medium::Medium;
use crate::peer::Peer;
use limosa_nbd::protocol::Headers;
use limosa_nbd::protocol::MAX_PAYLOAD;
use limosa_nbd::protocol::handshake::{
    ClientFlags, OptionCode, OptionReply, info, push_export_name_reply, push_option_reply, transmission,
};
use limosa_nbd::protocol::option_data::{ContextQuery, ExportQuery, export_name};

/// The most bytes of an option's data that are decoded: two names of the greatest length, and some queries.
pub(crate) const OPTION_MAX: u32 = 64 << 10;

/// Bounds of the preferred block size.
const PREFERRED: (u64, u64) = (4096, 1 << 20);

/// Whether connections are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encryption {
    /// They cannot be.
    Off,
    /// They may be.
    Allowed,
    /// They must be.
    Required,
}

/// The export that a client uses, and how.
#[derive(Debug, Clone)]
pub(crate) struct Agreement {
    pub(crate) export: Arc<Export>,
    pub(crate) medium: Arc<Medium>,
    pub(crate) headers: Headers,
    pub(crate) contexts: Contexts,
}

/// The next step after an option.
#[derive(Debug)]
pub(crate) enum Step {
    /// The next option.
    Next,
    /// TLS begins, after the replies.
    StartTls,
    /// Requests begin, after the replies.
    Transmit(Agreement),
    /// The connection ends, after the replies.
    Abort,
    /// The connection ends at once.
    Disconnect(&'static str),
}

/// A handshake after the client's flags.
#[derive(Debug)]
pub(crate) struct Negotiation {
    exports: Exports,
    /// The other end of the connection.
    peer: Arc<Peer>,
    client: ClientFlags,
    encryption: Encryption,
    encrypted: bool,
    headers: Headers,
    /// The contexts that were chosen, and the export that they are for.
    contexts: (String, Contexts),
}

impl Negotiation {
    /// Begins one with a client at the other end of a connection.
    pub(crate) fn new((exports, peer): (Exports, Arc<Peer>), client: ClientFlags, encryption: Encryption) -> Self {
        Self {
            exports,
            peer,
            client,
            encryption,
            encrypted: false,
            headers: Headers::Simple,
            contexts: (String::new(), Contexts::default()),
        }
    }

    /// Notes that the connection is encrypted. What was negotiated before is forgotten.
    pub(crate) fn encrypted(&mut self) {
        self.encrypted = true;
        self.headers = Headers::Simple;
        self.contexts = (String::new(), Contexts::default());
    }

    /// Processes an option that is too long.
    pub(crate) fn too_long(&self, option: u32, replies: &mut Vec<u8>) -> Step {
        if option == OptionCode::ExportName as u32 {
            return Step::Disconnect("the name of an export is too long");
        }
        push_option_reply(replies, option, OptionReply::TooBig, b"");
        Step::Next
    }

    /// Processes an option. Replies are appended.
    pub(crate) fn option(&mut self, number: u32, data: &[u8], replies: &mut Vec<u8>) -> Step {
        let code = OptionCode::from_repr(number);
        if !self.client.fixed && code != Some(OptionCode::ExportName) {
            return Step::Disconnect("a client without fixed newstyle may only send EXPORT_NAME");
        }
        let mut reply = |reply, data: &[u8]| push_option_reply(replies, number, reply, data);
        let must_encrypt = self.encryption == Encryption::Required && !self.encrypted;
        match code {
            Some(OptionCode::Abort) => {
                reply(OptionReply::Ack, b"");
                return Step::Abort;
            }
            Some(OptionCode::StartTls) => {
                let refusal = match self.encryption {
                    _ if !data.is_empty() || self.encrypted => OptionReply::Invalid,
                    Encryption::Off => OptionReply::Policy,
                    Encryption::Allowed | Encryption::Required => {
                        reply(OptionReply::Ack, b"");
                        return Step::StartTls;
                    }
                };
                reply(refusal, b"");
            }
            Some(OptionCode::ExportName) if must_encrypt => {
                return Step::Disconnect("TLS is required, and EXPORT_NAME cannot say so");
            }
            _ if must_encrypt => reply(OptionReply::TlsRequired, b""),
            Some(OptionCode::ExportName) => return self.export_name(data, replies),
            Some(OptionCode::List) => self.list(data, replies),
            Some(OptionCode::Info | OptionCode::Go) => return self.describe(number, data, replies),
            Some(OptionCode::StructuredReply) => reply(self.set_headers(Headers::Structured, data), b""),
            Some(OptionCode::ExtendedHeaders) => reply(self.set_headers(Headers::Extended, data), b""),
            Some(OptionCode::ListMetaContext | OptionCode::SetMetaContext) => self.meta_context(number, data, replies),
            None => reply(OptionReply::Unsupported, b""),
        }
        Step::Next
    }

    fn export_name(&self, data: &[u8], replies: &mut Vec<u8>) -> Step {
        if self.headers == Headers::Extended {
            return Step::Disconnect("EXPORT_NAME is not allowed with extended headers");
        }
        let Some(export) = export_name(data).ok().and_then(|name| self.exports.find_for(name, &self.peer)) else {
            return Step::Disconnect("an export of that name does not exist, and EXPORT_NAME cannot say so");
        };
        push_export_name_reply(replies, export.size(), self.flags(&export), self.client);
        Step::Transmit(self.agreement(export))
    }

    fn list(&self, data: &[u8], replies: &mut Vec<u8>) {
        let list = OptionCode::List as u32;
        if !data.is_empty() {
            return push_option_reply(replies, list, OptionReply::Invalid, b"");
        }
        for export in self.exports.all() {
            let name = export.name().as_bytes();
            // A name has at most 4096 bytes.
            let length = u32::try_from(name.len()).unwrap_or(u32::MAX).to_be_bytes();
            let entry = [&length, name, export.description_text().as_bytes()].concat();
            push_option_reply(replies, list, OptionReply::Server, &entry);
        }
        push_option_reply(replies, list, OptionReply::Ack, b"");
    }

    /// Processes `INFO` or `GO`.
    fn describe(&self, option: u32, data: &[u8], replies: &mut Vec<u8>) -> Step {
        let Ok(query) = ExportQuery::decode(data) else {
            push_option_reply(replies, option, OptionReply::Invalid, b"");
            return Step::Next;
        };
        let Some(export) = self.exports.find_for(query.name, &self.peer) else {
            push_option_reply(replies, option, OptionReply::Unknown, b"");
            return Step::Next;
        };
        let mut inform = |kind: u16, data: &[u8]| {
            push_option_reply(replies, option, OptionReply::Info, &[&kind.to_be_bytes(), data].concat());
        };
        let flags = self.flags(&export);
        inform(info::EXPORT, &[&export.size().to_be_bytes()[..], &flags.to_be_bytes()].concat());
        let sizes = block_sizes(&export).map(u32::to_be_bytes);
        inform(info::BLOCK_SIZE, sizes.as_flattened());
        if query.wanted.contains(&info::NAME) {
            inform(info::NAME, export.name().as_bytes());
        }
        if query.wanted.contains(&info::DESCRIPTION) && !export.description_text().is_empty() {
            inform(info::DESCRIPTION, export.description_text().as_bytes());
        }
        push_option_reply(replies, option, OptionReply::Ack, b"");
        if option == OptionCode::Go as u32 { Step::Transmit(self.agreement(export)) } else { Step::Next }
    }

    fn set_headers(&mut self, headers: Headers, data: &[u8]) -> OptionReply {
        match self.headers {
            _ if !data.is_empty() => OptionReply::Invalid,
            Headers::Extended if headers == Headers::Structured => OptionReply::ExtendedHeadersRequired,
            before if before == headers => OptionReply::Invalid,
            _ => {
                self.headers = headers;
                OptionReply::Ack
            }
        }
    }

    fn meta_context(&mut self, option: u32, data: &[u8], replies: &mut Vec<u8>) {
        let sets = option == OptionCode::SetMetaContext as u32;
        if sets {
            // Also if this fails.
            self.contexts = (String::new(), Contexts::default());
        }
        let mut reply = |reply, data: &[u8]| push_option_reply(replies, option, reply, data);
        if !self.headers.has_chunks() {
            return reply(OptionReply::Invalid, b"");
        }
        let Ok(query) = ContextQuery::decode(data) else { return reply(OptionReply::Invalid, b"") };
        let Some(export) = self.exports.find_for(query.name, &self.peer) else {
            return reply(OptionReply::Unknown, b"");
        };
        let (queries, bitmaps) = (&query.queries, export.bitmap_names());
        let found = if sets { Contexts::chosen(queries, bitmaps) } else { Contexts::listed(queries, bitmaps) };
        for context in found.iter() {
            let id = if sets { context.id() } else { 0 };
            let name = context.name(bitmaps).unwrap_or_default();
            reply(OptionReply::MetaContext, &[&id.to_be_bytes(), name.as_bytes()].concat());
        }
        reply(OptionReply::Ack, b"");
        if sets {
            self.contexts = (query.name.to_owned(), found);
        }
    }

    fn agreement(&self, export: Arc<Export>) -> Agreement {
        let (name, contexts) = &self.contexts;
        let contexts = if name == export.name() { *contexts } else { Contexts::default() };
        Agreement { medium: export.medium(), export, headers: self.headers, contexts }
    }

    /// The transmission flags of an export.
    fn flags(&self, export: &Export) -> u16 {
        // A flush of a disk covers the writes of all connections.
        let mut flags = transmission::HAS_FLAGS
            | transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::CAN_MULTI_CONN
            | transmission::SEND_CACHE;
        flags |= if export.is_read_only() {
            transmission::READ_ONLY
        } else {
            transmission::SEND_TRIM | transmission::SEND_WRITE_ZEROES | transmission::SEND_FAST_ZERO
        };
        if self.headers.has_chunks() {
            flags |= transmission::SEND_DF;
        }
        let (name, contexts) = &self.contexts;
        if self.headers == Headers::Extended && name == export.name() && !contexts.is_empty() {
            flags |= transmission::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }
}

/// The least, the preferred and the greatest length of a request. Any alignment is accepted.
fn block_sizes(export: &Export) -> [u32; 3] {
    let preferred = export.disk().allocation_unit().clamp(PREFERRED.0, PREFERRED.1);
    [1, u32::try_from(preferred).unwrap_or(4096), MAX_PAYLOAD]
}

#[cfg(test)]
mod tests;
