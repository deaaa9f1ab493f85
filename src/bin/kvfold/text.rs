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

/// JSON over several lines, with a newline at the end.
pub(crate) fn json(value: &impl Serialize) -> String {
    // Every type that is printed has text keys and finite numbers or null, which always serialise.
    serde_json::to_string_pretty(value).map_or_else(|error| error.to_string(), |text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

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
