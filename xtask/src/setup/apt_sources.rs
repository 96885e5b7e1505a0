//! Reads apt's sources in both formats, see sources.list(5).

use anyhow::{Context, Result};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// One source of binary packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    /// As written, including the lines of a key in the file itself.
    signed_by: Option<String>,
}

impl Source {
    /// Whether packages of exactly this suite come from here.
    pub fn has_suite(&self, suite: &str) -> bool {
        self.suites.iter().any(|own| own == suite)
    }

    /// The first URI.
    pub fn first_uri(&self) -> Option<&str> {
        self.uris.first().map(String::as_str)
    }

    /// The `main` component of another suite, with the same URIs and key.
    pub fn other_suite(base: &Self, suite: &str) -> Self {
        Self {
            suites: vec![suite.to_owned()],
            components: vec!["main".to_owned()],
            ..base.clone()
        }
    }

    /// The source as a stanza of a `.sources` file.
    pub fn to_deb822(&self) -> String {
        let mut text = format!(
            "Types: deb\nURIs: {}\nSuites: {}\nComponents: {}\n",
            self.uris.join(" "),
            self.suites.join(" "),
            self.components.join(" ")
        );
        if let Some(signed_by) = &self.signed_by {
            let space = if signed_by.starts_with('\n') { "" } else { " " };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "Signed-By:{space}{signed_by}");
        }
        text
    }
}

/// All sources below `/etc/apt`; tests give another folder.
pub fn read_all(apt: &Path) -> Result<Vec<Source>> {
    let mut files = vec![apt.join("sources.list")];
    if let Ok(folder) = fs::read_dir(apt.join("sources.list.d")) {
        let mut parts: Vec<PathBuf> = folder.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut sources = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        match file.extension().and_then(|ending| ending.to_str()) {
            Some("sources") => sources.extend(parse_deb822(&text)),
            Some("list") => sources.extend(text.lines().filter_map(parse_line)),
            _ => {}
        }
    }
    Ok(sources)
}

/// `deb [arch=amd64 signed-by=KEY] URI SUITE COMPONENT...`
fn parse_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let mut rest = line.strip_prefix("deb")?;
    if !rest.starts_with(char::is_whitespace) {
        return None; // deb-src
    }
    rest = rest.trim_start();
    let mut signed_by = None;
    if let Some(options) = rest.strip_prefix('[') {
        let (options, after) = options.split_once(']')?;
        rest = after;
        signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
    }
    let mut words = rest.split_whitespace().map(str::to_owned);
    Some(Source {
        uris: vec![words.next()?],
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by,
    })
}

/// The enabled stanzas of a `.sources` file for binary packages.
fn parse_deb822(text: &str) -> Vec<Source> {
    let uncommented: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    uncommented
        .split(|line| line.trim().is_empty())
        .filter_map(parse_stanza)
        .collect()
}

fn parse_stanza(lines: &[&str]) -> Option<Source> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in lines {
        if line.starts_with([' ', '\t']) {
            let (_, value) = fields.last_mut()?;
            value.push('\n');
            value.push_str(line);
        } else {
            let (name, value) = line.split_once(':')?;
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    let field = |name: &str| {
        let mut found = fields.iter().filter(|(own, _)| own == name);
        found.next().map(|(_, value)| value.clone())
    };
    let words = |name: &str| -> Option<Vec<String>> {
        Some(field(name)?.split_whitespace().map(str::to_owned).collect())
    };
    let disabled = field("enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if disabled || !words("types")?.contains(&"deb".to_owned()) {
        return None;
    }
    Some(Source {
        uris: words("uris")?,
        suites: words("suites")?,
        components: words("components").unwrap_or_default(),
        signed_by: field("signed-by"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "\
Types: deb
# a mirror
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/archive.gpg

Types: deb
URIs: http://off.test/debian
Suites: bookworm-backports
Components: main
Enabled: no

Types: deb-src
URIs: http://src.test/debian
Suites: bookworm
Components: main
";

    #[test]
    fn disabled_stanzas_and_source_packages_are_skipped() {
        let sources = parse_deb822(STANZAS);
        assert_eq!(sources.len(), 1);
        assert!(sources[0].has_suite("bookworm") && !sources[0].has_suite("bookworm-backports"));
        assert_eq!(sources[0].first_uri(), Some("http://mirror.test/debian"));
    }

    #[test]
    fn the_added_suite_has_uri_and_key_of_its_base() {
        let added =
            Source::other_suite(&parse_deb822(STANZAS)[0], "bookworm-backports").to_deb822();
        assert_eq!(
            added,
            "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm-backports\n\
             Components: main\nSigned-By: /usr/share/keyrings/archive.gpg\n"
        );
    }

    #[test]
    fn a_key_inside_the_file_is_kept_line_by_line() {
        let text = "Types: deb\nURIs: http://m.test/debian\nSuites: trixie\nComponents: main\n\
                    Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n";
        let [source] = &parse_deb822(text)[..] else {
            panic!("one stanza");
        };
        assert_eq!(source.to_deb822(), text);
    }

    #[test]
    fn one_line_sources_are_read_with_and_without_options() {
        let plain = parse_line("deb http://m.test/debian bookworm main contrib # mirror").unwrap();
        assert!(plain.has_suite("bookworm") && plain.signed_by.is_none());
        let signed =
            parse_line("deb [ arch=amd64 signed-by=/k.gpg ] http://m.test/d bookworm main");
        assert_eq!(signed.unwrap().signed_by.as_deref(), Some("/k.gpg"));
        for none in [
            "# deb http://m.test/debian bookworm main",
            "deb-src http://m s main",
            "",
        ] {
            assert_eq!(parse_line(none), None, "{none:?}");
        }
    }

    #[test]
    fn both_formats_are_found_in_their_folders() {
        let apt = tempfile::tempdir().unwrap();
        fs::create_dir(apt.path().join("sources.list.d")).unwrap();
        let write = |name: &str, text: &str| fs::write(apt.path().join(name), text).unwrap();
        write("sources.list", "deb http://a.test/debian one main\n");
        write("sources.list.d/b.sources", STANZAS);
        write(
            "sources.list.d/c.list.off",
            "deb http://c.test/debian three main\n",
        );
        let sources = read_all(apt.path()).unwrap();
        assert_eq!(sources.len(), 2);
        assert!(sources[0].has_suite("one") && sources[1].has_suite("bookworm"));
    }
}
