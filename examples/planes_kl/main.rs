//! How far attention weights move when keys are kept as sign planes: their KL divergence from the exact weights, on a
//! capture with queries, mean over layers, query heads, queries and rotation seeds.
//!
//! ```text
//! cargo run --release --no-default-features --example planes_kl -- CAPTURE [TOKENS [ROUNDS]]
//! ```
//!
//! The first 4 tokens are exact, all others coded, the most recent ones included. Mean, balance and order come from the
//! keys from token 4 up to `TOKENS` (128) and from the capture's queries; a rotation has `ROUNDS` (1) rounds.

mod divergence;

use divergence::{SINKS, planes_kl, qjl_kl};
use kvfold::qjl::planes::{CALIBRATION_TOKENS, Codec, PlanesOptions};
use kvfold::rope::Rope;
use kvfold::{Capture, Result};

const SEEDS: [u64; 4] = [1, 2, 3, 7];

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let capture = Capture::open(arguments.next().ok_or("wanted a capture, had no argument")?)?;
    let known = arguments.next().map_or(Ok(CALIBRATION_TOKENS), |tokens| tokens.parse())?;
    let rounds = arguments.next().map_or(Ok(PlanesOptions::default().rounds), |rounds| rounds.parse())?;
    let options = PlanesOptions::default().sinks(SINKS as u32).rounds(rounds);
    let planes = [
        ("1 plane", options.key_planes(1)),
        ("2 planes", options.key_planes(2)),
        ("3 planes", options.key_planes(3)),
        ("4 planes", options.key_planes(4)),
        ("split 2+0", options.split(2, 0)),
        ("split 3+1", options.split(3, 1)),
        ("split 4+2", options.split(4, 2)),
    ];
    println!("{:<12} {:>6} {:>9}   by seed {SEEDS:?}", "keys", "bits", "KL");
    for (name, options) in planes {
        let dim = capture.layers.first().map_or(1, |layer| layer.key_dim());
        let bits = Codec::new(options, dim, dim, Rope::from_capture(&capture, 0)?)?.key_bits();
        show(name, bits, |seed| planes_kl(&capture, known, &options.seed(seed)))?;
    }
    show("qjl", 1.25, |seed| qjl_kl(&capture, seed))?;
    Ok(())
}

fn show(name: &str, bits: f64, kl: impl Fn(u64) -> Result<f64>) -> Result<()> {
    let each = SEEDS.iter().map(|&seed| kl(seed)).collect::<Result<Vec<f64>>>()?;
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    let texts: Vec<String> = each.iter().map(|kl| format!("{kl:.4}")).collect();
    println!("{name:<12} {bits:>6.3} {mean:>9.4}   {}", texts.join(" "));
    Ok(())
}
