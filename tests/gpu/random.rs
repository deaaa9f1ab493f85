//! Kernels against twins and reference over random shapes, types, options and strides. `KVFOLD_CASES` sets the number of
//! cases of each test; a case depends on its number alone.

use kvfold::attention::AttendOptions;
use kvfold::minicache::{Layout, MergeOptions, Mode, Retention, Row, cpu};
use kvfold::qjl::{KeyScale, MAX_SKETCH_DIM, Projection, ProjectionKind};
use kvfold::{DType, Gpu, KvView, Shape, Strides, Tensor};

use crate::Test;
use crate::attention::retyped;
use crate::minicache::{COSINE, compare_views};
use crate::numbers::Random;
use crate::qjl::{Case, Folded, check_folded, check_keys, check_values};
use crate::rows::{pair, scatter};

pub(crate) const TESTS: &[Test] =
    &[("random_pairs_fold_as_their_twins", pairs), ("random_caches_attend_as_the_reference", caches)];

const SEED: u64 = 0x6b76_666f_6c64;
const CASES: u64 = 12;

/// Runs every case; a case that fails says which it is.
fn each(test: &str, run: impl Fn(u64, &mut Random) -> kvfold::Result<()>) -> kvfold::Result<()> {
    struct Named(String);
    impl Drop for Named {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("{}", self.0);
            }
        }
    }
    let cases = std::env::var("KVFOLD_CASES").map_or(CASES, |text| text.parse().unwrap());
    for case in 0..cases {
        let name = Named(format!("{test}: case {case} of seed {SEED:#x} failed"));
        run(case, &mut Random(SEED ^ case.wrapping_mul(0x2545_f491_4f6c_dd1d)))
            .inspect_err(|_| eprintln!("{}", name.0))?;
    }
    Ok(())
}

/// One of `count` numbers from 0.
fn below(random: &mut Random, count: usize) -> usize {
    (random.uniform() * count as f64) as usize
}

fn any<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[below(random, of.len())]
}

fn shape(random: &mut Random) -> Shape {
    let [batch, heads, tokens, dim] = [3, 4, 91, 160].map(|count| below(random, count));
    Shape::new(batch + 1, heads + 1, tokens, dim + 1).unwrap()
}

/// The tensor at a random offset, head-major or token-major, with gaps or without.
fn somewhere(gpu: &Gpu, random: &mut Random, tensor: &Tensor) -> KvView {
    let Shape { heads, tokens, dim, .. } = tensor.shape();
    let [row_gap, gap] = [(); 2].map(|()| below(random, 4).saturating_sub(1));
    let pitch = dim + row_gap;
    let strides = if random.uniform() < 0.5 {
        let stride = tokens * pitch + gap;
        Strides { batch: heads * stride, heads: stride, tokens: pitch }
    } else {
        let stride = heads * pitch + gap;
        Strides { batch: tokens * stride, heads: pitch, tokens: stride }
    };
    scatter(gpu, tensor, below(random, 9), strides)
}

fn merge_options(random: &mut Random) -> MergeOptions {
    let share = random.uniform() as f32;
    let retention = any(
        random,
        &[
            Retention::Never,
            Retention::Cosine(2.0 * share - 1.0),
            Retention::Range(share),
            Retention::Fraction(share),
        ],
    );
    let t = random.uniform() as f32;
    MergeOptions::default()
        .mode(any(random, &[Mode::Shared, Mode::Anchor, Mode::Compat]))
        .retention(retention)
        .slerp_t(any(random, &[0.0, 0.5, 1.0, t]))
        .sinks(below(random, 8) as u32)
        .first_position(below(random, 6) as u32)
        .raw_page_share(any(random, &[0.5, 0.9, 1.0]))
}

/// Whether rounding can move no row across the rule's cut: not even where every cosine is as wrong as it may be, towards it.
fn is_settled(rows: &[Row], layout: &Layout, options: &MergeOptions) -> bool {
    let decide = |rows: &[Row]| cpu::retain(rows, &cpu::threshold(rows, layout, options), layout, options);
    let causes = decide(rows);
    let wrong: Vec<Row> = rows
        .iter()
        .zip(&causes)
        .map(|(row, cause)| Row {
            cosine: row.cosine + if cause.is_some() { COSINE } else { -COSINE },
            ..*row
        })
        .collect();
    decide(&wrong) == causes
}

fn pairs(gpu: &Gpu) -> kvfold::Result<()> {
    each("a pair", |case, random| {
        let (shape, dtype) = (shape(random), any(random, &DType::ALL));
        let mut options = merge_options(random);
        let pair = pair(case as u8, shape, dtype);
        let layout = Layout::new((shape, dtype), (shape, dtype), options.mode)?;
        let rows = cpu::similarity(&pair[0].view(), &pair[1].view(), &options)?;
        if !is_settled(&rows, &layout, &options) {
            options = options.retention(Retention::Never);
        }
        let views = [0, 1].map(|layer| somewhere(gpu, random, &pair[layer]));
        compare_views(gpu, &pair, &views, &options)?;
        Ok(())
    })
}

fn caches(gpu: &Gpu) -> kvfold::Result<()> {
    each("a cache", |case, random| {
        let keys = shape(random);
        let Shape { batch, heads, tokens, dim } = keys;
        let value_dim = below(random, 160) + 1;
        let [group, queries] = [below(random, 5) + 1, below(random, 4) + 1];
        let case = Case::new(case as u8, [batch, heads, tokens], [dim, value_dim], group, queries);
        let case = Case {
            keys: retyped(&case.keys, any(random, &DType::ALL)),
            values: retyped(&case.values, any(random, &DType::ALL)),
            queries: retyped(&case.queries, any(random, &DType::ALL)),
        };
        let kind =
            any(random, &[ProjectionKind::Gaussian, ProjectionKind::Orthogonal, ProjectionKind::Hadamard]);
        let kind = if kind == ProjectionKind::Hadamard && !dim.is_power_of_two() {
            ProjectionKind::Gaussian
        } else {
            kind
        };
        let sketch_dim = (below(random, 3 * dim) + 1).min(MAX_SKETCH_DIM);
        let projection = Projection::new(kind, dim, sketch_dim, SEED)?;
        let scale = any(random, &KeyScale::ALL);
        let views = [&case.keys, &case.values].map(|tensor| somewhere(gpu, random, tensor));
        check_keys(gpu, &case.keys, &views[0], &projection, scale)?;
        check_values(gpu, &case.values, &views[1])?;
        let lengths: Vec<u32> = (0..batch).map(|_| below(random, tokens + 1) as u32).collect();
        let lengths = any(random, &[None, Some(lengths.as_slice())]);
        let plain = AttendOptions::default().causal(random.uniform() < 0.5);
        let window = below(random, 100) as u32 + 1;
        let options = any(random, &[plain, plain.window(window), plain.soft_cap(5.0), plain.scale(0.05)]);
        let folded = Folded::of(gpu, &views, &projection, scale)?;
        check_folded(gpu, &folded, &case, &projection, scale, lengths, &options)?;
        Ok(())
    })
}
