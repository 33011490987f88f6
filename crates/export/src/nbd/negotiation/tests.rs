use limosa_image::raw::{Raw, RawOptions};
use limosa_storage::MemoryStorage;
use proptest::prelude::*;

use super::*;

const SIZE: u64 = 1 << 20;

fn negotiation(encryption: Encryption) -> Negotiation {
    let exports = Exports::new();
    for name in ["", "second"] {
        let disk = MemoryStorage::with_contents(vec![0; 1 << 20], SIZE);
        let disk = Raw::open(Arc::new(disk), &RawOptions::default()).unwrap();
        exports.add(Export::new(name, disk).unwrap().description("for tests").unwrap()).unwrap();
    }
    Negotiation::new((exports, Arc::new(Peer::Unknown)), ClientFlags { fixed: true, no_zeroes: true }, encryption)
}

fn string(text: &str) -> Vec<u8> {
    [&u32::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat()
}

fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&u16::try_from(wanted.len()).unwrap().to_be_bytes());
    wanted.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
    data
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&u32::try_from(queries.len()).unwrap().to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
    data
}

/// The kinds and data of replies.
fn replies(mut bytes: &[u8]) -> Vec<(OptionReply, Vec<u8>)> {
    let mut found = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<20>() {
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        let (data, behind) = rest.split_at(usize::try_from(number(16)).unwrap());
        found.push((OptionReply::from_repr(number(12)).unwrap(), data.to_vec()));
        bytes = behind;
    }
    assert!(bytes.is_empty());
    found
}

/// Sends an option, and returns the step and the replies.
fn send(negotiation: &mut Negotiation, option: OptionCode, data: &[u8]) -> (Step, Vec<(OptionReply, Vec<u8>)>) {
    let mut bytes = Vec::new();
    let step = negotiation.option(option as u32, data, &mut bytes);
    (step, replies(&bytes))
}

/// Sends an option that is answered by one reply without data.
#[track_caller]
fn answered(negotiation: &mut Negotiation, option: OptionCode, data: &[u8]) -> OptionReply {
    let (step, replies) = send(negotiation, option, data);
    assert!(matches!(step, Step::Next));
    let [(reply, data)] = replies.as_slice() else { panic!("{replies:?}") };
    assert!(data.is_empty());
    *reply
}

fn transmission_flags(replies: &[(OptionReply, Vec<u8>)]) -> u16 {
    let (_, data) = replies.iter().find(|(_, data)| data.starts_with(&[0, 0])).unwrap();
    u16::from_be_bytes(data[10..].try_into().unwrap())
}

#[test]
fn exports_are_listed_and_described() {
    let mut negotiation = negotiation(Encryption::Off);
    let (_, listed) = send(&mut negotiation, OptionCode::List, b"");
    assert_eq!(listed.len(), 3);
    assert_eq!(listed[1], (OptionReply::Server, [string("second"), b"for tests".to_vec()].concat()));
    assert_eq!(listed[2].0, OptionReply::Ack);
    assert_eq!(answered(&mut negotiation, OptionCode::List, b"x"), OptionReply::Invalid);
    let (step, info) = send(&mut negotiation, OptionCode::Info, &go("second", &[1, 2, 99]));
    assert!(matches!(step, Step::Next));
    let data: Vec<_> = info.iter().map(|(_, data)| data.as_slice()).collect();
    assert_eq!(data[0][..10], [0, 0, 0, 0, 0, 0, 0, 16, 0, 0]);
    assert_eq!(data[1], [0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0]);
    assert_eq!((data[2], data[3], data[4]), (&b"\0\x01second"[..], &b"\0\x02for tests"[..], &b""[..]));
    assert_eq!(answered(&mut negotiation, OptionCode::Info, &go("third", &[])), OptionReply::Unknown);
    assert_eq!(answered(&mut negotiation, OptionCode::Go, b"\0\0"), OptionReply::Invalid);
    let (step, _) = send(&mut negotiation, OptionCode::Go, &go("", &[]));
    let Step::Transmit(agreement) = step else { panic!("{step:?}") };
    assert_eq!((agreement.export.name(), agreement.headers), ("", Headers::Simple));
}

#[test]
fn extended_headers_take_the_place_of_structured_replies_and_never_the_other_way_round() {
    let mut negotiation = negotiation(Encryption::Off);
    let mut answered = |option, data| answered(&mut negotiation, option, data);
    assert_eq!(answered(OptionCode::StructuredReply, b"x"), OptionReply::Invalid);
    assert_eq!(answered(OptionCode::StructuredReply, b""), OptionReply::Ack);
    assert_eq!(answered(OptionCode::StructuredReply, b""), OptionReply::Invalid);
    assert_eq!(answered(OptionCode::ExtendedHeaders, b""), OptionReply::Ack);
    assert_eq!(answered(OptionCode::StructuredReply, b""), OptionReply::ExtendedHeadersRequired);
    assert!(matches!(send(&mut negotiation, OptionCode::ExportName, b"").0, Step::Disconnect(_)));
    let (step, replies) = send(&mut negotiation, OptionCode::Go, &go("", &[]));
    assert!(matches!(step, Step::Transmit(Agreement { headers: Headers::Extended, .. })));
    assert_eq!(transmission_flags(&replies) & transmission::BLOCK_STATUS_PAYLOAD, 0);
}

#[test]
fn contexts_are_chosen_for_one_export_by_the_last_option() {
    let mut negotiation = negotiation(Encryption::Off);
    let all = ["base:allocation", "qemu:allocation-depth"];
    let set = OptionCode::SetMetaContext;
    assert_eq!(answered(&mut negotiation, set, &contexts("", &all)), OptionReply::Invalid);
    assert_eq!(answered(&mut negotiation, OptionCode::ExtendedHeaders, b""), OptionReply::Ack);
    let (_, replies) = send(&mut negotiation, OptionCode::ListMetaContext, &contexts("", &[]));
    assert_eq!(replies[0], (OptionReply::MetaContext, [&[0; 4][..], b"base:allocation"].concat()));
    assert_eq!(replies.len(), 3);
    let (_, replies) = send(&mut negotiation, set, &contexts("second", &all));
    assert_eq!(replies[1], (OptionReply::MetaContext, [&[0, 0, 0, 2][..], b"qemu:allocation-depth"].concat()));
    let mut chosen = |name: &str| {
        let (step, replies) = send(&mut negotiation, OptionCode::Go, &go(name, &[]));
        let Step::Transmit(agreement) = step else { panic!("{step:?}") };
        (agreement.contexts.iter().count(), transmission_flags(&replies) & transmission::BLOCK_STATUS_PAYLOAD != 0)
    };
    assert_eq!((chosen("second"), chosen("")), ((2, true), (0, false)));
    // An option that fails chooses none.
    assert_eq!(answered(&mut negotiation, set, &contexts("third", &all)), OptionReply::Unknown);
    let (step, _) = send(&mut negotiation, OptionCode::Go, &go("second", &[]));
    assert!(matches!(step, Step::Transmit(agreement) if agreement.contexts.is_empty()));
}

#[test]
fn tls_comes_first_where_it_is_required_and_what_was_before_it_is_forgotten() {
    let mut required = negotiation(Encryption::Required);
    for option in [OptionCode::List, OptionCode::Go, OptionCode::StructuredReply, OptionCode::SetMetaContext] {
        assert_eq!(answered(&mut required, option, b""), OptionReply::TlsRequired, "{option:?}");
    }
    assert!(matches!(send(&mut required, OptionCode::ExportName, b"").0, Step::Disconnect(_)));
    assert!(matches!(send(&mut required, OptionCode::Abort, b"").0, Step::Abort));
    assert_eq!(answered(&mut required, OptionCode::StartTls, b"x"), OptionReply::Invalid);
    assert!(matches!(send(&mut required, OptionCode::StartTls, b"").0, Step::StartTls));
    required.encrypted();
    assert_eq!(send(&mut required, OptionCode::List, b"").1.len(), 3);
    assert_eq!(answered(&mut required, OptionCode::StartTls, b""), OptionReply::Invalid);

    let mut allowed = negotiation(Encryption::Allowed);
    assert_eq!(answered(&mut allowed, OptionCode::StructuredReply, b""), OptionReply::Ack);
    let all = contexts("", &["base:allocation"]);
    assert_eq!(send(&mut allowed, OptionCode::SetMetaContext, &all).1.len(), 2);
    assert!(matches!(send(&mut allowed, OptionCode::StartTls, b"").0, Step::StartTls));
    allowed.encrypted();
    let (step, _) = send(&mut allowed, OptionCode::Go, &go("", &[]));
    assert!(matches!(
        step,
        Step::Transmit(Agreement { headers: Headers::Simple, contexts, .. }) if contexts.is_empty()
    ));
    assert_eq!(answered(&mut negotiation(Encryption::Off), OptionCode::StartTls, b""), OptionReply::Policy);
}

#[test]
fn options_that_are_unknown_or_too_long_are_answered() {
    let mut negotiation = negotiation(Encryption::Off);
    let mut bytes = Vec::new();
    assert!(matches!(negotiation.option(4, b"data", &mut bytes), Step::Next));
    assert!(matches!(negotiation.too_long(OptionCode::Go as u32, &mut bytes), Step::Next));
    let kinds: Vec<_> = replies(&bytes).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [OptionReply::Unsupported, OptionReply::TooBig]);
    assert!(matches!(negotiation.too_long(OptionCode::ExportName as u32, &mut bytes), Step::Disconnect(_)));
}

#[test]
fn an_old_client_may_only_name_an_export() {
    let mut old = negotiation(Encryption::Off);
    old.client = ClientFlags { fixed: false, no_zeroes: false };
    assert!(matches!(send(&mut old, OptionCode::List, b"").0, Step::Disconnect(_)));
    let mut bytes = Vec::new();
    let step = old.option(OptionCode::ExportName as u32, b"second", &mut bytes);
    assert!(matches!(step, Step::Transmit(agreement) if agreement.export.name() == "second"));
    assert_eq!((bytes.len(), &bytes[..8]), (134, &SIZE.to_be_bytes()[..]));
    assert!(matches!(send(&mut old, OptionCode::ExportName, b"third").0, Step::Disconnect(_)));
}

proptest! {
    #[test]
    fn any_options_are_answered_and_none_without_tls_tells_a_name(
        options in prop::collection::vec((0..13_u32, prop::collection::vec(any::<u8>(), 0..40)), 1..20),
    ) {
        let mut negotiation = negotiation(Encryption::Required);
        for (option, data) in options {
            let mut bytes = Vec::new();
            match negotiation.option(option, &data, &mut bytes) {
                Step::Next => prop_assert_eq!(replies(&bytes).len(), 1),
                Step::Transmit(_) => prop_assert!(false, "requests without TLS"),
                Step::StartTls | Step::Abort | Step::Disconnect(_) => {}
            }
            let found = bytes.windows(6).any(|window| window == b"second");
            prop_assert!(!found);
        }
    }
}
