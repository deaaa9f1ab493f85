//! What a cache says of itself in a line.

use std::fmt;

use super::ledger::Ledger;
use super::options::Coding;

/// `QjlCache of 30 layers, 2 sequences of 2048, 12 tokens: keys 3 bits, values 3 bits, 401234 bytes for 1582080`: bytes held
/// for those that the visible rows had when they came.
pub(crate) fn write<B, C, X: Clone + Default>(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    ledger: &Ledger<B, C, X>,
    bytes: u64,
) -> fmt::Result {
    let lengths: Vec<String> =
        (0..ledger.sequences.len()).map(|sequence| ledger.len(sequence).unwrap_or(0).to_string()).collect();
    let coding = match &ledger.options.coding {
        Coding::Planes(options) => {
            let lo = options.planes_lo.map_or_else(String::new, |lo| format!("+{lo}"));
            format!("keys {}{lo} bits, values {} bits", options.planes_hi, options.value_planes)
        }
        Coding::Sketch(options) => {
            format!("keys {} bits a channel ({}), values 8 bits", options.rate, options.projection)
        }
    };
    write!(
        f,
        "{name} of {} layers, {} sequences of {} tokens: {coding}, {bytes} bytes for {}",
        ledger.layers.len(),
        lengths.len(),
        lengths.join(", "),
        ledger.raw_bytes()
    )
}
