//! One migration through a proxy that holds it where a test says.

use std::time::Duration;

use limosa_channel::Uri;
use limosa_demo::Settings;
use limosa_demo::state::{Role, State};
use limosa_testkit::{Direction, Proxy};

use super::{EndProcess, Scene, Whereabouts, migrate, operate, words};

/// Both ends; the destination listens behind a proxy.
pub(crate) struct ProxiedMigration {
    pub(crate) scene: Scene,
    pub(crate) source: EndProcess,
    pub(crate) destination: EndProcess,
    pub(crate) proxy: Proxy,
}

impl ProxiedMigration {
    pub(crate) fn new(settings: &Settings) -> Self {
        let mut scene = Scene::new();
        let (source, destination) =
            (scene.start(Role::Source, settings, None), scene.start(Role::Destination, settings, None));
        let (source, destination) = (scene.meet(source), scene.meet(destination));
        let proxy = Proxy::start(&scene.path("proxy"), &scene.path("real")).unwrap();
        destination.monitor.listen("migrate-incoming", &Uri::Unix(scene.path("real"))).unwrap();
        Self { scene, source, destination, proxy }
    }

    /// Begins to migrate.
    pub(crate) fn migrate(&self) {
        migrate(&self.source, &Uri::Unix(self.proxy.path().to_owned()), true);
    }

    /// The same, held after this number of bytes: waits until they have gone through, or it is over before.
    pub(crate) fn migrate_up_to(&mut self, direction: Direction, byte: u64) {
        self.proxy.stall_at(direction, byte);
        self.migrate();
        wait_for_byte(&self.proxy, direction, &mut self.source);
    }

    /// Another attempt: into the same destination if it is still there and that is wanted, or into a new one. Who has
    /// the guest then.
    pub(crate) fn retry(self, settings: &Settings, same: bool) -> (Scene, EndProcess) {
        let Self { mut scene, mut source, destination: mut old, .. } = self;
        let waits = old.status().is_some_and(|status| status.state == State::Failed);
        let (mut destination, fresh) = if waits && same {
            (old, false)
        } else {
            let started = scene.start(Role::Destination, settings, None);
            (scene.meet(started), true)
        };
        let at = destination.monitor.listen("migrate-incoming", &Uri::Unix(scene.path("again"))).unwrap();
        migrate(&source, &at, fresh);
        let moved = operate(&mut source, &mut destination, None, true);
        assert_eq!(moved, Whereabouts::Destination, "another attempt: {}", words(&source.control));
        (scene, destination)
    }
}

/// Waits until a proxy has let its limit through, or the source is stable.
pub(crate) fn wait_for_byte(proxy: &Proxy, direction: Direction, source: &mut EndProcess) {
    let busy = |source: &mut EndProcess| source.status().is_some_and(|status| status.state == State::Sending);
    while !proxy.wait_stalled(direction, Duration::from_millis(5)) && busy(source) {}
}
