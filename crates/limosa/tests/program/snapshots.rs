//! `limosa snapshot`: a directory of packed snapshots is listed and thinned out, also by kills; what stays comes back.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use limosa_migrate::Handle;
use limosa_pack::{Access, open_snapshot, unpack};
use limosa_snapshot::{Durability, Manifest, UnnamedFile};
use rustix::process::Signal;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::snapshot_fixture as fixture;
use crate::stage::{Ended, limosa, names, start, start_command, variable};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn snapshot(words: &[&str]) -> Ended {
    limosa([&["snapshot"], words].concat())
}

/// A day in 2023, in seconds since 1970.
const FIRST_DAY: u64 = 19_676 * 86_400;

/// Packed snapshots `1` to `COUNT`, and the plain ones in a directory beside them. Each is half a day younger than the
/// one before; the first is of the noon of its day.
pub(crate) struct Chain {
    pub(crate) folder: tempfile::TempDir,
    count: u64,
}

impl Chain {
    /// Each stands on the one before.
    fn new(count: u64, pages: u64) -> Self {
        Self::on(&(0..count).collect::<Vec<_>>(), pages)
    }

    /// Each stands on the one with this number, or on none: 0.
    pub(crate) fn on(bases: &[u64], pages: u64) -> Self {
        let folder = limosa_testkit::scratch().unwrap();
        let count = u64::try_from(bases.len()).unwrap();
        for directory in ["plain", "packed"] {
            std::fs::create_dir(folder.path().join(directory)).unwrap();
        }
        let chain = Self { folder, count };
        for (number, on) in (1..).zip(bases) {
            let mut writer = fixture::writer(&chain.plain(number), pages, fixture::QUICK);
            for page in 0..pages {
                fixture::put(&mut writer, 0, page, &[if page % 7 == number % 7 { page * number } else { page }]);
            }
            let mut manifest = Manifest::new();
            manifest.vm_name = Some("vm".to_owned());
            manifest.finished = FIRST_DAY + number * 43_200;
            writer.finish(&fixture::tail("running"), manifest).unwrap();
            let mut words = vec!["pack", "--no-sync"];
            let (plain, packed, base) = (chain.plain(number), chain.packed(number), chain.packed(*on));
            words.extend([text(&plain), text(&packed)]);
            if *on > 0 {
                words.extend(["--base", text(&base)]);
            }
            limosa(words).success();
        }
        chain
    }

    fn directory(&self) -> PathBuf {
        self.folder.path().join("packed")
    }

    fn plain(&self, number: u64) -> PathBuf {
        self.folder.path().join(format!("plain/{number}"))
    }

    pub(crate) fn packed(&self, number: u64) -> PathBuf {
        self.directory().join(number.to_string())
    }

    fn list(&self) -> Vec<Value> {
        let listed = snapshot(&["list", "--json", text(&self.directory())]).json();
        listed["snapshots"].as_array().unwrap().clone()
    }

    /// Expects that all that are there are what was saved.
    #[track_caller]
    fn assert_whole(&self) -> usize {
        let there: Vec<_> = (1..=self.count).filter(|number| self.packed(*number).exists()).collect();
        for number in &there {
            assert!(self.holds(&self.packed(*number), *number), "{number}");
        }
        there.len()
    }

    /// Whether a packed snapshot holds the plain one of this number.
    #[track_caller]
    fn holds(&self, packed: &Path, number: u64) -> bool {
        let packed =
            open_snapshot(packed, &Access::default()).unwrap_or_else(|error| panic!("{}: {error}", packed.display()));
        let unpacked = self.folder.path().join("unpacked");
        let pending = UnnamedFile::create(&unpacked, true).unwrap();
        unpack(&packed, pending, Durability::Unsynced, &Handle::new()).unwrap();
        std::fs::read(&unpacked).unwrap() == std::fs::read(self.plain(number)).unwrap()
    }
}

#[test]
fn a_directory_is_listed_rebased_merged_and_pruned() {
    let chain = Chain::new(4, 600);
    let listed = chain.list();
    assert_eq!(listed.len(), 4);
    assert_eq!(listed.iter().find(|entry| entry["name"] == "3").unwrap()["base"], json!("2"));
    let people = snapshot(&["list", text(&chain.directory())]).success();
    assert!(people.stdout.contains("3 on 2"), "{}", people.stdout);
    let (one, two, three, four) = (chain.packed(1), chain.packed(2), chain.packed(3), chain.packed(4));
    snapshot(&["rm", text(&two)]).one_line(&["2: 3 stands on it", "limosa snapshot merge"]);
    snapshot(&["merge", text(&four)]).one_line(&["4: no snapshot stands on it, so"]);
    snapshot(&["rebase", text(&four), "--base", text(&chain.plain(1))]).one_line(&["another directory"]);
    // Nothing that others stand on is replaced, not even by what stands on them.
    let again = chain.plain(1);
    limosa(["pack", text(&again), text(&one), "--force"]).one_line(&["2 stands on it"]);
    limosa(["pack", text(&again), text(&one), "--force", "--base", text(&four)]).one_line(&["would be replaced"]);
    limosa(["unpack", text(&four), text(&two), "--force"]).one_line(&["3 stands on it"]);
    let stream = chain.folder.path().join("stream");
    limosa(["export", text(&again), text(&stream)]).success();
    limosa(["export", text(&again), text(&one), "--force"]).one_line(&["2 stands on it"]);
    limosa(["import", text(&stream), text(&one), "--force"]).one_line(&["2 stands on it"]);
    let address = format!("file:{}", stream.display());
    limosa(["receive", &address, text(&one), "--force"]).one_line(&["2 stands on it"]);
    assert_eq!(chain.assert_whole(), 4);
    let rebased = snapshot(&["rebase", text(&four), "--base", text(&one), "--json"]).json();
    assert!(rebased["base_bytes"].as_u64().unwrap() > 0, "{rebased}");
    assert_eq!(chain.assert_whole(), 4);
    let merged = snapshot(&["merge", text(&two), "--json"]).json();
    assert_eq!(merged["removed"], json!(["2"]), "{merged}");
    assert_eq!(chain.assert_whole(), 3);
    let said = snapshot(&["prune", text(&chain.directory()), "--keep-last", "2", "--dry-run", "--json"]).success();
    assert!(said.stderr.contains("would have 3 stand on nothing"), "{}", said.stderr);
    let planned: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!(planned["would_remove"], json!(["1"]), "{planned}");
    let whole = ["3", "4"].map(|name| json!({ "snapshot": name, "base": null }));
    assert_eq!(planned["would_rebase"], json!(whole));
    assert_eq!(chain.assert_whole(), 3);
    snapshot(&["prune", text(&chain.directory()), "--keep-last", "2"]).success();
    assert_eq!(chain.assert_whole(), 2);
    // In any order of the command line.
    snapshot(&["rebase", text(&four), "--base", text(&three)]).success();
    snapshot(&["rm", text(&three), text(&four)]).success();
    assert_eq!(chain.assert_whole(), 0);
    let empty = snapshot(&["list", text(&chain.directory())]).success();
    assert_eq!(empty.stdout, format!("no snapshots in {}\n", chain.directory().display()));
    assert_eq!(snapshot(&["prune", text(&chain.directory())]).status.code(), Some(2), "without a rule");
}

#[test]
fn the_newest_one_of_each_of_the_last_days_stays() {
    let chain = Chain::new(5, 600);
    let directory = chain.directory();
    let prune = ["prune", text(&directory), "--keep-daily", "2"];
    let planned = snapshot(&[&prune[..], &["--dry-run", "--json"]].concat()).json();
    // 2 and 3 are of one day, and 4 and 5 of the next.
    assert_eq!(planned["would_remove"], json!(["2", "1", "4"]), "{planned}");
    let rebased = [json!({ "snapshot": "3", "base": null }), json!({ "snapshot": "5", "base": "3" })];
    assert_eq!(planned["would_rebase"], json!(rebased), "{planned}");
    let done = snapshot(&[&prune[..], &["--json"]].concat()).json();
    assert_eq!((done["removed"].as_array().map(Vec::len), names(&directory)), (Some(3), vec!["3".into(), "5".into()]));
    assert_eq!(chain.assert_whole(), 2);
}

#[test]
fn vms_that_have_one_name_are_told_apart_in_a_list() {
    let folder = limosa_testkit::scratch().unwrap();
    for (file, name, number) in [("a", "web", Some(1)), ("b", "web", Some(2)), ("c", "db", Some(3)), ("d", "web", None)]
    {
        let mut manifest = Manifest::new();
        (manifest.vm_name, manifest.vm_uuid) = (Some(name.to_owned()), number.map(Uuid::from_u128));
        let mut writer = fixture::writer(&folder.path().join(file), 4, fixture::QUICK);
        fixture::put(&mut writer, 0, 1, &[1]);
        writer.finish(&fixture::tail("running"), manifest).unwrap();
    }
    let shown = snapshot(&["list", text(folder.path())]).success().stdout;
    assert_eq!(shown.matches("web 00000000-0000-0000-0000-00000000000").count(), 2, "{shown}");
    assert!(shown.contains(" db ") && !shown.contains("web web") && !shown.contains("0003"), "{shown}");
}

#[test]
fn a_name_with_a_scheme_that_no_store_has_is_explained() {
    let folder = limosa_testkit::scratch().unwrap();
    let file = folder.path().join("vm");
    for words in [
        &["inspect", "S3://b/k"][..],
        &["snapshot", "list", "ftp://b/k"],
        &["snapshot", "rm", "gcs://b/k"],
        &["pack", text(&file), "azure://b/k"],
    ] {
        limosa(words.iter().copied()).one_line(&["is not the scheme of a store, which is s3, gs, az, http or https"]);
    }
    limosa(["unpack", "s3:/b/k", text(&file)]).one_line(&["a URL has two slashes: s3://b/k"]);
    // One that is the name of a directory is no scheme.
    std::fs::create_dir_all(folder.path().join("c:/d")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.args(["inspect", "c:/none"]).current_dir(folder.path());
    let ended = start_command(command).wait();
    assert!(ended.one_line(&["c:/none: cannot open it"]).trim_end().ends_with("(os error 2)"));
}

#[test]
fn what_limosa_cannot_look_into_keeps_everything_until_it_is_ignored() {
    let chain = Chain::new(3, 600);
    let odd = chain.directory().join("odd");
    std::fs::write(&odd, b"QFI\xfb and nothing that limosa knows").unwrap();
    let three = chain.packed(3);
    snapshot(&["rm", text(&three)]).one_line(&["odd: whether it stands on another snapshot", "--ignore NAME"]);
    let directory = chain.directory();
    let prune = ["prune", text(&directory), "--keep-last", "1"];
    snapshot(&prune).one_line(&["odd: may stand on any other one", "--ignore"]);
    assert_eq!(chain.assert_whole(), 3);
    // Each file that stays is named, and the others go.
    std::fs::write(directory.join("notes"), "text").unwrap();
    let (notes, odd) = (directory.join("notes"), text(&odd));
    let removed = snapshot(&["rm", "--json", "--ignore", "odd", text(&notes), odd, text(&three), text(&three)]);
    assert_eq!(removed.status.code(), Some(1));
    let object: Value = serde_json::from_str(&removed.stdout).unwrap();
    assert_eq!(object["removed"].as_array().unwrap().len(), 1, "{object}");
    assert_eq!(object["failed"].as_array().unwrap().len(), 2, "{object}");
    snapshot(&[&prune[..], &["--ignore", "odd"]].concat()).success();
    assert_eq!(chain.assert_whole(), 1);
    assert!(notes.exists() && Path::new(odd).exists());
}

/// Kills of each kind, at moments that are spread over a run: `LIMOSA_PACK_KILLS`.
fn kills() -> u64 {
    variable("LIMOSA_PACK_KILLS").unwrap_or(12)
}

/// Starts a command again and again, kills it, and expects after each time that all that is there is whole. Returns how
/// often it was killed before its end.
fn kill_repeatedly(chain: &Chain, words: impl Fn(u64) -> Vec<String>, check: impl Fn()) -> u64 {
    let mut killed = 0;
    for turn in 0..kills() {
        let running = start(words(turn));
        std::thread::sleep(Duration::from_micros(2000 + turn * 7919 % 110_000));
        running.signal(Signal::KILL);
        killed += u64::from(!running.wait().status.success());
        let broken: Vec<_> = chain.list().into_iter().filter(|entry| !entry["fault"].is_null()).collect();
        assert!(broken.is_empty(), "{broken:?}");
        check();
        chain.assert_whole();
    }
    killed
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn pruning_that_is_killed_at_any_moment_loses_nothing_that_stays_and_is_repeated() {
    let chain = Chain::new(5, 3000);
    let directory = chain.directory();
    let words = ["snapshot", "prune", text(&directory), "--keep-last", "2"];
    let stays = || assert!(chain.packed(4).exists() && chain.packed(5).exists());
    let killed = kill_repeatedly(&chain, |_| strings(&words), stays);
    assert!(killed > 0, "killed {killed} times");
    limosa(words).success();
    assert_eq!(chain.assert_whole(), 2);
}

#[test]
fn rebasing_and_merging_that_are_killed_at_any_moment_lose_nothing() {
    let chain = Chain::new(5, 3000);
    let (one, three) = (chain.packed(1), chain.packed(3));
    let rebase = |turn: u64| match turn % 2 {
        0 => strings(&["snapshot", "rebase", text(&three), "--whole"]),
        _ => strings(&["snapshot", "rebase", text(&three), "--base", text(&one)]),
    };
    let killed = kill_repeatedly(&chain, rebase, || assert_eq!(chain.list().len(), 5));
    assert!(killed > 0, "killed {killed} times");
    snapshot(&["rebase", text(&three), "--base", text(&chain.packed(2))]).success();
    let merge = |_| strings(&["snapshot", "merge", text(&three)]);
    kill_repeatedly(&chain, merge, || assert!(chain.list().len() >= 4 && chain.packed(4).exists()));
    if three.exists() {
        let ended = limosa(["snapshot", "merge", text(&three)]);
        // It was merged already if nothing stands on it any more.
        assert!(ended.status.success() || ended.stderr.contains("no snapshot stands on it"), "{}", ended.stderr);
    }
    assert!(chain.assert_whole() >= 4);
}

#[test]
fn packing_over_an_older_one_that_is_killed_at_any_moment_leaves_the_old_or_the_new_one() {
    let chain = Chain::new(2, 1500);
    let over = chain.directory().join("over");
    limosa(["pack", text(&chain.plain(2)), text(&over)]).success();
    let pack = |turn: u64| strings(&["pack", text(&chain.plain(1 + turn % 2)), text(&over), "--force"]);
    let is_whole = || assert!(chain.holds(&over, 1) || chain.holds(&over, 2));
    let killed = kill_repeatedly(&chain, pack, is_whole);
    assert!(killed > 0, "killed {killed} times");
    limosa(pack(0)).success();
    assert!(chain.holds(&over, 1));
    assert_eq!(names(&chain.directory()), ["1", "2", "over"]);
}
