//! A cache in a file: safetensors with everything that a cache needs to go on as if it had never stopped, under a digest.
//! Rows stand in canonical order, not as a kernel lays them out. `docs/minicache-format.md` describes it.

use std::collections::BTreeMap;
use std::sync::Arc;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::super::cpu::{check_digests, rotation_digests};
use super::super::cut::Cut;
use super::super::folded::{Folded, Layout, PAGE};
use super::super::plan::LayerRole;
use super::host::Host;
use super::ledger::Ledger;
use super::sequence::{Decided, GroupState, Run};
use super::verdict::{CAUSE_WORDS, Verdict};
use super::{CacheOptions, Sequence};
use crate::cache::LayerShape;
use crate::cache::host::HostBlock;
use crate::cache::tail::{Block, Tail};
use crate::container::{self, to_file_dtype};
use crate::error::{Error, Result};
use crate::store::file::DIGEST;
use crate::store::pairs;
use crate::store::tensors::{Reader, Tensors, check_version, digest, required, word_bytes};
use crate::tensor::{Shape, TensorView};

/// The metadata key of the version.
const VERSION_KEY: &str = "kvfold.minicache";
/// The newest version, and the only one there is so far.
const VERSION: u32 = 1;
/// The metadata key of everything but the rows.
const HEAD: &str = "kvfold.minicache.head";
/// The raw blocks that a file asks for may be this many times as large as the file: far above what a cache leaves empty.
const MAX_GROWTH: u64 = 1024;
/// Below this many bytes they are never too large.
const SMALL: u64 = 1 << 26;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    layers: Vec<LayerShape>,
    plan: Vec<LayerRole>,
    options: CacheOptions,
    /// Digests of the rotations of coded directions, by their channels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    rotations: BTreeMap<usize, String>,
    sequences: Vec<SequenceHead>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SequenceHead {
    prefill: Option<usize>,
    layers: Vec<TailHead>,
    groups: Vec<GroupHead>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TailHead {
    /// Tokens from `first` to `end` are raw.
    first: usize,
    end: usize,
    /// First token and capacity of every block.
    blocks: Vec<[usize; 2]>,
    /// First token and tokens of every call that was decided at once (Compat).
    decided: Vec<[usize; 2]>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupHead {
    runs: Vec<RunHead>,
    /// Key and index of the frozen verdicts of keys and of values.
    cuts: Option<[[u32; 2]; 2]>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunHead {
    start: usize,
    tokens: usize,
    /// Tokens that the run holds, of which the first `tokens` are alive.
    stored: usize,
    open: bool,
}

/// Keys and values, by their place and the name that tensors have.
const PARTS: [(usize, &str); 2] = [(0, "key"), (1, "value")];

fn raw_name(sequence: usize, layer: usize, part: &str) -> String {
    format!("sequence.{sequence}.layer.{layer}.{part}.rows")
}

fn decided_name(sequence: usize, layer: usize, call: usize, part: &str) -> String {
    format!("sequence.{sequence}.layer.{layer}.call.{call}.{part}.causes")
}

fn run_name(sequence: usize, group: usize, run: usize, part: &str) -> String {
    format!("sequence.{sequence}.group.{group}.run.{run}.{part}")
}

/// Digests of the rotations of what the groups fold.
fn rotations(ledger: &Ledger<Host>) -> Result<BTreeMap<usize, String>> {
    let layers = ledger.groups.iter().filter_map(|group| ledger.layers.get(*group.layers.first()?));
    rotation_digests(layers.flat_map(LayerShape::dims), ledger.options.merge.planes)
}

fn head_of(ledger: &Ledger<Host>) -> Result<Head> {
    let tail = |(tail, decided): (&Tail<HostBlock>, &Vec<Decided>)| TailHead {
        first: tail.first(),
        end: tail.end(),
        blocks: tail.blocks().iter().map(|block| [block.start, block.capacity]).collect(),
        decided: decided.iter().map(|part| [part.start, part.tokens]).collect(),
    };
    let run = |run: &Run<Host>| {
        let [keys, _] = &run.folds;
        RunHead { start: run.start, tokens: run.tokens, stored: keys.layout.shape.tokens, open: run.open }
    };
    let group = |group: &GroupState<Host>| GroupHead {
        runs: group.runs.iter().map(run).collect(),
        cuts: group.cuts.as_ref().map(|cuts| cuts.each_ref().map(|cut| [cut.key, cut.index])),
    };
    let sequence = |sequence: &Sequence<Host>| SequenceHead {
        prefill: sequence.prefill,
        layers: sequence.tails.iter().zip(&sequence.decided).map(tail).collect(),
        groups: sequence.groups.iter().map(group).collect(),
    };
    Ok(Head {
        layers: ledger.layers.clone(),
        plan: ledger.plan.clone(),
        options: ledger.options.clone(),
        rotations: rotations(ledger)?,
        sequences: ledger.sequences.iter().map(sequence).collect(),
    })
}

impl Ledger<Host> {
    /// The bytes of a file.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut tensors = Tensors::default();
        for (s, sequence) in self.sequences.iter().enumerate() {
            for (l, (tail, shape)) in sequence.tails.iter().zip(&self.layers).enumerate() {
                put_raw(&mut tensors, tail, shape, |part| raw_name(s, l, part))?;
            }
            for (l, decided) in sequence.decided.iter().enumerate() {
                for (call, (verdicts, (_, part))) in decided
                    .iter()
                    .enumerate()
                    .flat_map(|(c, d)| d.verdicts.iter().zip(PARTS).map(move |v| (c, v)))
                {
                    put_causes(&mut tensors, decided_name(s, l, call, part), verdicts);
                }
            }
            for (g, group) in sequence.groups.iter().enumerate() {
                for (r, run) in group.runs.iter().enumerate() {
                    for ((_, part), (fold, verdict)) in PARTS.iter().zip(run.folds.iter().zip(&run.verdicts))
                    {
                        let name = run_name(s, g, r, part);
                        put_causes(&mut tensors, format!("{name}.causes"), verdict);
                        pairs::put(&mut tensors, &name, fold);
                    }
                }
            }
        }
        // Numbers and text keys always serialise.
        let head = serde_json::to_string(&head_of(self)?).unwrap_or_default();
        let mut entries =
            BTreeMap::from([(VERSION_KEY.to_owned(), VERSION.to_string()), (HEAD.to_owned(), head)]);
        let digest = digest(&entries, &tensors);
        entries.insert(DIGEST.to_owned(), digest);
        container::write(&entries, tensors.stored().collect())
    }

    /// Reads the bytes of a file and checks all of it. `run_tokens` as in [`Ledger::new`].
    pub(crate) fn from_bytes(
        file: &[u8],
        run_tokens: impl Fn(&LayerShape, usize) -> Result<usize>,
    ) -> Result<Self> {
        let read = container::read(file)?;
        let mut entries = read.metadata;
        check_version(&entries, VERSION_KEY, "MiniCache", VERSION)?;
        let mut tensors = Tensors::default();
        read.tensors.into_iter().for_each(|stored| tensors.add(stored));
        let want = required(entries.remove(DIGEST), DIGEST, "the digest of the contents")?;
        let have = digest(&entries, &tensors);
        if want != have {
            return Err(Error::Digest { what: "cache".to_owned(), want, have });
        }
        let text = required(entries.remove(HEAD), HEAD, "the JSON object of a cache")?;
        let head: Head = serde_json::from_str(&text)
            .map_err(|cause| wrong("the JSON object of a cache", cause.to_string()))?;
        check_room(&head, file.len() as u64)?;
        let mut ledger = Self::new(head.layers, head.plan, head.options, run_tokens)?;
        check_digests(&head.rotations, &rotations(&ledger)?)?;
        let mut reader = tensors.reader();
        for (index, sequence) in head.sequences.iter().enumerate() {
            let sequence = read_sequence(&ledger, &mut reader, index, sequence)?;
            ledger.sequences.push(sequence);
        }
        reader.finish()?;
        Ok(ledger)
    }
}

fn wrong(want: impl Into<String>, have: impl Into<String>) -> Error {
    Error::Metadata { key: HEAD.to_owned(), want: want.into(), have: have.into() }
}

/// Refuses blocks that would take far more than the file.
fn check_room(head: &Head, file: u64) -> Result<()> {
    let most = file.saturating_mul(MAX_GROWTH).max(SMALL);
    let mut bytes = 0u64;
    for sequence in &head.sequences {
        for (tail, shape) in sequence.layers.iter().zip(&head.layers) {
            shape.check()?;
            let token = shape.kv_heads.saturating_mul(shape.key_dim + shape.value_dim).saturating_mul(4);
            for [_, capacity] in &tail.blocks {
                bytes = bytes.saturating_add((*capacity as u64).saturating_mul(token as u64));
            }
        }
    }
    if bytes > most {
        return Err(wrong(format!("raw blocks of at most {most} bytes"), bytes.to_string()));
    }
    Ok(())
}

/// The raw rows of a layer, `[kv_heads, tokens, dim]`.
fn put_raw(
    tensors: &mut Tensors,
    tail: &Tail<HostBlock>,
    shape: &LayerShape,
    name: impl Fn(&str) -> String,
) -> Result<()> {
    for ((part, text), dim) in PARTS.into_iter().zip(shape.dims()) {
        let mut bytes = Vec::new();
        for head in 0..shape.kv_heads {
            for piece in tail.pieces() {
                let rows = piece.at..piece.at + piece.tokens;
                rows.for_each(|row| bytes.extend_from_slice(piece.rows.row(part, head, row)));
            }
        }
        let tokens = tail.end() - tail.first();
        tensors.put(name(text), to_file_dtype(shape.dtype), &[shape.kv_heads, tokens, dim], bytes);
    }
    Ok(())
}

fn put_causes(tensors: &mut Tensors, name: String, verdict: &Verdict) {
    let words = verdict.words();
    tensors.put(name, Dtype::U32, &[words.len()], word_bytes(words.iter().copied()));
}

fn read_sequence(
    ledger: &Ledger<Host>,
    reader: &mut Reader<'_>,
    index: usize,
    head: &SequenceHead,
) -> Result<Sequence<Host>> {
    let (layers, groups) = (ledger.layers.len(), ledger.groups.len());
    if head.layers.len() != layers || head.groups.len() != groups {
        let have = format!("{} and {} in sequence {index}", head.layers.len(), head.groups.len());
        return Err(wrong(format!("{layers} layers and {groups} groups"), have));
    }
    let mut sequence = Sequence::new(layers, groups);
    sequence.prefill = head.prefill;
    for (l, (tail, shape)) in head.layers.iter().zip(&ledger.layers).enumerate() {
        let what = format!("layer {l} of sequence {index}");
        let read = read_tail(reader, tail, shape, &what, |part| raw_name(index, l, part))?;
        sequence.reserved = sequence.reserved.max(read.end() + read.room());
        let decided = read_decided(reader, tail, shape, |call, part| decided_name(index, l, call, part))?;
        if let (Some(place), Some(calls)) = (sequence.tails.get_mut(l), sequence.decided.get_mut(l)) {
            (*place, *calls) = (read, decided);
        }
    }
    for (g, head) in head.groups.iter().enumerate() {
        let state = read_group(ledger, reader, g, head, |run, part| run_name(index, g, run, part))?;
        let members = ledger.groups.get(g).map_or(&[][..], |group| &group.layers);
        let firsts = members.iter().filter_map(|&layer| sequence.tails.get(layer)).map(Tail::first);
        if let Some(first) = firsts.into_iter().find(|&first| first != state.folded()) {
            let want = format!("raw rows from token {} on, where group {g} is folded", state.folded());
            return Err(wrong(want, format!("{first} in sequence {index}")));
        }
        if let Some(place) = sequence.groups.get_mut(g) {
            *place = state;
        }
    }
    for (layer, tail) in sequence.tails.iter().enumerate().filter(|(l, _)| ledger.member(*l).is_none()) {
        if tail.first() != 0 {
            return Err(wrong(
                format!("all rows of layer {layer}, which stands alone"),
                tail.first().to_string(),
            ));
        }
    }
    Ok(sequence)
}

fn read_tail(
    reader: &mut Reader<'_>,
    head: &TailHead,
    shape: &LayerShape,
    what: &str,
    name: impl Fn(&str) -> String,
) -> Result<Tail<HostBlock>> {
    let blocks = head.blocks.iter().map(|&[start, capacity]| {
        Ok(Block { start, capacity, rows: Arc::new(HostBlock::new(*shape, capacity)?) })
    });
    let blocks: Vec<Block<HostBlock>> = blocks.collect::<Result<_>>()?;
    let mut tail = Tail::from_blocks(blocks, head.first, head.end).ok_or_else(|| {
        wrong(format!("blocks that hold the raw rows of {what}"), format!("{:?}", head.blocks))
    })?;
    let tokens = head.end - head.first;
    let mut read = |text: &str, dim: usize| {
        let bytes = reader.read(&name(text), to_file_dtype(shape.dtype), &[shape.kv_heads, tokens, dim])?;
        TensorView::new(bytes, shape.dtype, Shape::new(1, shape.kv_heads, tokens, dim)?)
    };
    let (keys, values) = (read("key", shape.key_dim)?, read("value", shape.value_dim)?);
    tail.put(head.first, [&keys, &values], 0, 0, tokens);
    Ok(tail)
}

fn read_decided(
    reader: &mut Reader<'_>,
    head: &TailHead,
    shape: &LayerShape,
    name: impl Fn(usize, &str) -> String,
) -> Result<Vec<Decided>> {
    let mut calls = Vec::with_capacity(head.decided.len());
    for (call, &[start, tokens]) in head.decided.iter().enumerate() {
        if tokens > head.end || start > head.end - tokens {
            return Err(wrong(
                format!("decided rows before token {}", head.end),
                format!("{start} and {tokens} more"),
            ));
        }
        let mut read = |part| {
            let words = reader.whole(&name(call, part))?;
            Ok::<_, Error>(Arc::new(Verdict::from_words(words)))
        };
        let verdicts = [read("key")?, read("value")?];
        if let Some(verdict) = verdicts.iter().find(|verdict| !verdict.holds(shape.kv_heads, tokens)) {
            let want = format!("causes of {} heads of {tokens} rows", shape.kv_heads);
            return Err(Error::shape(
                name(call, "key"),
                want,
                format_args!("{} words", verdict.words().len()),
            ));
        }
        calls.push(Decided { start, tokens, verdicts });
    }
    Ok(calls)
}

fn read_group(
    ledger: &Ledger<Host>,
    reader: &mut Reader<'_>,
    index: usize,
    head: &GroupHead,
    name: impl Fn(usize, &str) -> String,
) -> Result<GroupState<Host>> {
    let group = ledger.groups.get(index);
    let (layers, run_tokens) =
        group.map_or((&[][..], 0), |group| (group.layers.as_slice(), group.run_tokens));
    let shape = ledger.shape(layers.first().copied().unwrap_or_default())?;
    let mut state = GroupState::default();
    for (run, part) in head.runs.iter().enumerate() {
        let whole = part.stored.is_multiple_of(PAGE);
        if part.start != state.folded() || part.tokens > part.stored || part.tokens == 0 || !whole {
            let want = format!("runs of whole pages that follow each other in group {index}");
            return Err(wrong(want, format!("{} tokens at {} of {}", part.tokens, part.start, part.stored)));
        }
        let mut read = |text: &str, dim: usize| {
            let rows = Shape::new(1, shape.kv_heads, part.stored, dim)?;
            let merge = &ledger.options.merge;
            let layout = Layout::group(rows, shape.dtype, merge.mode, layers.len())?.coded(merge.planes);
            let name = name(run, text);
            let fold: Folded = pairs::read(reader, &name, layout)?;
            let words = reader.words(&format!("{name}.causes"), &[layout.pages() * CAUSE_WORDS])?;
            let verdict = Verdict::from_words(words);
            if verdict.retained(shape.kv_heads) != fold.retained_rows() {
                return Err(Error::shape(
                    format!("{name}.causes"),
                    format_args!("{} rows retained, as the pages say", fold.retained_rows()),
                    verdict.retained(shape.kv_heads),
                ));
            }
            Ok((Arc::new(fold), Arc::new(verdict)))
        };
        let ((keys, key_causes), (values, value_causes)) =
            (read("key", shape.key_dim)?, read("value", shape.value_dim)?);
        // A run that another backend made may hold more than one here.
        let open = part.open && part.tokens == part.stored && part.stored < run_tokens;
        let (folds, verdicts) = ([keys, values], [key_causes, value_causes]);
        state.runs.push(Run { start: part.start, tokens: part.tokens, open, folds, verdicts });
    }
    state.planned = state.folded();
    state.cuts = head.cuts.map(|cuts| cuts.map(|[key, index]| Arc::new(Cut { key, index })));
    Ok(state)
}
