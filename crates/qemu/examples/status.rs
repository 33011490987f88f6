//! Asks a QEMU how its VM is: `cargo run -p limosa-qemu --example status -- unix:PATH`
//!
//! Without an address it asks a monitor that it plays itself, so that neither QEMU nor root is needed.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::thread;

use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::{Options, Qmp};

/// As much of QEMU's monitor as this example asks: a greeting, and an answer to each command.
fn play(listener: &UnixListener) -> std::io::Result<()> {
    let (mut socket, _) = listener.accept()?;
    let version = r#"{"qemu":{"major":10,"minor":0,"micro":2},"package":""}"#;
    writeln!(socket, r#"{{"QMP":{{"version":{version},"capabilities":["oob"]}}}}"#)?;
    for line in BufReader::new(socket.try_clone()?).lines() {
        let command: serde_json::Value = serde_json::from_str(&line?)?;
        let answer = match command["execute"].as_str() {
            Some("query-status") => serde_json::json!({ "status": "running", "running": true }),
            _ => serde_json::json!({}),
        };
        writeln!(socket, "{}", serde_json::json!({ "return": answer, "id": command["id"] }))?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let address = if let Some(address) = std::env::args().nth(1) {
        address
    } else {
        let path = directory.path().join("qmp.sock");
        let listener = UnixListener::bind(&path)?;
        thread::spawn(move || play(&listener));
        format!("unix:{}", path.display())
    };
    let monitor = Monitor::new(Qmp::connect(&address.parse()?, &Options::default())?);
    let status = monitor.status()?;
    println!(
        "QEMU {} at {address}: {} ({})",
        monitor.version(),
        status.state,
        if status.running { "runs" } else { "stopped" }
    );
    Ok(())
}
