//! `limosa serve ctl`: requests of people to a running server.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use limosa_console::{check_stdout, print_out, quantity, say};
use limosa_image::resize::NewSize;
use limosa_page::to_millis;
use limosa_qemu::qmp::{Options, Qmp};
use serde_json::{Value, json};

use super::steering::{AddRequest, BitmapChange};
use crate::args::{ServeBitmapArgs, ServeCtlArgs, ServeCtlCommand, ServeEpochArgs, ServeKeeperArgs};
use crate::ctl::{Server, explained};
use crate::usage::misused;

const SERVER: Server = Server { command: "limosa serve", what: "a server of disks", or: "" };
/// Time that the server gets for what it does besides waiting for requests: flushing, closing an image.
const ANSWER: Duration = Duration::from_secs(600);

pub(super) fn run(args: &ServeCtlArgs) -> anyhow::Result<ExitCode> {
    let ctl = Ctl { qmp: Qmp::connect(&args.control, &Options::default()).map_err(failed)?, json: args.json };
    let named = |name: &Option<String>| name.as_ref().map_or_else(|| json!({}), |name| json!({ "name": name }));
    match &args.what {
        ServeCtlCommand::List => ctl.list()?,
        ServeCtlCommand::Add(args) => ctl.add(&AddRequest::new(args)?)?,
        ServeCtlCommand::Remove { name, force } => {
            ctl.order("export-remove", json!({ "name": name, "force": force }), &format!("{name:?} is removed"))?;
        }
        ServeCtlCommand::Flush { name } => ctl.order("export-flush", named(name), "flushed")?,
        ServeCtlCommand::Quiesce { name, timeout } => {
            let mut arguments = named(name);
            if let Some(arguments) = arguments.as_object_mut() {
                arguments.insert("timeout".into(), to_millis(*timeout).into());
            }
            ctl.order("export-quiesce", arguments, "no request is in flight; `resume` continues")?;
        }
        ServeCtlCommand::Resume { name } => ctl.order("export-resume", named(name), "requests continue")?,
        ServeCtlCommand::Resize { name, size } => ctl.resize(name, *size)?,
        ServeCtlCommand::Snapshot { name, overlay, clear, timeout } => ctl.snapshot(name, overlay, clear, *timeout)?,
        ServeCtlCommand::Commit { name, overlay, timeout } => ctl.commit(name, overlay.as_deref(), *timeout)?,
        ServeCtlCommand::Bitmap(args) => ctl.bitmaps(args)?,
        ServeCtlCommand::Protect { export, first, log_size, timeout } => {
            let mut arguments = keeper(export);
            arguments["first"] = (*first).into();
            arguments["log-size"] = (*log_size).into();
            arguments["timeout"] = to_millis(*timeout).into();
            ctl.order("export-protect", arguments, &format!("{:?} is protected; epoch {first} is open", export.name))?;
        }
        ServeCtlCommand::Seal(args) => {
            let next = args.epoch.saturating_add(1);
            ctl.order("export-seal", epoch(args), &format!("epoch {} is sealed; epoch {next} is open", args.epoch))?;
        }
        ServeCtlCommand::Prepare { epoch: args, durable } => {
            let mut arguments = epoch(args);
            arguments["durable"] = (*durable).into();
            ctl.order("export-prepare", arguments, &format!("epoch {} is prepared", args.epoch))?;
        }
        ServeCtlCommand::Keep { epoch: args, durable } => {
            let mut arguments = epoch(args);
            arguments["durable"] = (*durable).into();
            ctl.order("export-keep", arguments, &format!("epoch {} is kept", args.epoch))?;
        }
        ServeCtlCommand::Drop { epoch: args, serve_again, fence } => {
            let mut arguments = epoch(args);
            arguments["serve-again"] = (*serve_again).into();
            // Left out if it is off: older servers refuse fields that they do not know.
            if *fence {
                arguments["fence"] = true.into();
            }
            let now = if *serve_again { "served again" } else { "not served any more" };
            let done = format!("{:?} is as of epoch {}, and {now}", args.export.name, args.epoch);
            ctl.order("export-drop", arguments, &done)?;
        }
        ServeCtlCommand::Unprotect { export, timeout } => {
            let mut arguments = keeper(export);
            arguments["timeout"] = to_millis(*timeout).into();
            ctl.order("export-unprotect", arguments, &format!("{:?} is not protected any more", export.name))?;
        }
        ServeCtlCommand::Quit => ctl.order("quit", json!({}), "the server is ending")?,
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// The arguments of a keeper's commands.
fn keeper(args: &ServeKeeperArgs) -> Value {
    json!({ "name": args.name, "keeper": args.keeper })
}

/// The arguments of commands on an epoch.
fn epoch(args: &ServeEpochArgs) -> Value {
    json!({ "name": args.export.name, "keeper": args.export.keeper, "epoch": args.epoch })
}

fn failed(error: limosa_qemu::qmp::QmpError) -> anyhow::Error {
    explained(&SERVER, error)
}

struct Ctl {
    qmp: Qmp,
    json: bool,
}

impl Ctl {
    fn ask(&self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        self.qmp.execute_within(command, arguments, ANSWER).map_err(failed)
    }

    /// Has a command executed that answers nothing.
    fn order(&self, command: &str, arguments: Value, done: &str) -> anyhow::Result<()> {
        let answer = self.ask(command, arguments)?;
        if self.json {
            print_out!("{answer}");
        } else {
            say!("limosa: {done}");
        }
        Ok(())
    }

    fn add(&self, request: &AddRequest) -> anyhow::Result<()> {
        self.change("export-add", serde_json::to_value(request)?, |export| format!("{} is served", line(export)))
    }

    fn resize(&self, name: &str, size: NewSize) -> anyhow::Result<()> {
        let arguments = match size {
            NewSize::Exactly(size) => json!({ "name": name, "size": size }),
            NewSize::More(more) => json!({ "name": name, "more": more }),
            NewSize::Less(_) => {
                misused("a disk that is used does not become shorter: stop serving it and use `limosa img resize`")
            }
        };
        self.change("export-resize", arguments, |export| format!("{} now", line(export)))
    }

    /// Changes bitmaps, and shows what there is then.
    fn bitmaps(&self, args: &ServeBitmapArgs) -> anyhow::Result<()> {
        let change = |(name, action): &(String, _)| BitmapChange::new(name, action, args.granularity);
        let changes = args.changes.0.iter().map(change).collect::<anyhow::Result<Vec<_>>>()?;
        let bitmaps = self.ask("export-bitmaps", json!({ "name": args.name, "changes": changes }))?;
        if self.json {
            print_out!("{}", json!({ "bitmaps": bitmaps }));
            return Ok(());
        }
        bitmaps.as_array().into_iter().flatten().for_each(|bitmap| print_out!("{}", bitmap_line(bitmap)));
        Ok(())
    }

    fn snapshot(&self, name: &str, overlay: &Path, clear: &[String], timeout: Duration) -> anyhow::Result<()> {
        let overlay = absolute_text(overlay)?;
        let arguments = json!({ "name": name, "overlay": overlay, "clear": clear, "timeout": to_millis(timeout) });
        self.change("export-snapshot", arguments, |export| {
            let frozen = export.get("frozen").and_then(Value::as_str).unwrap_or("the image");
            format!("{}; {frozen} is not written any more", line(export))
        })
    }

    fn commit(&self, name: &str, overlay: Option<&Path>, timeout: Duration) -> anyhow::Result<()> {
        let mut arguments = json!({ "name": name, "timeout": to_millis(timeout) });
        if let Some(overlay) = overlay {
            arguments["overlay"] = absolute_text(overlay)?.into();
        }
        self.change("export-commit", arguments, |export| {
            let committed = export.get("committed").and_then(Value::as_str).unwrap_or("the overlay");
            format!("{}; it has the {} of {committed}", line(export), quantity::bytes(number(export, "bytes")))
        })
    }

    /// Has an export changed, and shows it.
    fn change(&self, command: &str, arguments: Value, text: impl FnOnce(&Value) -> String) -> anyhow::Result<()> {
        let export = self.ask(command, arguments)?;
        if self.json {
            print_out!("{export}");
        } else {
            say!("limosa: {}", text(&export));
        }
        Ok(())
    }

    fn list(&self) -> anyhow::Result<()> {
        let exports = self.ask("query-exports", json!({}))?;
        let server = self.ask("query-server", json!({}))?;
        if self.json {
            print_out!("{}", json!({ "exports": exports, "server": server }));
            return Ok(());
        }
        for export in exports.as_array().into_iter().flatten() {
            print_out!("{}", line(export));
            let clients = quantity::count(number(export, "clients"));
            let quiesced = if export.get("quiesced") == Some(&Value::Bool(true)) { "; quiesced" } else { "" };
            print_out!("  clients: {clients}{quiesced}");
            if let Some(protection) = export.get("protection") {
                let keeper = protection.get("keeper").and_then(Value::as_str).unwrap_or("");
                let [open, kept, merged] = ["open", "kept", "merged"].map(|name| number(protection, name));
                let log = quantity::bytes(number(protection, "log-bytes"));
                print_out!(
                    "  protected by {keeper:?}: epoch {open} is open, {kept} kept, {merged} in the image; log {log}"
                );
                if let Some(failure) = protection.get("failure").and_then(Value::as_str) {
                    print_out!("  kept epochs cannot be brought to the image: {failure}");
                }
            }
            for bitmap in export.get("bitmaps").and_then(Value::as_array).into_iter().flatten() {
                print_out!("  bitmap {}", bitmap_line(bitmap));
            }
            if let Some(counters) = export.get("counters") {
                print_counters(counters);
            }
            for (kind, times) in export.get("latency-ms").and_then(Value::as_object).into_iter().flatten() {
                let time = |name| times.get(name).and_then(Value::as_f64).unwrap_or(0.0);
                let [median, most, longest] = ["median", "p99", "longest"].map(time);
                print_out!("  {kind}: median {median} ms, 99% within {most} ms, longest {longest} ms");
            }
        }
        print_out!("connections: {}", quantity::count(number(&server, "active")));
        if let Some(counters) = server.get("counters") {
            print_counters(counters);
        }
        Ok(())
    }
}

/// A path for the server, which has another folder.
fn absolute_text(path: &Path) -> anyhow::Result<String> {
    let path = std::path::absolute(path)?;
    Ok(path.to_str().with_context(|| format!("{}: the path must be UTF-8", path.display()))?.to_owned())
}

/// An export in one line.
fn line(export: &Value) -> String {
    let text = |name| export.get(name).and_then(Value::as_str).unwrap_or("");
    let read_only = if export.get("read-only") == Some(&Value::Bool(true)) { ", read-only" } else { "" };
    let size = quantity::bytes(number(export, "size"));
    format!("{:?}: {} ({size}, {}{read_only})", text("name"), text("image"), text("format"))
}

/// A bitmap in one line.
fn bitmap_line(bitmap: &Value) -> String {
    let is = |name| bitmap.get(name) == Some(&Value::Bool(true));
    let name = bitmap.get("name").and_then(Value::as_str).unwrap_or("");
    let state = if is("inconsistent") {
        "not stored by who used it, can only be removed".to_owned()
    } else {
        let enabled = if is("enabled") { "enabled" } else { "disabled" };
        format!("{} dirty, {enabled}", quantity::bytes(number(bitmap, "dirty-bytes")))
    };
    let exported = if is("exported") { ", read by clients" } else { "" };
    format!("{name:?}: {state}, granularity {}{exported}", quantity::bytes(number(bitmap, "granularity")))
}

/// Prints all counters but those that are 0.
fn print_counters(counters: &Value) {
    for (name, count) in counters.as_object().into_iter().flatten() {
        match count.as_u64() {
            None | Some(0) => {}
            Some(count) if name.ends_with("-bytes") => print_out!("  {name}: {}", quantity::bytes(count)),
            Some(count) => print_out!("  {name}: {}", quantity::count(count)),
        }
    }
}

fn number(answer: &Value, name: &str) -> u64 {
    answer.get(name).and_then(Value::as_u64).unwrap_or(0)
}
