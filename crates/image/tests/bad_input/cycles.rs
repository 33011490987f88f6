//! Chains that lead back into themselves.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use limosa_image::Policy;
use limosa_image::chain::{OpenOptions, open};
use limosa_image::qcow2::{CreateOptions, create};
use limosa_image::reference::Reference;
use limosa_storage::{Create, FileOptions, FileStorage, block_on};
use limosa_testkit::scratch;

/// An image over another one, named as here.
fn over(path: &Path, backing: &str) {
    let file = FileStorage::open(path, &FileOptions { create: Create::IfMissing, ..FileOptions::default() }).unwrap();
    let options =
        CreateOptions::default().size(1 << 20).backing_file(Some(backing.into())).backing_format(Some("qcow2".into()));
    block_on(create(&*file, None, &options)).unwrap();
}

#[test]
fn a_chain_that_leads_back_into_itself_is_refused_by_whatever_name() {
    let folder = scratch().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let at = |name: &str| folder.path().join(name);
    // The way back leads to the image in the middle, or to the first one.
    for target in ["middle", "top"] {
        let absolute = at(target).to_str().unwrap().to_owned();
        for name in [target, &format!("./inner/../{target}"), &absolute, "symbolic", "hard", "inner/chained"] {
            for old in ["symbolic", "hard", "inner/chained", "top", "middle", "bottom"] {
                let _ = fs::remove_file(at(old));
            }
            over(&at("top"), "middle");
            over(&at("middle"), "bottom");
            over(&at("bottom"), name);
            symlink(target, at("symbolic")).unwrap();
            fs::hard_link(at(target), at("hard")).unwrap();
            symlink("../symbolic", at("inner/chained")).unwrap();
            for read_only in [true, false] {
                let options = OpenOptions::default().read_only(read_only).policy(Policy::Follow);
                let said = block_on(open(&Reference::file(at("top")), &options)).unwrap_err().to_string();
                assert!(said.starts_with(at("bottom").to_str().unwrap()), "{name}: {said}");
                assert!(said.ends_with("that file is already part of the chain"), "{name}: {said}");
            }
        }
    }
}
