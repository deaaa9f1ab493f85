//! The model against its formulas, on a made-up file; and, where `KVFOLD_MODEL` names one, on real weights.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kvfold::fold::Policy;

use crate::cache::{Cache, HostCache};
use crate::gguf::Gguf;
use crate::model::Model;
use crate::perplexity::{Request, Scored, score};
use crate::score::Difference;
use crate::{generate, presets};

const LAYERS: usize = 3;
const WIDTH: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const FEED: usize = 48;
const WORDS: usize = 40;
const EPSILON: f64 = 1e-5;
const THETA: f64 = 1e4;

/// Weights by name, `[out, in]` row by row.
struct Made(Vec<(String, [usize; 2], Vec<f32>)>);

impl Made {
    fn new() -> Self {
        let mut state = 7u64;
        let mut number = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let mut made = Vec::new();
        let mut put = |name: String, shape: [usize; 2], scale: f32, add: f32| {
            let numbers = (0..shape[0] * shape[1]).map(|_| scale * number() + add);
            made.push((name, shape, numbers.collect()));
        };
        put("token_embd.weight".to_owned(), [WORDS, WIDTH], 1.0, 0.0);
        put("output_norm.weight".to_owned(), [1, WIDTH], 0.3, 1.0);
        for layer in 0..LAYERS {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            for norm in ["attn_norm", "ffn_norm"] {
                put(name(norm), [1, WIDTH], 0.3, 1.0);
            }
            for (part, shape) in [
                ("attn_q", [HEADS * DIM, WIDTH]),
                ("attn_k", [KV_HEADS * DIM, WIDTH]),
                ("attn_v", [KV_HEADS * DIM, WIDTH]),
                ("attn_output", [WIDTH, HEADS * DIM]),
                ("ffn_gate", [FEED, WIDTH]),
                ("ffn_up", [FEED, WIDTH]),
                ("ffn_down", [WIDTH, FEED]),
            ] {
                put(name(part), shape, 0.4, 0.0);
            }
        }
        Self(made)
    }

    fn weights(&self, name: &str) -> &[f32] {
        &self.0.iter().find(|(held, _, _)| held == name).unwrap().2
    }

    /// Writes the file; every test has one of its own.
    fn file(&self, test: &str) -> PathBuf {
        let number = |x: usize| Value::U32(x as u32);
        let metadata = [
            ("general.architecture", Value::String("llama".to_owned())),
            ("llama.block_count", number(LAYERS)),
            ("llama.embedding_length", number(WIDTH)),
            ("llama.attention.head_count", number(HEADS)),
            ("llama.attention.head_count_kv", number(KV_HEADS)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(EPSILON as f32)),
            ("llama.rope.freq_base", Value::F32(THETA as f32)),
        ];
        let tensors: Vec<(&str, QTensor)> = (self.0.iter())
            .map(|(name, [rows, columns], numbers)| {
                let shape = if *rows == 1 { vec![*columns] } else { vec![*rows, *columns] };
                let tensor = Tensor::from_slice(numbers, shape, &Device::Cpu).unwrap();
                (name.as_str(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap())
            })
            .collect();
        let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let path = std::env::temp_dir().join(format!("kvfold-{}-{test}.gguf", std::process::id()));
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        path
    }

    fn model(&self, test: &str) -> Model {
        let path = self.file(test);
        let model = Model::from_gguf(&mut Gguf::open(&path).unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        model
    }
}

fn times(x: &[f64], weights: &[f32]) -> Vec<f64> {
    weights.chunks(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

fn normed(x: &[f64], weights: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weights).map(|(x, &w)| x / (mean + EPSILON).sqrt() * f64::from(w)).collect()
}

/// RoPE on neighbouring channels, as the file has them.
fn turned(row: &mut [f64], position: usize) {
    for (i, pair) in row.chunks_mut(2).enumerate() {
        let angle = position as f64 * THETA.powf(-2.0 * i as f64 / DIM as f64);
        let (a, b) = (pair[0], pair[1]);
        (pair[0], pair[1]) = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos());
    }
}

fn stored(x: &mut f64) {
    *x = half::f16::from_f64(*x).to_f64();
}

/// The whole model again, in f64 and a token at a time: logits of every token.
fn reference(made: &Made, tokens: &[u32]) -> Vec<Vec<f64>> {
    let embedding = made.weights("token_embd.weight");
    let mut held: Vec<[Vec<Vec<f64>>; 2]> = vec![[Vec::new(), Vec::new()]; LAYERS];
    let mut logits = Vec::new();
    for (position, &token) in tokens.iter().enumerate() {
        let mut x: Vec<f64> =
            embedding[token as usize * WIDTH..][..WIDTH].iter().map(|&x| f64::from(x)).collect();
        for (layer, [keys, values]) in held.iter_mut().enumerate() {
            let weights = |part: &str| made.weights(&format!("blk.{layer}.{part}.weight"));
            let h = normed(&x, weights("attn_norm"));
            let (mut query, mut key) = (times(&h, weights("attn_q")), times(&h, weights("attn_k")));
            let mut value = times(&h, weights("attn_v"));
            query.chunks_mut(DIM).chain(key.chunks_mut(DIM)).for_each(|row| turned(row, position));
            key.iter_mut().chain(&mut value).for_each(stored);
            keys.push(key);
            values.push(value);
            let mut attended = Vec::new();
            for (head, query) in query.chunks(DIM).enumerate() {
                let own = head / (HEADS / KV_HEADS) * DIM..(head / (HEADS / KV_HEADS) + 1) * DIM;
                let score = |key: &Vec<f64>| {
                    let dot: f64 = key[own.clone()].iter().zip(query).map(|(k, q)| k * q).sum();
                    (dot / (DIM as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = keys.iter().map(score).collect();
                let sum: f64 = weights.iter().sum();
                attended.extend(own.clone().map(|c| {
                    weights.iter().zip(values.iter()).map(|(w, value)| w / sum * value[c]).sum::<f64>()
                }));
            }
            x.iter_mut().zip(times(&attended, weights("attn_output"))).for_each(|(x, y)| *x += y);
            let h = normed(&x, weights("ffn_norm"));
            let gate = times(&h, weights("ffn_gate"));
            let up = times(&h, weights("ffn_up"));
            let gated: Vec<f64> = gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
            x.iter_mut().zip(times(&gated, weights("ffn_down"))).for_each(|(x, y)| *x += y);
        }
        logits.push(times(&normed(&x, made.weights("output_norm.weight")), embedding));
    }
    logits
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i + 3 * i) % WORDS as u32).collect()
}

fn cache(model: &Model, preset: &str) -> Box<dyn Cache> {
    let policy: Policy = presets::policy(preset, model.config.layers).unwrap();
    Box::new(HostCache::new(&model.config, policy).unwrap())
}

#[test]
fn the_forward_pass_is_that_of_the_formulas() {
    let made = Made::new();
    let (model, tokens) = (made.model("formulas"), tokens(40));
    let want = reference(&made, &tokens);
    let mut cache = cache(&model, "raw");
    let mut had = Vec::new();
    for (start, end) in [(0, 17), (17, 18), (18, 40)] {
        let hidden = model.forward(&tokens[start..end], start, cache.as_mut()).unwrap();
        had.extend(model.logits(&hidden).unwrap().to_vec2::<f32>().unwrap());
    }
    // A key or value at the border of two f16 numbers may fall to either side: 2^-11 of itself, a few in a sum of many.
    let length = want.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
    let apart = had.iter().flatten().zip(want.iter().flatten());
    let error = apart.map(|(&had, want)| (f64::from(had) - want).powi(2)).sum::<f64>().sqrt() / length;
    assert!(error < 1e-3, "{error}");
}

#[test]
fn a_folded_cache_scores_nearly_as_the_raw_one_and_a_ruined_one_does_not() {
    let (model, tokens) = (Made::new().model("presets"), tokens(300));
    let request = Request { tokens: &tokens, prefix: 200, whole_prefix: false };
    let scored = |preset: &str| -> Scored { score(&model, &request, cache(&model, preset)).unwrap() };
    let raw = scored("raw");
    assert_eq!(raw.bytes.needed, raw.bytes.raw);
    let against =
        |had: &Scored| Difference::of(&had.predictions, &raw.predictions, request.targets()).unwrap();
    let (close, sketch) = (scored("near-lossless"), scored("qjl"));
    let [near, far] = [&close, &sketch].map(|had| against(had).divergence.mean);
    assert!(near < far / 4.0, "near-lossless diverges by {near}, qjl by {far}");
    assert!(close.bytes.needed < raw.bytes.needed && against(&raw).nats.mean == 0.0);
}

#[test]
fn steps_at_page_borders_are_as_single_tokens() {
    let (model, tokens) = (Made::new().model("steps"), tokens(230));
    let request = Request { tokens: &tokens, prefix: 180, whole_prefix: false };
    let scored = score(&model, &request, cache(&model, "balanced")).unwrap();
    let mut one = cache(&model, "balanced");
    let rows = scored.predictions.rows();
    let mut rows = rows.map(<[f32]>::to_vec);
    for (position, token) in tokens[..229].iter().enumerate() {
        let hidden = model.forward(&[*token], position, one.as_mut()).unwrap();
        if position < request.prefix {
            continue;
        }
        let mut alone = crate::score::Predictions::default();
        alone.push(&model.logits(&hidden).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
        let (alone, row) = (alone.rows().next().unwrap().to_vec(), rows.next().unwrap());
        // Matrices are multiplied in another order: a code at the border of a cell may fall to the other side.
        let apart = alone.iter().zip(&row).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(apart < 0.02, "position {position}: {apart}");
    }
    assert!(rows.next().is_none());
}

#[test]
fn text_goes_on_from_a_prompt() {
    let model = Made::new().model("generate");
    let prompt = tokens(50);
    let run = |preset: &str| {
        generate::generate(&model, cache(&model, preset), &prompt, 12, None, |_, _| Ok(())).unwrap().tokens
    };
    let raw = run("raw");
    assert_eq!(raw.len(), 12);
    let read = generate::agreement(&model, cache(&model, "raw"), &prompt, &raw).unwrap();
    assert_eq!((read, generate::divergence(&run("raw"), &raw)), (12, None), "a text agrees with itself");
}

#[test]
fn files_of_other_architectures_are_refused() {
    let path = std::env::temp_dir().join(format!("kvfold-{}-other.gguf", std::process::id()));
    let architecture = Value::String("mamba".to_owned());
    let metadata = HashMap::from([("general.architecture", &architecture)]);
    let metadata: Vec<(&str, &Value)> = metadata.into_iter().collect();
    gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &[]).unwrap();
    let error = Model::from_gguf(&mut Gguf::open(&path).unwrap()).map(drop).unwrap_err();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(error.to_string(), "architecture: wanted llama or gemma3, had mamba");
    assert!(Gguf::open(&path).is_err());
}

#[test]
#[ignore = "set KVFOLD_MODEL to the GGUF file that engine/fetch gets, and run with --release"]
fn smollm2_keeps_its_perplexity() {
    let path = std::env::var("KVFOLD_MODEL").unwrap();
    let (model, tokenizer) = crate::load(path.as_ref()).unwrap();
    let mut tokens = tokenizer.encode(include_str!("../texts/persuasion.txt")).unwrap();
    assert_eq!(tokens.len(), 2281);
    tokens.truncate(1792);
    let request = Request { tokens: &tokens, prefix: 1024, whole_prefix: true };
    let scored = |preset: &str| score(&model, &request, cache(&model, preset)).unwrap();
    let raw = scored("raw");
    let nats = raw.predictions.nats(request.targets()).unwrap();
    let perplexity = (nats.iter().sum::<f64>() / nats.len() as f64).exp();
    assert!((perplexity - 27.3).abs() < 0.1, "{perplexity}");
    // The divergence says what a preset costs on the average; what it costs on one text is known to its standard error.
    for (preset, nats, divergence) in [
        ("near-lossless", 0.005, 0.003),
        ("balanced", 0.02, 0.012),
        ("compact", 0.03, 0.016),
        ("minicache", 1e-6, 1e-6),
    ] {
        let had = scored(preset);
        let over = Difference::of(&had.predictions, &raw.predictions, request.targets()).unwrap();
        assert!(over.nats.mean < nats + 2.0 * over.nats.error, "{preset}: {over:?}");
        assert!(over.divergence.mean < divergence, "{preset}: {over:?}");
    }
}
