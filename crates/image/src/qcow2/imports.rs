//! Which modules of the crate import which: no module of qcow2 imports itself through others.
//!
//! The source is read as tokens, so that groups, inline modules, visibilities, macros and code behind a file's tests count too. A path
//! that begins with `super`, `self` or `crate` is resolved to the module it leads to, through the re-exports of `lib.rs` and of the folders.
//! What would hide an import (a glob or another name for a parent) is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Folders whose files and folders are modules each on its own.
const FOLDERS: [&[&str]; 5] =
    [&["operations"], &["qcow2"], &["qcow2", "engine"], &["qcow2", "format"], &["qcow2", "offline"]];

/// By module: what it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// A path from the crate's root.
type ModulePath = Vec<String>;

/// The paths that a file mentions.
#[derive(Default)]
struct Mentioned {
    /// By the name under which a file has it: `use a::b as c` is a path `a::b` with the name `c`.
    paths: Vec<(ModulePath, String)>,
    /// Paths whose meaning cannot be told from this file.
    hidden: Vec<String>,
}

impl Mentioned {
    fn in_file(text: &str, module: &[String]) -> Self {
        let mut found = Self::default();
        found.search(text.parse().expect("a file of Rust source"), module);
        found
    }

    /// Every path in `tokens`, which stand in the module `module`.
    fn search(&mut self, tokens: TokenStream, module: &[String]) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            if let [TokenTree::Ident(keyword), TokenTree::Ident(name), TokenTree::Group(body), ..] = &tokens[at..]
                && keyword == "mod"
                && body.delimiter() == Delimiter::Brace
            {
                if !is_test(&tokens[..at]) {
                    self.search(body.stream(), &child(module, &name.to_string()));
                }
                at += 3;
            } else if ident(&tokens, at).is_some_and(|name| matches!(&*name, "super" | "self" | "crate"))
                && separated(&tokens, at + 1)
                && !(at >= 2 && separated(&tokens, at - 2))
            {
                at = self.path(&tokens, at, module);
            } else if ident(&tokens, at).is_some_and(|name| matches!(&*name, "super" | "crate"))
                && ident(&tokens, at + 1).is_some_and(|word| word == "as")
            {
                self.hidden.push(format!("another name for {}", tokens[at]));
                at += 2;
            } else if ident(&tokens, at).is_some_and(|word| word == "pub")
                && matches!(tokens.get(at + 1), Some(TokenTree::Group(scope)) if scope.delimiter() == Delimiter::Parenthesis)
            {
                // A visibility imports nothing.
                at += 2;
            } else if let TokenTree::Group(group) = &tokens[at] {
                self.search(group.stream(), module);
                at += 1;
            } else {
                at += 1;
            }
        }
    }

    /// The path, or the group of paths, that begins at `at` and goes on from `from`. Returns where it ends.
    fn path(&mut self, tokens: &[TokenTree], mut at: usize, from: &[String]) -> usize {
        let mut path = from.to_vec();
        let mut last = String::new();
        loop {
            match tokens.get(at) {
                Some(TokenTree::Ident(name)) => {
                    last = name.to_string();
                    match &*last {
                        "self" => {}
                        "crate" => path.clear(),
                        "super" => drop(path.pop()),
                        name => path.push(name.to_owned()),
                    }
                }
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    let names: Vec<_> = group.stream().into_iter().collect();
                    for one in names.split(|token| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',')) {
                        if !one.is_empty() {
                            self.path(one, 0, &path);
                        }
                    }
                    return at + 1;
                }
                // A glob: what it gives names to is not known here.
                Some(TokenTree::Punct(mark)) if mark.as_char() == '*' => {
                    at += 1;
                    break;
                }
                _ => break,
            }
            at += 1;
            if !separated(tokens, at) {
                break;
            }
            at += 2;
        }
        if ident(tokens, at).is_some_and(|word| word == "as") {
            last = ident(tokens, at + 1).unwrap_or_default();
            at += 2;
        }
        if is_door(&path) {
            self.hidden.push(format!("everything in {path:?}"));
        }
        self.paths.push((path, last));
        at
    }
}

/// Whether a path leads to the crate or a folder as a whole.
fn is_door(path: &[String]) -> bool {
    path.is_empty() || FOLDERS.iter().any(|folder| path == *folder)
}

/// How many parts of a path name its module.
fn length(path: &[String]) -> usize {
    let folders = FOLDERS.iter().filter(|folder| path.len() >= folder.len() && path[..folder.len()] == ***folder);
    folders.map(|folder| folder.len()).max().unwrap_or(0) + 1
}

fn child(module: &[String], name: &str) -> ModulePath {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

fn ident(tokens: &[TokenTree], at: usize) -> Option<String> {
    match tokens.get(at) {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

/// Whether `::` is at `at`.
fn separated(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |at| matches!(tokens.get(at), Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
    colon(at) && colon(at + 1)
}

/// Whether an item behind these tokens has `#[cfg(test)]`, or is for the model checker.
fn is_test(before: &[TokenTree]) -> bool {
    matches!(before.last(), Some(TokenTree::Group(attribute)) if matches!(&*attribute.to_string().replace(' ', ""), "[cfg(test)]" | "[cfg(all(test,loom))]"))
}

/// The modules of the crate, and what the files that re-export give names to.
struct Modules {
    known: BTreeSet<String>,
    re_exported: BTreeMap<String, ModulePath>,
}

impl Modules {
    /// The module that `path` leads to: `qcow2::NAME`, or a name at the crate's root.
    fn of(&self, path: &[String]) -> Option<String> {
        let name = path.get(..length(path))?.join("::");
        if self.known.contains(&name) {
            return Some(name);
        }
        self.re_exported.get(&name).and_then(|path| self.of(path))
    }
}

/// A module from which one comes back to it, and the way.
fn cycle(imports: &Imports) -> Option<Vec<&str>> {
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

/// What each module of the crate in `folder` imports, by the name of the module: the folder of a module belongs to it.
///
/// # Panics
///
/// If an import is hidden.
fn imports_of(folder: &Path) -> Imports {
    let mut mentioned: BTreeMap<ModulePath, Mentioned> = BTreeMap::new();
    for file in files(folder) {
        let inside = file.strip_prefix(folder).unwrap().with_extension("");
        let mut module: ModulePath = inside.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if module == ["lib"] {
            module.clear();
        }
        module.pop_if(|name| name == "mod");
        if module.last().is_some_and(|name| name == "tests") {
            continue;
        }
        let found = Mentioned::in_file(&fs::read_to_string(&file).unwrap(), &module);
        assert!(found.hidden.is_empty(), "{}: {:?}", file.display(), found.hidden);
        mentioned.insert(module, found);
    }
    let re_exports = |module: ModulePath| {
        let file = module.first().map_or("lib.rs".to_owned(), |name| format!("{name}/mod.rs"));
        let text = fs::read_to_string(folder.join(file)).unwrap();
        // A `use` of a child needs neither `self` nor `crate`: this is made one that is found.
        let text = text.replace("pub use ", "pub use self::").replace("pub(crate) use ", "pub(crate) use self::");
        let found = Mentioned::in_file(&text, &module).paths;
        found.into_iter().map(move |(path, name)| (child(&module, &name).join("::"), path)).collect::<Vec<_>>()
    };
    let re_exported =
        [vec![], vec!["operations".to_owned()], vec!["qcow2".to_owned()]].into_iter().flat_map(re_exports).collect();
    let known = mentioned.keys().filter(|path| !is_door(path)).map(|path| path[..length(path)].join("::"));
    let modules = Modules { known: known.filter(|name| !name.is_empty()).collect(), re_exported };
    let mut imports = Imports::new();
    for (module, found) in &mentioned {
        let Some(name) = modules.of(module) else { continue };
        let of_module = imports.entry(name.clone()).or_default();
        of_module
            .extend(found.paths.iter().filter_map(|(path, _)| modules.of(path)).filter(|imported| *imported != name));
    }
    imports
}

#[test]
fn no_module_of_qcow2_imports_itself_through_others() {
    let imports = imports_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    // Owners are above what they work with: a check that the files have been read.
    for (above, below) in [
        ("engine::writer", "engine::flusher"),
        ("engine::flusher", "engine::tables"),
        ("engine::tables", "engine::allocator"),
        ("offline::check", "format::header"),
    ] {
        let (above, below) = (format!("qcow2::{above}"), format!("qcow2::{below}"));
        assert!(imports[&above].contains(&below), "{above} imports {:?}", imports[&above]);
    }
    assert!(imports["chain"].contains("qcow2::engine::image"), "chain imports {:?}", imports["chain"]);
    assert_eq!(cycle(&imports), None);
}

#[test]
fn an_import_is_found_in_whichever_way_it_is_written() {
    let module = ["qcow2".to_owned(), "tables".to_owned()];
    let paths = |text: &str| {
        let found = Mentioned::in_file(text, &module);
        assert!(found.hidden.is_empty(), "{:?}", found.hidden);
        found.paths.into_iter().map(|(path, _)| path.join("::")).collect::<Vec<_>>()
    };
    assert_eq!(paths("use super::{a::{B, C},\n  d::E};"), ["qcow2::a::B", "qcow2::a::C", "qcow2::d::E"]);
    assert_eq!(paths("use crate::{qcow2::a::B, offset::C};"), ["qcow2::a::B", "offset::C"]);
    assert_eq!(paths("use super::super::qcow2::a::B;"), ["qcow2::a::B"]);
    assert_eq!(paths("use super::{super::offset::C};"), ["offset::C"]);
    assert_eq!(paths("use super::Qcow2 as Other;"), ["qcow2::Qcow2"]);
    assert_eq!(paths("mod inner { fn f(_: &super::super::a::B) {} }"), ["qcow2::a::B"]);
    assert_eq!(paths("fn f() { assert!(super::a::b()) }"), ["qcow2::a::b"]);
    assert_eq!(paths("pub(in super::super) fn f() {}"), [""; 0]);
    assert_eq!(paths("#[cfg(test)]\nmod tests { use super::super::a; }\nfn f(_: super::d::E) {}"), ["qcow2::d::E"]);
    let refused = [
        "use super::*;",
        "use crate::*;",
        "use crate as all;",
        "use crate::qcow2 as all;",
        "use super::super::qcow2;",
        "use super::{self};",
    ];
    for text in refused {
        assert!(!Mentioned::in_file(text, &module).hidden.is_empty(), "{text}");
    }
}

#[test]
fn a_cycle_is_found() {
    let imports = |edges: &[(&str, &str)]| {
        let mut imports = Imports::new();
        for (from, to) in edges {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        imports
    };
    assert_eq!(cycle(&imports(&[("a", "b"), ("a", "c"), ("b", "c")])), None);
    let cyclic = imports(&[("a", "b"), ("b", "c"), ("c", "b")]);
    assert_eq!(cycle(&cyclic), Some(vec!["a", "b", "c", "b"]));
}
