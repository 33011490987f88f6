//! Two network namespaces and a cable between them that can be pulled.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Two namespaces, each with an end of a veth pair. Removed when dropped.
pub(crate) struct Cable {
    names: [String; 2],
    third: u32,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Whether `LIMOSA_SKIP_NETNS=1` is set: for machines on which a test may not make network namespaces.
pub(crate) fn skipped() -> bool {
    limosa_testkit::skipped("LIMOSA_SKIP_NETNS")
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr)))
}

impl Cable {
    /// Lays it.
    pub(crate) fn new() -> Self {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |end: char| format!("limosa-{}-{number}{end}", std::process::id());
        let cable = Self { names: [name('a'), name('b')], third: number % 250 };
        let laid = cable.lay();
        assert!(laid.is_ok(), "{laid:?}: needs root and iproute2, or skip with LIMOSA_SKIP_NETNS=1");
        cable
    }

    fn lay(&self) -> Result<(), String> {
        let [a, b] = &self.names;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b])?;
        for (end, name) in (1..).zip(&self.names) {
            ip(&["-n", name, "address", "add", &format!("{}/24", self.address(end)), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
        }
        Ok(())
    }

    /// The name of an end's namespace: 0 or 1.
    pub(crate) fn namespace(&self, end: usize) -> &str {
        &self.names[end]
    }

    /// The address of an end: 1 or 2.
    pub(crate) fn address(&self, end: u32) -> String {
        format!("10.77.{}.{end}", self.third)
    }

    /// Nothing arrives any more, and neither end gets an error.
    pub(crate) fn pull(&self) {
        // At the far end: what the near one sends is lost on the way, as with a switch that fails.
        ip(&["-n", &self.names[1], "link", "set", "cable", "down"]).unwrap();
    }

    /// Puts it back.
    pub(crate) fn put_back(&self) {
        ip(&["-n", &self.names[1], "link", "set", "cable", "up"]).unwrap();
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}
