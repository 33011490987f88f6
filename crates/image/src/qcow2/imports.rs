//! Which modules of qcow2 import which: none of them, through others, itself.
//!
//! What is read is the source text, up to a file's tests: every path that begins with `super::` or `crate::qcow2::`. Modules of a folder
//! count as the module that the folder belongs to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// By module: what it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The names that follow a path's beginning: one, or those of a group.
fn names(rest: &str) -> Vec<String> {
    let name = |text: &str| text.chars().take_while(|char| char.is_alphanumeric() || *char == '_').collect::<String>();
    let Some(group) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let (mut depth, mut names, mut fresh) = (1, Vec::new(), true);
    for (at, char) in group.char_indices() {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => fresh = true,
            _ if fresh && !char.is_whitespace() => {
                names.push(name(&group[at..]));
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names
}

/// What a file imports that is `depth` folders below the crate's own modules.
fn imported(text: &str, depth: usize) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for (at, _) in code.match_indices("super::").chain(code.match_indices("crate::qcow2::")) {
        if code[..at].ends_with("super::") {
            continue;
        }
        let mut rest = &code[at..];
        if let Some(path) = rest.strip_prefix("crate::qcow2::") {
            found.extend(names(path));
            continue;
        }
        let mut up = 0;
        while let Some(path) = rest.strip_prefix("super::") {
            (rest, up) = (path, up + 1);
        }
        if up == depth {
            found.extend(names(rest));
        }
    }
    found
}

/// A module from which one comes back to it, and the way.
fn circle(imports: &Imports) -> Option<Vec<&str>> {
    fn visit<'a>(imports: &'a Imports, way: &mut Vec<&'a str>, done: &mut BTreeSet<&'a str>) -> bool {
        let Some(module) = way.last().copied() else { return false };
        for next in imports.get(module).into_iter().flatten() {
            let again = way.contains(&next.as_str());
            way.push(next);
            if again || (!done.contains(next.as_str()) && visit(imports, way, done)) {
                return true;
            }
            way.pop();
        }
        done.insert(module);
        false
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| {
        let mut way = vec![module.as_str()];
        visit(imports, &mut way, &mut done).then_some(way)
    })
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn no_module_imports_itself_through_others() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/qcow2");
    let mut imports = Imports::new();
    for file in files(&folder) {
        let inside = file.strip_prefix(&folder).unwrap().with_extension("");
        let parts: Vec<_> = inside.iter().map(|part| part.to_str().unwrap()).collect();
        let found = imported(&fs::read_to_string(&file).unwrap(), parts.len());
        imports.entry(parts[0].to_owned()).or_default().extend(found);
    }
    let modules: BTreeSet<String> = imports.keys().cloned().collect();
    for (module, imported) in &mut imports {
        imported.retain(|name| name != module && modules.contains(name));
    }
    // It has been read: owners are above what they work with.
    for (above, below) in [("writer", "flusher"), ("flusher", "tables"), ("tables", "allocator"), ("check", "header")] {
        assert!(imports[above].contains(below), "{above} imports {:?}", imports[above]);
    }
    assert_eq!(circle(&imports), None);
}

#[test]
fn a_circle_is_found_in_whatever_way_it_is_written() {
    let text =
        "//! super::nothing::Here\nuse super::{a::{B, C},\n  d::E};\nuse super::super::f;\nuse crate::qcow2::g::H;\n";
    assert_eq!(imported(text, 1), ["a", "d", "g"]);
    assert_eq!(imported(text, 2), ["f", "g"]);
    let tested = "fn f(x: super::a::X) {}\n#[cfg(test)]\nmod tests {\n    use super::b;\n}\n";
    assert_eq!(imported(tested, 1), ["a"]);
    let imports = |edges: &[(&str, &str)]| {
        let mut imports = Imports::new();
        for (from, to) in edges {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        imports
    };
    assert_eq!(circle(&imports(&[("a", "b"), ("a", "c"), ("b", "c")])), None);
    let circular = imports(&[("a", "b"), ("b", "c"), ("c", "b")]);
    assert_eq!(circle(&circular), Some(vec!["a", "b", "c", "b"]));
}
