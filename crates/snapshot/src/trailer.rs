//! The trailer: limosa's records behind QEMU's stream in the same file.
//!
//! Stock QEMU stops reading at the end of its VM description, so one file holds both and one rename publishes both.
//! Behind the description follow, without padding:
//!
//! | part | contents |
//! |---|---|
//! | manifest | compact JSON |
//! | checksums | optional: one little-endian u32 (crc32c) for each 1 MiB chunk of each RAM block, in block order |
//! | footer | 64 bytes, at the very end of the file |
//!
//! The footer, little-endian:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `limosa\x1a\n` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | flags; bit 0: there are checksums, bits that a reader does not know: it ignores the trailer |
//! | 16 | 8 | where the manifest begins |
//! | 24 | 8 | length of the manifest |
//! | 32 | 8 | length of the checksums, which begin where the manifest ends |
//! | 40 | 4 | log2 of the chunk length, 20 |
//! | 44 | 4 | crc32c of the manifest |
//! | 48 | 4 | crc32c of the checksums |
//! | 52 | 4 | crc32c of the device state: sections before the pages, then those to the end of stream; with flag bit 0 |
//! | 56 | 4 | 0 |
//! | 60 | 4 | crc32c of the 60 bytes before |
//!
//! A trailer is replaced by a newer one behind it, never in its place: power may fail at any moment, and then the file
//! ends in the middle of the newer one and the older one counts. So the manifest begins at the end of QEMU's stream, or
//! where the trailer before ends.
//!
//! A raw image of a snapshot is whole sectors long, so up to 511 zeros may follow: they are not counted.
//!
//! Law of this module: a trailer that is missing, foreign or damaged costs its contents and a warning, never the
//! memory. The parts are judged one by one: checksums that are readable are enforced also beside a damaged manifest.

use limosa_page::{to_u64, to_usize};

use crate::manifest::Manifest;

/// The footer's length in bytes.
pub(crate) const FOOTER_LEN: usize = 64;
/// log2 of the bytes of guest memory that one checksum covers.
pub(crate) const CHUNK_BITS: u32 = 20;
/// Bytes of guest memory that one checksum covers.
pub(crate) const CHUNK: u64 = 1 << CHUNK_BITS;

const MAGIC: [u8; 8] = *b"limosa\x1a\n";
const VERSION: u32 = 1;
/// Longest manifest that is read or written: thousands of disks.
const MANIFEST_MAX: u64 = 16 << 20;
/// Most values of a manifest that is read. In memory a value takes many times the room of its shortest text, `0`.
const VALUES_MAX: usize = 1 << 18;
/// Bytes at a file's end in which a whole trailer is looked for, where the file does not end with one.
const SEARCHED: u64 = 2 * MANIFEST_MAX;
/// Bytes of a disk's sector.
const SECTOR: u64 = 512;

/// Flag: checksums of the memory and of the device state were recorded.
const CHECKSUMS: u32 = 1;

/// The reason why bytes are not a footer.
#[derive(Debug)]
struct NoFooter {
    why: String,
    /// They are a whole footer, of a version or with flags that this limosa does not know.
    is_unknown_version: bool,
}

impl From<String> for NoFooter {
    fn from(why: String) -> Self {
        Self { why, is_unknown_version: false }
    }
}

/// A decoded footer: where the other parts are, and their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Footer {
    manifest_offset: u64,
    manifest_length: u64,
    table_length: u64,
    manifest_crc: u32,
    table_crc: u32,
    device_crc: Option<u32>,
}

impl Footer {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FOOTER_LEN);
        bytes.extend_from_slice(&MAGIC);
        let flags = if self.device_crc.is_some() { CHECKSUMS } else { 0 };
        for word in [VERSION, flags] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in [self.manifest_offset, self.manifest_length, self.table_length] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in [CHUNK_BITS, self.manifest_crc, self.table_crc, self.device_crc.unwrap_or(0), 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let crc = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Where the checksums begin.
    fn table_offset(&self) -> u64 {
        self.manifest_offset.saturating_add(self.manifest_length)
    }

    /// Reads the 64 bytes before `end` of a file whose QEMU stream ends at `stream_end`; the reason if they are not a
    /// footer for it.
    fn decode(bytes: &[u8; FOOTER_LEN], stream_end: u64, end: u64) -> Result<Self, NoFooter> {
        let (magic, mut words) = bytes.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err("what follows QEMU's stream is not limosa's trailer, or is only a part of it"
                .to_owned()
                .into());
        }
        let version = u32_le(&mut words);
        let flags = u32_le(&mut words);
        let (manifest_offset, manifest_length) = (u64_le(&mut words), u64_le(&mut words));
        let table_length = u64_le(&mut words);
        let chunk_bits = u32_le(&mut words);
        let (manifest_crc, table_crc) = (u32_le(&mut words), u32_le(&mut words));
        let device_crc = (flags & CHECKSUMS != 0).then_some(u32_le(&mut words));
        if crc32c::crc32c(bytes.split_at(FOOTER_LEN - 4).0) != u32_le(&mut bytes.split_at(FOOTER_LEN - 4).1) {
            return Err("the footer of limosa's trailer is damaged".to_owned().into());
        }
        if version != VERSION || flags & !CHECKSUMS != 0 || chunk_bits != CHUNK_BITS {
            let why = format!("limosa's trailer is of version {version}, which this limosa does not know in full");
            return Err(NoFooter { why, is_unknown_version: true });
        }
        let room = end.checked_sub(FOOTER_LEN as u64).and_then(|end| end.checked_sub(manifest_offset));
        let parts = manifest_length.checked_add(table_length);
        if manifest_offset < stream_end || parts.is_none() || parts != room {
            let why = format!(
                "limosa's trailer belongs to a stream that ends at offset {manifest_offset:#x}, this one ends at {stream_end:#x}",
            );
            return Err(why.into());
        }
        Ok(Self { manifest_offset, manifest_length, table_length, manifest_crc, table_crc, device_crc })
    }
}

fn u32_le(words: &mut &[u8]) -> u32 {
    words.split_off(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_le(words: &mut &[u8]) -> u64 {
    words.split_off(..8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Checksums of a file's contents, recorded with `--checksum`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checksums {
    /// crc32c of each chunk of each RAM block, in order.
    pub(crate) chunks: Vec<u32>,
    /// crc32c of the device state, from its first section to the end of QEMU's stream.
    pub(crate) devices: u32,
}

/// A manifest that no trailer can hold.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnwritableManifest {
    /// It has no JSON form.
    #[error("it is not valid JSON")]
    Json(#[from] serde_json::Error),
    /// No reader would take it.
    #[error("it has {length} bytes and {values} values; at most {MANIFEST_MAX} bytes and {VALUES_MAX} values are read")]
    TooLarge { length: usize, values: usize },
}

/// Returns the trailer's bytes, for `offset` of the file.
pub(crate) fn encode(
    manifest: &Manifest,
    checksums: Option<&Checksums>,
    offset: u64,
) -> Result<Vec<u8>, UnwritableManifest> {
    let mut bytes = serde_json::to_vec(manifest)?;
    let (manifest_length, values) = (bytes.len(), values_at_most(&bytes));
    if to_u64(manifest_length) > MANIFEST_MAX || values > VALUES_MAX {
        return Err(UnwritableManifest::TooLarge { length: manifest_length, values });
    }
    for checksum in checksums.iter().flat_map(|checksums| &checksums.chunks) {
        bytes.extend_from_slice(&checksum.to_le_bytes());
    }
    let (json, table) = bytes.split_at(manifest_length);
    let footer = Footer {
        manifest_offset: offset,
        manifest_length: json.len() as u64,
        table_length: table.len() as u64,
        manifest_crc: crc32c::crc32c(json),
        table_crc: crc32c::crc32c(table),
        device_crc: checksums.map(|checksums| checksums.devices),
    };
    bytes.extend_from_slice(&footer.encode());
    Ok(bytes)
}

/// The result of parsing a file's trailer.
#[derive(Debug, Default)]
pub(crate) struct Trailer {
    /// The manifest, if it is there and whole.
    pub(crate) manifest: Option<Manifest>,
    /// The reason for its absence.
    pub(crate) without: Option<String>,
    /// The checksums, if they were recorded and are whole.
    pub(crate) checksums: Option<Checksums>,
    /// Warnings for a person: each is one sentence without a full stop.
    pub(crate) warnings: Vec<String>,
    /// Whether the file ends with a trailer of a version that this limosa does not know. A trailer behind it would hide
    /// its records from the limosa that does.
    pub(crate) is_unknown_version: bool,
    /// Zeros behind the end that fill up the last sector of an image.
    pub(crate) padding: u64,
}

impl Trailer {
    fn none(why: String, warn: bool) -> Self {
        let warnings = if warn { vec![why.clone()] } else { Vec::new() };
        Self { without: Some(why), warnings, ..Self::default() }
    }

    /// Reads the trailer of a file through `read(offset, length)`, which is asked for ranges inside the file only.
    ///
    /// `chunks` is how many checksums the file's blocks have.
    ///
    /// # Errors
    /// Only those of `read`: the contents of the bytes are never an error.
    pub(crate) fn read<E>(
        stream_end: u64,
        file_length: u64,
        chunks: u64,
        mut read: impl FnMut(u64, usize) -> Result<Vec<u8>, E>,
    ) -> Result<Self, E> {
        let padding = padding(stream_end, file_length, &mut read)?;
        let trailer = Self::read_unpadded(stream_end, file_length - padding, chunks, read)?;
        Ok(Self { padding, ..trailer })
    }

    fn read_unpadded<E>(
        stream_end: u64,
        file_length: u64,
        chunks: u64,
        mut read: impl FnMut(u64, usize) -> Result<Vec<u8>, E>,
    ) -> Result<Self, E> {
        let behind = file_length.saturating_sub(stream_end);
        if behind == 0 {
            return Ok(Self::none("the file has no limosa trailer (QEMU wrote it alone)".to_owned(), false));
        }
        if behind < FOOTER_LEN as u64 {
            let why = format!("the {behind} bytes behind QEMU's stream are no whole limosa trailer: it was cut");
            return Ok(Self::none(why, true));
        }
        let bytes = read(file_length - FOOTER_LEN as u64, FOOTER_LEN)?;
        let footer = match <&[u8; FOOTER_LEN]>::try_from(bytes.as_slice()) {
            Ok(bytes) => Footer::decode(bytes, stream_end, file_length),
            Err(_) => Err("the footer of limosa's trailer is cut".to_owned().into()),
        };
        let mut trailer = Self::default();
        let footer = match footer {
            Ok(footer) => footer,
            Err(NoFooter { why, is_unknown_version }) => {
                let start = stream_end.max(file_length.saturating_sub(SEARCHED));
                let bytes = read(start, to_usize(file_length - start))?;
                let Some(footer) = last_footer(&bytes, start, stream_end) else {
                    return Ok(Self { is_unknown_version, ..Self::none(why, true) });
                };
                trailer.is_unknown_version = is_unknown_version;
                trailer.warnings.push(format!("{why}; limosa's trailer before it is used"));
                footer
            }
        };
        match manifest(&footer, &mut read)? {
            Ok(manifest) => trailer.manifest = Some(manifest),
            Err(why) => {
                trailer.warnings.push(why.clone());
                trailer.without = Some(why);
            }
        }
        if let Some(devices) = footer.device_crc {
            match table(&footer, chunks, &mut read)? {
                Ok(chunks) => trailer.checksums = Some(Checksums { chunks, devices }),
                Err(why) => trailer.warnings.push(why),
            }
        }
        Ok(trailer)
    }
}

/// Returns how many zeros fill up the last sector of an image behind its trailer, or behind the stream of one without.
fn padding<E>(
    stream_end: u64,
    file_length: u64,
    read: &mut impl FnMut(u64, usize) -> Result<Vec<u8>, E>,
) -> Result<u64, E> {
    if !file_length.is_multiple_of(SECTOR) || file_length <= stream_end {
        return Ok(0);
    }
    let start = stream_end.max(file_length.saturating_sub(SECTOR - 1 + FOOTER_LEN as u64));
    let bytes = read(start, to_usize(file_length - start))?;
    let whole = bytes.windows(FOOTER_LEN).enumerate().rev().find_map(|(at, window)| {
        let window = <&[u8; FOOTER_LEN]>::try_from(window).ok().filter(|window| window.starts_with(&MAGIC))?;
        let end = start.checked_add((at + FOOTER_LEN) as u64)?;
        let known = Footer::decode(window, stream_end, end).map_or_else(|no| no.is_unknown_version, |_| true);
        known.then_some(at + FOOTER_LEN)
    });
    let is_zero = |from: usize| bytes.get(from..).is_some_and(|rest| rest.iter().all(|byte| *byte == 0));
    Ok(match whole {
        Some(end) if is_zero(end) => to_u64(bytes.len() - end),
        None if file_length - stream_end < SECTOR && is_zero(0) => file_length - stream_end,
        _ => 0,
    })
}

/// The last whole footer in `bytes`, which stand at `start` of the file.
fn last_footer(bytes: &[u8], start: u64, stream_end: u64) -> Option<Footer> {
    let mut windows = bytes.windows(FOOTER_LEN).enumerate().rev();
    windows.find_map(|(at, window)| {
        let window = <&[u8; FOOTER_LEN]>::try_from(window).ok().filter(|window| window.starts_with(&MAGIC))?;
        Footer::decode(window, stream_end, start.checked_add((at + FOOTER_LEN) as u64)?).ok()
    })
}

type Judged<T, E> = Result<Result<T, String>, E>;

fn manifest<E>(footer: &Footer, read: &mut impl FnMut(u64, usize) -> Result<Vec<u8>, E>) -> Judged<Manifest, E> {
    let length = match usize::try_from(footer.manifest_length) {
        Ok(length) if footer.manifest_length <= MANIFEST_MAX => length,
        _ => return Ok(Err(format!("limosa's manifest has {} bytes: more than it can", footer.manifest_length))),
    };
    let bytes = read(footer.manifest_offset, length)?;
    if crc32c::crc32c(&bytes) != footer.manifest_crc {
        return Ok(Err("limosa's manifest was edited or is damaged: it is ignored".to_owned()));
    }
    let values = values_at_most(&bytes);
    if values > VALUES_MAX {
        return Ok(Err(format!("limosa's manifest has {values} values: more than it can")));
    }
    Ok(serde_json::from_slice(&bytes).map_err(|e| format!("limosa's manifest cannot be read: {e}")))
}

/// An upper bound of the number of values in a JSON text: each but the first follows one of these bytes.
fn values_at_most(json: &[u8]) -> usize {
    json.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count().saturating_add(1)
}

fn table<E>(
    footer: &Footer,
    chunks: u64,
    read: &mut impl FnMut(u64, usize) -> Result<Vec<u8>, E>,
) -> Judged<Vec<u32>, E> {
    let length = match usize::try_from(footer.table_length) {
        // `chunks` is bounded by the blocks' bitmaps, which are in memory already.
        Ok(length) if chunks.checked_mul(4) == Some(footer.table_length) => length,
        _ => {
            let has = footer.table_length;
            return Ok(Err(format!("{has} bytes of checksums for {chunks} chunks: they are ignored")));
        }
    };
    let bytes = read(footer.table_offset(), length)?;
    if crc32c::crc32c(&bytes) != footer.table_crc {
        return Ok(Err("the checksums are damaged: the memory is served unverified".to_owned()));
    }
    let (words, _) = bytes.as_chunks::<4>();
    Ok(Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect()))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    const STREAM_END: u64 = 1000;

    fn file(chunks: Option<&[u32]>) -> Vec<u8> {
        let mut file = vec![0x55; 1000];
        file.extend(encode(&Manifest::new(), chunks.map(recorded).as_ref(), STREAM_END).unwrap());
        file
    }

    fn recorded(chunks: &[u32]) -> Checksums {
        Checksums { chunks: chunks.to_vec(), devices: 99 }
    }

    fn read(file: &[u8], chunks: u64) -> Trailer {
        let read = |offset: u64, length: usize| -> Result<Vec<u8>, Infallible> {
            let start = usize::try_from(offset).unwrap();
            Ok(file[start..start + length].to_vec())
        };
        let Ok(trailer) = Trailer::read(STREAM_END, file.len() as u64, chunks, read);
        trailer
    }

    #[test]
    fn a_trailer_comes_back_with_its_checksums_and_without_warnings() {
        let trailer = read(&file(Some(&[1, 2, 3])), 3);
        assert_eq!(trailer.checksums, Some(recorded(&[1, 2, 3])));
        assert!(trailer.manifest.is_some());
        assert!(trailer.warnings.is_empty());
    }

    #[test]
    fn no_trailer_is_no_warning_but_a_cut_one_is() {
        let whole = file(None);
        assert!(read(&whole[..1000], 0).warnings.is_empty());
        assert!(read(&whole[..1000], 0).without.is_some());
        for length in 1001..whole.len() {
            let trailer = read(&whole[..length], 0);
            assert_eq!(trailer.warnings.len(), 1, "cut to {length}");
            assert!(trailer.manifest.is_none());
        }
    }

    /// A file with a second trailer behind the first.
    fn superseded(older: &Manifest, newer: &Manifest) -> (usize, Vec<u8>) {
        let mut file = vec![0x55; 1000];
        file.extend(encode(older, Some(&recorded(&[1, 2])), STREAM_END).unwrap());
        let first = file.len();
        file.extend(encode(newer, Some(&recorded(&[1, 2])), first as u64).unwrap());
        (first, file)
    }

    #[test]
    fn a_newer_trailer_counts_once_it_is_whole_and_until_then_the_older_one() {
        let (older, newer) = (Manifest::new(), Manifest::new());
        let (first, whole) = superseded(&older, &newer);
        let trailer = read(&whole, 2);
        assert_eq!((trailer.manifest.as_ref(), trailer.warnings.len()), (Some(&newer), 0));
        for length in first..whole.len() {
            let trailer = read(&whole[..length], 2);
            assert_eq!(trailer.manifest.as_ref(), Some(&older), "cut to {length}");
            assert_eq!(trailer.checksums, Some(recorded(&[1, 2])));
            assert_eq!(trailer.warnings.len(), usize::from(length > first), "cut to {length}");
        }
        // A file that has its new length and none of its new bytes.
        let mut zeroed = whole;
        zeroed[first..].fill(0);
        assert_eq!(read(&zeroed, 2).manifest, Some(older));
    }

    #[test]
    fn checksums_survive_a_damaged_manifest() {
        let mut bytes = file(Some(&[7]));
        bytes[1003] ^= 1;
        let trailer = read(&bytes, 1);
        assert!(trailer.manifest.is_none());
        assert_eq!(trailer.checksums, Some(recorded(&[7])));
        assert!(trailer.warnings[0].contains("edited"), "{:?}", trailer.warnings);
    }

    #[test]
    fn checksums_for_another_number_of_chunks_are_ignored_with_a_warning() {
        let trailer = read(&file(Some(&[7])), 2);
        assert!(trailer.checksums.is_none());
        assert!(trailer.manifest.is_some());
        assert_eq!(trailer.warnings.len(), 1);
    }

    #[test]
    fn a_record_of_before_hints_were_counted_says_nothing_of_them() {
        let old = r#"{"id":"8c1e1b5e-9f05-4d34-8d7d-0f4c6f3e5a11","pages":{"normal":1,"zero":2,"explicit_zero":0,"resent":4,"punched":0}}"#;
        let manifest: Manifest = serde_json::from_str(old).unwrap();
        assert_eq!((manifest.pages.zero, manifest.pages.resent, manifest.pages.hinted), (2, 4, None));
        assert!(!serde_json::to_string(&manifest).unwrap().contains("hinted"));
    }

    #[test]
    fn keys_that_a_later_version_added_are_kept() {
        let mut manifest = Manifest::new();
        manifest.unknown_keys.insert("colour".to_owned(), serde_json::json!({"a": [1, 2]}));
        let mut bytes = vec![0x55; 1000];
        bytes.extend(encode(&manifest, None, STREAM_END).unwrap());
        assert_eq!(read(&bytes, 0).manifest, Some(manifest));
    }

    #[test]
    fn a_manifest_of_more_values_than_are_read_is_neither_written_nor_read() {
        let mut manifest = Manifest::new();
        let many = vec![serde_json::Value::from(0); VALUES_MAX];
        manifest.unknown_keys.insert("many".to_owned(), many.into());
        let error = encode(&manifest, None, STREAM_END).unwrap_err();
        assert!(matches!(error, UnwritableManifest::TooLarge { values, .. } if values > VALUES_MAX), "{error:?}");
        // As a hostile writer puts it into a file.
        let json = serde_json::to_vec(&manifest).unwrap();
        let footer = Footer {
            manifest_offset: STREAM_END,
            manifest_length: json.len() as u64,
            table_length: 0,
            manifest_crc: crc32c::crc32c(&json),
            table_crc: crc32c::crc32c(&[]),
            device_crc: None,
        };
        let bytes = [vec![0x55; 1000], json, footer.encode()].concat();
        let trailer = read(&bytes, 0);
        assert!(trailer.manifest.is_none() && trailer.warnings[0].contains("values"), "{:?}", trailer.warnings);
    }

    /// Values of a key that a later version may write: whole numbers, texts, and lists and objects of them.
    fn later_value() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<u64>().prop_map(Into::into),
            ".{0,12}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..5).prop_map(Into::into),
                proptest::collection::btree_map(".{0,8}", inner, 0..5)
                    .prop_map(|keys| serde_json::Value::Object(keys.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_a_later_version_added_anywhere_comes_back_unchanged(
            top in proptest::collection::btree_map("x-.{0,8}", later_value(), 0..4),
            pages in proptest::collection::btree_map("x-.{0,8}", later_value(), 0..4),
            disk in proptest::collection::btree_map("x-.{0,8}", later_value(), 0..4),
            via in "x-.{0,8}",
        ) {
            let mut json = serde_json::json!({
                "id": "8c1e1b5e-9f05-4d34-8d7d-0f4c6f3e5a11",
                "limosa": "99.0.0",
                "created": 1,
                "finished": 2,
                "ram_bytes": 3,
                "via": via,
                "pages": { "normal": 1, "zero": 2, "explicit_zero": 0, "resent": 4, "punched": 0 },
                "disks": [{ "node": "drive0", "path": "/srv/disk", "format": "raw", "size": 7 }],
            });
            for (place, keys) in [("", top), ("/pages", pages), ("/disks/0", disk)] {
                json.pointer_mut(place).unwrap().as_object_mut().unwrap().extend(keys);
            }
            let manifest: Manifest = serde_json::from_value(json.clone()).unwrap();
            let mut bytes = vec![0x55; 1000];
            bytes.extend(encode(&manifest, None, STREAM_END).unwrap());
            let again = read(&bytes, 0).manifest.unwrap();
            prop_assert_eq!(serde_json::to_value(&again).unwrap(), json);
        }

        #[test]
        fn any_damage_costs_at_most_what_it_hits(at in 0_usize..4000, flip in 1_u8..) {
            let whole = file(Some(&[1, 2, 3, 4]));
            let at = 1000 + at % (whole.len() - 1000);
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            let (before, after) = (read(&whole, 4), read(&bytes, 4));
            prop_assert!(!after.warnings.is_empty());
            prop_assert!(after.manifest.is_none() || after.manifest == before.manifest);
            prop_assert!(after.checksums.is_none() || after.checksums == before.checksums);
        }

        #[test]
        fn arbitrary_bytes_behind_the_stream_are_a_warning(tail in proptest::collection::vec(any::<u8>(), 1..300)) {
            let mut bytes = vec![0x55; 1000];
            bytes.extend(tail);
            let trailer = read(&bytes, 3);
            prop_assert_eq!(trailer.warnings.len(), 1);
            prop_assert!(trailer.manifest.is_none());
        }
    }
}
