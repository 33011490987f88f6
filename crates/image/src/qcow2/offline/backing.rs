//! Another backing file's name in the header of an image.
//!
//! Law: at any moment the header is the old one or the new one ([`replace_header`]).

use std::ffi::OsString;
use std::sync::Arc;

use limosa_storage::Storage;

use super::header_change::replace_header;
use crate::error::{CreateOptionsError, ImageError};
use crate::qcow2::format::header::{BACKING_MOST, Backing, Header};

/// Has an image name another backing file, with its format, or none, durably. The file is not opened. The image is not
/// used by anything else meanwhile, and is not open as a disk. `change` changes fixed fields of the header in the same
/// step.
///
/// # Errors
/// [`ImageError::Options`]: the name is empty or too long, or the image has a raw data file;
/// [`ImageError::NeedsRepair`]: it is marked as corrupt; [`ImageError::Unsupported`]: the header's cluster has no room
/// for the name; what the storage says.
pub async fn change_backing(
    storage: &dyn Storage,
    backing: Option<(OsString, Option<String>)>,
    change: impl FnOnce(&mut Header),
) -> Result<(), ImageError> {
    let image = storage.name();
    let mut old = Header::read(storage).await?;
    if old.features.corrupt() {
        let what = "it is marked as corrupt: repair it before its header changes".to_owned();
        return Err(ImageError::NeedsRepair { image: Arc::clone(image), what });
    }
    let mut new = old.clone();
    (new.extensions.backing_format, new.extensions.backing_content) = (None, None);
    new.backing = None;
    if let Some((name, format)) = backing {
        if name.is_empty() || name.len() > BACKING_MOST {
            let fault = CreateOptionsError::Name { bytes: name.len(), most: BACKING_MOST };
            return Err(ImageError::options(Arc::clone(image), fault));
        }
        if new.features.raw_data_file() {
            return Err(ImageError::options(Arc::clone(image), CreateOptionsError::RawWithBacking));
        }
        (new.backing, new.extensions.backing_format) = (Some(Backing::new(name)), format);
    }
    old.prepare_autoclear(storage, true).await?;
    new.features = old.features;
    change(&mut new);
    replace_header(storage, &old, new).await
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::{Loss, PowerCut};
    use limosa_storage::{MemoryStorage, block_on};

    use super::*;
    use crate::qcow2::offline::create::{CreateOptions, create};

    fn named(name: &str, format: &str) -> Option<(OsString, Option<String>)> {
        (!name.is_empty()).then(|| (name.into(), Some(format.to_owned())))
    }

    fn image(cluster: u64, backing: &str, version: u32) -> Vec<u8> {
        let storage = MemoryStorage::growing_to(16 << 20);
        let options = CreateOptions::default().size(1 << 20).cluster_size(cluster).version(version);
        let options = options.backing_file((!backing.is_empty()).then(|| backing.into()));
        block_on(create(&storage, None, &options.backing_format((!backing.is_empty()).then(|| "raw".into())))).unwrap();
        storage.contents()
    }

    fn header(bytes: &[u8]) -> Header {
        block_on(Header::read(&MemoryStorage::with_contents(bytes.to_vec(), 16 << 20))).unwrap()
    }

    /// Everything that matters: names of features and places of names do not.
    fn meaning(bytes: &[u8]) -> Header {
        let mut header = header(bytes);
        header.extensions.feature_names.clear();
        if let Some(backing) = &mut header.backing {
            backing.name_offset = 0;
        }
        header
    }

    #[test]
    fn a_cut_at_any_moment_leaves_the_old_or_the_new_name() {
        let long = "d/".repeat(400);
        let names = ["", "base", &long];
        let mut cuts = 0;
        for (version, cluster) in [(2, 512), (3, 512), (3, 1024), (3, 2048), (3, 4096), (3, 65536), (2, 65536)] {
            for before in names.iter().filter(|name| name.len() < 10 || name.len() as u64 + 600 < cluster) {
                for after in names {
                    let whole = image(cluster, before, version);
                    let power = PowerCut::new();
                    let storage = power.add_storage("image", whole.clone(), 16 << 20);
                    let changed = block_on(change_backing(&*storage, named(after, "qcow2"), |_| {}));
                    let last = power.cut(power.moments(), Loss::None).remove(0);
                    if changed.is_err() {
                        assert!(whole == last && after.len() as u64 + 512 > cluster / 2);
                        continue;
                    }
                    let [old, new] = [&whole, &last].map(|bytes| meaning(bytes));
                    assert_eq!(new.backing.as_ref().map_or("", |backing| backing.name.to_str().unwrap()), after);
                    let losses = (0..20).map(Loss::Some).chain([Loss::None, Loss::All]);
                    for (moment, loss) in
                        (0..=power.moments()).flat_map(|moment| losses.clone().map(move |l| (moment, l)))
                    {
                        let found = meaning(&power.cut(moment, loss).remove(0));
                        assert!(found == old || found == new, "{version} {cluster} {moment} {loss:?}: {found:?}");
                        cuts += 1;
                    }
                }
            }
        }
        assert!(cuts > 1000, "{cuts}");
    }

    #[test]
    fn names_of_features_are_there_again_in_the_end() {
        let storage = MemoryStorage::with_contents(image(65536, "base", 3), 16 << 20);
        let before = header(&storage.contents());
        for name in ["another/base", "", "base"] {
            block_on(change_backing(&storage, named(name, "raw"), |_| {})).unwrap();
        }
        assert_eq!(header(&storage.contents()), before);
    }

    #[test]
    fn a_name_that_no_header_can_have_is_refused_and_nothing_is_written() {
        let storage = MemoryStorage::with_contents(image(65536, "base", 3), 16 << 20);
        let before = storage.contents();
        for name in [String::new(), "b".repeat(1024)] {
            assert!(block_on(change_backing(&storage, Some((name.into(), None)), |_| {})).is_err());
        }
        assert!(storage.contents() == before);
    }
}
