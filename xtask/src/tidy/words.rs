//! What a file must begin with, and words that must not stand in it.

use super::Problem;
use super::source::Source;

/// Put together, so that this file does not hold what it looks for.
const PROMISES: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// The first line, promises of later work, and `unwrap` outside tests.
pub fn check(source: &Source) -> Vec<Problem> {
    let place = &source.place;
    let mut problems = Vec::new();
    if !source.text.starts_with("//! ") {
        let message = "does not begin with `//!` and what the file is for";
        problems.push(Problem::error(place, 1, message));
    }
    for (index, line) in source.text.lines().enumerate() {
        for promise in PROMISES.iter().filter(|promise| has_word(line, promise)) {
            let message = format!("{promise}: do it now, or write it down where work is planned");
            problems.push(Problem::error(place, index + 1, message));
        }
    }
    for (index, token) in source.tokens.iter().enumerate() {
        let follows = |words: &[&str]| {
            let rest = source.tokens[index + 1..]
                .iter()
                .map(|token| token.text.as_str());
            rest.take(words.len()).eq(words.iter().copied())
        };
        // With an argument it is another method of that name.
        if token.text == "." && follows(&["unwrap", "(", ")"]) && !source.is_test(token.line) {
            let message =
                "unwrap outside a test: give an error, or expect with a comment why it holds";
            problems.push(Problem::error(place, token.line, message));
        }
        if ["todo", "unimplemented"].contains(&token.text.as_str()) && follows(&["!"]) {
            let message = format!("{}!: a stub", token.text);
            problems.push(Problem::error(place, token.line, message));
        }
    }
    problems
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let source = Source::parse("crates/a/src/b.rs", text.to_owned()).unwrap();
        check(&source).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_good_file_passes() {
        let text = "//! A room.\nfn a() { x.unwrap_or(1); key.unwrap(password); \"x.unwrap()\"; }\n\
                    #[cfg(test)]\nmod tests { fn b() { x.unwrap(); } }\n";
        assert_eq!(messages(text), [""; 0]);
    }

    #[test]
    fn a_file_that_does_not_say_what_it_is_for_does_not_pass() {
        for text in [
            "fn a() {}\n",
            "\n//! Late.\n",
            "// A room.\n",
            "//!\n//! Late.\n",
            "",
        ] {
            assert_eq!(messages(text).len(), 1, "{text:?}");
        }
    }

    #[test]
    fn unwrap_does_not_pass_nor_does_it_inside_a_macro_call() {
        let text =
            "//! A room.\nfn a() {\n    x.unwrap( );\n    println!(\"{}\", x.unwrap());\n}\n";
        let found = messages(text);
        assert_eq!(found.len(), 2);
        assert!(
            found[0].starts_with("error: crates/a/src/b.rs:3: unwrap"),
            "{found:?}"
        );
        assert!(
            found[1].starts_with("error: crates/a/src/b.rs:4: unwrap"),
            "{found:?}"
        );
    }

    #[test]
    fn promises_and_stubs_do_not_pass_even_in_tests() {
        for promise in PROMISES {
            assert_eq!(
                messages(&format!("//! A room.\n// {promise}: later\n")).len(),
                1
            );
            assert_eq!(messages(&format!("//! A room.\n// {promise}S\n")).len(), 0);
        }
        for stub in ["todo", "unimplemented"] {
            let text = format!("//! A room.\n#[test]\nfn a() {{ {stub}!() }}\n");
            assert_eq!(
                messages(&text),
                [format!("error: crates/a/src/b.rs:3: {stub}!: a stub")]
            );
        }
    }
}
