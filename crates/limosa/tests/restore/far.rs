//! A saved guest, and a store for its snapshots, behind a proxy that makes it far away.

use std::path::Path;
use std::process::Command;

use limosa_testkit::{BUCKET, HttpProxy, Machine, ObjectServer, ObjectServerKind};
use serde_json::Value;

use crate::scene::{Saved, Scene, beat, saved_beat, text};
use crate::stage::{Ended, Program, start_command};

/// A scene with a store, in which the files of a saved guest are.
pub(crate) struct Far {
    pub(crate) scene: Scene,
    pub(crate) saved: Saved,
    pub(crate) server: ObjectServer,
    /// Where limosa finds the store.
    pub(crate) proxy: HttpProxy,
}

impl Far {
    pub(crate) fn new() -> Self {
        Self::of(&beat())
    }

    /// The guest that this machine runs.
    pub(crate) fn of(machine: &Machine) -> Self {
        let scene = Scene::new();
        let saved = saved_beat(&scene, machine, &[]);
        let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
        let proxy = HttpProxy::start(server.address()).unwrap();
        Self { scene, saved, server, proxy }
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.scene.command(words);
        command.envs(ObjectServer::environment(self.proxy.address()));
        command.env("LIMOSA_CACHE_DIR", self.scene.path("cache"));
        command
    }

    pub(crate) fn start(&self, words: &[&str]) -> Program {
        start_command(self.command(words))
    }

    pub(crate) fn run(&self, words: &[&str]) -> Ended {
        self.start(words).wait()
    }

    /// Packs the snapshot, and puts the image into the store. Returns its URL.
    pub(crate) fn packed(&self, name: &str, how: &[&str]) -> String {
        let target = self.scene.path(name);
        self.run(&[&["pack", text(&self.saved.snapshot), text(&target), "--no-sync"], how].concat()).success();
        self.put(&target, name)
    }

    /// Puts a file into the store. Returns its URL.
    pub(crate) fn put(&self, file: &Path, name: &str) -> String {
        std::fs::copy(file, self.server.folder().join(name)).unwrap();
        format!("s3://{BUCKET}/{name}")
    }

    pub(crate) fn forget_cache(&self) {
        let _ = std::fs::remove_dir_all(self.scene.path("cache"));
    }
}

/// A figure of the cost of a store, as a command says it.
pub(crate) fn cost(report: &Value, figure: &str) -> u64 {
    report["remote"][figure].as_u64().unwrap_or_else(|| panic!("no {figure} in {report}"))
}
