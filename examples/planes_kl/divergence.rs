//! KL divergence of the attention weights that coded keys give from the exact ones, over a capture with queries.

#![allow(clippy::indexing_slicing, reason = "an instrument; shapes are checked by the library")]
#![allow(unreachable_pub, reason = "a module of an example and of a test")]

use kvfold::attention::exact_scores;
use kvfold::qjl::planes::{Calibration, Codec, PlanesOptions, Tables, cpu};
use kvfold::qjl::{self, KeyScale, Projection, ProjectionKind};
use kvfold::rope::{Positions, Rope};
use kvfold::{Capture, Result, TensorView};

/// First tokens, exact and left out of the tables.
pub const SINKS: usize = 4;

/// Keys as planes, tables from the keys of tokens up to `known`.
pub fn planes_kl(capture: &Capture, known: usize, options: &PlanesOptions) -> Result<f64> {
    let starts = capture.info.position_start.clone().unwrap_or_else(|| vec![0; capture.batch()]);
    let positions = Positions::Start(&starts);
    over_layers(capture, |layer, queries, keys| {
        let rope = Rope::from_capture(capture, layer)?;
        let mut calibration = Calibration::new(keys, positions).queries(queries).tokens(SINKS..known);
        calibration.rope = rope.as_ref();
        let tables = Tables::calibrate(&calibration, options)?;
        let codec = Codec::new(*options, keys.shape().dim, keys.shape().dim, rope.clone())?;
        let codes = cpu::encode_keys(&codec, keys, positions, &tables)?;
        cpu::scores(&codec, queries, &codes, &tables)
    })
}

/// Keys as the original QJL has them: Gaussian, as many signs as channels, nothing subtracted.
pub fn qjl_kl(capture: &Capture, seed: u64) -> Result<f64> {
    over_layers(capture, |_, queries, keys| {
        let dim = keys.shape().dim;
        let projection = Projection::new(ProjectionKind::Gaussian, dim, dim, seed)?;
        let sketch = qjl::cpu::quantize(keys, &projection, KeyScale::Norm)?;
        qjl::cpu::scores(queries, &sketch, &projection, KeyScale::Norm)
    })
}

/// Mean KL over layers of one sequence each, of scores that `estimate` makes of a layer's queries and keys.
fn over_layers(
    capture: &Capture,
    estimate: impl Fn(usize, &TensorView<'_>, &TensorView<'_>) -> Result<Vec<f32>>,
) -> Result<f64> {
    let mut sum = 0.0;
    for layer in 0..capture.layers.len() {
        let (queries, keys) = (capture.queries(layer)?.view(), capture.keys(layer)?.view());
        let scale = f64::from(capture.info.attn_scale.unwrap_or((keys.shape().dim as f32).sqrt().recip()));
        let exact = exact_scores(&queries, &keys)?;
        let estimated = estimate(layer, &queries, &keys)?;
        let first = capture.query_positions(layer, 0).map_or(0, |positions| positions.start);
        let (count, tokens) = (queries.shape().tokens, keys.shape().tokens);
        let rows = exact.chunks(tokens).zip(estimated.chunks(tokens)).enumerate();
        let kl = rows.map(|(row, (exact, estimated))| {
            let seen = first + row % count + 1;
            divergence(&exact[..seen], &estimated[..seen], scale)
        });
        sum += kl.sum::<f64>() / (exact.len() / tokens) as f64;
    }
    Ok(sum / capture.layers.len() as f64)
}

/// KL divergence of the weights that estimated scores give from those of exact ones; sinks are exact in both.
fn divergence(exact: &[f32], estimated: &[f32], scale: f64) -> f64 {
    let logs = |score: &dyn Fn(usize) -> f32| -> Vec<f64> {
        let logits: Vec<f64> = (0..exact.len()).map(|t| scale * f64::from(score(t))).collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum = logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
        logits.iter().map(|x| x - sum).collect()
    };
    let p = logs(&|t| exact[t]);
    let q = logs(&|t| if t < SINKS { exact[t] } else { estimated[t] });
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}
