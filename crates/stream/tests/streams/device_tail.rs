//! Where the device sections end, when only the description behind them says so.

use limosa_stream::devices::{self, TAIL_LIMIT};
use limosa_stream::{DeviceTailFinder, GlobalState, SectionHeader, SectionKind, Vmdesc, section};
use proptest::prelude::*;

struct Tail {
    bytes: Vec<u8>,
    devices: Vec<String>,
}

impl Tail {
    fn new() -> Self {
        Self { bytes: Vec::new(), devices: Vec::new() }
    }

    /// Adds a section whose description has one field of `body.len()` bytes.
    fn device(mut self, id: u32, name: &str, body: &[u8]) -> Self {
        let name = name.to_owned();
        let length = body.len();
        self.devices.push(format!(
            r#"{{"name":"{name}","instance_id":0,"vmsd_name":"{name}","version":1,
               "fields":[{{"name":"body","type":"buffer","size":{length}}}]}}"#
        ));
        SectionHeader { kind: SectionKind::Full, id, name, instance: 0, version: 1 }.encode(&mut self.bytes).unwrap();
        self.bytes.extend_from_slice(body);
        section::encode_footer(id, &mut self.bytes);
        self
    }

    /// The whole tail with its description.
    fn finish(mut self) -> Vec<u8> {
        let json = self.json();
        section::encode_eof(&mut self.bytes);
        self.bytes.push(section::DESCRIPTION);
        self.bytes.extend(u32::try_from(json.len()).unwrap().to_be_bytes());
        self.bytes.extend(json.as_bytes());
        self.bytes
    }

    fn json(&self) -> String {
        format!(r#"{{"configuration":{{"x":[1]}},"page_size":4096,"devices":[{}]}}"#, self.devices.join(","))
    }
}

fn state(run_state: &str) -> [u8; 104] {
    GlobalState { run_state: run_state.into(), was_suspended: Some(false) }.encode().unwrap()
}

fn plain() -> Vec<u8> {
    Tail::new().device(0, "timer", &[1; 24]).device(44, "globalstate", &state("paused")).finish()
}

#[test]
fn sections_are_cut_where_the_description_says() {
    let tail = plain();
    let found = devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap();
    assert_eq!(found.end, tail.len());
    assert_eq!(found.sections.len(), 2);
    let timer = found.section("timer").unwrap();
    assert_eq!((timer.id, timer.version, timer.instance), (0, 1, 0));
    assert_eq!(timer.range, 0..19 + 24 + 5);
    assert_eq!(timer.body, 19..19 + 24);
    assert_eq!(found.sections_range.end, found.sections[1].range.end);
    assert!(tail[found.json_range.clone()].starts_with(b"{\"configuration\""));
    assert_eq!(found.global_state(&tail).unwrap().unwrap().run_state, "paused");
}

#[test]
fn the_run_state_can_be_replaced_in_place() {
    let mut tail = plain();
    let found = devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap();
    found.replace_run_state(&mut tail, "running").unwrap();
    let wanted = Tail::new().device(0, "timer", &[1; 24]).device(44, "globalstate", &state("running")).finish();
    assert_eq!(tail, wanted);
    assert!(found.replace_run_state(&mut tail, "no such state").is_err());
    assert_eq!(tail, wanted);
    let mut without = Tail::new().device(0, "timer", &[1; 24]).finish();
    let found = devices::find_tail_end(&without, 0, TAIL_LIMIT).unwrap();
    assert_eq!(found.global_state(&without).unwrap(), None);
    assert!(found.replace_run_state(&mut without, "running").is_err());
}

#[test]
fn globalstate_has_the_bytes_qemu_writes() {
    let body = state("paused");
    assert_eq!(body[..12], *b"\0\0\0\x07paused\0\0");
    assert_eq!(body[36..38], [1, 0]);
    assert!(body[38..].iter().all(|byte| *byte == 0));
    for (at, wrong) in [(3, 0u8), (3, 33), (3, 6), (4, b' '), (4, 0)] {
        let mut damaged = body;
        damaged[at] = wrong;
        assert!(GlobalState::decode(&damaged).is_err(), "byte {at} = {wrong}");
    }
    assert!(GlobalState::decode(&body[..35]).is_err());
}

#[test]
fn the_end_is_found_with_the_last_byte_and_not_before() {
    let tail = plain();
    let mut arriving = DeviceTailFinder::new(0x1000, TAIL_LIMIT);
    for end in 1..tail.len() {
        assert_eq!(arriving.find(&tail[..end]).unwrap(), None, "after {end} bytes");
    }
    let found = arriving.find(&tail).unwrap().unwrap();
    assert_eq!(found, devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap());
    assert_eq!(arriving.find(&tail).unwrap(), Some(found), "asking twice does no harm");
}

/// A device body that holds a whole end of its own, made by the guest that owns the memory: a footer of the section
/// that the body is in, the mark, and a description that fits everything up to there.
fn forged_body(prefix: &Tail, id: u32) -> Vec<u8> {
    let inner = 16;
    let mut body = vec![0xaa; inner];
    let mut devices = prefix.devices.clone();
    devices.push(format!(
        r#"{{"name":"e1000","instance_id":0,"version":1,"fields":[{{"name":"x","type":"y","size":{inner}}}]}}"#
    ));
    let json = format!(r#"{{"page_size":4096,"devices":[{}]}}"#, devices.join(","));
    section::encode_footer(id, &mut body);
    body.extend([0, 6]);
    body.extend(u32::try_from(json.len()).unwrap().to_be_bytes());
    body.extend(json.as_bytes());
    body
}

#[test]
fn a_forged_end_inside_a_device_body_is_not_believed() {
    let prefix = Tail::new().device(0, "timer", &[1; 24]);
    let body = forged_body(&prefix, 7);
    let forged_end = prefix.bytes.len() + 19 + body.len();
    let tail = prefix.device(7, "e1000", &body).device(44, "globalstate", &state("running")).finish();
    let located = devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap();
    assert_eq!((located.end, located.sections.len()), (tail.len(), 3));
    // It does fit: cut off there, nothing could show it.
    assert_eq!(devices::find_tail_end(&tail[..forged_end], 0, TAIL_LIMIT).unwrap().end, forged_end);
    let mut arriving = DeviceTailFinder::new(0, TAIL_LIMIT);
    assert!(arriving.find(&tail[..forged_end]).unwrap().is_some());
    assert_eq!(arriving.find(&tail[..forged_end + 1]).unwrap(), None, "bytes behind it prove it wrong");
    assert_eq!(arriving.find(&tail).unwrap(), Some(located));
    let mut at_once = DeviceTailFinder::new(0, TAIL_LIMIT);
    assert_eq!(at_once.find(&tail).unwrap().unwrap().sections.len(), 3);
}

#[test]
fn a_trailer_behind_the_description_is_left_alone() {
    let mut tail = plain();
    let end = tail.len();
    tail.extend_from_slice(b"limosa's own {\"devices\":[]}");
    assert_eq!(devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap().end, end);
    assert_eq!(DeviceTailFinder::new(0, TAIL_LIMIT).find(&tail).unwrap(), None);
}

#[test]
fn sizes_that_do_not_fit_the_sections_prove_nothing() {
    let tail = plain();
    let text = String::from_utf8_lossy(&tail).into_owned();
    assert!(text.contains("\"size\":24"));
    let at = tail.windows(9).position(|window| window == b"\"size\":24").unwrap();
    for wrong in [b"\"size\":23", b"\"size\":25", b"\"size\":99"] {
        let mut damaged = tail.clone();
        damaged[at..at + 9].copy_from_slice(wrong);
        let error = devices::find_tail_end(&damaged, 0x77, TAIL_LIMIT).unwrap_err();
        assert_eq!(error.offset(), 0x77);
        assert!(error.to_string().contains("sizes match the device sections"), "{error}");
    }
}

#[test]
fn a_walk_that_fails_says_which_section() {
    let tail = plain();
    let found = devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap();
    let mut description = Vmdesc::decode(&tail[found.json_range.clone()]).unwrap();
    let sections = &tail[found.sections_range];
    description.devices[1].body_length += 1;
    let error = devices::walk_sections(sections, &description).unwrap_err();
    assert!(error.to_string().contains("wanted"), "{error}");
    description.devices[1].body_length -= 2;
    let error = devices::walk_sections(sections, &description).unwrap_err();
    assert!(error.to_string().contains("the footer of section \"globalstate\" (id 44)"), "{error}");
    description.devices.pop();
    let error = devices::walk_sections(sections, &description).unwrap_err();
    assert!(error.to_string().contains("\"globalstate\" instance 0"), "{error}");
    assert_eq!(error.offset(), 48);
}

#[test]
fn a_tail_beyond_the_limit_is_refused() {
    let tail = plain();
    let error = DeviceTailFinder::new(0, 100).find(&tail).unwrap_err();
    assert!(error.to_string().contains("more than the limit of 100"), "{error}");
    assert!(devices::find_tail_end(&tail, 0, 100).is_err());
}

#[test]
fn arrays_and_nested_subsections_add_up() {
    let json = br#"{"page_size":4096,"devices":[
        {"name":"a","instance_id":3,"vmsd_name":"a","version":2,"unknown":{"deep":[[[]]]},
         "fields":[{"name":"x","type":"uint64","size":8,"array_len":4},
                   {"name":"y","type":"uint8","index":0,"size":1},{"name":"y","type":"uint8","index":1,"size":1},
                   {"name":"s","type":"struct","struct":{"vmsd_name":"n","fields":[{"size":99}]},"size":10}],
         "subsections":[{"vmsd_name":"a/b","version":1,"fields":[{"name":"z","type":"uint16","size":2}],
                         "subsections":[{"vmsd_name":"a/b/c","version":1,"fields":[]}]}]},
        {"name":"slirp","instance_id":0,"size":77,"fields":[{"name":"data","size":77,"type":"buffer"}]}]}"#;
    let description = Vmdesc::decode(json).unwrap();
    let a = &description.devices[0];
    assert_eq!((a.instance, a.version, a.state_name.as_deref()), (3, Some(2), Some("a")));
    assert_eq!(a.body_length, 32 + 2 + 10 + (6 + 3 + 2) + (6 + 5));
    assert_eq!((description.devices[1].body_length, description.devices[1].version), (77, None));
}

#[test]
fn descriptions_beyond_all_bounds_are_errors() {
    let nested = |levels: usize| {
        let open = r#"{"vmsd_name":"x","subsections":["#.repeat(levels);
        let close = "]}".repeat(levels);
        format!(r#"{{"devices":[{{"name":"a","instance_id":0,"size":0,"subsections":[{open}{close}]}}]}}"#)
    };
    assert!(Vmdesc::decode(nested(20).as_bytes()).is_ok());
    assert!(Vmdesc::decode(nested(100_000).as_bytes()).is_err());
    let ignored = format!(r#"{{"devices":[],"x":{}{}}}"#, "[".repeat(1 << 20), "]".repeat(1 << 20));
    let _ = Vmdesc::decode(ignored.as_bytes());
    let huge = r#"{"devices":[{"name":"a","instance_id":0,"fields":[{"size":18446744073709551615,"array_len":2}]}]}"#;
    assert!(Vmdesc::decode(huge.as_bytes()).unwrap_err().to_string().contains("overflows"));
    let device = r#"{"name":"","instance_id":0,"size":0}"#;
    let many = format!(r#"{{"devices":[{}]}}"#, vec![device; 65_537].join(","));
    assert!(Vmdesc::decode(many.as_bytes()).unwrap_err().to_string().contains("more than 65536 devices"));
    let error = Vmdesc::decode(br#"{"devices":[{"name":7}]}"#).unwrap_err();
    assert!(error.offset() > 0 && error.to_string().contains("device description"), "{error}");
}

proptest! {
    #[test]
    fn any_sections_are_found_however_they_arrive(
        bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..6),
        cuts in prop::collection::vec(1..200usize, 1..8),
    ) {
        let mut tail = Tail::new();
        for (id, body) in (0u32..).zip(&bodies) {
            tail = tail.device(id, &format!("dev{id}"), body);
        }
        let tail = tail.finish();
        let mut arriving = DeviceTailFinder::new(0, TAIL_LIMIT);
        let (mut end, mut cuts, mut found) = (0, cuts.into_iter().cycle(), None);
        while end < tail.len() {
            end = tail.len().min(end + cuts.next().unwrap_or(1));
            found = arriving.find(&tail[..end]).unwrap();
            prop_assert_eq!(found.is_some(), end == tail.len());
        }
        let found = found.unwrap();
        prop_assert_eq!(&found, &devices::find_tail_end(&tail, 0, TAIL_LIMIT).unwrap());
        let cut: Vec<_> = found.sections.iter().map(|section| tail[section.body.clone()].to_vec()).collect();
        prop_assert_eq!(cut, bodies);
    }
}
