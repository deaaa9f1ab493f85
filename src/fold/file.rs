//! A cache of a whole model in a file: the files of its parts in one, under a digest. `docs/folded-format.md` describes it.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::ledger::{Ledger, Model, Part, Sequences, Spec};
use super::policy::Policy;
use super::shared::either;
use crate::cache::LayerShape;
use crate::container;
use crate::error::{Error, Result};
use crate::qjl::cache::SavedRope;
use crate::store::file::DIGEST;
use crate::store::tensors::{Tensors, check_version, digest, required};

/// The metadata key of the version.
const VERSION_KEY: &str = "kvfold.folded";
/// The newest version, and the only one there is so far.
const VERSION: u32 = 1;
/// The metadata key of the model and the policy.
const HEAD: &str = "kvfold.folded.head";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    layers: Vec<LayerShape>,
    ropes: Vec<Option<SavedRope>>,
    windows: Vec<Option<u32>>,
    policy: Policy,
    sequences: usize,
    /// Bytes of the file of every part.
    parts: Vec<usize>,
}

fn part_name(part: usize) -> String {
    format!("part.{part}")
}

/// The file of a cache whose parts have these files.
pub(crate) fn write<Q: Sequences, M: Sequences>(
    ledger: &Ledger<Q, M>,
    parts: Vec<Vec<u8>>,
) -> Result<Vec<u8>> {
    let model = &ledger.model;
    let head = Head {
        layers: model.layers.clone(),
        ropes: model.ropes.iter().map(|rope| rope.as_ref().map(SavedRope::of)).collect(),
        windows: model.windows.clone(),
        policy: ledger.policy.clone(),
        sequences: ledger.sequences(),
        parts: parts.iter().map(Vec::len).collect(),
    };
    let mut tensors = Tensors::default();
    for (index, bytes) in parts.into_iter().enumerate() {
        tensors.put(part_name(index), Dtype::U8, &[bytes.len()], bytes);
    }
    // Numbers and text keys always serialise.
    let head = serde_json::to_string(&head).unwrap_or_default();
    let mut entries =
        BTreeMap::from([(VERSION_KEY.to_owned(), VERSION.to_string()), (HEAD.to_owned(), head)]);
    let sum = digest(&entries, &tensors);
    entries.insert(DIGEST.to_owned(), sum);
    container::write(&entries, tensors.stored().collect())
}

/// Reads a file: `load` makes a cache of each part's file, of the wanted kind.
pub(crate) fn read<Q: Sequences, M: Sequences>(
    file: &[u8],
    load: impl Fn(&Spec, &[u8]) -> Result<Part<Q, M>>,
) -> Result<Ledger<Q, M>> {
    let read = container::read(file)?;
    let mut entries = read.metadata;
    check_version(&entries, VERSION_KEY, "folded cache", VERSION)?;
    let mut tensors = Tensors::default();
    read.tensors.into_iter().for_each(|stored| tensors.add(stored));
    let want = required(entries.remove(DIGEST), DIGEST, "the digest of the contents")?;
    let have = digest(&entries, &tensors);
    if want != have {
        return Err(Error::Digest { what: "folded cache".to_owned(), want, have });
    }
    let text = required(entries.remove(HEAD), HEAD, "the JSON object of a cache")?;
    let head: Head = serde_json::from_str(&text)
        .map_err(|cause| wrong("the JSON object of a cache", cause.to_string()))?;
    let ropes = head.ropes.iter().map(|rope| rope.as_ref().map(SavedRope::restore).transpose());
    let model = Model::new(head.layers).ropes(ropes.collect::<Result<_>>()?).windows(head.windows);
    let mut reader = tensors.reader();
    let mut index = 0;
    let ledger = Ledger::new(model, head.policy, |spec| {
        let bytes = head.parts.get(index).copied();
        let bytes = bytes.ok_or_else(|| wrong("a file for every part", head.parts.len().to_string()))?;
        let part = load(&spec, reader.read(&part_name(index), Dtype::U8, &[bytes])?)?;
        index += 1;
        Ok(part)
    })?;
    reader.finish()?;
    for (part, held) in ledger.parts.iter().enumerate() {
        let sequences = either!(held, held => held.sequences());
        if sequences != head.sequences {
            let want = format!("{} sequences", head.sequences);
            return Err(wrong(&want, format!("{sequences} in part {part}")));
        }
    }
    Ok(ledger)
}

fn wrong(want: &str, have: String) -> Error {
    Error::Metadata { key: HEAD.to_owned(), want: want.to_owned(), have }
}

/// Checks that a part is what the policy asks for.
pub(crate) fn check_part(want: &Spec, had: &Spec) -> Result<()> {
    if want == had {
        return Ok(());
    }
    Err(wrong(&format!("a part like {want:?}"), format!("{had:?}")))
}
