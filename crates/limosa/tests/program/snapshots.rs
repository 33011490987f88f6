//! `limosa snapshot list`: the snapshots of a directory, and which stands on which.

use std::path::Path;

use serde_json::json;

use crate::snapshot_fixture as fixture;
use crate::stage::limosa;

#[test]
fn a_directory_is_listed_with_what_each_snapshot_stands_on_and_what_cannot_be_restored() {
    let folder = limosa_testkit::scratch().unwrap();
    let path = |name: &str| folder.path().join(name);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    for number in 1..=3 {
        let plain = path(&format!("plain-{number}"));
        let mut writer = fixture::writer(&plain, 100, fixture::QUICK);
        for page in 0..100 {
            fixture::put(&mut writer, 0, page, &[page + u64::from(page == number)]);
        }
        writer.finish(&fixture::tail("running"), limosa_snapshot::Manifest::new()).unwrap();
        let (packed, base) = (text(&path(&format!("{number}.qcow2"))), text(&path(&format!("{}.qcow2", number - 1))));
        let plain = text(&plain);
        let mut words = vec!["pack", "--no-sync", &plain, &packed];
        if number > 1 {
            words.extend(["--base", &base]);
        }
        limosa(words).success();
    }
    let again = path("again");
    std::fs::rename(path("plain-1"), &again).unwrap();
    for number in 2..=3 {
        std::fs::remove_file(path(&format!("plain-{number}"))).unwrap();
    }
    // Nothing that others stand on is replaced, not even by what stands on them.
    let (again, one, two, three) =
        (text(&again), text(&path("1.qcow2")), text(&path("2.qcow2")), text(&path("3.qcow2")));
    limosa(["pack", &again, &one, "--force"]).one_line(&["2.qcow2 stands on it"]);
    limosa(["pack", &again, &one, "--force", "--base", &three]).one_line(&["would be replaced"]);
    limosa(["unpack", &three, &two, "--force"]).one_line(&["3.qcow2 stands on it"]);
    std::fs::remove_file(&again).unwrap();
    let directory = text(folder.path());
    let list = || limosa(["snapshot", "list", "--json", &directory]).json();
    let listed = list();
    let bases: Vec<_> = listed["snapshots"].as_array().unwrap().iter().map(|entry| &entry["base"]).collect();
    assert_eq!(bases, [&json!(null), &json!("1.qcow2"), &json!("2.qcow2")], "{listed}");
    let people = limosa(["snapshot", "list", &directory]).success();
    assert!(people.stdout.contains("3.qcow2 on 2.qcow2"), "{}", people.stdout);
    std::fs::remove_file(path("1.qcow2")).unwrap();
    let listed = list();
    let faults = listed["snapshots"].as_array().unwrap().iter().filter(|entry| entry["fault"].is_string()).count();
    assert_eq!(faults, 2, "{listed}");
    let people = limosa(["snapshot", "list", &directory]).success();
    assert!(people.stdout.contains("cannot be restored: 2.qcow2: "), "{}", people.stdout);
}
