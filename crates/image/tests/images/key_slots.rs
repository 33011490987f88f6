//! Key slots that get and lose passphrases: what stock tools open afterwards, and what a cut leaves.

use std::sync::Arc;
use std::time::Duration;

use limosa_image::ImageError;
use limosa_image::luks::{self, KeySlotChange, NewHeader, Passphrase, change_key_slots};
use limosa_storage::testing::{Loss, PowerCut};
use limosa_storage::{MemoryStorage, Storage, block_on};

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec())
}

fn activate(text: &str, slot: Option<usize>) -> KeySlotChange {
    KeySlotChange::Activate { passphrase: passphrase(text), slot, iter_time: Duration::ZERO }
}

fn erase(slot: Option<usize>, text: Option<&str>) -> KeySlotChange {
    KeySlotChange::Erase { slot, passphrase: text.map(passphrase) }
}

/// An image whose slot 0 has the passphrase `first`.
fn image() -> Vec<u8> {
    let file = MemoryStorage::growing_to(8 << 20);
    let header = NewHeader::default().iter_time(Duration::ZERO);
    block_on(luks::create(&file, &luks::CreateOptions::new(passphrase("first")).size(4096).header(header))).unwrap();
    file.contents()
}

/// Whether the passphrase opens the image.
fn opens(bytes: &[u8], text: &str) -> bool {
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(bytes.to_vec(), 8 << 20));
    block_on(luks::open(file, &passphrase(text))).is_ok()
}

/// The image after changes that are made one after the other.
fn changed(bytes: &[u8], with: &str, change: &KeySlotChange, force: bool) -> Result<Vec<u8>, String> {
    let file = MemoryStorage::with_contents(bytes.to_vec(), 8 << 20);
    let done = block_on(change_key_slots(&file, &passphrase(with), change, force));
    done.map(|()| file.contents()).map_err(|error| match error {
        ImageError::Encryption { source, .. } => source.to_string(),
        error => error.to_string(),
    })
}

#[test]
fn slots_are_neither_overwritten_nor_all_erased_by_accident() {
    let one = image();
    let refused = |bytes: &[u8], change: &KeySlotChange, says: &str| {
        let error = changed(bytes, "first", change, false).unwrap_err();
        assert!(error.contains(says), "{error}");
    };
    refused(&one, &activate("new", Some(0)), "key slot 0 is active");
    refused(&one, &activate("new", Some(8)), "must be 0 to 7");
    refused(&one, &erase(Some(0), None), "no key slot would be left");
    refused(&one, &erase(None, Some("first")), "no key slot would be left");
    refused(&one, &erase(None, Some("other")), "no key slot opens");
    refused(&one, &erase(Some(3), None), "key slot 3 is not active");
    refused(&one, &erase(Some(0), Some("other")), "does not open with the old passphrase");
    refused(&one, &erase(None, None), "takes the slot or its passphrase");
    assert!(changed(&one, "wrong", &activate("new", None), false).unwrap_err().contains("does not open any"));
    let mut all = one.clone();
    for slot in 1..8 {
        all = changed(&all, "first", &activate(&format!("slot {slot}"), None), false).unwrap();
    }
    assert!((1..8).all(|slot| opens(&all, &format!("slot {slot}"))) && opens(&all, "first"));
    refused(&all, &activate("new", None), "all key slots are active");
    // The passphrase of a slot that is overwritten opens nothing any more.
    let over = changed(&all, "first", &activate("new", Some(0)), true).unwrap();
    assert!(opens(&over, "new") && !opens(&over, "first"));
    let few = changed(&all, "first", &erase(Some(6), Some("slot 6")), false).unwrap();
    assert!(!opens(&few, "slot 6") && opens(&few, "slot 7"));
    let none = changed(&one, "first", &erase(Some(0), None), true).unwrap();
    assert!(!opens(&none, "first"));
}

#[test]
fn a_cut_leaves_a_passphrase_that_opens_the_disk() {
    let one = image();
    let two = changed(&one, "first", &activate("second", Some(6)), false).unwrap();
    for (before, change, force, known) in [
        (&one, activate("new", None), false, &["first"][..]),
        (&one, activate("new", Some(6)), false, &["first"]),
        // The only slot is overwritten: one of the two opens it.
        (&one, activate("new", Some(0)), true, &["first", "new"]),
        (&two, activate("new", Some(6)), true, &["first"]),
        (&two, erase(None, Some("first")), false, &["second"]),
        (&two, erase(Some(6), None), false, &["first"]),
    ] {
        let power = PowerCut::new();
        let file = power.add_storage("image", before.clone(), 8 << 20);
        block_on(change_key_slots(&*file, &passphrase("first"), &change, force)).unwrap();
        for moment in 0..=power.moments() {
            for loss in (0..6).map(Loss::Some).chain([Loss::None, Loss::All]) {
                let found = power.cut(moment, loss).remove(0);
                assert!(known.iter().any(|text| opens(&found, text)), "{change:?} {moment} {loss:?}");
            }
        }
        let after = power.cut(power.moments(), Loss::All).remove(0);
        let expected = matches!(change, KeySlotChange::Activate { .. });
        assert_eq!(opens(&after, "new"), expected, "{change:?}");
    }
}

/// A slot whose erasure was interrupted opens with nothing, and does not count as the one that is left.
#[test]
fn an_interrupted_erasure_leaves_a_slot_that_opens_the_disk_whatever_is_erased_next() {
    let two = changed(&image(), "first", &activate("second", Some(6)), false).unwrap();
    let power = PowerCut::new();
    let file = power.add_storage("image", two.clone(), 8 << 20);
    block_on(change_key_slots(&*file, &passphrase("first"), &erase(Some(6), None), false)).unwrap();
    for moment in 0..=power.moments() {
        for loss in [Loss::None, Loss::All, Loss::Some(1), Loss::Some(2)] {
            let found = power.cut(moment, loss).remove(0);
            if let Ok(next) = changed(&found, "first", &erase(None, Some("first")), false) {
                assert!(opens(&next, "second"), "{moment} {loss:?}: nobody opens it");
            }
            // The next change finishes it: said to be active again, the slot opens nothing.
            let mut again = changed(&found, "first", &activate("new", Some(3)), false).unwrap();
            if !opens(&again, "second") {
                let entry = 208 + 6 * 48..208 + 7 * 48;
                again[entry.clone()].copy_from_slice(&two[entry]);
                assert!(!opens(&again, "second"), "{moment} {loss:?}: its key material is there");
            }
        }
    }
}

#[test]
fn the_material_of_an_erased_slot_is_gone() {
    let two = changed(&image(), "first", &activate("second", Some(6)), false).unwrap();
    let after = changed(&two, "first", &erase(Some(6), None), false).unwrap();
    // Said to be active again, as it was, it opens nothing.
    let entry = 208 + 6 * 48..208 + 7 * 48;
    let mut again = after;
    again[entry.clone()].copy_from_slice(&two[entry]);
    assert!(!opens(&again, "second") && opens(&again, "first"));
}
