//! Splits a quantity into number and unit.

/// Splits `1.5m` into 1.5 and `m`; `None` if there is no number or no unit.
pub fn split(text: &str) -> Option<(f64, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    // "1." and ".5" are numbers to Rust, but typing errors here.
    if number.split('.').any(str::is_empty) {
        return None;
    }
    Some((number.parse().ok()?, unit))
}
