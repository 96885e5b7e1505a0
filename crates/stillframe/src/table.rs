//! Formats tables, sizes and counts.

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Rows of cells with an optional heading.
#[derive(Debug)]
pub struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(columns: &[(&str, Align)]) -> Table {
        Table {
            columns: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    /// A list of names and values, without a heading.
    pub fn list() -> Table {
        Table {
            columns: vec![Align::Left, Align::Left],
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let row: Vec<String> = cells.into_iter().map(|cell| printable(&cell)).collect();
        debug_assert_eq!(row.len(), self.columns.len());
        self.rows.push(row);
    }

    /// Adds a row to a list.
    pub fn entry(&mut self, name: &str, value: impl ToString) {
        self.row([name.to_owned(), value.to_string()]);
    }

    /// The aligned text, without a final line end.
    pub fn render(&self) -> String {
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&self.columns).zip(&widths);
            let cells = cells.map(|((cell, align), &width)| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// The text with control characters escaped. Names come from outside, and must not move the cursor or break a table.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Bytes in a fitting unit, in steps of 1024.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0.
    while size >= 1023.95 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", UNITS[unit])
}

/// `1 page`, `2 pages`.
pub fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[("NAME", Align::Left), ("PAGES", Align::Right)]);
        table.row(["a".to_owned(), "1".to_owned()]);
        table.row(["größer".to_owned(), "1234567".to_owned()]);
        assert_eq!(
            table.render(),
            "NAME      PAGES\na             1\ngrößer  1234567"
        );
    }

    #[test]
    fn an_empty_table_is_its_heading() {
        assert_eq!(
            Table::new(&[("A", Align::Left), ("B", Align::Left)]).render(),
            "A  B"
        );
        assert_eq!(Table::list().render(), "");
    }

    #[test]
    fn control_characters_are_escaped() {
        let mut table = Table::list();
        table.entry("vm", "x\x1b[2J\ny");
        assert_eq!(table.render(), "vm  x\\u{1b}[2J\\ny");
    }

    #[test]
    fn sizes_change_unit_at_1024() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes(64 * 1024 * 1024 + 200 * 1024), "64.2 MiB");
        assert_eq!(bytes((1 << 30) - 1), "1.0 GiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(count(0, "page"), "0 pages");
        assert_eq!(count(1, "page"), "1 page");
        assert_eq!(count(2, "page"), "2 pages");
    }
}
