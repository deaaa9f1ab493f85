//! Models against their formulas, on made-up files; and, where `KVFOLD_MODEL` names one, on real weights.

mod gemma3;
pub(crate) mod made;

use candle_core::quantized::gguf_file::Value;

use crate::model::Model;
use crate::perplexity::{Request, Scored, score};
use crate::score::Difference;
use crate::{generate, gguf::Gguf};
use made::{Made, apart, attended, cache, logits, normed, stored, times, turned};

const LAYERS: usize = 3;
const WIDTH: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const FEED: usize = 48;
const WORDS: usize = 40;
const EPSILON: f64 = 1e-5;
const THETA: f64 = 1e4;

fn llama() -> Made {
    let mut made = Made::new("llama")
        .sizes(&[
            ("llama.block_count", LAYERS),
            ("llama.embedding_length", WIDTH),
            ("llama.attention.head_count", HEADS),
            ("llama.attention.head_count_kv", KV_HEADS),
        ])
        .says("llama.attention.layer_norm_rms_epsilon", Value::F32(EPSILON as f32))
        .says("llama.rope.freq_base", Value::F32(THETA as f32));
    made.put("token_embd.weight".to_owned(), [WORDS, WIDTH], 1.0, 0.0);
    made.put("output_norm.weight".to_owned(), [1, WIDTH], 0.3, 1.0);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for norm in ["attn_norm", "ffn_norm"] {
            made.put(name(norm), [1, WIDTH], 0.3, 1.0);
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
            made.put(name(part), shape, 0.4, 0.0);
        }
    }
    made
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
            let h = normed(&x, weights("attn_norm"), EPSILON);
            let (mut query, mut key) = (times(&h, weights("attn_q")), times(&h, weights("attn_k")));
            let mut value = times(&h, weights("attn_v"));
            for row in query.chunks_mut(DIM).chain(key.chunks_mut(DIM)) {
                // Neighbouring channels, as the file has them.
                let pairs = (0..DIM / 2).map(|i| [2 * i, 2 * i + 1]);
                turned(row, pairs, |i| position as f64 * THETA.powf(-2.0 * i as f64 / DIM as f64));
            }
            key.iter_mut().chain(&mut value).for_each(stored);
            keys.push(key);
            values.push(value);
            let heads = query.chunks(DIM).enumerate();
            let scale = 1.0 / (DIM as f64).sqrt();
            let heads = heads.flat_map(|(head, query)| {
                attended(query, head / (HEADS / KV_HEADS) * DIM, scale, keys, values)
            });
            let output = times(&heads.collect::<Vec<f64>>(), weights("attn_output"));
            x.iter_mut().zip(output).for_each(|(x, y)| *x += y);
            let h = normed(&x, weights("ffn_norm"), EPSILON);
            let gate = times(&h, weights("ffn_gate"));
            let up = times(&h, weights("ffn_up"));
            let gated: Vec<f64> = gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
            x.iter_mut().zip(times(&gated, weights("ffn_down"))).for_each(|(x, y)| *x += y);
        }
        logits.push(times(&normed(&x, made.weights("output_norm.weight"), EPSILON), embedding));
    }
    logits
}

/// A text of made-up words.
fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i + 3 * i) % WORDS as u32).collect()
}

#[test]
fn the_forward_pass_is_that_of_the_formulas() {
    let (made, tokens) = (llama(), tokens(40));
    let had = logits(&made.model("formulas"), &tokens, &[17, 18, 40], "raw");
    let want = reference(&made, &tokens);
    // A key or value at the border of two f16 numbers may fall to either side: 2^-11 of itself, a few in a sum of many.
    let error = apart(had.iter().flatten().map(|&x| f64::from(x)), want.into_iter().flatten());
    assert!(error < 1e-3, "{error}");
}

#[test]
fn a_folded_cache_scores_nearly_as_the_raw_one_and_a_ruined_one_does_not() {
    let (model, tokens) = (llama().model("presets"), tokens(300));
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
    let (model, tokens) = (llama().model("steps"), tokens(230));
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
    let model = llama().model("generate");
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
    let error = Model::from_gguf(&mut Made::new("mamba").open("other")).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "architecture: wanted llama or gemma3, had mamba");
    assert!(Gguf::open("no-such.gguf".as_ref()).is_err());
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
