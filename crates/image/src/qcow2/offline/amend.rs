//! Another version of the format, and refcounts that are written late or not.
//!
//! Law: at any moment the header is the old one or the new one ([`replace_header`]). An image becomes one of version 2
//! only if it has nothing that version 2 does not have.

use std::sync::Arc;

use limosa_storage::Storage;

use super::check::{CheckOptions, Repair, check, expand_zero_clusters, has_zero_clusters, rebuild_as, repair};
use super::header_change::replace_header;
use crate::compression::Compression;
use crate::error::ImageError;
use crate::qcow2::format::feature::{FeatureName, Features};
use crate::qcow2::format::header::{Encryption, Header};
use crate::qcow2::format::snapshot_table;

/// Makes an image one of this version (2: `compat=0.10`, 3: `compat=1.1`), durably. The image is not used by anything
/// else meanwhile, and is not open as a disk. An image that was not closed is repaired first.
///
/// # Errors
/// [`ImageError::Unsupported`]: it has something that version 2 does not have (clusters that are said to be zeros get
/// contents instead), or snapshots without what version 3 needs; [`ImageError::NeedsRepair`]: it is damaged; what the
/// storage says.
pub async fn change_version(file: &dyn Storage, version: u32, options: CheckOptions) -> Result<(), ImageError> {
    let mut old = sound(file, options).await?;
    let unsupported = |what: String| Err(ImageError::Unsupported { image: Arc::clone(file.name()), what });
    let mut new = old.clone();
    new.version = version;
    match version {
        _ if version == old.version => return Ok(()),
        2 => {
            refuse_newer(file, &old, old.refcount_order, options).await?;
            if has_zero_clusters(file, &old, options).await? {
                old = clean(file, options).await?;
                expand_zero_clusters(file, &mut old, options).await?;
                new.clone_from(&old);
                new.version = version;
            }
            new.features = Features::default();
            new.extensions.feature_names.clear();
            new.unknown_fields.clear();
        }
        3 => {
            let snapshots = snapshot_table::read(file, &old).await?;
            if let Some(snapshot) = snapshots.iter().find(|snapshot| snapshot.disk_size.is_none()) {
                let id = &snapshot.id;
                return unsupported(format!("snapshot {id} does not say how long its disk is, as in version 3"));
            }
            new.extensions.feature_names = FeatureName::all_known();
            // The byte of the compression is always there.
            new.unknown_fields = vec![0; 7];
        }
        other => return unsupported(format!("version {other}: must be 2 or 3")),
    }
    replace_header(file, &old, new).await
}

/// Checks that an image can become one of version 2. `refcount_bits` and `size`: the width that its refcounts get
/// before, and the length of its disk.
///
/// # Errors
/// As of [`change_version`].
pub(crate) async fn check_downgrade(
    file: &dyn Storage,
    refcount_bits: Option<u32>,
    size: Option<u64>,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let header = sound(file, options).await?;
    let order = match refcount_bits {
        Some(bits) => refcount_order(file, bits)?,
        None => header.refcount_order,
    };
    if header.version < 3 {
        return Ok(());
    }
    let resized = Header { size: size.unwrap_or(header.size), ..header.clone() };
    refuse_newer(file, &resized, order, options).await?;
    if has_zero_clusters(file, &header, options).await? {
        let report = check(file, options).await?;
        if report.corruptions > 0 || report.check_errors > 0 {
            return Err(damaged(file));
        }
    }
    Ok(())
}

/// Refuses an image that has something that version 2 does not have. `order`: the width of its refcounts.
async fn refuse_newer(
    file: &dyn Storage,
    header: &Header,
    order: u32,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let Some(what) = newer(file, header, order, options).await? else { return Ok(()) };
    let what = format!("it has {what}, which version 2 does not have");
    Err(ImageError::Unsupported { image: Arc::clone(file.name()), what })
}

/// The logarithm of a number of bits that a refcount can have.
fn refcount_order(file: &dyn Storage, bits: u32) -> Result<u32, ImageError> {
    if bits.is_power_of_two() && bits <= 64 {
        return Ok(bits.ilog2());
    }
    let what = format!("refcounts of {bits} bits: must be 1 to 64, a power of two");
    Err(ImageError::Unsupported { image: Arc::clone(file.name()), what })
}

/// Gives the refcounts of an image another width in bits, durably: new ones are written beside the old ones, then the
/// header names them. As [`change_version`] otherwise. Space that was leaked is free afterwards.
///
/// # Errors
/// [`ImageError::Unsupported`]: it is of version 2, there is no such width, or a cluster has more references than so
/// many bits can say; [`ImageError::NeedsRepair`]: it is damaged; what the storage says.
pub async fn change_refcount_bits(file: &dyn Storage, bits: u32, options: CheckOptions) -> Result<(), ImageError> {
    let order = refcount_order(file, bits)?;
    let header = sound(file, options).await?;
    if header.refcount_order == order {
        return Ok(());
    }
    if header.version < 3 {
        let what = "refcounts of other than 16 bits need compat=1.1".to_owned();
        return Err(ImageError::Unsupported { image: Arc::clone(file.name()), what });
    }
    // The flags of entries say what refcounts say now, leaks included: the new ones are counted without them.
    let mut header = clean(file, options).await?;
    header.prepare_autoclear(file, true).await?;
    rebuild_as(file, &mut header, order, options).await
}

/// The header of an image in which nothing is wrong: leaks are repaired, and anything else is refused. What an entry
/// says of its cluster is true then.
async fn clean(file: &dyn Storage, options: CheckOptions) -> Result<Header, ImageError> {
    if !repair(file, Repair::Leaks, options).await?.is_clean() {
        return Err(damaged(file));
    }
    Header::read(file).await
}

fn damaged(file: &dyn Storage) -> ImageError {
    let what = "it is damaged: check and repair it before it is amended".to_owned();
    ImageError::NeedsRepair { image: Arc::clone(file.name()), what }
}

/// Has refcounts of an image be written late or not, durably. As [`change_version`] otherwise.
///
/// # Errors
/// [`ImageError::Unsupported`]: it is of version 2; [`ImageError::NeedsRepair`]: it is damaged; what the storage says.
pub async fn change_lazy_refcounts(file: &dyn Storage, lazy: bool, options: CheckOptions) -> Result<(), ImageError> {
    let mut header = sound(file, options).await?;
    if header.version < 3 && lazy {
        let what = "lazy_refcounts needs compat=1.1".to_owned();
        return Err(ImageError::Unsupported { image: Arc::clone(file.name()), what });
    }
    if header.features.lazy_refcounts() == lazy {
        return Ok(());
    }
    header.prepare_autoclear(file, true).await?;
    header.features.compatible ^= Features::LAZY_REFCOUNTS;
    header.write_fields(file).await?;
    Ok(file.flush().await?)
}

/// The header of an image that is in order.
pub(crate) async fn sound(file: &dyn Storage, options: CheckOptions) -> Result<Header, ImageError> {
    let mut header = Header::read(file).await?;
    if header.features.dirty() && !header.features.corrupt() {
        repair(file, Repair::Refcounts, options).await?;
        header = Header::read(file).await?;
    }
    if header.features.dirty() || header.features.corrupt() {
        return Err(damaged(file));
    }
    Ok(header)
}

/// Something that an image has, and that there is only in version 3.
async fn newer(
    file: &dyn Storage,
    header: &Header,
    order: u32,
    options: CheckOptions,
) -> Result<Option<&'static str>, ImageError> {
    let features = &header.features;
    let found = [
        (order != 4, "refcounts of other than 16 bits"),
        (features.data_file(), "a data file"),
        (features.extended_l2(), "subclusters"),
        (header.compression != Compression::Zlib, "another compression than zlib"),
        (features.incompatible != 0, "features that readers have to know"),
        (header.extensions.bitmaps.is_some(), "bitmaps"),
    ];
    if let Some((_, what)) = found.into_iter().find(|(found, _)| *found) {
        return Ok(Some(what));
    }
    for snapshot in snapshot_table::read(file, header).await? {
        // Version 2 has no place for them.
        if snapshot.disk_size.is_some_and(|size| size != header.size) {
            return Ok(Some("snapshots of a disk of another length"));
        }
        if u32::try_from(snapshot.vm_state_size).is_err() {
            return Ok(Some("snapshots with a VM's state of 4 GiB or more"));
        }
    }
    // Zeros that are written in their place would have to be encrypted.
    let is_encrypted = header.encryption != Encryption::None;
    Ok((is_encrypted && has_zero_clusters(file, header, options).await?)
        .then_some("zero clusters in encrypted contents"))
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::{Loss, PowerCut};
    use limosa_storage::{MemoryStorage, block_on};

    use super::*;
    use crate::qcow2::offline::create::{CreateOptions, create};

    fn image(options: &CreateOptions) -> Vec<u8> {
        let storage = MemoryStorage::growing_to(16 << 20);
        block_on(create(&storage, None, options)).unwrap();
        storage.contents()
    }

    fn header(bytes: &[u8]) -> Header {
        let mut header = block_on(Header::read(&MemoryStorage::with_contents(bytes.to_vec(), 16 << 20))).unwrap();
        header.extensions.feature_names.clear();
        if let Some(backing) = &mut header.backing {
            backing.name_offset = 0;
        }
        header
    }

    #[test]
    fn a_cut_at_any_moment_leaves_the_old_version_or_the_new_one() {
        for (from, to, cluster) in [(2, 3, 512), (3, 2, 512), (2, 3, 65536), (3, 2, 65536)] {
            for name in ["base", &"d/".repeat(100)] {
                let options = CreateOptions::default().size(1 << 20).version(from).cluster_size(cluster);
                let options = options.backing_file(Some(name.into())).backing_format(Some("raw".into()));
                let before = image(&options);
                let power = PowerCut::new();
                let storage = power.add_storage("image", before.clone(), 16 << 20);
                block_on(change_version(&*storage, to, CheckOptions::default())).unwrap();
                let after = header(&power.cut(power.moments(), Loss::None).remove(0));
                assert_eq!((after.version, after.backing.as_ref()), (to, header(&before).backing.as_ref()));
                for moment in 0..=power.moments() {
                    for loss in (0..20).map(Loss::Some).chain([Loss::None, Loss::All]) {
                        let found = header(&power.cut(moment, loss).remove(0));
                        assert!(found == header(&before) || found == after, "{from} {to} {moment} {loss:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_version_2_does_not_have_keeps_the_version() {
        let usual = || CreateOptions::default().size(1 << 20);
        for (options, says) in [
            (usual().refcount_bits(8), "16 bits"),
            (usual().extended_l2(true), "subclusters"),
            (usual().compression(Compression::Zstd), "zlib"),
        ] {
            let storage = MemoryStorage::with_contents(image(&options), 16 << 20);
            let before = storage.contents();
            let error = block_on(change_version(&storage, 2, CheckOptions::default())).unwrap_err().to_string();
            assert!(error.contains(says) && storage.contents() == before, "{error}");
        }
        let old = MemoryStorage::with_contents(image(&usual().version(2)), 16 << 20);
        assert!(block_on(change_lazy_refcounts(&old, true, CheckOptions::default())).is_err());
        block_on(change_version(&old, 3, CheckOptions::default())).unwrap();
        // Bits that we do not know are cleared by who writes.
        let mut unknown = header(&old.contents());
        unknown.features.autoclear |= 1 << 9;
        block_on(unknown.write_fields(&old)).unwrap();
        for lazy in [true, true, false] {
            block_on(change_lazy_refcounts(&old, lazy, CheckOptions::default())).unwrap();
            let features = header(&old.contents()).features;
            assert_eq!((features.lazy_refcounts(), features.autoclear), (lazy, 0));
        }
    }
}
