//! Gemma 3, made up; and, where `KVFOLD_GEMMA_MODEL` names a file that `engine/fetch FOLDER gemma3` got, on real weights.

use anyhow::Result;
use candle_core::quantized::gguf_file::Value;
use kvfold::Capture;

use super::made::{Made, apart, attended, cache, logits, normed, stored, times, turned};
use super::tokens;
use crate::baseline::{Baseline, Codes};
use crate::cache::Cache;
use crate::model::{Attention, Rows};
use crate::perplexity::{Request, score};
use crate::score::Difference;

const LAYERS: usize = 7;
/// The one layer that sees everything.
const GLOBAL: usize = 5;
const WIDTH: usize = 32;
const HEADS: usize = 2;
const DIM: usize = 32;
const FEED: usize = 40;
const WORDS: usize = 40;
const EPSILON: f64 = 1e-6;
/// Frequencies of the layer that sees everything are divided by this.
const FACTOR: f64 = 8.0;

fn gemma3(window: usize) -> Made {
    let mut made = Made::new("gemma3")
        .sizes(&[
            ("gemma3.block_count", LAYERS),
            ("gemma3.embedding_length", WIDTH),
            ("gemma3.attention.head_count", HEADS),
            ("gemma3.attention.head_count_kv", 1),
            ("gemma3.attention.key_length", DIM),
            ("gemma3.attention.value_length", DIM),
            ("gemma3.attention.sliding_window", window),
        ])
        .says("gemma3.attention.layer_norm_rms_epsilon", Value::F32(EPSILON as f32))
        .says("gemma3.rope.freq_base", Value::F32(1e6))
        .says("gemma3.rope.scaling.type", Value::String("linear".to_owned()))
        .says("gemma3.rope.scaling.factor", Value::F32(FACTOR as f32));
    // Embeddings that are small, since they are scaled.
    made.put("token_embd.weight".to_owned(), [WORDS, WIDTH], 0.3, 0.0);
    made.put("output_norm.weight".to_owned(), [1, WIDTH], 0.6, 2.0);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            made.put(name(norm), [1, WIDTH], 0.3, 1.0);
        }
        made.put(name("attn_q_norm"), [1, DIM], 0.3, 1.2);
        made.put(name("attn_k_norm"), [1, DIM], 0.3, 1.2);
        for (part, shape) in [
            ("attn_q", [HEADS * DIM, WIDTH]),
            ("attn_k", [DIM, WIDTH]),
            ("attn_v", [DIM, WIDTH]),
            ("attn_output", [WIDTH, HEADS * DIM]),
            ("ffn_gate", [FEED, WIDTH]),
            ("ffn_up", [FEED, WIDTH]),
            ("ffn_down", [WIDTH, FEED]),
        ] {
            made.put(name(part), shape, 0.4, 0.0);
        }
    }
    made
}

/// The angle of a pair of channels.
fn angle(layer: usize, position: usize, pair: usize) -> f64 {
    let [theta, factor] = if layer == GLOBAL { [1e6, FACTOR] } else { [1e4, 1.0] };
    position as f64 * f64::powf(theta, -2.0 * pair as f64 / DIM as f64) / factor
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

/// The whole model again, in f64 and a token at a time: logits of every token.
fn reference(made: &Made, tokens: &[u32], window: usize) -> Vec<Vec<f64>> {
    let embedding = made.weights("token_embd.weight");
    let mut held: Vec<[Vec<Vec<f64>>; 2]> = vec![[Vec::new(), Vec::new()]; LAYERS];
    let mut logits = Vec::new();
    for (position, &token) in tokens.iter().enumerate() {
        let row = embedding[token as usize * WIDTH..][..WIDTH].iter();
        let mut x: Vec<f64> = row.map(|&x| f64::from(x) * (WIDTH as f64).sqrt()).collect();
        for (layer, [keys, values]) in held.iter_mut().enumerate() {
            let weights = |part: &str| made.weights(&format!("blk.{layer}.{part}.weight"));
            let add = |x: &mut Vec<f64>, y: &[f64], norm: &str| {
                x.iter_mut().zip(normed(y, weights(norm), EPSILON)).for_each(|(x, y)| *x += y);
            };
            let h = normed(&x, weights("attn_norm"), EPSILON);
            let rows = |part: &str, norm: &str| {
                let all = times(&h, weights(part));
                let rows = all.chunks(DIM).flat_map(|row| {
                    let mut row = normed(row, weights(norm), EPSILON);
                    turned(&mut row, (0..DIM / 2).map(|i| [i, i + DIM / 2]), |i| angle(layer, position, i));
                    row
                });
                rows.collect::<Vec<f64>>()
            };
            let (query, mut key) = (rows("attn_q", "attn_q_norm"), rows("attn_k", "attn_k_norm"));
            let mut value = times(&h, weights("attn_v"));
            key.iter_mut().chain(&mut value).for_each(stored);
            keys.push(key);
            values.push(value);
            let from = if layer == GLOBAL { 0 } else { keys.len().saturating_sub(window) };
            let scale = 1.0 / (DIM as f64).sqrt();
            let heads = query.chunks(DIM);
            let heads = heads.flat_map(|query| attended(query, 0, scale, &keys[from..], &values[from..]));
            let heads: Vec<f64> = heads.collect();
            add(&mut x, &times(&heads, weights("attn_output")), "post_attention_norm");
            let h = normed(&x, weights("ffn_norm"), EPSILON);
            let gate = times(&h, weights("ffn_gate"));
            let gated = gate.iter().zip(times(&h, weights("ffn_up"))).map(|(&gate, up)| gelu(gate) * up);
            add(&mut x, &times(&gated.collect::<Vec<f64>>(), weights("ffn_down")), "post_ffw_norm");
        }
        logits.push(times(&normed(&x, made.weights("output_norm.weight"), EPSILON), embedding));
    }
    logits
}

#[test]
fn the_forward_pass_is_that_of_the_formulas() {
    let (made, tokens, window) = (gemma3(12), tokens(40), 12);
    let had = logits(&made.model("gemma3-formulas"), &tokens, &[9, 10, 11, 31, 40], "raw");
    let error = |window: usize| {
        let want = reference(&made, &tokens, window);
        apart(had.iter().flatten().map(|&x| f64::from(x)), want.into_iter().flatten())
    };
    // As for Llamas, over more layers.
    assert!(error(window) < 2e-3, "{}", error(window));
    assert!(error(window + 1) > 0.02, "another window is another model: {}", error(window + 1));
}

#[test]
fn layers_keep_their_window_and_the_rest_is_folded() {
    let (model, tokens, window) = (gemma3(160).model("gemma3-windows"), tokens(300), 160);
    let request = Request { tokens: &tokens, prefix: 200, whole_prefix: false };
    let raw = score(&model, &request, cache(&model, "raw")).unwrap();
    let seen = (LAYERS - 1) * window + tokens.len() - 1;
    let rows = (seen * 2 * 2 * DIM) as u64;
    // The signs of a rotation are held too, a bit a channel, though what is never coded is never rotated.
    assert_eq!([raw.bytes.raw, raw.bytes.needed], [rows, rows + DIM as u64 / 8]);
    let against = |preset: &str| {
        let had = score(&model, &request, cache(&model, preset)).unwrap();
        let over = Difference::of(&had.predictions, &raw.predictions, request.targets()).unwrap();
        (had.bytes, over.divergence.mean)
    };
    // MiniCache keeps every row and hides what the window does not show; nothing merges.
    let (bytes, divergence) = against("minicache");
    assert!(bytes.needed > bytes.raw && divergence.abs() < 1e-9, "{bytes:?} {divergence}");
    let (close, near) = against("near-lossless");
    let (small, far) = against("extreme");
    assert!(small.needed < close.needed && close.needed < close.raw, "{small:?} {close:?}");
    assert!(near < far / 4.0, "near-lossless diverges by {near}, extreme by {far}");
}

#[test]
fn integers_keep_the_window_too() {
    let (model, tokens) = (gemma3(160).model("gemma3-integers"), tokens(300));
    let request = Request { tokens: &tokens, prefix: 200, whole_prefix: false };
    let raw = score(&model, &request, cache(&model, "raw")).unwrap();
    let had = score(&model, &request, Box::new(Baseline::new(&model.config, Codes::Int8))).unwrap();
    let over = Difference::of(&had.predictions, &raw.predictions, request.targets()).unwrap();
    // Half a step of 1 / 127 of a row's largest number; with another window the divergence is that of another model, above 0.01.
    assert!(over.divergence.mean < 1e-3, "{over:?}");
    // 299 tokens: 4 sinks and from token 228 on raw where all is seen, and of a window's 160 from token 139 on as many.
    let channels = 2 * DIM;
    let coded = |tokens: usize| tokens * channels * 8 + tokens * 2 * 16;
    let bits = (LAYERS - 1) * (coded(228 - 139) + 16 * channels * 71) + coded(224) + 16 * channels * 75;
    assert_eq!(had.bytes.needed, (bits / 8) as u64);
}

#[test]
#[ignore = "set KVFOLD_GEMMA_MODEL to the GGUF file that `engine/fetch FOLDER gemma3` gets, and run with --release"]
fn gemma3_reads_as_other_programs_do() {
    let (model, tokenizer) = crate::load(std::env::var("KVFOLD_GEMMA_MODEL").unwrap().as_ref()).unwrap();
    // Token by token as llama.cpp has it.
    let text =
        "Straße über  die   naïve Ärger 2026\n\nπ ≈ 3.14159; 日本語のテキスト \u{1f600}\t<end_of_turn>\n";
    let want = [
        2, 223_305, 8046, 138, 22097, 139, 1789, 238_527, 560, 171_520, 1716, 236_743, 236_778, 236_771,
        236_778, 236_825, 108, 237_161, 67081, 236_743, 236_800, 236_761, 236_770, 236_812, 236_770, 236_810,
        236_819, 236_793, 33375, 238_582, 236_945, 95830, 163_543, 255_968, 106, 107,
    ];
    assert_eq!(tokenizer.encode(text).unwrap(), want);
    let mut tokens = tokenizer.encode(include_str!("../../texts/persuasion.txt")).unwrap();
    assert_eq!(tokens.len(), 2186);
    tokens.truncate(800);
    let request = Request { tokens: &tokens, prefix: 600, whole_prefix: true };
    let raw = score(&model, &request, cache(&model, "raw")).unwrap();
    let nats = raw.predictions.nats(request.targets()).unwrap();
    let mean = nats.iter().sum::<f64>() / nats.len() as f64;
    // From a program of its own in numpy, keys and values in f32: f16 turns a token's nats by some 1e-3, and not all one way.
    assert!((mean - 3.344_24).abs() < 2e-3, "{mean}");
}

/// A cache that remembers the rows that came to it.
struct Witness {
    cache: Box<dyn Cache>,
    rows: Vec<[Vec<f32>; 3]>,
}

impl Attention for Witness {
    fn attend(&mut self, layer: usize, rows: Rows<'_>) -> Result<Vec<f32>> {
        self.rows.push([rows.keys, rows.values, rows.queries].map(<[f32]>::to_vec));
        self.cache.attend(layer, rows)
    }

    fn commit(&mut self) -> Result<()> {
        self.cache.commit()
    }
}

#[test]
#[ignore = "set KVFOLD_GEMMA_MODEL as above and KVFOLD_GEMMA_CAPTURE to a capture that another program made of that file"]
fn gemma3_has_the_rows_of_a_capture() {
    let (model, tokenizer) = crate::load(std::env::var("KVFOLD_GEMMA_MODEL").unwrap().as_ref()).unwrap();
    let capture = Capture::open(std::env::var("KVFOLD_GEMMA_CAPTURE").unwrap()).unwrap();
    let ids = capture.info.token_ids.as_ref().unwrap();
    let tokens: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
    let text: Vec<u8> = tokens.iter().skip(1).flat_map(|&id| tokenizer.bytes(id)).collect();
    assert_eq!(tokenizer.encode(std::str::from_utf8(&text).unwrap()).unwrap(), tokens);
    let config = &model.config;
    let mut witness = Witness { cache: cache(&model, "raw"), rows: Vec::new() };
    model.forward(&tokens, 0, &mut witness).unwrap();
    for (layer, [keys, values, queries]) in witness.rows.iter().enumerate() {
        let asked = capture.query_positions(layer, 0).unwrap();
        let heads = queries.chunks_exact(tokens.len() * config.head_dim);
        let seen = asked.start * config.head_dim..asked.end * config.head_dim;
        let queries: Vec<f32> = heads.flat_map(|head| &head[seen.clone()]).copied().collect();
        let held = &capture.layers[layer];
        for (name, had, want) in [
            ("keys", keys, capture.keys(layer).unwrap()),
            ("values", values, &held.values),
            ("queries", &queries, capture.queries(layer).unwrap()),
        ] {
            let want = want.view().to_f32();
            assert_eq!(had.len(), want.len(), "layer {layer}, {name}");
            let [had, want] = [had.as_slice(), &want].map(|all| all.iter().map(|&x| f64::from(x)));
            let error = apart(had, want);
            // f16 has them to 2^-12 or less; the rows that deeper layers saw of earlier ones were rounded here, and there not.
            assert!(error < 1e-3, "layer {layer}, {name}: {error}");
            println!("layer {layer}, {name}: {error:.2e}");
        }
        assert_eq!(config.windows[layer], capture.info.sliding_window[layer], "layer {layer}");
    }
    assert_eq!(witness.rows.len(), capture.layers.len());
}
