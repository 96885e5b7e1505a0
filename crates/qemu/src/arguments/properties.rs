//! The value of an option: `a,b=c,d=e,,f`, or the same as a JSON object.

use serde_json::Value;

/// Key-value pairs of one option in their order.
///
/// Text form (QEMU: `util/qemu-option.c`): pairs are separated by commas; a comma inside a value is written twice.
/// The first pair may leave out its key. Any other pair without a value is a switch (`wait` is `wait=on`, `nowait`
/// is `wait=off`). A value that begins with `{` is a JSON object; its nested members get dotted keys (`addr.path`),
/// as QEMU itself names them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Properties {
    pairs: Vec<(String, String)>,
}

impl Properties {
    /// Reads `text`; `implied` is the key of a first value without key. Never fails: a text that
    /// QEMU would refuse yields whatever pairs can be read, and none if it is neither an object nor pairs.
    pub fn parse(text: &str, implied: &str) -> Properties {
        let mut pairs = Vec::new();
        if text.starts_with('{') {
            if let Ok(object) = serde_json::from_str::<Value>(text) {
                flatten("", &object, &mut pairs);
            }
            return Properties { pairs };
        }
        let mut rest = Some(text);
        while let Some(text) = rest {
            let name_end = text.find(['=', ',']).unwrap_or(text.len());
            let (name, after_name) = text.split_at(name_end);
            rest = if let Some(value) = after_name.strip_prefix('=') {
                let (value, rest) = split_value(value);
                pairs.push((name.to_owned(), unescape(value)));
                rest
            } else if pairs.is_empty() {
                let (value, rest) = split_value(text);
                pairs.push((implied.to_owned(), unescape(value)));
                rest
            } else {
                // A comma ends a name even where another one follows.
                if !name.is_empty() {
                    pairs.push(switch(name));
                }
                after_name.strip_prefix(',')
            };
        }
        Properties { pairs }
    }

    /// The value of `key`; of several the last, as in QEMU.
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.pairs.iter().rev().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str())
    }

    /// Whether the switch `key` is on.
    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.get(key), Some("on" | "yes" | "true" | "y"))
    }

    /// Sets `key`, in its old place when it had one.
    pub fn set(&mut self, key: &str, value: &str) {
        match self.pairs.iter_mut().rfind(|(name, _)| name == key) {
            Some(pair) => value.clone_into(&mut pair.1),
            None => self.pairs.push((key.to_owned(), value.to_owned())),
        }
    }

    /// Removes `key`; true when it was there.
    pub fn remove(&mut self, key: &str) -> bool {
        let before = self.pairs.len();
        self.pairs.retain(|(name, _)| name != key);
        self.pairs.len() < before
    }

    /// The pairs in their order.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The text form, the first pair without its key when that is `implied`.
    pub fn render(&self, implied: &str) -> String {
        let items = self.pairs.iter().enumerate().map(|(index, (key, value))| {
            let value = escape(value);
            if index == 0 && key == implied && !value.contains('=') && !value.starts_with('{') {
                value
            } else {
                format!("{key}={value}")
            }
        });
        items.collect::<Vec<_>>().join(",")
    }
}

/// Doubles the commas of a value.
pub(super) fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

fn unescape(value: &str) -> String {
    value.replace(",,", ",")
}

/// A value up to the first single comma, its doubled commas as they are, and what follows that comma.
fn split_value(text: &str) -> (&str, Option<&str>) {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b',', Some(b',')) => at += 2,
            (b',', _) => return (&text[..at], Some(&text[at + 1..])),
            _ => at += 1,
        }
    }
    (text, None)
}

fn switch(item: &str) -> (String, String) {
    match item.strip_prefix("no") {
        Some(name) if !name.is_empty() => (name.to_owned(), "off".to_owned()),
        _ => (item.to_owned(), "on".to_owned()),
    }
}

fn flatten(prefix: &str, value: &Value, into: &mut Vec<(String, String)>) {
    let dotted = |name: &str| {
        if prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{prefix}.{name}")
        }
    };
    match value {
        Value::Object(members) => {
            // No name in QEMU's schema has them; as text such a name would be several properties, or an object.
            let names = members
                .iter()
                .filter(|(name, _)| !name.contains([',', '=', '{']));
            for (name, member) in names {
                flatten(&dotted(name), member, into);
            }
        }
        Value::Array(members) => {
            for (index, member) in members.iter().enumerate() {
                flatten(&dotted(&index.to_string()), member, into);
            }
        }
        Value::Bool(true) => into.push((prefix.to_owned(), "on".to_owned())),
        Value::Bool(false) => into.push((prefix.to_owned(), "off".to_owned())),
        Value::String(text) => into.push((prefix.to_owned(), text.clone())),
        Value::Number(number) => into.push((prefix.to_owned(), number.to_string())),
        // In a text QEMU takes nothing for it: `backing=` is no backing file, whatever the image says.
        Value::Null => into.push((prefix.to_owned(), String::new())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_in_json_is_never_several_properties() {
        let text = r#"{"id":"c","x,logfile":"/f","fd=3,y":"1","deep":{"a,fd":"4"},"{":"5"}"#;
        assert_eq!(Properties::parse(text, "backend").render("backend"), "id=c");
        // Rendered, pairs read out of this would be an object.
        let text = r#"{"a=b":"c"},"#;
        assert_eq!(Properties::parse(text, "backend"), Properties::default());
    }

    #[test]
    fn reading() {
        let table: &[(&str, &[(&str, &str)])] = &[
            (
                "socket,id=c0,path=/a,,b,server=on",
                &[
                    ("first", "socket"),
                    ("id", "c0"),
                    ("path", "/a,b"),
                    ("server", "on"),
                ],
            ),
            (
                "x,server,nowait",
                &[("first", "x"), ("server", "on"), ("wait", "off")],
            ),
            ("key=v", &[("key", "v")]),
            ("a,,b", &[("first", "a,b")]),
            ("a=b=c", &[("a", "b=c")]),
            ("", &[("first", "")]),
            ("a,,", &[("first", "a,")]),
            ("a,", &[("first", "a")]),
            // Doubled commas are for values only.
            ("x,a,,b", &[("first", "x"), ("a", "on"), ("b", "on")]),
            ("x,noa,,b=1", &[("first", "x"), ("a", "off"), ("b", "1")]),
            (
                r#"{"driver":"x","addr":{"path":"/p","deep":[1,true]}}"#,
                &[
                    ("addr.deep.0", "1"),
                    ("addr.deep.1", "on"),
                    ("addr.path", "/p"),
                    ("driver", "x"),
                ],
            ),
        ];
        for (text, expected) in table {
            let properties = Properties::parse(text, "first");
            let mut pairs: Vec<_> = properties.pairs().collect();
            if text.starts_with('{') {
                pairs.sort_unstable();
            }
            assert_eq!(&pairs, expected, "{text}");
        }
    }

    #[test]
    fn changing() {
        let mut properties = Properties::parse("socket,id=c,path=/p,logfile=/l", "backend");
        properties.set("path", "/q,r");
        assert!(properties.remove("logfile"));
        assert!(!properties.remove("logfile"));
        properties.set("mux", "on");
        assert_eq!(
            properties.render("backend"),
            "socket,id=c,path=/q,,r,mux=on"
        );
    }

    proptest! {
        #[test]
        fn rendering_is_the_inverse_of_reading(values in proptest::collection::vec("[ -~]{0,12}", 1..6)) {
            let mut properties = Properties::default();
            for (index, value) in values.iter().enumerate() {
                properties.set(&format!("k{index}"), value);
            }
            prop_assert_eq!(Properties::parse(&properties.render("k0"), "k0"), properties);
        }

        #[test]
        fn what_was_read_once_is_read_the_same_again(text in "[,=no{a-b]{0,40}|.{0,200}") {
            let properties = Properties::parse(&text, "first");
            // No pairs at all are the same text as one empty value.
            if properties != Properties::default() {
                prop_assert_eq!(Properties::parse(&properties.render("first"), "first"), properties);
            }
        }
    }
}
