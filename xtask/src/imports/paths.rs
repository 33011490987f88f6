//! The paths that a file mentions, read from its tokens: groups, inline modules, macros and code behind a file's tests
//! count too.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path from the crate's root.
pub(super) type ModulePath = Vec<String>;

/// The paths that a file mentions.
#[derive(Debug, Default)]
pub(super) struct Mentioned {
    /// Paths of the crate that it uses.
    pub(super) paths: Vec<ModulePath>,
    /// Names that `use` gives in this module, public or not, and what they stand for.
    pub(super) names: BTreeMap<String, ModulePath>,
    /// Modules in files of their own that are compiled for tests alone.
    pub(super) test_modules: Vec<ModulePath>,
    /// The modules below this one.
    children: BTreeSet<String>,
}

impl Mentioned {
    /// Reads the text of the module at `module`. A file that is not Rust mentions nothing: the compiler reports it.
    pub(super) fn in_file(text: &str, module: &[String]) -> Self {
        let mut found = Self::default();
        let Ok(tokens) = text.parse::<TokenStream>() else { return found };
        found.declarations(&tokens, module);
        found.search(tokens, module, true);
        found
    }

    /// The modules that the file declares.
    fn declarations(&mut self, tokens: &TokenStream, module: &[String]) {
        let tokens: Vec<_> = tokens.clone().into_iter().collect();
        for at in 0..tokens.len() {
            let [TokenTree::Ident(keyword), TokenTree::Ident(name), body, ..] = &tokens[at..] else { continue };
            if keyword != "mod" {
                continue;
            }
            let name = name.to_string();
            let own_file = matches!(body, TokenTree::Punct(mark) if mark.as_char() == ';');
            if own_file && is_test(&tokens[..at]) {
                self.test_modules.push(child(module, &name));
            } else {
                self.children.insert(name);
            }
        }
    }

    /// Every path in `tokens`, which are in the module `module`; `top` if that is the file's own module.
    fn search(&mut self, tokens: TokenStream, module: &[String], top: bool) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            at = self.step(&tokens, at, module, top);
        }
    }

    /// Reads what begins at `at`; returns where the next thing begins.
    fn step(&mut self, tokens: &[TokenTree], at: usize, module: &[String], top: bool) -> usize {
        if let [TokenTree::Ident(keyword), TokenTree::Ident(name), TokenTree::Group(body), ..] = &tokens[at..]
            && keyword == "mod"
            && body.delimiter() == Delimiter::Brace
        {
            if !is_test(&tokens[..at]) {
                self.search(body.stream(), &child(module, &name.to_string()), false);
            }
            return at + 3;
        }
        let word = ident(tokens, at).unwrap_or_default();
        if word == "pub" {
            // A visibility imports nothing.
            let scoped = matches!(tokens.get(at + 1), Some(TokenTree::Group(scope)) if scope.delimiter() == Delimiter::Parenthesis);
            let next = if scoped { at + 2 } else { at + 1 };
            if ident(tokens, next).is_some_and(|word| word == "use") {
                return self.import(tokens, next + 1, module, Place { public: true, top });
            }
            return next;
        }
        if word == "use" {
            return self.import(tokens, at + 1, module, Place { public: false, top });
        }
        let begins = !word.is_empty() && separated(tokens, at + 1) && !(at >= 2 && separated(tokens, at - 2));
        if begins {
            let mut paths = Vec::new();
            let end = path(tokens, at, &[], &mut paths);
            for (path, _) in paths {
                if let Some(path) = self.resolved(&path, module) {
                    self.paths.push(path);
                }
            }
            return end;
        }
        if let Some(TokenTree::Group(group)) = tokens.get(at) {
            self.search(group.stream(), module, top);
        }
        at + 1
    }

    /// The `use` whose tree begins at `at`; a public one gives names and uses nothing.
    fn import(&mut self, tokens: &[TokenTree], at: usize, module: &[String], place: Place) -> usize {
        let mut paths = Vec::new();
        let end = path(tokens, at, &[], &mut paths);
        for (path, name) in paths {
            let Some(path) = self.resolved(&path, module) else { continue };
            if place.top {
                self.names.insert(name, path.clone());
            }
            if !place.public {
                self.paths.push(path);
            }
        }
        end
    }

    /// A path as it is written in `module`, from the root; none if it leads out of the crate.
    fn resolved(&self, path: &[String], module: &[String]) -> Option<ModulePath> {
        let (first, rest) = path.split_first()?;
        let mut from = match first.as_str() {
            "crate" => Vec::new(),
            "self" => module.to_vec(),
            "super" => module.split_last()?.1.to_vec(),
            name if self.children.contains(name) => child(module, name),
            name => self.names.get(name)?.clone(),
        };
        for name in rest {
            match name.as_str() {
                "self" => {}
                "super" => drop(from.pop()),
                name => from.push(name.to_owned()),
            }
        }
        Some(from)
    }
}

/// The place of a `use`.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// It is public.
    public: bool,
    /// It is at the top of its module.
    top: bool,
}

/// The path, or the paths of the group, that begins at `at` and continues `from`, each with the name that a `use` gives
/// it. Returns where it ends.
fn path(tokens: &[TokenTree], mut at: usize, from: &[String], into: &mut Vec<(ModulePath, String)>) -> usize {
    let mut path = from.to_vec();
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(name)) => path.push(name.to_string()),
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let names: Vec<_> = group.stream().into_iter().collect();
                for one in names.split(|token| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',')) {
                    if !one.is_empty() {
                        self::path(one, 0, &path, into);
                    }
                }
                return at + 1;
            }
            // A glob uses the module that it is of.
            Some(TokenTree::Punct(mark)) if mark.as_char() == '*' => {
                into.push((path, "*".to_owned()));
                return at + 1;
            }
            _ => break,
        }
        at += 1;
        if !separated(tokens, at) {
            break;
        }
        at += 2;
    }
    let mut name = path.iter().rfind(|name| *name != "self").cloned().unwrap_or_default();
    if ident(tokens, at).is_some_and(|word| word == "as") {
        name = ident(tokens, at + 1).unwrap_or_default();
        at += 2;
    }
    into.push((path, name));
    at
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

/// Whether an item behind these tokens is compiled for tests or the model checker alone: its attributes and visibility
/// are the last of them.
fn is_test(before: &[TokenTree]) -> bool {
    let mut end = before.len();
    while let Some(last) = end.checked_sub(1).and_then(|at| before.get(at)) {
        match last {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket => {
                let text = group.to_string().replace(' ', "");
                if text.starts_with("[cfg(")
                    && !text.contains("not(")
                    && (text.contains("test") || text.contains("loom"))
                {
                    return true;
                }
            }
            TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis => {}
            TokenTree::Punct(mark) if mark.as_char() == '#' => {}
            TokenTree::Ident(word) if word == "pub" => {}
            _ => return false,
        }
        end -= 1;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str) -> Vec<String> {
        let module = ["a".to_owned(), "b".to_owned()];
        Mentioned::in_file(text, &module).paths.into_iter().map(|path| path.join("::")).collect()
    }

    #[test]
    fn an_import_is_found_in_whichever_way_it_is_written() {
        assert_eq!(paths("use super::{c::{D, E},\n  f::G};"), ["a::c::D", "a::c::E", "a::f::G"]);
        assert_eq!(paths("use crate::{a::c::D, g::H as I};"), ["a::c::D", "g::H"]);
        assert_eq!(paths("use super::super::g::H;"), ["g::H"]);
        assert_eq!(paths("use super::c::{self, D};"), ["a::c", "a::c::D"]);
        assert_eq!(paths("use crate::g::*;"), ["g"]);
        assert_eq!(paths("mod inner { fn f(_: &super::super::c::D) {} }"), ["a::c::D"]);
        assert_eq!(paths("fn f() { assert!(super::c::d()) }"), ["a::c::d"]);
        assert_eq!(paths("mod k; fn f() { k::g() }"), ["a::b::k::g"]);
        assert_eq!(paths("use crate::g; fn f(_: g::H) {}"), ["g", "g::H"]);
    }

    #[test]
    fn visibilities_re_exports_and_other_crates_import_nothing() {
        assert_eq!(paths("pub(in super::super) fn f() {}"), [""; 0]);
        assert_eq!(paths("mod k; pub use k::L; pub(crate) use super::c::D;"), [""; 0]);
        assert_eq!(paths("use std::fs; fn f() { fs::read(serde::x::Y) }"), [""; 0]);
    }

    #[test]
    fn tests_are_left_out_and_the_code_behind_them_is_not() {
        assert_eq!(paths("#[cfg(test)]\nmod tests { use super::super::c; }\nfn f(_: super::d::E) {}"), ["a::d::E"]);
        assert_eq!(paths("#[cfg(not(test))]\nmod k { use crate::g::H; }"), ["g::H"]);
        let found = Mentioned::in_file("#[cfg(test)]\npub(crate) mod k;\n#[cfg(loom)] mod models;", &[]);
        assert_eq!(found.test_modules, [["k"], ["models"]]);
    }
}
