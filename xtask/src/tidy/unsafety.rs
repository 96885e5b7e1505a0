//! Checks that `unsafe` is only in its crate, and has a note above it.

use super::Problem;
use super::source::{Source, flatten};
use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// The crate that may use `unsafe`.
const UNSAFE_CRATE: &str = "crates/sys/";
const NOTES: [&str; 2] = ["SAFETY:", "# Safety"];

/// Reports `unsafe` outside [`UNSAFE_CRATE`], and inside without a note.
pub fn check(source: &Source) -> Vec<Problem> {
    if source.place.starts_with(UNSAFE_CRATE) {
        let mut finder = Finder {
            source,
            statement: 0,
            problems: Vec::new(),
        };
        finder.visit_file(&source.tree);
        return finder.problems;
    }
    source
        .tokens
        .iter()
        .filter(|token| token.text == "unsafe")
        .map(|token| {
            let message = format!("unsafe outside {UNSAFE_CRATE}");
            Problem::error(&source.place, token.line, message)
        })
        .collect()
}

struct Finder<'a> {
    source: &'a Source,
    /// First line of the innermost statement, item or match arm around the current node.
    statement: usize,
    problems: Vec<Problem>,
}

impl Finder<'_> {
    fn require_note(&mut self, what: &str, line: usize) {
        let noted = [line, self.statement]
            .iter()
            .any(|start| has_note_above(self.source, *start));
        if !noted {
            let message = format!("this {what} needs a SAFETY comment above it");
            self.problems
                .push(Problem::error(&self.source.place, line, message));
        }
    }

    fn within(&mut self, span: Span, visit: impl FnOnce(&mut Self)) {
        let outer = std::mem::replace(&mut self.statement, span.start().line);
        visit(self);
        self.statement = outer;
    }
}

/// Whether the comments and attributes directly above the line contain a note.
fn has_note_above(source: &Source, line: usize) -> bool {
    let above = (1..line).rev().map(|number| source.line(number));
    above
        .take_while(|line| line.starts_with("//") || line.starts_with("#["))
        .any(|line| NOTES.iter().any(|note| line.contains(note)))
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        self.within(statement.span(), |finder| {
            visit::visit_stmt(finder, statement)
        });
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        self.within(arm.span(), |finder| visit::visit_arm(finder, arm));
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.within(item.span(), |finder| visit::visit_item(finder, item));
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        self.within(item.span(), |finder| visit::visit_impl_item(finder, item));
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.require_note("block", block.unsafe_token.span.start().line);
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        // A declaration in an extern block needs no note: the extern block has one.
        if let syn::Safety::Unsafe(unsafety) = &signature.safety {
            self.require_note("fn", unsafety.span().start().line);
        }
        visit::visit_signature(self, signature);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if let Some(unsafety) = &item.unsafety {
            self.require_note("impl", unsafety.span().start().line);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        if let Some(unsafety) = &item.unsafety {
            self.require_note("trait", unsafety.span().start().line);
        }
        visit::visit_item_trait(self, item);
    }

    fn visit_item_foreign_mod(&mut self, item: &'ast syn::ItemForeignMod) {
        if let Some(unsafety) = &item.unsafety {
            self.require_note("extern", unsafety.span().start().line);
        }
    }

    /// The tokens of a macro are not a syntax tree: only blocks are checked.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let mut tokens = Vec::new();
        flatten(call.tokens.clone(), &mut tokens);
        for pair in tokens.windows(2) {
            if pair[0].text == "unsafe" && pair[1].text == "{" {
                self.require_note("block", pair[0].line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `?` is a placeholder for the word, which must not occur here.
    fn messages(place: &str, text: &str) -> Vec<String> {
        let text = text.replace('?', "unsafe");
        let source = Source::parse(place, text).unwrap();
        check(&source).iter().map(Problem::to_string).collect()
    }

    const NOTED: &str = "\
// SAFETY: no pointers in it.
? impl Send for A {}
/// Does it.
///
/// # Safety
/// The caller knows.
#[inline]
pub ? fn a() {}
// SAFETY: as the manual says.
? extern \"C\" { fn c(); }
fn b() {
    // SAFETY: checked above.
    ? { a() };
    // SAFETY: checked above.
    let x =
        f(? { a() });
    match x {
        // SAFETY: x is 1.
        1 => ? { a() },
        _ => {}
    }
    m!({
        // SAFETY: checked above.
        ? { a() }
    });
}
";

    #[test]
    fn noted_ones_pass_in_the_unsafe_crate() {
        assert_eq!(messages("crates/sys/src/a.rs", NOTED), [""; 0]);
    }

    #[test]
    fn all_fail_in_another_crate_also_inside_a_macro() {
        let found = messages("crates/engine/src/a.rs", NOTED);
        assert_eq!(found.len(), NOTED.matches('?').count());
        assert_eq!(
            found[0],
            "error: crates/engine/src/a.rs:2: unsafe outside crates/sys/"
        );
    }

    #[test]
    fn each_kind_without_its_note_fails() {
        for (text, what) in [
            ("? impl Send for A {}", "impl"),
            ("/// Does it.\npub ? fn a() {}", "fn"),
            ("impl A { pub ? fn a() {} }", "fn"),
            ("? trait A {}", "trait"),
            ("? extern \"C\" { fn c(); }", "extern"),
            ("fn a() { ? { b() } }", "block"),
            ("fn a() { m!(? { b() }) }", "block"),
            // A note above the function does not cover its body.
            (
                "// SAFETY: of another thing.\nfn a() {\n    ? { b() }\n}",
                "block",
            ),
            // A note above the previous statement does not count.
            (
                "fn a() {\n    // SAFETY: c.\n    c();\n    ? { b() }\n}",
                "block",
            ),
        ] {
            let found = messages("crates/sys/src/a.rs", text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(
                found[0].contains(&format!("this {what} needs a SAFETY comment")),
                "{found:?}"
            );
        }
    }

    #[test]
    fn comments_and_strings_may_contain_the_word() {
        let text = "//! ? code is elsewhere.\nconst A: &str = \"?\";\n";
        assert_eq!(messages("crates/page/src/a.rs", text), [""; 0]);
    }
}
