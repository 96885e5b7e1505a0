//! Checks imports between modules of a crate: no cycle, and no import upward between the parts of a crate.
//!
//! ```text
//! use crate::pack::place::Place      in index/reader.rs:   index::reader --> pack::place
//! use super::frame_job::FrameJob     in pack/packer/...    pack::packer::sealer --> pack::packer::frame_job
//! ```
//!
//! An import of a name that a module re-exports (`pub use`) counts for the module that defines the name. A submodule
//! belongs to its ancestors, so an import from an ancestor does not count. Tests may import everything.

use super::Problem;
use super::source::Source;
use std::collections::{BTreeMap, BTreeSet};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{ItemUse, UseTree};

/// The parts of each crate in their order, the lowest first: a part imports only from parts before it. A part is a file
/// or a folder of `src`. Crates without an order must also be free of cycles.
const ORDERS: &[(&str, &[&str])] = &[
    ("crates/sys", SYS),
    ("crates/qemu", QEMU),
    ("crates/repo", REPO),
    ("crates/engine", ENGINE),
    ("crates/stillframe", STILLFRAME),
];

const SYS: &[&str] = &[
    "control_group",
    "fdpass",
    "memfd",
    "private_dir",
    "process",
    "security_label",
    "system",
    "affinity",
    "credentials",
    "memory",
    "pagemap",
    "uffd",
    "fuzzing",
    "infect",
    "probe",
];

const QEMU: &[&str] = &[
    "arguments",
    "credentials",
    "executable",
    "device_state",
    "page_tables",
    "qmp",
    "unix_sockets",
    "start_folder",
    "vmstate_image",
    "cpu_state",
    "guest_agent",
    "migration_file",
    "target",
    "monitor",
    "physical_memory",
    "devices",
    "elf_core",
    "reload",
    "record",
    "suitability",
    "qemu_img",
    "launch",
    "fuzzing",
];

const REPO: &[&str] = &[
    "progress",
    "sync",
    "format",
    "error",
    "crypto",
    "store",
    "pack",
    "images",
    "index",
    "blobs",
    "repository",
    "keyring",
    "writer",
    "indexing",
    "page_table",
    "lease",
    "working_set",
    "selector",
    "copy",
    "maintenance",
];

const ENGINE: &[&str] = &[
    "runtime",
    "control_socket",
    "guardian",
    "inhibitor",
    "placement",
    "memory",
    "disks",
    "post_restore",
    "guest_clock",
    "tracking",
    "free_pages",
    "balloon",
    "encoding",
    "connection",
    "capture",
    "sink",
    "source",
    "populate",
    "template",
    "attach",
    "verify",
    "statistics",
    "page_classes",
    "streaming",
    "checkpoint",
    "pipeline",
    "restore",
    "clones",
    "rewind",
    "export",
    "import",
    "migration",
];

const STILLFRAME: &[&str] = &[
    "help",
    "picture",
    "quantity",
    "shell",
    "table",
    "unlocked",
    "durations",
    "sizes",
    "error",
    "output",
    "args",
    "progress",
    "password",
    "exit",
    "interrupt",
    "cmd",
];

/// A module: its path from the root of its crate.
type Module = Vec<String>;

/// The imports, each with its line.
type Arrows = BTreeMap<(Module, Module), usize>;

/// Re-exports and imported names: module, name, and the full path of the name.
type ImportedNames = BTreeMap<(Module, String), Module>;

/// Upper bound on the re-exports of one name, because `pub use` may be circular.
const HOPS_MAX: usize = 8;

/// The import graph of one crate in figures.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Graph {
    pub modules: usize,
    pub arrows: usize,
    pub cycles: usize,
    pub upward: usize,
}

/// Checks all crates, including those in tests/ and xtask; returns problems and the graph of each crate.
pub fn check(sources: &[Source]) -> (Vec<Problem>, BTreeMap<String, Graph>) {
    let mut crates: BTreeMap<String, Vec<&Source>> = BTreeMap::new();
    for source in sources {
        if let Some((krate, _)) = split(&source.place) {
            crates.entry(krate.to_owned()).or_default().push(source);
        }
    }
    let mut problems = Vec::new();
    let mut graphs = BTreeMap::new();
    for (krate, sources) in crates {
        let order = ORDERS.iter().find(|(name, _)| *name == krate);
        let (found, graph) = check_crate(&krate, &sources, order.map(|(_, order)| *order));
        problems.extend(found);
        graphs.insert(krate, graph);
    }
    (problems, graphs)
}

/// The crate and module of a file; `None` if it is not a module of a library or program.
fn split(place: &str) -> Option<(&str, Module)> {
    let (krate, below) = place.split_once("/src/")?;
    let path = below.strip_suffix(".rs")?;
    let mut module: Module = path.split('/').map(str::to_owned).collect();
    match module.first().map(String::as_str) {
        Some("tests" | "bin") => return None,
        Some("lib" | "main") => module.clear(),
        _ => {}
    }
    if module.last().is_some_and(|name| name == "mod") {
        module.pop();
    }
    Some((krate, module))
}

fn check_crate(krate: &str, sources: &[&Source], order: Option<&[&str]>) -> (Vec<Problem>, Graph) {
    let mut places: BTreeMap<Module, &str> = BTreeMap::new();
    for source in sources {
        if let Some((_, module)) = split(&source.place)
            && !source.is_test(1)
        {
            places.insert(module, &source.place);
        }
    }
    let modules: BTreeSet<Module> = places.keys().cloned().collect();
    let mut found = Vec::new();
    for source in sources {
        if let Some((_, module)) = split(&source.place)
            && modules.contains(&module)
        {
            let mut finder = Finder {
                source,
                modules: &modules,
                module,
                found: &mut found,
            };
            finder.visit_file(&source.tree);
        }
    }
    let arrows = arrows(&modules, &found);
    let mut problems = Vec::new();
    let cycles = cycles(&modules, &arrows);
    for cycle in &cycles {
        let names: Vec<String> = cycle.iter().map(|module| module.join("::")).collect();
        let message = format!("these modules import from each other: {}", names.join(", "));
        problems.push(Problem::error(places[&cycle[0]], 0, message));
    }
    let upward = order.map(|order| upward(order, &arrows, &places));
    let upward = upward.unwrap_or_default();
    let graph = Graph {
        modules: modules.len(),
        arrows: arrows.len(),
        cycles: cycles.len(),
        upward: upward.len(),
    };
    problems.extend(upward);
    if let Some(order) = order {
        for module in modules.iter().filter(|module| !module.is_empty()) {
            if !order.contains(&module[0].as_str()) {
                let message = format!("{} is missing in the order of {krate}", module[0]);
                problems.push(Problem::error(places[module], 0, message));
            }
        }
    }
    (problems, graph)
}

/// Imports from a part that is higher in the order.
fn upward(order: &[&str], arrows: &Arrows, places: &BTreeMap<Module, &str>) -> Vec<Problem> {
    let rank = |module: &Module| {
        let part = module.first()?;
        order.iter().position(|name| name == part)
    };
    let mut problems = Vec::new();
    for ((from, to), &line) in arrows {
        if let (Some(low), Some(high)) = (rank(from), rank(to))
            && low < high
        {
            let message = format!(
                "{} may not import from {}, which is higher in the order",
                order[low], order[high]
            );
            problems.push(Problem::error(places[from], line, message));
        }
    }
    problems
}

/// Groups of modules that can all be reached from each other.
fn cycles(modules: &BTreeSet<Module>, arrows: &Arrows) -> Vec<Vec<Module>> {
    let mut reached: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
    for module in modules {
        let mut seen = BTreeSet::new();
        let mut next = vec![module];
        while let Some(at) = next.pop() {
            for (from, to) in arrows.keys() {
                if from == at && seen.insert(to) {
                    next.push(to);
                }
            }
        }
        reached.insert(module, seen);
    }
    let mut found: BTreeSet<Vec<Module>> = BTreeSet::new();
    for module in modules {
        let back = |other: &&&Module| reached[**other].contains(module);
        let circle: Vec<Module> = reached[module]
            .iter()
            .filter(back)
            .map(|m| (*m).clone())
            .collect();
        if !circle.is_empty() {
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

/// One import in a source file.
struct Import {
    from: Module,
    /// The imported path, from the root of the crate.
    path: Module,
    line: usize,
    /// The name that it adds to this module.
    as_name: Option<String>,
}

/// The imports between modules.
fn arrows(modules: &BTreeSet<Module>, found: &[Import]) -> Arrows {
    let mut imported_names = ImportedNames::new();
    for import in found {
        if let Some(name) = &import.as_name {
            imported_names.insert((import.from.clone(), name.clone()), import.path.clone());
        }
    }
    let mut arrows = Arrows::new();
    for import in found {
        if let Some(to) = origin(modules, &imported_names, &import.path)
            && !import.from.starts_with(&to)
        {
            let arrow = (import.from.clone(), to);
            arrows.entry(arrow).or_insert(import.line);
        }
    }
    arrows
}

/// The module that defines the item at a path, resolved through re-exports.
fn origin(
    modules: &BTreeSet<Module>,
    imported_names: &ImportedNames,
    path: &[String],
) -> Option<Module> {
    let mut path = path.to_vec();
    for _ in 0..HOPS_MAX {
        let mut lengths = (0..=path.len()).rev();
        let length = lengths.find(|length| modules.contains(&path[..*length]))?;
        let module = path[..length].to_vec();
        let Some(name) = path.get(length) else {
            return Some(module);
        };
        let Some(from) = imported_names.get(&(module.clone(), name.clone())) else {
            return Some(module);
        };
        path = [from, &path[length + 1..]].concat();
    }
    None
}

struct Finder<'a> {
    source: &'a Source,
    modules: &'a BTreeSet<Module>,
    module: Module,
    found: &'a mut Vec<Import>,
}

impl Finder<'_> {
    fn note(&mut self, path: &[String], line: usize, as_name: Option<String>) {
        if self.source.is_test(line) {
            return;
        }
        if let Some(path) = self.path_in_crate(path) {
            let from = self.module.clone();
            self.found.push(Import {
                from,
                path,
                line,
                as_name,
            });
        }
    }

    /// The path from the root of the crate; `None` for a path outside the crate.
    fn path_in_crate(&self, path: &[String]) -> Option<Module> {
        let first = path.first()?.as_str();
        let mut base = match first {
            "crate" => Vec::new(),
            "self" | "super" => self.module.clone(),
            child => {
                let mut below = self.module.clone();
                below.push(child.to_owned());
                return self.modules.contains(&below).then(|| {
                    below.extend_from_slice(&path[1..]);
                    below
                });
            }
        };
        for name in path {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => {
                    base.pop();
                }
                name => base.push(name.to_owned()),
            }
        }
        Some(base)
    }

    fn note_tree(&mut self, tree: &UseTree, before: &mut Module, line: usize) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.note_tree(&path.tree, before, line);
                before.pop();
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                self.note_leaf(&name, &name, before, line);
            }
            UseTree::Rename(rename) => {
                let name = rename.ident.to_string();
                self.note_leaf(&name, &rename.rename.to_string(), before, line);
            }
            UseTree::Glob(_) => self.note(before, line, None),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.note_tree(tree, before, line);
                }
            }
        }
    }

    fn note_leaf(&mut self, name: &str, here: &str, before: &mut Module, line: usize) {
        if name == "self" {
            let here = before.last().cloned();
            return self.note(before, line, here);
        }
        before.push(name.to_owned());
        self.note(before, line, Some(here.to_owned()));
        before.pop();
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let line = item.span().start().line;
        self.note_tree(&item.tree, &mut Vec::new(), line);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Module = path
            .segments
            .iter()
            .map(|part| part.ident.to_string())
            .collect();
        if names.len() > 1 {
            self.note(&names, path.span().start().line, None);
        }
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(files: &[(&str, &str)], order: Option<&[&str]>) -> (Vec<String>, Graph) {
        let parse = |(place, text): &(&str, &str)| {
            Source::parse(&format!("crates/a/src/{place}"), (*text).to_owned()).unwrap()
        };
        let mut sources: Vec<Source> = files.iter().map(parse).collect();
        super::super::source::mark_test_files(&mut sources);
        let sources: Vec<&Source> = sources.iter().collect();
        let (problems, graph) = check_crate("crates/a", &sources, order);
        (problems.iter().map(Problem::to_string).collect(), graph)
    }

    #[test]
    fn imports_downward_pass_in_all_forms() {
        let files = [
            ("lib.rs", "mod low;\nmod high;\npub use high::High;\n"),
            ("low.rs", "pub mod deep;\npub struct Low;\n"),
            ("low/deep.rs", "pub fn dig() {}\n"),
            (
                "high.rs",
                "use crate::low::{Low, deep};\npub struct High(super::low::Low);\n",
            ),
        ];
        let (problems, graph) = graph(&files, Some(&["low", "high"]));
        assert_eq!(problems, [""; 0]);
        assert_eq!((graph.modules, graph.arrows, graph.cycles), (4, 3, 0));
    }

    #[test]
    fn an_import_upward_fails() {
        let files = [
            ("lib.rs", "mod low;\nmod high;\n"),
            ("low.rs", "\nuse crate::high::High;\n"),
            ("high.rs", "pub struct High;\n"),
        ];
        let (problems, graph) = graph(&files, Some(&["low", "high"]));
        let expected = "error: crates/a/src/low.rs:2: low may not import from high, which is higher in the order";
        assert_eq!(problems, [expected]);
        assert_eq!(graph.upward, 1);
    }

    #[test]
    fn a_cycle_through_a_path_in_a_body_fails() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "pub fn f() { crate::b::g() }\n"),
            ("b.rs", "use crate::a;\npub fn g() { a::f() }\n"),
        ];
        let (problems, graph) = graph(&files, None);
        let expected = "error: crates/a/src/a.rs: these modules import from each other: a, b";
        assert_eq!(problems, [expected]);
        assert_eq!(graph.cycles, 1);
    }

    #[test]
    fn a_cycle_through_re_exports_fails() {
        let files = [
            ("lib.rs", "mod part;\n"),
            ("part.rs", "mod a;\nmod b;\npub use a::f;\npub use b::g;\n"),
            ("part/a.rs", "use super::g;\n"),
            ("part/b.rs", "use crate::part::f as other;\n"),
        ];
        let (problems, _) = graph(&files, None);
        assert!(
            problems[0].ends_with("import from each other: part::a, part::b"),
            "{problems:?}"
        );
    }

    #[test]
    fn a_module_and_its_submodules_are_one() {
        let files = [
            ("lib.rs", "mod part;\n"),
            (
                "part.rs",
                "mod inside;\npub struct Shared;\nuse inside::Hidden;\n",
            ),
            (
                "part/inside.rs",
                "use super::Shared;\npub struct Hidden(Shared);\n",
            ),
        ];
        let (problems, graph) = graph(&files, None);
        assert_eq!((problems.len(), graph.arrows), (0, 1));
    }

    #[test]
    fn tests_may_import_everything() {
        let files = [
            ("lib.rs", "mod low;\nmod high;\n#[cfg(test)]\nmod tests;\n"),
            (
                "low.rs",
                "#[cfg(test)]\nmod tests {\n    use crate::high::High;\n}\n",
            ),
            ("high.rs", "use crate::low;\n"),
            ("tests/all.rs", "use crate::high;\n"),
        ];
        let (problems, _) = graph(&files, Some(&["low", "high"]));
        assert_eq!(problems, [""; 0]);
    }

    #[test]
    fn a_part_that_is_missing_in_the_order_fails() {
        let files = [("lib.rs", "mod new;\n"), ("new.rs", "")];
        let (problems, _) = graph(&files, Some(&["low"]));
        let expected = "error: crates/a/src/new.rs: new is missing in the order of crates/a";
        assert_eq!(problems, [expected]);
    }
}
