//! The simplest cache that does what `qjl::cache` promises, in f64 where it attends, and a random walk that compares both.

#![allow(dead_code, reason = "each suite uses its part")]

pub mod original;
pub mod walk;

use kvfold::attention::AttendOptions;
use kvfold::cache::LayerShape;
use kvfold::qjl::cache::{CacheOptions, Coding, PAGE};
use kvfold::qjl::planes::{
    Balance, CALIBRATION_TOKENS, Calibration, Centring, Codec, PlanesOptions, Tables, cpu as planes,
};
use kvfold::qjl::{Projection, cpu as sketch};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Shape, Tensor};

/// One token of one layer: `[heads][dim]` of keys and values, as they were stored.
#[derive(Clone)]
pub struct Row {
    pub rows: [Vec<Vec<f32>>; 2],
    pub position: u32,
    /// What the codes stand for, where it is coded.
    pub decoded: Option<[Vec<Vec<f32>>; 2]>,
}

#[derive(Clone, Default)]
pub struct Track {
    pub rows: Vec<Row>,
    pub first_raw: usize,
    pub evicted: usize,
    pub tables: Option<Tables>,
    /// Queries of the first tokens, `[query_heads][dim]` each, in order.
    queries: Vec<Vec<Vec<f32>>>,
    counted: usize,
}

pub struct Model {
    pub options: CacheOptions,
    pub layers: Vec<LayerShape>,
    pub sequences: Vec<Vec<Track>>,
}

fn tensor(rows: &[Vec<Vec<f32>>], dtype: DType) -> Tensor {
    let (tokens, heads, dim) = (rows.len(), rows[0].len(), rows[0][0].len());
    let numbers: Vec<f32> =
        (0..heads).flat_map(|h| rows.iter().flat_map(move |row| row[h].clone())).collect();
    Tensor::from_f32(&numbers, dtype, Shape::new(1, heads, tokens, dim).unwrap()).unwrap()
}

fn rows_of(numbers: &[f32], [heads, tokens, dim]: [usize; 3]) -> Vec<Vec<Vec<f32>>> {
    let row = |h: usize, t: usize| numbers[(h * tokens + t) * dim..][..dim].to_vec();
    (0..tokens).map(|t| (0..heads).map(|h| row(h, t)).collect()).collect()
}

impl Model {
    pub fn new(layers: &[LayerShape], sequences: usize, options: CacheOptions) -> Self {
        let track = Track { first_raw: sinks(&options), ..Track::default() };
        let sequences = vec![vec![track; layers.len()]; sequences];
        Self { options, layers: layers.to_vec(), sequences }
    }

    pub fn add_sequence(&mut self) {
        let track = Track { first_raw: sinks(&self.options), ..Track::default() };
        self.sequences.push(vec![track; self.layers.len()]);
    }

    /// Appends rows of one sequence, `[tokens][heads][dim]`.
    pub fn append(
        &mut self,
        layer: usize,
        sequence: usize,
        rows: [&[Vec<Vec<f32>>]; 2],
        queries: Option<&[Vec<Vec<f32>>]>,
        start: Option<u32>,
    ) {
        let sinks = sinks(&self.options);
        let track = &mut self.sequences[sequence][layer];
        for t in 0..rows[0].len() {
            let token = track.rows.len();
            if token >= sinks.max(track.counted) && token < CALIBRATION_TOKENS {
                track.counted = token + 1;
                track.queries.extend(queries.map(|queries| queries[t].clone()));
            }
            let next = track.rows.last().map_or(0, |row| row.position + 1);
            let position = start.map_or(next, |start| start + t as u32);
            track.rows.push(Row { rows: rows.map(|rows| rows[t].clone()), position, decoded: None });
        }
    }

    pub fn trim(&mut self, sequence: usize, tokens: usize) {
        for track in &mut self.sequences[sequence] {
            track.rows.truncate(tokens);
            track.first_raw = track.first_raw.min(tokens.max(sinks(&self.options)));
        }
    }

    pub fn commit(&mut self, all: bool) {
        for sequence in 0..self.sequences.len() {
            for layer in 0..self.layers.len() {
                let mut track = self.sequences[sequence][layer].clone();
                self.commit_track(layer, &mut track, all);
                self.sequences[sequence][layer] = track;
            }
        }
    }

    fn commit_track(&self, layer: usize, track: &mut Track, all: bool) {
        let (sinks, len) = (sinks(&self.options), track.rows.len());
        let learns = self.options.tables.is_none() && needs_tables(&self.options);
        if learns && track.tables.is_none() && len >= CALIBRATION_TOKENS {
            track.tables = Some(self.learn(layer, track));
        }
        let pinned = if self.options.pin_sinks { sinks } else { 0 };
        let floor = self.options.capacity.map_or(0, |capacity| len.saturating_sub(capacity - pinned));
        let (page, least, recent) = units(&self.options);
        if floor > track.evicted.max(pinned) {
            track.evicted = floor;
            // What has left is never coded; pages are still counted from the first raw row.
            while track.first_raw + least <= floor {
                track.first_raw += least;
            }
        }
        if learns && track.tables.is_none() {
            return;
        }
        let unit = if all { least } else { page };
        let first = track.first_raw;
        while track.first_raw + unit + recent <= len {
            track.first_raw += unit;
        }
        if track.first_raw > first {
            self.code(layer, track, first..track.first_raw);
        }
    }

    fn rope(&self, layer: usize) -> Option<Rope> {
        self.options.ropes.get(layer.min(self.options.ropes.len().max(1) - 1)).cloned().flatten()
    }

    fn codec(&self, layer: usize, options: PlanesOptions) -> Codec {
        let (rope, shape) = (self.rope(layer), self.layers[layer]);
        Codec::new(options.sinks(0).recent(0), shape.key_dim, shape.value_dim, rope).unwrap()
    }

    fn learn(&self, layer: usize, track: &Track) -> Tables {
        let options = match self.options.coding {
            Coding::Planes(options) => options,
            // Sketches have a mean alone.
            Coding::Sketch(sketch) => {
                PlanesOptions::default().sinks(sketch.sinks).centring(sketch.centring).balance(Balance::None)
            }
            _ => panic!("another coding"),
        };
        let rope = self.rope(layer);
        let rows = &track.rows[options.sinks as usize..CALIBRATION_TOKENS];
        let keys: Vec<_> = rows.iter().map(|row| row.rows[0].clone()).collect();
        let keys = tensor(&keys, DType::F32);
        let positions: Vec<u32> = rows.iter().map(|row| row.position).collect();
        let (keys, queries) =
            (keys.view(), (!track.queries.is_empty()).then(|| tensor(&track.queries, DType::F32)));
        let queries = queries.as_ref().map(Tensor::view);
        let mut from = Calibration::new(&keys, Positions::Explicit(&positions)).tokens(0..rows.len());
        if let Some(queries) = &queries {
            from = from.queries(queries);
        }
        if let Some(rope) = &rope {
            from = from.rope(rope);
        }
        Tables::calibrate(&from, &options).unwrap()
    }

    /// The tables that a track is coded with: its own, the layer's, or ones that change nothing.
    fn tables(&self, layer: usize, track: &Track) -> Tables {
        let shared = self.options.tables.as_ref().map(|tables| tables[layer].clone());
        let LayerShape { kv_heads, key_dim, .. } = self.layers[layer];
        track.tables.clone().or(shared).unwrap_or_else(|| Tables::identity(kv_heads, key_dim))
    }

    /// The mean of keys at these positions, `[kv_heads, tokens, key_dim]`; zeros where a track has none.
    fn means(&self, layer: usize, track: &Track, positions: &[u32]) -> Vec<f32> {
        let (shape, rope, tables) = (self.layers[layer], self.rope(layer), self.tables(layer, track));
        let mut means = Vec::new();
        for head in 0..shape.kv_heads {
            for &position in positions {
                let mut mean: Vec<f32> = tables.head(0, head).mu.iter().map(|mu| mu.to_f32()).collect();
                if let Some(rope) = &rope {
                    rope.rotate(&mut mean, &rope.angles(position));
                }
                means.extend(mean);
            }
        }
        means
    }

    fn code(&self, layer: usize, track: &mut Track, tokens: std::ops::Range<usize>) {
        let shape = self.layers[layer];
        let part = |which: usize| {
            let rows: Vec<_> = track.rows[tokens.clone()].iter().map(|row| row.rows[which].clone()).collect();
            tensor(&rows, shape.dtype)
        };
        let (keys, values) = (part(0), part(1));
        let positions: Vec<u32> = track.rows[tokens.clone()].iter().map(|row| row.position).collect();
        let (keys, values) = match self.options.coding {
            Coding::Planes(options) => {
                let codec = self.codec(layer, options);
                let tables = self.tables(layer, track);
                let positions = Positions::Explicit(&positions);
                let keys = planes::encode_keys(&codec, &keys.view(), positions, &tables).unwrap();
                let values = planes::encode_values(&codec, &values.view()).unwrap();
                let finite = [keys.segments[0].nu.clone(), values.segments[0].nu.clone()];
                let mut decoded = [
                    planes::decode_keys(&codec, &keys, &tables).unwrap(),
                    planes::decode_values(&codec, &values).unwrap(),
                ];
                for (nu, (decoded, dim)) in finite.iter().zip(decoded.iter_mut().zip(shape.dims())) {
                    for (row, nu) in decoded.chunks_mut(dim).zip(nu) {
                        if !nu.is_finite() {
                            row.fill(f32::NAN);
                        }
                    }
                }
                let [keys, values] = decoded;
                (keys, values)
            }
            Coding::Sketch(options) => {
                let drawn = || {
                    let bits = options.sketch_dim(shape.key_dim).unwrap();
                    Projection::new(options.projection, shape.key_dim, bits, options.seed).unwrap()
                };
                let projection = self.options.projection.clone().unwrap_or_else(drawn);
                let means = self.means(layer, track, &positions);
                let shifted = |keys: &[f32], sign: f32| -> Vec<f32> {
                    keys.iter().zip(&means).map(|(k, m)| k + sign * m).collect()
                };
                let centred = shifted(&keys.view().to_f32(), -1.0);
                let centred = Tensor::from_f32(&centred, DType::F32, keys.shape()).unwrap();
                let keys = shifted(&decoded_sketch(&centred, &projection, options.scale), 1.0);
                let coded = sketch::quantize_values(&values.view()).unwrap();
                let mut values = sketch::dequantize_values(&coded).unwrap();
                for (row, scale) in values.chunks_mut(shape.value_dim).zip(&coded.scale) {
                    if !scale.is_finite() {
                        row.fill(f32::NAN);
                    }
                }
                (keys, values)
            }
            _ => panic!("another coding"),
        };
        let count = tokens.len();
        let keys = rows_of(&keys, [shape.kv_heads, count, shape.key_dim]);
        let values = rows_of(&values, [shape.kv_heads, count, shape.value_dim]);
        for ((row, key), value) in track.rows[tokens].iter_mut().zip(keys).zip(values) {
            row.decoded = Some([key, value]);
        }
    }

    /// `[query_heads, queries, value_dim]` of one sequence, in f64; `queries` `[query_heads][queries][dim]`.
    pub fn attend(
        &self,
        layer: usize,
        sequence: usize,
        queries: &[Vec<Vec<f32>>],
        options: &AttendOptions,
    ) -> Vec<f64> {
        let shape = self.layers[layer];
        let group = queries.len() / shape.kv_heads;
        let mut out = Vec::new();
        for (head, queries) in queries.iter().enumerate() {
            for (i, query) in queries.iter().enumerate() {
                let seen = self.visible(layer, sequence, [queries.len(), i], options);
                let track = &self.sequences[sequence][layer];
                let row = |t: usize| {
                    let row = &track.rows[t];
                    let [key, value] = row.decoded.as_ref().unwrap_or(&row.rows);
                    let (key, value) = (&key[head / group], &value[head / group]);
                    let finite = key.iter().chain(value).all(|x| x.is_finite());
                    finite.then_some((key, value))
                };
                let seen: Vec<_> = seen.into_iter().filter_map(row).collect();
                let seen = if query.iter().all(|x| x.is_finite()) { seen } else { Vec::new() };
                out.extend(attend_row(query, &seen, head, shape, options));
            }
        }
        out
    }

    fn visible(
        &self,
        layer: usize,
        sequence: usize,
        [queries, query]: [usize; 2],
        options: &AttendOptions,
    ) -> Vec<usize> {
        let track = &self.sequences[sequence][layer];
        let len = track.rows.len();
        let Some(position) = (len + query).checked_sub(queries) else { return Vec::new() };
        let pinned = if self.options.pin_sinks { sinks(&self.options) } else { 0 };
        (0..len)
            .filter(|&t| t < pinned || t >= track.evicted)
            .filter(|&t| t <= position || !(options.causal || options.window.is_some()))
            .filter(|&t| t < pinned || options.window.is_none_or(|window| t + window as usize > position))
            .collect()
    }
}

fn attend_row(
    query: &[f32],
    seen: &[(&Vec<f32>, &Vec<f32>)],
    head: usize,
    shape: LayerShape,
    options: &AttendOptions,
) -> Vec<f64> {
    let scale = options.scale.map_or(1.0 / (shape.key_dim as f64).sqrt(), f64::from);
    let logit = |key: &[f32]| {
        let x = scale * key.iter().zip(query).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum::<f64>();
        options.soft_cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
    };
    let logits: Vec<f64> = seen.iter().map(|(key, _)| logit(key)).collect();
    let sink = options.sink_logits.map(|sinks| f64::from(sinks[head]));
    let largest = logits.iter().copied().chain(sink).fold(f64::MIN, f64::max);
    let mut out = vec![0.0; shape.value_dim];
    if seen.is_empty() {
        return out;
    }
    let mut sum = sink.map_or(0.0, |sink| (sink - largest).exp());
    for ((_, value), logit) in seen.iter().zip(logits) {
        let weight = (logit - largest).exp();
        sum += weight;
        out.iter_mut().zip(*value).for_each(|(out, &v)| *out += weight * f64::from(v));
    }
    out.iter_mut().for_each(|x| *x /= sum);
    out
}

/// The keys that sketches stand for: `g/m nu S^T s`, which meets a query as the estimate does.
fn decoded_sketch(keys: &Tensor, projection: &Projection, scale: kvfold::qjl::KeyScale) -> Vec<f32> {
    let shape = keys.shape();
    let coded = sketch::quantize(&keys.view(), projection, scale).unwrap();
    let unit = |c: usize| {
        let mut row = vec![0.0; shape.dim];
        row[c] = 1.0;
        Tensor::from_f32(&row, DType::F32, Shape::new(1, 1, 1, shape.dim).unwrap()).unwrap()
    };
    let mut out = vec![0.0; shape.elements()];
    for c in 0..shape.dim {
        // The score of a unit vector is the key's number in its channel.
        let heads = Shape::new(1, shape.heads, 1, shape.dim).unwrap();
        let queries: Vec<f32> = (0..shape.heads).flat_map(|_| unit(c).view().to_f32()).collect();
        let queries = Tensor::from_f32(&queries, DType::F32, heads).unwrap();
        let scores = sketch::scores(&queries.view(), &coded, projection, scale).unwrap();
        for (row, score) in scores.iter().enumerate() {
            out[row * shape.dim + c] = *score;
        }
    }
    for (row, nu) in out.chunks_mut(shape.dim).zip(&coded.scale) {
        if !nu.is_finite() {
            row.fill(f32::NAN);
        }
    }
    out
}

pub fn sinks(options: &CacheOptions) -> usize {
    match options.coding {
        Coding::Planes(options) => options.sinks as usize,
        Coding::Sketch(options) => options.sinks as usize,
        _ => panic!("another coding"),
    }
}

fn needs_tables(options: &CacheOptions) -> bool {
    match options.coding {
        Coding::Planes(planes) => {
            planes.centring == Centring::PreRope
                || planes.balance != Balance::None
                || planes.planes_lo.is_some()
        }
        Coding::Sketch(sketch) => sketch.centring == Centring::PreRope,
        _ => panic!("another coding"),
    }
}

/// A page, the least that is coded together, and the recent rows.
fn units(options: &CacheOptions) -> (usize, usize, usize) {
    match options.coding {
        Coding::Planes(planes) => match planes.centring {
            Centring::BlockMean(block) => {
                let least = (block as usize).next_multiple_of(2);
                let page = (1..).map(|n| n * least).find(|page| page % PAGE == 0).unwrap();
                (page, least, planes.recent as usize)
            }
            _ => (PAGE, 2, planes.recent as usize),
        },
        Coding::Sketch(options) => (PAGE, 2, options.recent as usize),
        _ => panic!("another coding"),
    }
}
