//! The metadata of a capture: texts to [`CaptureInfo`] and back, and what it must agree with.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;

use serde::de::DeserializeOwned;

use super::{Capture, CaptureInfo, Layer, RopeLayout, VERSION};
use crate::error::{Error, Result};
use crate::store::STORE;

/// The key of the version.
pub(crate) const CAPTURE: &str = "kvfold.capture";
const MODEL: &str = "model";
const N_LAYERS: &str = "n_layers";
const ATTN_SCALE: &str = "attn_scale";
const QUERY_POSITIONS: &str = "query_positions";
const LENGTHS: &str = "lengths";
const POSITION_START: &str = "position_start";
const ROTARY_DIM: &str = "rotary_dim";
const INV_FREQ: &str = "inv_freq";
const ROPE_THETA: &str = "rope_theta";
const ROPE_LAYOUT: &str = "rope_layout";
const SLIDING_WINDOW: &str = "sliding_window";

/// The keys that have a field of their own, or are the writer's.
const OWN: [&str; 12] = [
    CAPTURE,
    MODEL,
    N_LAYERS,
    ATTN_SCALE,
    QUERY_POSITIONS,
    LENGTHS,
    POSITION_START,
    ROTARY_DIM,
    INV_FREQ,
    ROPE_THETA,
    ROPE_LAYOUT,
    SLIDING_WINDOW,
];

/// Older entries that say what the format now fixes. Another value would mean tensors of another meaning.
const FIXED: [(&str, &str); 4] = [
    ("key_rope_applied", "true"),
    ("key_pre_rope_applied", "false"),
    ("query_scaled", "false"),
    ("shape", "[B,H,S,D]"),
];

/// A number that the tensors of a layer say too.
type Restated = fn(&Layer) -> Option<usize>;

/// Older entries that repeat what the tensors say: a number, or a list of one per layer.
const RESTATED: [(&str, Restated); 4] = [
    ("n_kv_heads", |layer| Some(layer.kv_heads())),
    ("n_heads", Layer::query_heads),
    ("head_dim", |layer| Some(layer.key_dim())),
    ("seq_len", |layer| Some(layer.tokens())),
];

/// Refuses a file of a newer version. Files without a version are the older captures, which differ in nothing else.
pub(super) fn check_version(entries: &BTreeMap<String, String>) -> Result<()> {
    let known = |text: &String| text.parse::<u32>().is_ok_and(|version| (1..=VERSION).contains(&version));
    if let Some(text) = entries.get(STORE) {
        return Err(wrong(STORE, "a capture, not a store (`kvfold unfold` makes a capture of one)", text));
    }
    match entries.get(CAPTURE) {
        Some(text) if !known(text) => Err(wrong(CAPTURE, format_args!("a version of 1 to {VERSION}"), text)),
        _ => Ok(()),
    }
}

/// Reads the entries that have a field of their own; the others become `extra`.
pub(crate) fn parse(
    mut entries: BTreeMap<String, String>,
    batch: usize,
    layers: usize,
) -> Result<CaptureInfo> {
    entries.remove(CAPTURE);
    let e = &mut entries;
    Ok(CaptureInfo {
        model: e.remove(MODEL),
        model_layers: take(e, N_LAYERS, "a whole number", |text| text.parse().ok())?,
        attn_scale: take(e, ATTN_SCALE, "a number", |text| text.parse().ok())?,
        query_positions: take(e, QUERY_POSITIONS, "start..end", range)?,
        lengths: take(e, LENGTHS, "a JSON list of a whole number per sequence", json)?,
        position_start: take(
            e,
            POSITION_START,
            "a whole number, or a JSON list of one per sequence",
            |text| one_or_each(text, batch),
        )?,
        rotary_dim: take(e, ROTARY_DIM, "a whole number", |text| text.parse().ok())?,
        inv_freq: take(e, INV_FREQ, "a JSON list of numbers", json)?,
        rope_theta: take(e, ROPE_THETA, "a number, or a JSON list of one per layer", |text| {
            one_or_each(text, layers)
        })?,
        rope_layout: e.remove(ROPE_LAYOUT).map(layout),
        sliding_window: take(
            e,
            SLIDING_WINDOW,
            "tokens or null, or a JSON list of them per layer",
            |text| one_or_each(text, layers),
        )?
        .unwrap_or_default(),
        token_ids: None,
        extra: entries,
    })
}

/// The entries of a file of this version.
pub(crate) fn render(info: &CaptureInfo) -> BTreeMap<String, String> {
    let windows = |windows: &[Option<u32>]| {
        list(
            windows
                .iter()
                .map(|window| window.map_or_else(|| "null".to_owned(), |tokens| tokens.to_string())),
        )
    };
    let own = [
        (CAPTURE, Some(VERSION.to_string())),
        (MODEL, info.model.clone()),
        (N_LAYERS, info.model_layers.map(|n| n.to_string())),
        (ATTN_SCALE, info.attn_scale.map(|scale| scale.to_string())),
        (
            QUERY_POSITIONS,
            info.query_positions.as_ref().map(|range| format!("{}..{}", range.start, range.end)),
        ),
        (LENGTHS, info.lengths.as_ref().map(list)),
        (POSITION_START, info.position_start.as_ref().map(list)),
        (ROTARY_DIM, info.rotary_dim.map(|n| n.to_string())),
        (INV_FREQ, info.inv_freq.as_ref().map(list)),
        (ROPE_THETA, info.rope_theta.as_ref().map(list)),
        (ROPE_LAYOUT, info.rope_layout.as_ref().map(ToString::to_string)),
        (SLIDING_WINDOW, Some(&info.sliding_window).filter(|all| !all.is_empty()).map(|all| windows(all))),
    ];
    let own = own.into_iter().filter_map(|(key, text)| Some((key.to_owned(), text?)));
    info.extra.clone().into_iter().chain(own).collect()
}

/// Checks the metadata against the tensors and itself.
pub(super) fn check(capture: &Capture) -> Result<()> {
    let info = &capture.info;
    if let Some((key, text)) = OWN.iter().find_map(|key| info.extra.get_key_value(*key)) {
        return Err(wrong(key, "a key without a field of its own", text));
    }
    if let Some(scale) = info.attn_scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
        return Err(wrong(ATTN_SCALE, "a finite number above 0", scale));
    }
    check_sequences(info, capture.batch(), capture.tokens())?;
    check_queries(capture)?;
    check_layers(info, capture.layers.len())?;
    check_rope(info, capture.layers.iter().map(Layer::key_dim).min().unwrap_or(0))?;
    for (key, want) in FIXED {
        match info.extra.get(key) {
            Some(text) if !text.eq_ignore_ascii_case(want) => return Err(wrong(key, want, text)),
            _ => {}
        }
    }
    RESTATED.iter().try_for_each(|&(key, of)| check_restated(capture, key, of))
}

/// `lengths` and `position_start`.
pub(crate) fn check_sequences(info: &CaptureInfo, batch: usize, tokens: usize) -> Result<()> {
    if let Some(lengths) = &info.lengths
        && (lengths.len() != batch || lengths.iter().any(|&length| length > tokens))
    {
        return Err(wrong(LENGTHS, format_args!("{batch} numbers of 0 to {tokens}"), list(lengths)));
    }
    // Every position fits u32: the last is `start + tokens - 1`.
    let fits =
        |&start: &u32| u32::try_from(tokens.saturating_sub(1)).is_ok_and(|n| start.checked_add(n).is_some());
    if let Some(starts) = &info.position_start
        && (starts.len() != batch || !starts.iter().all(fits))
    {
        let want = format!("{batch} numbers that leave {tokens} positions within 32 bits");
        return Err(wrong(POSITION_START, want, list(starts)));
    }
    Ok(())
}

/// `query_positions`, or the lengths that stand in for it.
fn check_queries(capture: &Capture) -> Result<()> {
    let counts = capture.layers.iter().filter_map(|layer| Some(layer.queries.as_ref()?.shape().tokens));
    let mut counts: Vec<usize> = counts.collect();
    if let Some(range) = &capture.info.query_positions {
        if counts.is_empty() {
            counts.push(0); // without queries there is nothing that could have positions
        }
        let tokens = capture.tokens();
        let count = counts.into_iter().find(|&count| count != range.len()).unwrap_or(range.len());
        if count != range.len() || range.start > range.end || range.end > tokens {
            let want = format!("{count} positions, the tokens of the queries, within 0..{tokens}");
            return Err(wrong(QUERY_POSITIONS, want, format_args!("{}..{}", range.start, range.end)));
        }
    } else if let (Some(lengths), Some(most)) = (&capture.info.lengths, counts.into_iter().max())
        && lengths.iter().any(|&length| length < most)
    {
        let want = format!("at least the {most} tokens of the queries each, or {QUERY_POSITIONS}");
        return Err(wrong(LENGTHS, want, list(lengths)));
    }
    Ok(())
}

/// `n_layers` and the lists per layer.
pub(crate) fn check_layers(info: &CaptureInfo, layers: usize) -> Result<()> {
    if let Some(depth) = info.model_layers.filter(|&depth| depth < layers) {
        return Err(wrong(N_LAYERS, format_args!("at least the {layers} layers captured"), depth));
    }
    let counted = |n: usize| n == layers || Some(n) == info.model_layers;
    let want = |each: &str| format!("{each} for each of {layers} layers");
    if let Some(thetas) = &info.rope_theta
        && !(counted(thetas.len()) && thetas.iter().all(|theta| theta.is_finite() && *theta > 0.0))
    {
        return Err(wrong(ROPE_THETA, want("a finite number above 0"), list(thetas)));
    }
    let windows = &info.sliding_window;
    if !windows.is_empty() && (!counted(windows.len()) || windows.contains(&Some(0))) {
        return Err(wrong(SLIDING_WINDOW, want("null or at least 1"), format_args!("{windows:?}")));
    }
    Ok(())
}

/// `rotary_dim` and `inv_freq`, for keys of at least `dim` channels.
pub(crate) fn check_rope(info: &CaptureInfo, dim: usize) -> Result<()> {
    if let Some(rotary) = info.rotary_dim.filter(|&rotary| rotary > dim || !rotary.is_multiple_of(2)) {
        return Err(wrong(
            ROTARY_DIM,
            format_args!("an even number of at most the {dim} channels of a key"),
            rotary,
        ));
    }
    let Some(inv_freq) = &info.inv_freq else { return Ok(()) };
    let fits = info.rotary_dim.map_or(inv_freq.len() <= dim / 2, |rotary| inv_freq.len() == rotary / 2);
    if fits && inv_freq.iter().all(|frequency| frequency.is_finite()) {
        return Ok(());
    }
    let count =
        info.rotary_dim.map_or_else(|| format!("at most {}", dim / 2), |rotary| (rotary / 2).to_string());
    Err(wrong(INV_FREQ, format_args!("{count} finite numbers"), list(inv_freq)))
}

/// One of the older entries that repeat a number of the tensors.
fn check_restated(capture: &Capture, key: &str, of: Restated) -> Result<()> {
    let Some(text) = capture.info.extra.get(key) else { return Ok(()) };
    let layers = &capture.layers;
    let said: Vec<usize> = one_or_each(text, layers.len())
        .ok_or_else(|| wrong(key, "a whole number, or a JSON list of one per layer", text))?;
    if said.len() < layers.len() {
        return Err(wrong(key, format_args!("a number for each of {} layers", layers.len()), text));
    }
    match layers.iter().zip(&said).find_map(|(layer, said)| of(layer).filter(|held| held != said)) {
        Some(held) => Err(wrong(key, format_args!("{held}, as the tensors have"), text)),
        None => Ok(()),
    }
}

impl Display for RopeLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::HalfSplit => "half-split",
            Self::Interleaved => "interleaved",
            Self::Other(name) => name,
        })
    }
}

fn layout(text: String) -> RopeLayout {
    match text.as_str() {
        "half-split" | "half-split (HF)" => RopeLayout::HalfSplit,
        "interleaved" => RopeLayout::Interleaved,
        _ => RopeLayout::Other(text),
    }
}

fn wrong(key: &str, want: impl Display, have: impl Display) -> Error {
    Error::Metadata { key: key.to_owned(), want: want.to_string(), have: have.to_string() }
}

/// Removes an entry and reads it.
fn take<T>(
    entries: &mut BTreeMap<String, String>,
    key: &str,
    want: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>> {
    entries.remove(key).map(|text| read(&text).ok_or_else(|| wrong(key, want, &text))).transpose()
}

fn json<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}

/// A JSON list, or one value that stands for `count` of them.
fn one_or_each<T: DeserializeOwned + Clone>(text: &str, count: usize) -> Option<Vec<T>> {
    json(text).or_else(|| Some(vec![json::<T>(text)?; count]))
}

fn range(text: &str) -> Option<Range<usize>> {
    let (start, end) = text.split_once("..")?;
    Some(start.parse().ok()?..end.parse().ok()?)
}

/// A JSON list of what prints as JSON by itself.
fn list<T: Display>(all: impl IntoIterator<Item = T>) -> String {
    let texts: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    format!("[{}]", texts.join(", "))
}
