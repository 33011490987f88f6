//! Files of other programs: what is whole becomes a snapshot, page by page; what is not is refused, and leaves nothing.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use limosa_migrate::Handle;
use limosa_migrate::stored::PageSource;
use limosa_page::PageRange;
use limosa_page::error_with_causes;
use limosa_snapshot::{
    ByteOrder, Decompressor, Foreign, ForeignError, Manifest, SAVE_IMAGE_HEADER_LENGTH, SAVE_IMAGE_XML_LIMIT,
    SaveHeader, SaveImage, SaveImageFormat, Snapshot, SnapshotError, Transport, UnnamedFile, summarize_file,
};
use limosa_stream::{Configuration, SectionHeader, SectionKind, UnsupportedFeature};
use proptest::prelude::*;

use crate::fixture::{CHECKED, QUICK, names, small};

const XML: &str = "<domain type='kvm'>\n  <name>web &amp; db</name>\n  <uuid>3f2504e0-4f89-41d3-9a0c-0305e82c3301</uuid>\n</domain>\n";

/// A recorded stream of the small VM: a snapshot that was exported.
fn stream(folder: &Path) -> PathBuf {
    export(&small(folder, "original", QUICK), &folder.join("stream"))
}

fn export(snapshot: &Path, target: &Path) -> PathBuf {
    let pending = UnnamedFile::create(target, false).unwrap();
    Snapshot::open(snapshot).unwrap().export_file(pending, &Handle::new()).unwrap();
    target.to_path_buf()
}

fn import(file: &Path, target: &Path) -> Result<Manifest, ForeignError> {
    let pending = UnnamedFile::create(target, false)?;
    let foreign = Foreign::open(file, None)?;
    Ok(foreign.import(pending, CHECKED, &Handle::new())?.published.manifest)
}

/// Every page, the device state and the layout.
fn contents(path: &Path) -> (Vec<Vec<u8>>, Vec<u8>, String) {
    let snapshot = Snapshot::open(path).unwrap();
    let memory = snapshot.setup().blocks.iter().enumerate().map(|(block, layout)| {
        let mut bytes = vec![0; usize::try_from(layout.used_length).unwrap()];
        snapshot.read(block, PageRange::whole_block(layout.pages()), &mut bytes).unwrap();
        bytes
    });
    (memory.collect(), snapshot.device_tail().to_vec(), format!("{:?}", snapshot.setup()))
}

/// The words of a header in this byte order, and what stands behind it.
fn image(order: ByteOrder, words: [u32; 5], data: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"LibvirtQemudSave".to_vec();
    for word in words {
        bytes.extend(match order {
            ByteOrder::Little => word.to_le_bytes(),
            ByteOrder::Big => word.to_be_bytes(),
        });
    }
    bytes.resize(SAVE_IMAGE_HEADER_LENGTH, 0);
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(payload);
    bytes
}

/// XML, its NUL, and padding.
fn padded() -> Vec<u8> {
    let mut data = XML.as_bytes().to_vec();
    data.resize(XML.len() + 1000, 0);
    data
}

fn length(data: &[u8]) -> u32 {
    u32::try_from(data.len()).unwrap()
}

#[test]
fn an_exported_snapshot_that_is_imported_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let stream = stream(folder.path());
    let manifest = import(&stream, &folder.path().join("again")).unwrap();
    assert_eq!((manifest.transport, manifest.run_state.as_deref()), (Some(Transport::Import), Some("running")));
    assert_eq!(contents(&folder.path().join("again")), contents(&folder.path().join("original")));
    // Once every page was mentioned, exporting and importing change nothing any more.
    let second = export(&folder.path().join("again"), &folder.path().join("second"));
    import(&second, &folder.path().join("once more")).unwrap();
    let third = export(&folder.path().join("once more"), &folder.path().join("third"));
    assert!(std::fs::read(second).unwrap() == std::fs::read(third).unwrap());
}

#[test]
fn a_stream_behind_zeros_is_found_and_one_in_a_pipe_too() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(stream(folder.path())).unwrap();
    let original = contents(&folder.path().join("original"));
    for zeros in [1, 4096, 200_001] {
        let file = folder.path().join(format!("{zeros}"));
        std::fs::write(&file, [vec![0; zeros], bytes.clone()].concat()).unwrap();
        let target = folder.path().join(format!("{zeros} imported"));
        import(&file, &target).unwrap();
        assert_eq!(contents(&target), original);
        let summary = summarize_file(&file).unwrap();
        assert_eq!((summary.blocks.len(), summary.devices.len()), (2, 2));
    }
    let (reader, mut writer) = std::io::pipe().unwrap();
    let writing = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
    let foreign = Foreign::from_fd(reader.into(), Path::new("pipe")).unwrap();
    let target = folder.path().join("piped");
    let pending = UnnamedFile::create(&target, false).unwrap();
    foreign.import(pending, QUICK, &Handle::new()).unwrap();
    writing.join().unwrap();
    assert_eq!(contents(&target), original);
}

#[test]
fn save_images_of_both_byte_orders_become_snapshots_that_know_their_domain() {
    let folder = tempfile::tempdir().unwrap();
    let stream = std::fs::read(stream(folder.path())).unwrap();
    let original = contents(&folder.path().join("original"));
    let data = padded();
    for (order, running) in [(ByteOrder::Little, 1), (ByteOrder::Big, 0)] {
        let file = folder.path().join(format!("{order:?}"));
        std::fs::write(&file, image(order, [2, length(&data), running, 0, 0], &data, &stream)).unwrap();
        let target = folder.path().join(format!("{order:?} imported"));
        let manifest = import(&file, &target).unwrap();
        assert_eq!(contents(&target), original);
        assert_eq!(manifest.vm_name.as_deref(), Some("web & db"));
        assert_eq!(manifest.vm_uuid, Some("3f2504e0-4f89-41d3-9a0c-0305e82c3301".parse().unwrap()));
        let state = if running == 1 { "running" } else { "paused" };
        assert_eq!(Snapshot::open(&target).unwrap().run_state().as_deref(), Some(state));
        let summary = summarize_file(&file).unwrap();
        let libvirt = summary.libvirt.unwrap();
        assert_eq!((libvirt.header.byte_order, libvirt.header.was_running), (order, running == 1));
        assert_eq!((summary.run_state.as_deref(), summary.devices.len()), (Some(state), 2));

        // The same through a pipe.
        let bytes = std::fs::read(&file).unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        let writing = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
        let foreign = Foreign::from_fd(reader.into(), Path::new("pipe")).unwrap();
        let target = folder.path().join(format!("{order:?} piped"));
        foreign.import(UnnamedFile::create(&target, false).unwrap(), QUICK, &Handle::new()).unwrap();
        writing.join().unwrap();
        assert_eq!(contents(&target), original);
    }
}

/// Expects that neither an import nor a look at it works, that both say why, and that nothing is left.
#[track_caller]
fn refused(folder: &Path, bytes: &[u8], why: &str) {
    let file = folder.join("bad");
    std::fs::write(&file, bytes).unwrap();
    let before = names(folder);
    for said in [
        error_with_causes(&import(&file, &folder.join("target")).unwrap_err()),
        error_with_causes(&summarize_file(&file).unwrap_err()),
    ] {
        assert!(said.contains(why) && said.contains("bad") && said.len() < 600, "{why:?}: {said}");
    }
    assert_eq!(names(folder), before);
}

#[test]
fn images_that_lie_are_refused_with_a_reason_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let stream = std::fs::read(stream(folder.path())).unwrap();
    let data = padded();
    let little = |words, data: &[u8]| image(ByteOrder::Little, words, data, &stream);
    let all = length(&data);
    let no_end = vec![b'x'; data.len()];
    let mut no_text = data.clone();
    no_text[3] = 0xff;
    let mut other = data.clone();
    other[..7].copy_from_slice(b"<other>");
    for (words, data, why) in [
        ([3, all, 1, 0, 0], &data, "version 3"),
        ([0, all, 1, 0, 0], &data, "version 0"),
        ([2, 0, 1, 0, 0], &data, "said to take 0 bytes"),
        ([2, u32::MAX, 1, 0, 0], &data, "said to take 4294967295 bytes"),
        ([2, SAVE_IMAGE_XML_LIMIT + 1, 1, 0, 0], &data, "said to take"),
        ([2, SAVE_IMAGE_XML_LIMIT, 1, 0, 0], &data, "cut off in its domain XML"),
        ([2, all, 1, 7, 0], &data, "format 7"),
        ([2, all, 1, 0, all], &data, "cookie"),
        ([2, all, 1, 0, u32::MAX], &data, "cookie"),
        ([2, all, 1, 0, 10], &data, "no end"),
        ([2, all, 1, 0, 0], &no_end, "no end"),
        ([2, all, 1, 0, 0], &no_text, "not valid UTF-8"),
        ([2, all, 1, 0, 0], &other, "<domain>"),
        // The XML ends later than it is said to: the stream begins inside it.
        ([2, all - 1, 1, 0, 0], &data, "QEVM"),
        ([2, all, 1, 1, 0], &data, "gzip cannot unpack it"),
        ([2, all, 1, 6, 0], &data, "mapped-ram"),
    ] {
        refused(folder.path(), &little(words, data), why);
    }
    let mut unfinished = little([2, all, 1, 0, 0], &data);
    unfinished[..16].copy_from_slice(b"LibvirtQemudPart");
    refused(folder.path(), &unfinished, "never completed");
    for length in [16, 40, SAVE_IMAGE_HEADER_LENGTH - 1] {
        refused(folder.path(), &little([2, all, 1, 0, 0], &data)[..length], "cut off in its header");
    }
}

#[test]
fn a_payload_that_is_cut_off_or_has_something_behind_it_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let stream = std::fs::read(stream(folder.path())).unwrap();
    let data = padded();
    let whole = image(ByteOrder::Little, [2, length(&data), 1, 0, 0], &data, &stream);
    let behind = [whole.as_slice(), b"something"].concat();
    let file = folder.path().join("bad");
    for (bytes, why) in
        [(&behind[..], "behind"), (&whole[..whole.len() - 1], "description"), (&whole[..20_000], "ends")]
    {
        std::fs::write(&file, bytes).unwrap();
        let before = names(folder.path());
        let said = error_with_causes(&import(&file, &folder.path().join("target")).unwrap_err());
        assert!(said.contains("bad"), "{why}: {said}");
        assert_eq!(names(folder.path()), before);
    }
    // Packed: the program itself notices.
    let mut gzip = std::process::Command::new("gzip");
    let input = File::open(folder.path().join("stream")).unwrap();
    let packed = gzip.arg("-c").stdin(input).output().unwrap().stdout;
    let header = |payload: &[u8]| image(ByteOrder::Little, [2, length(&data), 1, 1, 0], &data, payload);
    std::fs::write(&file, header(&packed)).unwrap();
    import(&file, &folder.path().join("unpacked")).unwrap();
    assert_eq!(contents(&folder.path().join("unpacked")), contents(&folder.path().join("original")));
    refused(folder.path(), &header(&[&packed[..], b"something"].concat()), "gzip cannot unpack it");
    refused(folder.path(), &header(&packed[..packed.len() / 2]), "gzip cannot unpack it");
    // A stream that was packed by hand needs no header.
    std::fs::write(&file, &packed).unwrap();
    assert_eq!(Foreign::open(&file, None).unwrap().decompressor(), Some(Decompressor::Gzip));
    import(&file, &folder.path().join("unpacked again")).unwrap();
    assert!(summarize_file(&file).unwrap().warnings.iter().any(|warning| warning.contains("gzip")));
}

#[test]
fn what_is_a_snapshot_or_nothing_known_is_not_imported() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = small(folder.path(), "original", QUICK);
    let said = error_with_causes(&import(&snapshot, &folder.path().join("target")).unwrap_err());
    assert!(said.contains("is a snapshot as it is"), "{said}");
    refused(folder.path(), b"Dear Sir or Madam", "");
    refused(folder.path(), &[0; 100_000], "");
}

#[test]
fn a_conversion_for_once_has_no_name_and_is_gone_with_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let stream = stream(folder.path());
    let before = names(folder.path());
    let pending = UnnamedFile::create(&folder.path().join("once"), false).unwrap();
    let snapshot = Foreign::open(&stream, None).unwrap().import_unnamed(pending, &Handle::new()).unwrap();
    assert_eq!(names(folder.path()), before);
    snapshot.lock_serving().unwrap();
    snapshot.check_restorable().unwrap();
    let pending = UnnamedFile::create(&folder.path().join("again"), false).unwrap();
    snapshot.export_file(pending, &Handle::new()).unwrap();
    import(&folder.path().join("again"), &folder.path().join("imported")).unwrap();
    assert_eq!(contents(&folder.path().join("imported")), contents(&folder.path().join("original")));
}

proptest! {
    #[test]
    fn any_header_and_data_are_decoded_or_refused(
        words in proptest::collection::vec(prop_oneof![0_u32..9, any::<u32>(), 80_u32..130], 5),
        data in proptest::collection::vec(any::<u8>(), 0..200),
        big in any::<bool>(),
        cut in 0_usize..110,
    ) {
        let order = if big { ByteOrder::Big } else { ByteOrder::Little };
        let words: [u32; 5] = words.try_into().unwrap();
        let bytes = image(order, words, &[XML.as_bytes(), &data].concat(), &[]);
        if let Ok(header) = SaveHeader::decode(&bytes) {
            prop_assert!(header.data_length <= SAVE_IMAGE_XML_LIMIT);
            let _ = SaveImage::decode(header, &bytes[SAVE_IMAGE_HEADER_LENGTH..]);
        }
        let _ = SaveHeader::decode(&bytes[..cut.min(bytes.len())]);
    }

    #[test]
    fn a_whole_header_is_decoded_as_it_was_written(
        running in 0_u32..2, format in 0_u32..7, padding in 1_usize..300, cookie in proptest::option::of("[a-z]{0,20}"), big in any::<bool>(),
    ) {
        let order = if big { ByteOrder::Big } else { ByteOrder::Little };
        let mut data = XML.as_bytes().to_vec();
        data.push(0);
        let offset = if cookie.is_some() { length(&data) } else { 0 };
        data.extend(cookie.as_deref().unwrap_or_default().as_bytes());
        data.resize(data.len() + padding, 0);
        let bytes = image(order, [2, length(&data), running, format, offset], &data, &[]);
        let header = SaveHeader::decode(&bytes).unwrap();
        prop_assert_eq!((header.byte_order, header.was_running), (order, running == 1));
        let formats = ["raw", "gzip", "bzip2", "xz", "lzop", "zstd", "sparse"];
        prop_assert_eq!(header.format.name(), formats[usize::try_from(format).unwrap()]);
        prop_assert_eq!(header.format == SaveImageFormat::Sparse, format == 6);
        let image = SaveImage::decode(header, &bytes[SAVE_IMAGE_HEADER_LENGTH..]).unwrap();
        prop_assert_eq!(image.xml, XML);
        prop_assert_eq!(image.cookie, cookie);
        prop_assert_eq!(image.name.as_deref(), Some("web & db"));
    }
}

#[test]
fn a_stream_with_a_feature_that_is_not_supported_is_refused_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stream");
    let mut bytes = Vec::new();
    Configuration::new("pc").encode(&mut bytes).unwrap();
    let name = "dirty-bitmap".to_owned();
    SectionHeader { kind: SectionKind::Start, id: 5, name, instance: 0, version: 1 }.encode(&mut bytes).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let error = summarize_file(&path).unwrap_err();
    let ForeignError::Snapshot(SnapshotError::Structure { feature, .. }) = &error else { panic!("{error:?}") };
    assert_eq!(*feature, Some(UnsupportedFeature::DirtyBitmaps));
    assert!(error.to_string().contains("block dirty bitmaps"), "{error}");
}
