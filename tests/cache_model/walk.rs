//! A random walk over everything that a cache can do, with the model beside it.

use std::ops::Range;

use kvfold::attention::AttendOptions;
use kvfold::cache::LayerShape;
use kvfold::qjl::cache::CacheOptions;
use kvfold::{DType, Error, Shape, Tensor};

use super::Model;
use crate::numbers::Random;

/// One layer's step: `[sequences, heads, tokens, dim]` each.
pub struct Batch {
    pub keys: Tensor,
    pub values: Tensor,
    pub queries: Option<Tensor>,
    pub counts: Vec<u32>,
    pub starts: Option<Vec<u32>>,
}

/// A cache under test.
pub trait Subject {
    fn append(&mut self, layer: usize, batch: &Batch) -> kvfold::Result<()>;
    fn attend(&mut self, layer: usize, queries: &Tensor, options: &AttendOptions)
    -> kvfold::Result<Vec<f32>>;
    fn commit(&mut self, all: bool) -> kvfold::Result<()>;
    fn len(&self, sequence: usize) -> kvfold::Result<usize>;
    fn evicted(&self, sequence: usize) -> kvfold::Result<usize>;
    fn trim(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()>;
    fn fork(&mut self, sequence: usize) -> kvfold::Result<usize>;
    fn gather(&mut self, sources: &[u32]) -> kvfold::Result<()>;
    fn add_sequence(&mut self) -> usize;
    fn remove_sequence(&mut self, sequence: usize) -> kvfold::Result<()>;
    fn clear(&mut self, sequence: usize) -> kvfold::Result<()>;
    fn reserve(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()>;
    /// Saves and loads.
    fn reload(&mut self) -> kvfold::Result<()>;
    fn bytes(&self) -> [u64; 2];
}

/// What is walked through.
pub struct Setting {
    pub layers: Vec<LayerShape>,
    pub group: usize,
    pub sequences: usize,
    pub options: CacheOptions,
    /// Whether the model's queries come with a step.
    pub queries: bool,
    /// One row in so many is odd; 0 is none.
    pub odd: usize,
    /// Largest allowed relative error against the model.
    pub tolerance: f64,
}

pub struct Walk<'a, S> {
    setting: &'a Setting,
    subject: S,
    model: Model,
    random: Random,
}

impl<'a, S: Subject> Walk<'a, S> {
    pub fn new(setting: &'a Setting, subject: S, seed: u64) -> Self {
        let model = Model::new(&setting.layers, setting.sequences, setting.options.clone());
        Self { setting, subject, model, random: Random(seed) }
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.random.uniform() * limit as f64) as usize
    }

    /// Rows with a mean, so that centring has something to take away, and odd ones.
    fn rows(&mut self, shape: Shape, dtype: DType, odd: bool) -> Tensor {
        let mut numbers = Vec::with_capacity(shape.elements());
        for _ in 0..shape.rows() {
            let kind = if odd && self.setting.odd > 0 { self.below(self.setting.odd * 4) } else { 9 };
            let factor = match kind {
                0 => 0.0,
                1 => 1e-4,
                2 => 1e3,
                _ => 1.0,
            };
            for c in 0..shape.dim {
                let number = factor * (self.random.normal() + (c % 3) as f64 - 1.0);
                numbers.push(if kind == 3 && c == 0 { f32::NAN } else { number as f32 });
            }
        }
        Tensor::from_f32(&numbers, dtype, shape).unwrap()
    }

    /// A step of every layer, of so many tokens at the most.
    fn step(&mut self, longest: usize, starts: bool) {
        let tokens = 1 + self.below(longest);
        let counts = (0..self.model.sequences.len()).map(|_| self.below(tokens + 1) as u32);
        let counts = counts.collect();
        self.take(tokens, counts, starts);
    }

    /// A step of every layer, of so many tokens of each sequence.
    fn take(&mut self, tokens: usize, counts: Vec<u32>, starts: bool) {
        let sequences = counts.len();
        let starts = starts.then(|| (0..sequences).map(|_| self.below(500) as u32).collect::<Vec<u32>>());
        for layer in 0..self.setting.layers.len() {
            let batch = self.batch(self.setting.layers[layer], tokens, counts.clone(), starts.clone());
            self.subject.append(layer, &batch).unwrap();
            for (sequence, &count) in counts.iter().enumerate() {
                let part = |tensor: &Tensor| token_rows(tensor, sequence, count as usize);
                let (keys, values) = (part(&batch.keys), part(&batch.values));
                let queries = batch.queries.as_ref().map(part);
                let start = batch.starts.as_ref().map(|starts| starts[sequence]);
                self.model.append(layer, sequence, [&keys, &values], queries.as_deref(), start);
            }
        }
    }

    /// A layer's rows for a step.
    fn batch(
        &mut self,
        layer: LayerShape,
        tokens: usize,
        counts: Vec<u32>,
        starts: Option<Vec<u32>>,
    ) -> Batch {
        let of = |heads, dim| Shape::new(counts.len(), heads, tokens, dim).unwrap();
        let keys = self.rows(of(layer.kv_heads, layer.key_dim), layer.dtype, true);
        let values = self.rows(of(layer.kv_heads, layer.value_dim), layer.dtype, true);
        let queries = of(layer.kv_heads * self.setting.group, layer.key_dim);
        let queries = self.setting.queries.then(|| self.rows(queries, DType::F32, false));
        Batch { keys, values, queries, counts, starts }
    }

    /// Sequences of these lengths, raw, in whole pages, and settled.
    pub fn lengths_of(&mut self, lengths: &[u32]) {
        let tokens = lengths.iter().copied().max().unwrap_or(0) as usize;
        self.take(tokens, lengths.to_vec(), true);
        self.check("raw");
        for all in [false, true] {
            self.commit(all);
            self.check(if all { "settled" } else { "committed" });
        }
        self.subject.reload().unwrap();
        self.check("reloaded");
    }

    /// That a step of so many tokens is refused, where there is room for some.
    fn is_refused(&mut self, tokens: usize, room: Range<usize>) {
        let batch = self.batch(self.setting.layers[0], tokens, vec![tokens as u32], None);
        let error = self.subject.append(0, &batch).unwrap_err();
        let Error::Capacity { need, have, .. } = error else { panic!("{error}") };
        assert!(need == tokens && room.contains(&have), "{error}");
    }

    /// A fixed cache of one sequence takes what was reserved, whatever is coded or given up meanwhile, and allocates nothing for it.
    pub fn takes_what_was_reserved(&mut self) {
        self.is_refused(1, 0..1);
        self.subject.reserve(0, 300).unwrap();
        let [reserved, _] = self.subject.bytes();
        self.take(200, vec![200], false);
        assert_eq!(self.subject.bytes()[0], reserved, "an append allocates nothing");
        self.commit(false);
        // Blocks are of whole 32s.
        self.is_refused(200, 100..132);
        self.take(100, vec![100], false);
        self.check("full");
        self.subject.trim(0, 290).unwrap();
        self.model.trim(0, 290);
        self.take(10, vec![10], false);
        self.commit(true);
        self.check("settled");
        self.subject.clear(0).unwrap();
        self.is_refused(1, 0..1);
    }

    fn commit(&mut self, all: bool) {
        self.subject.commit(all).unwrap();
        self.model.commit(all);
    }

    /// Compares attention in every layer.
    fn check(&mut self, what: &str) {
        let sequences = self.model.sequences.len();
        if sequences == 0 {
            return;
        }
        let heads = self.setting.group;
        let sinks: Vec<f32> = (0..64).map(|h| h as f32 * 0.25 - 1.0).collect();
        for layer in 0..self.setting.layers.len() {
            let shape = self.setting.layers[layer];
            let heads = shape.kv_heads * heads;
            let count = 1 + self.below(3);
            let mut options = AttendOptions::default().causal(count > 1);
            match self.below(5) {
                0 => options = options.window(1 + self.below(90) as u32),
                1 => options = options.soft_cap(5.0).scale(0.5),
                2 => options = options.sink_logits(&sinks[..heads]),
                _ => {}
            }
            let queries =
                self.rows(Shape::new(sequences, heads, count, shape.key_dim).unwrap(), DType::F32, false);
            let had = self.subject.attend(layer, &queries, &options).unwrap();
            let mut want = Vec::new();
            for sequence in 0..sequences {
                let own: Vec<_> = head_rows(&queries, sequence);
                want.extend(self.model.attend(layer, sequence, &own, &options));
            }
            assert_eq!(had.len(), want.len());
            let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
            let error = squares(&mut had.iter().zip(&want).map(|(had, want)| f64::from(*had) - want));
            let error = (error / squares(&mut want.iter().copied()).max(1e-6)).sqrt();
            assert!(
                error <= self.setting.tolerance,
                "{what}, layer {layer}: {error}, {options:?}, {:?}",
                self.state(layer)
            );
        }
        for sequence in 0..sequences {
            let track = &self.model.sequences[sequence][0];
            let pinned = if self.setting.options.pin_sinks { super::sinks(&self.setting.options) } else { 0 };
            assert_eq!(self.subject.len(sequence).unwrap(), track.rows.len(), "{what}");
            assert_eq!(
                self.subject.evicted(sequence).unwrap(),
                track.evicted.saturating_sub(pinned),
                "{what}"
            );
        }
        let [bytes, payload] = self.subject.bytes();
        assert!(payload <= bytes, "{what}: {payload} {bytes}");
    }

    /// Of every sequence: tokens, the first raw one, those that are gone, and whether there are tables.
    fn state(&self, layer: usize) -> Vec<(usize, usize, usize, bool)> {
        let tracks = self.model.sequences.iter().map(|tracks| &tracks[layer]);
        tracks.map(|t| (t.rows.len(), t.first_raw, t.evicted, t.tables.is_some())).collect()
    }

    /// One random thing.
    pub fn act(&mut self) {
        let sequences = self.model.sequences.len();
        let chosen = if sequences > 0 { self.below(sequences) } else { 0 };
        let what = match self.below(if sequences == 0 { 1 } else { 16 }) {
            0 if sequences < 4 => {
                assert_eq!(self.subject.add_sequence(), sequences);
                self.model.add_sequence();
                "add"
            }
            1 if sequences > 1 => {
                self.subject.remove_sequence(chosen).unwrap();
                self.model.sequences.remove(chosen);
                "remove"
            }
            2 => {
                self.subject.clear(chosen).unwrap();
                self.model.add_sequence();
                self.model.sequences.swap_remove(chosen);
                "clear"
            }
            3 | 4 => self.trim(chosen),
            5 if sequences < 4 => {
                assert_eq!(self.subject.fork(chosen).unwrap(), sequences);
                let copy = self.model.sequences[chosen].clone();
                self.model.sequences.push(copy);
                "fork"
            }
            6 => {
                let sources: Vec<u32> = (0..sequences).map(|_| self.below(sequences) as u32).collect();
                self.subject.gather(&sources).unwrap();
                let gathered = sources.iter().map(|&s| self.model.sequences[s as usize].clone()).collect();
                self.model.sequences = gathered;
                "gather"
            }
            7 => {
                self.commit(true);
                "settle"
            }
            8 => {
                self.subject.reload().unwrap();
                "reload"
            }
            9 => {
                self.subject.reserve(chosen, 100).unwrap();
                "reserve"
            }
            10 => {
                self.step(150, true);
                self.commit(false);
                "step from a position"
            }
            11 | 12 => {
                self.step(200, false);
                self.check("prefill before commit");
                self.commit(false);
                "prefill"
            }
            _ => {
                self.step(3, false);
                self.commit(false);
                "step"
            }
        };
        self.check(what);
    }

    fn trim(&mut self, sequence: usize) -> &'static str {
        let track = &self.model.sequences[sequence][0];
        let (len, evicted) = (track.rows.len(), track.evicted);
        let pinned = if self.setting.options.pin_sinks { super::sinks(&self.setting.options) } else { 0 };
        let first = if evicted <= pinned { 0 } else { evicted };
        assert!(self.subject.trim(sequence, len + 1).is_err());
        if first > 0 {
            assert!(self.subject.trim(sequence, first - 1).is_err());
        }
        let keep = len - self.below((len - first).min(80) + 1);
        self.subject.trim(sequence, keep).unwrap();
        self.model.trim(sequence, keep);
        "trim"
    }
}

/// `[tokens][heads][dim]` of the first tokens of a sequence.
fn token_rows(tensor: &Tensor, sequence: usize, tokens: usize) -> Vec<Vec<Vec<f32>>> {
    let (shape, view) = (tensor.shape(), tensor.view());
    let row = |h: usize, t: usize| {
        let mut row = vec![0.0; shape.dim];
        view.read_row(sequence, h, t, &mut row);
        row
    };
    (0..tokens).map(|t| (0..shape.heads).map(|h| row(h, t)).collect()).collect()
}

/// `[heads][tokens][dim]` of a sequence.
fn head_rows(tensor: &Tensor, sequence: usize) -> Vec<Vec<Vec<f32>>> {
    let rows = token_rows(tensor, sequence, tensor.shape().tokens);
    (0..tensor.shape().heads).map(|h| rows.iter().map(|row| row[h].clone()).collect()).collect()
}
