//! Files for packages are accepted by their readers, and cover every command that `--help` shows.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stage::{Ended, limosa};
use limosa_testkit::scratch;

/// The commands that `limosa --help` shows.
fn commands() -> Vec<String> {
    let help = limosa(["--help"]).success().stdout;
    let list = help.split_once("Commands:\n").expect("a list of commands").1;
    let lines = list.lines().take_while(|line| !line.is_empty());
    // A long explanation continues in lines that are indented further.
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let commands: Vec<_> = names.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect();
    for expected in ["save", "restore", "inspect", "completions"] {
        assert!(commands.iter().any(|command| command == expected), "{commands:?}");
    }
    commands
}

fn script(shell: &str) -> Ended {
    limosa(["completions", shell]).success()
}

fn has(program: &str) -> bool {
    Command::new("sh").args(["-c", &format!("command -v {program} >/dev/null")]).status().unwrap().success()
}

/// Runs it and expects that it is content and silent.
#[track_caller]
fn accepts(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{command:?}: {}: {said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn bash_accepts_its_script_and_offers_every_command_and_no_hidden_one() {
    let folder = scratch().unwrap();
    let path = folder.path().join("limosa.bash");
    std::fs::write(&path, script("bash").stdout).unwrap();
    accepts(Command::new("bash").arg("-n").arg(&path));
    let offered = |words: &str| {
        let line = format!(
            "source {}; COMP_WORDS=({words} ''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _limosa limosa '' \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            path.display()
        );
        let said = accepts(Command::new("bash").args(["--norc", "-c", &line]));
        said.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let first = offered("limosa");
    for command in commands() {
        assert!(first.contains(&command), "{command} is not in {first:?}");
    }
    assert!(!first.iter().any(|name| ["watchdog", "guard"].contains(&name.as_str())), "{first:?}");
    let options = offered("limosa save");
    assert!(options.contains(&"--qmp".to_owned()) && options.contains(&"--via".to_owned()), "{options:?}");
    assert!(offered("limosa save --via").contains(&"socket".to_owned()));
}

#[test]
fn the_other_shells_scripts_know_every_command_and_their_shells_accept_them() {
    let folder = scratch().unwrap();
    for (shell, check) in [("zsh", "-n"), ("fish", "--no-execute")] {
        let script = script(shell).stdout;
        for command in commands() {
            assert!(script.contains(&command), "{command} is not in the script for {shell}");
        }
        assert!(!script.contains("watchdog"), "{shell}");
        if has(shell) {
            let path = folder.path().join(shell);
            std::fs::write(&path, script).unwrap();
            accepts(Command::new(shell).arg(check).arg(&path));
        }
    }
}

#[test]
fn a_shell_that_is_not_known_is_bad_usage() {
    let ended = limosa(["completions", "cmd.exe"]);
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.stderr.contains("bash"), "{}", ended.stderr);
}

#[test]
fn every_command_has_a_manual_page_that_its_readers_accept() {
    let folder = scratch().unwrap();
    let directory = folder.path().join("share/man1");
    limosa([Path::new("man"), &directory]).success();
    let page = |name: &str| -> PathBuf { directory.join(format!("{name}.1")) };
    let shown = |page: &Path| accepts(Command::new("groff").args(["-man", "-Tascii", "-P-cbou", "-ww"]).arg(page));
    let commands: Vec<_> = commands().into_iter().filter(|command| command != "help").collect();
    for command in &commands {
        let path = page(&format!("limosa-{command}"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(text.starts_with(".ie") || text.contains(".TH "), "{text}");
        if has("groff") {
            let shown = shown(&path);
            assert!(shown.contains("SYNOPSIS") && shown.contains(command), "{shown}");
        }
        if has("mandoc") {
            accepts(Command::new("mandoc").args(["-Tlint", "-Werror"]).arg(&path));
        }
        if has("man") {
            let mut man = Command::new("man");
            accepts(man.args(["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"]).arg(&path));
        }
    }
    // The pages and nothing else: no page of a hidden command. A command's own commands have theirs behind its name.
    for entry in std::fs::read_dir(&directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let of = |command: &String| {
            let rest = name.strip_prefix(&format!("limosa-{command}"));
            rest.is_some_and(|rest| rest == ".1" || rest.starts_with('-') && rest.ends_with(".1"))
        };
        assert!(name == "limosa.1" || !name.contains("demo-end") && commands.iter().any(of), "{name}");
    }
    let send = std::fs::read_to_string(page("limosa-send")).unwrap();
    let synopsis = send.split(".SH SYNOPSIS").nth(1).unwrap().lines().nth(1).unwrap();
    assert_eq!(synopsis, r"limosa send [OPTIONS] <SNAPSHOT> <URI>");
    let save = std::fs::read_to_string(page("limosa-save")).unwrap();
    assert!(save.contains(r"limosa save [OPTIONS] \-\-qmp <SOCK> <SNAPSHOT>"), "{save}");
    let first = std::fs::read_to_string(page("limosa")).unwrap();
    assert!(first.contains("Exit status") && !first.contains("watchdog"), "{first}");
}

#[test]
fn pages_that_cannot_be_written_are_said_in_one_line() {
    let folder = scratch().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    limosa([Path::new("man"), &file]).one_line(&[&file.display().to_string()]);
}
