//! How numbers and headings look.

use anstyle::{AnsiColor, Style};
use serde::Serialize;

/// A heading.
pub(crate) const STRONG: Style = Style::new().bold();
/// What needs attention.
pub(crate) const NOTICE: Style = AnsiColor::Yellow.on_default().bold();
/// The word error.
pub(crate) const ERROR: Style = AnsiColor::Red.on_default().bold();

/// A figure with three decimals, or a dash where there is none.
pub(crate) fn figure(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), |x| format!("{x:.3}"))
}

/// Bytes in binary units, exact below 1 KiB.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut size = count as f64 / 1024.0;
    let mut units = UNITS.into_iter();
    let mut unit = units.next().unwrap_or_default();
    for next in units {
        // What would print as 1024.0 is one of the next unit.
        if size < 1023.95 {
            break;
        }
        size /= 1024.0;
        unit = next;
    }
    format!("{size:.1} {unit}")
}

/// Whether a terminal may obey this character instead of showing it: controls, and those that turn the writing's direction.
fn commands(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text from outside, made harmless: what a terminal would obey is written out, as `\u{1b}`.
pub(crate) fn plain(text: &str) -> String {
    let shown = |c: char| if commands(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

/// JSON over several lines, with a newline at the end. What a terminal would obey stands in it as JSON escapes.
pub(crate) fn json(value: &impl Serialize) -> String {
    // Every type that is printed has text keys and finite numbers or null, which always serialise.
    let text = serde_json::to_string_pretty(value).unwrap_or_else(|error| error.to_string()) + "\n";
    // Line feeds stand between tokens; all else that commands is in strings, and within 16 bits.
    let shown = |c: char| {
        if c != '\n' && commands(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() }
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_commands_a_terminal_is_written_out() {
        let text = "naïve \x1b[31m\u{9b}2J\u{202e}\r\n\x7f";
        assert_eq!(plain(text), r"naïve \u{1b}[31m\u{9b}2J\u{202e}\r\n\u{7f}");
        let written = json(&[text]);
        assert!(!written.contains(|c| c != '\n' && commands(c)), "{written:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&written).unwrap(), [text]);
    }

    #[test]
    fn sizes_read_well() {
        let sizes =
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (u64::MAX, "16.0 EiB")];
        for (count, text) in sizes {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
    }
}
