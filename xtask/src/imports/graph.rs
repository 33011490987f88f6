//! The graph of imports between files, and its circles.

use std::collections::{BTreeMap, BTreeSet};

/// By file: the files that it imports.
#[derive(Debug, Default)]
pub(super) struct Graph {
    imports: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    pub(super) fn add(&mut self, from: &str, to: &str) {
        self.imports.entry(from.to_owned()).or_default().insert(to.to_owned());
    }

    /// The files that `from` imports, in order.
    pub(super) fn imported(&self, from: &str) -> impl Iterator<Item = &str> {
        self.imports.get(from).into_iter().flatten().map(String::as_str)
    }

    /// The circles of two or more files: each file of one leads to all others of it.
    pub(super) fn circles(&self) -> Vec<BTreeSet<String>> {
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            self.imports.keys().map(|file| (file.as_str(), self.reached_from(file))).collect();
        let leads = |from: &str, to: &str| reached.get(from).is_some_and(|files| files.contains(to));
        let mut circles: Vec<BTreeSet<String>> = Vec::new();
        for file in reached.keys() {
            if !leads(file, file) || circles.iter().any(|circle| circle.contains(*file)) {
                continue;
            }
            let others = reached.keys().filter(|other| leads(file, other) && leads(other, file));
            circles.push(others.map(|&other| other.to_owned()).collect());
        }
        circles
    }

    /// Every file that imports lead to from `file`; `file` itself only through others.
    fn reached_from(&self, file: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut next: Vec<&str> = self.imported(file).collect();
        while let Some(file) = next.pop() {
            if reached.insert(file) {
                next.extend(self.imported(file));
            }
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circles_are_found_and_what_leads_to_them_is_no_part() {
        let mut graph = Graph::default();
        for (from, to) in [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d"), ("e", "f"), ("f", "g"), ("g", "e")] {
            graph.add(from, to);
        }
        let circle = |files: &[&str]| files.iter().map(|&file| file.to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(graph.circles(), [circle(&["b", "c"]), circle(&["e", "f", "g"])]);
    }

    #[test]
    fn a_tree_has_no_circle() {
        let mut graph = Graph::default();
        for (from, to) in [("a", "b"), ("a", "c"), ("b", "c")] {
            graph.add(from, to);
        }
        assert!(graph.circles().is_empty());
    }
}
