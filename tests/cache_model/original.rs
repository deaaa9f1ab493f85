//! What the original cache did (tests/golden/README.md), done again by ours with the original's projection.

use kvfold::attention::AttendOptions;
use kvfold::cache::LayerShape;
use kvfold::qjl::Projection;
use kvfold::qjl::cache::CacheOptions;
use kvfold::{DType, Shape, Tensor};

use super::walk::{Batch, Subject};
use crate::golden::Golden;

/// How a suite makes a cache of one sequence of one layer.
pub type Make<'a, S> = &'a dyn Fn(LayerShape, CacheOptions) -> kvfold::Result<S>;

/// The options of the original with a projection of a file.
fn options(golden: &Golden, name: &str, dim: usize) -> kvfold::Result<CacheOptions> {
    Ok(CacheOptions::qjl().projection(Projection::from_matrix(&golden.f32(name), dim, dim)?))
}

/// Tokens of one head.
fn rows(numbers: &[f32], dim: usize) -> kvfold::Result<Tensor> {
    Tensor::from_f32(numbers, DType::F16, Shape::new(1, 1, numbers.len() / dim, dim)?)
}

fn append(subject: &mut impl Subject, [keys, values]: [&[f32]; 2], dim: usize) -> kvfold::Result<()> {
    let (keys, values) = (rows(keys, dim)?, rows(values, dim)?);
    let counts = vec![keys.shape().tokens as u32];
    subject.append(0, &Batch { keys, values, queries: None, counts, starts: None })
}

/// That an answer is the original's but for codes of values: it chooses them in f16, which puts some a step off, and weights sum to 1.
fn is_near(had: &[f32], want: &[f64], scales: impl IntoIterator<Item = f32>) {
    assert_eq!(had.len(), want.len());
    let step = scales.into_iter().fold(0.0, f32::max);
    for (had, want) in had.iter().zip(want) {
        assert!((f64::from(*had) - want).abs() <= 1.01 * f64::from(step), "{had} {want}");
    }
}

/// Eight tokens through a capacity of five, one after the other.
pub fn evicts<S: Subject>(make: Make<'_, S>) -> kvfold::Result<()> {
    let golden = Golden::open("qjl_special");
    let mut cache = make(LayerShape::new(1, 64, DType::F16), options(&golden, "evict/S", 64)?.capacity(5))?;
    let (keys, values) = (golden.f32("evict/keys"), golden.f32("evict/values"));
    for (token, rows) in keys.chunks(64).zip(values.chunks(64)).enumerate() {
        append(&mut cache, [rows.0, rows.1], 64)?;
        cache.commit(false)?;
        assert_eq!(cache.len(0)? - cache.evicted(0)?, (token + 1).min(5));
    }
    cache.commit(true)?;
    let queries = rows(&golden.f32("evict/queries"), 64)?;
    let had = cache.attend(0, &queries, &AttendOptions::default())?;
    is_near(&had, &golden.f64("evict/attend_f64"), golden.f32("evict/live_v_scale"));
    Ok(())
}

/// Scores above f16's range, where the original is NaN.
pub fn overflows<S: Subject>(make: Make<'_, S>) -> kvfold::Result<()> {
    let golden = Golden::open("qjl_special");
    let mut cache = make(LayerShape::new(1, 128, DType::F16), options(&golden, "long/S", 128)?)?;
    let values = golden.f32("overflow/values");
    append(&mut cache, [&golden.f32("overflow/keys"), &values], 128)?;
    cache.commit(true)?;
    let queries = rows(&golden.f32("overflow/queries"), 128)?;
    let had = cache.attend(0, &queries, &AttendOptions::default())?;
    let scales = values.chunks(128).map(|row| row.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0);
    is_near(&had, &golden.f64("overflow/attend_f64"), scales);
    Ok(())
}
