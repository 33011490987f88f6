//! `limosa snapshot prune` of a folder of a store: exactly what no rule keeps goes, also by kills.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{BUCKET, HttpProxy, ObjectServer, ObjectServerKind, stores_skipped};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::snapshots::Chain;
use crate::stage::{Program, names, start_command, variable};

/// The bases of the snapshots 1 to 7; one with 0 stands on none.
const BASES: [u64; 7] = [0, 1, 1, 3, 0, 5, 5];

/// Packed snapshots, and a folder of a store with copies of them.
struct Bed {
    chain: Chain,
    server: ObjectServer,
    proxy: HttpProxy,
}

impl Bed {
    fn new() -> Self {
        let chain = Chain::on(&BASES, 300);
        let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
        let proxy = HttpProxy::start(server.address()).unwrap();
        let bed = Self { chain, server, proxy };
        std::fs::create_dir(bed.folder()).unwrap();
        std::fs::write(bed.folder().join("notes"), "text").unwrap();
        bed.put_all();
        bed
    }

    /// The folder's objects, as files.
    fn folder(&self) -> PathBuf {
        self.server.folder().join("vm")
    }

    /// Puts all snapshots there, each written a minute after the one before.
    fn put_all(&self) {
        for number in 1..=7 {
            let object = self.folder().join(number.to_string());
            std::fs::copy(self.chain.packed(number), &object).unwrap();
            let written = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + 60 * number);
            File::options().write(true).open(&object).unwrap().set_modified(written).unwrap();
        }
    }

    fn start(&self, words: &[&str]) -> Program {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        let scratch = self.chain.folder.path();
        command.args(["snapshot"]).args(words).arg(format!("s3://{BUCKET}/vm"));
        command.envs(ObjectServer::environment(self.proxy.address()));
        command.env("LIMOSA_CACHE_DIR", scratch.join("cache")).env("TMPDIR", scratch);
        start_command(command)
    }

    fn json(&self, words: &[&str]) -> Value {
        self.start(&[words, &["--json"]].concat()).wait().json()
    }

    /// Expects these objects, each as it was put there, and no other.
    #[track_caller]
    fn assert_holds(&self, numbers: &[u64]) {
        let objects = [numbers.iter().map(u64::to_string).collect(), vec!["notes".to_owned()]].concat();
        assert_eq!(names(&self.folder()), objects);
        for number in numbers {
            let object = std::fs::read(self.folder().join(number.to_string())).unwrap();
            assert!(object == std::fs::read(self.chain.packed(*number)).unwrap(), "{number}");
        }
    }
}

#[test]
fn what_no_rule_keeps_and_nothing_stands_on_goes_from_a_store() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let planned = bed.json(&["prune", "--keep-last", "1", "--dry-run"]);
    assert_eq!(planned["would_remove"], json!(["2", "6", "4", "3", "1"]), "{planned}");
    assert_eq!(planned["would_rebase"], json!([]), "{planned}");
    bed.assert_holds(&[1, 2, 3, 4, 5, 6, 7]);
    // Of the last three days 7, 5 and 3 are the newest ones. 3 stands on 1.
    let daily = bed.json(&["prune", "--keep-daily", "3"]);
    assert_eq!((&daily["removed"], &daily["failed"]), (&json!(["2", "6", "4"]), &json!([])), "{daily}");
    bed.assert_holds(&[1, 3, 5, 7]);
    let last = bed.json(&["prune", "--keep-last", "1"]);
    assert_eq!((&last["removed"], &last["rebased"]), (&json!(["3", "1"]), &json!([])), "{last}");
    bed.assert_holds(&[5, 7]);
    assert_eq!(bed.json(&["prune", "--keep-last", "1"])["removed"], json!([]));
    bed.assert_holds(&[5, 7]);
}

#[test]
fn a_store_that_does_not_answer_is_waited_for_and_that_is_said() {
    // A bound socket that does not listen: no other server gets the port, and connections are refused.
    let reserved = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&reserved, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddrV4::try_from(getsockname(&reserved).unwrap()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command
        .args(["inspect", "s3://bucket/vm"])
        .envs(ObjectServer::environment(address.into()))
        .env("LIMOSA_CACHE_DIR", "");
    let limosa = start_command(command);
    limosa_testkit::wait_for("word of the wait", || limosa.stderr().contains("is waited for").then_some(()));
    assert!(limosa.is_running() && limosa.stderr().contains("cannot connect to"), "{}", limosa.stderr());
    limosa.signal(Signal::KILL);
    limosa.wait();
}

#[test]
fn a_prune_in_a_store_that_is_killed_at_any_moment_leaves_nothing_without_its_base() {
    if stores_skipped() {
        return;
    }
    let seed = variable("LIMOSA_CHAOS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let trials = variable("LIMOSA_CHAOS_TRIALS").unwrap_or(4);
    println!("LIMOSA_CHAOS_SEED={seed} LIMOSA_CHAOS_TRIALS={trials}");
    let mut chance = SeededRandom::new(seed);
    let bed = Bed::new();
    let prune = ["prune", "--keep-last", "1"];
    // So that a kill meets every request, before it was answered and after it.
    bed.proxy.set_latency(Duration::from_millis(2));
    let begun = Instant::now();
    bed.json(&prune);
    // No longer than one that is over before its kill: the machine may have been busier at first.
    let mut lasts = u64::try_from(begun.elapsed().as_micros()).unwrap();
    let mut killed = 0;
    while killed < trials {
        bed.put_all();
        let pruning = bed.start(&prune);
        let moment = chance.below(lasts);
        std::thread::sleep(Duration::from_micros(moment));
        pruning.signal(Signal::KILL);
        if pruning.wait().status.success() {
            lasts = lasts.min(moment.max(1));
        } else {
            killed += 1;
        }
        let listed = bed.json(&["list"]);
        let listed = listed["snapshots"].as_array().unwrap();
        assert!(listed.iter().all(|entry| entry["fault"].is_null()), "{listed:?}");
        let mut left: Vec<u64> = listed.iter().map(|entry| entry["name"].as_str().unwrap().parse().unwrap()).collect();
        left.sort_unstable();
        println!("{killed} kills, after {moment} of {lasts} us: {left:?}");
        assert!(left.contains(&5) && left.contains(&7), "{left:?}");
        bed.assert_holds(&left);
    }
    bed.start(&prune).wait().success();
    bed.assert_holds(&[5, 7]);
}
