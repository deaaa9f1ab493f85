//! Which part of a cache keeps which layer, without a device: what both backends share.

use std::collections::BTreeMap;

use super::policy::{Fold, Policy};
use super::report::{FoldReport, FoldedLayer};
use super::shared::either;
use crate::attention::AttendOptions;
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::minicache::{self, LayerRole, Role};
use crate::qjl::cache::{CacheOptions, Coding};
use crate::qjl::planes::{Balance, CALIBRATION_TOKENS, Centring, PlanesOptions};
use crate::rope::Rope;

/// What a cache must know of a model.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Model {
    /// What every layer holds of a token.
    pub layers: Vec<LayerShape>,
    /// The RoPE of keys: none, one for all layers, or one for each.
    pub ropes: Vec<Option<Rope>>,
    /// The sliding window of every layer in tokens, the query's own included; none where nobody has one.
    pub windows: Vec<Option<u32>>,
}

impl Model {
    /// A model without RoPE or windows.
    #[must_use]
    pub const fn new(layers: Vec<LayerShape>) -> Self {
        Self { layers, ropes: Vec::new(), windows: Vec::new() }
    }

    /// Sets one RoPE for all layers.
    #[must_use]
    pub fn rope(mut self, rope: Rope) -> Self {
        self.ropes = vec![Some(rope)];
        self
    }

    /// Sets the RoPE of every layer.
    #[must_use]
    pub fn ropes(mut self, ropes: Vec<Option<Rope>>) -> Self {
        self.ropes = ropes;
        self
    }

    /// Sets the sliding window of every layer.
    #[must_use]
    pub fn windows(mut self, windows: Vec<Option<u32>>) -> Self {
        self.windows = windows;
        self
    }

    fn check(&self, policy: &Policy) -> Result<()> {
        let layers = self.layers.len();
        if layers == 0 {
            return Err(Error::range("layers", "at least 1", 0));
        }
        for (what, had) in [("ropes", self.ropes.len()), ("windows", self.windows.len())] {
            if had != 0 && had != layers && !(what == "ropes" && had == 1) {
                return Err(Error::shape(what, format_args!("none or {layers}, one for each layer"), had));
            }
        }
        if policy.layers.len() != layers {
            return Err(Error::shape("policy", format_args!("{layers} layers"), policy.layers.len()));
        }
        match self.windows.iter().position(|&window| window == Some(0)) {
            Some(layer) => {
                Err(Error::range("window", "at least 1 token", format_args!("0 of layer {layer}")))
            }
            None => Ok(()),
        }
    }

    fn layer_rope(&self, layer: usize) -> Option<Rope> {
        let index = if self.ropes.len() == 1 { 0 } else { layer };
        self.ropes.get(index).cloned().flatten()
    }

    fn window(&self, layer: usize) -> Option<u32> {
        self.windows.get(layer).copied().flatten()
    }
}

/// What a part is made of: a cache of some layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Spec {
    Coded { layers: Vec<LayerShape>, options: CacheOptions },
    Minicache { layers: Vec<LayerShape>, plan: Vec<LayerRole>, options: minicache::CacheOptions },
}

/// A part: a cache of QJL and sign planes, or a MiniCache.
#[derive(Debug)]
pub(crate) enum Part<Q, M> {
    Coded(Q),
    Minicache(M),
}

/// What the caches that a part may be have in common, whatever they run on.
pub(crate) trait Sequences {
    fn add_sequence(&mut self) -> usize;
    fn remove_sequence(&mut self, sequence: usize) -> Result<()>;
    fn clear(&mut self, sequence: usize) -> Result<()>;
    fn check_trim(&self, sequence: usize, tokens: usize) -> Result<()>;
    fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()>;
    fn gather(&mut self, sources: &[u32]) -> Result<()>;
    fn fork(&mut self, sequence: usize) -> Result<usize>;
    fn sequences(&self) -> usize;
    fn len(&self, sequence: usize) -> Result<usize>;
    /// Tokens of a layer that are held, and those of them that are folded, over all sequences.
    fn tokens(&self, layer: usize) -> [usize; 2];
    fn bytes(&self) -> u64;
    fn payload_bytes(&self) -> u64;
    fn raw_bytes(&self) -> u64;
}

/// The parts of a cache and which layers each keeps.
#[derive(Debug)]
pub(crate) struct Ledger<Q, M> {
    pub(crate) model: Model,
    pub(crate) policy: Policy,
    pub(crate) parts: Vec<Part<Q, M>>,
    /// The part and its layer that keep each layer.
    places: Vec<[usize; 2]>,
}

/// A raw layer of which only a window is kept: a cache that never codes, whose capacity lets the oldest tokens go.
fn never_coded() -> Coding {
    let plain = PlanesOptions::default().centring(Centring::None).balance(Balance::None);
    Coding::Planes(plain.sinks(0).recent(u32::MAX))
}

/// The caches that a policy asks for, and of every layer which of them keeps it, as what.
pub(crate) fn specs(model: &Model, policy: &Policy) -> Result<(Vec<Spec>, Vec<[usize; 2]>)> {
    model.check(policy)?;
    let mut specs: Vec<Spec> = Vec::new();
    let mut places = Vec::with_capacity(model.layers.len());
    let mut last = BTreeMap::new();
    for (index, (layer, policy_of)) in model.layers.iter().zip(&policy.layers).enumerate() {
        let window = model.window(index);
        let coding = match (policy_of.fold, window) {
            (Fold::Coded(coding), _) => coding,
            (Fold::Raw, Some(_)) => never_coded(),
            (Fold::Minicache(group), Some(window)) => {
                let want = format!("layers without a window in MiniCache group {group}");
                return Err(Error::range("policy", want, format_args!("layer {index} with one of {window}")));
            }
            (fold, None) => {
                places.push(put_minicache(&mut specs, policy, *layer, index, fold, &mut last)?);
                continue;
            }
        };
        let mut options = CacheOptions::new(coding);
        // A table is made from the first tokens, which must not leave before.
        let least = if options.learns() { CALIBRATION_TOKENS } else { 1 };
        options.capacity = window.map(|window| least.max(window as usize));
        places.push(put_coded(&mut specs, &options, *layer, model.layer_rope(index)));
    }
    Ok((specs, places))
}

/// Adds a layer to the part that codes like this.
fn put_coded(
    specs: &mut Vec<Spec>,
    options: &CacheOptions,
    layer: LayerShape,
    rope: Option<Rope>,
) -> [usize; 2] {
    for (part, spec) in specs.iter_mut().enumerate() {
        let Spec::Coded { layers, options: held } = spec else { continue };
        if (held.coding, held.capacity) == (options.coding, options.capacity) {
            layers.push(layer);
            held.ropes.push(rope);
            return [part, layers.len() - 1];
        }
    }
    let options = options.clone().ropes(vec![rope]);
    specs.push(Spec::Coded { layers: vec![layer], options });
    [specs.len() - 1, 0]
}

/// Adds a layer to the MiniCache; `last` has the last layer of every group so far.
fn put_minicache(
    specs: &mut Vec<Spec>,
    policy: &Policy,
    layer: LayerShape,
    index: usize,
    fold: Fold,
    last: &mut BTreeMap<usize, usize>,
) -> Result<[usize; 2]> {
    let found = specs.iter().position(|spec| matches!(spec, Spec::Minicache { .. }));
    let part = found.unwrap_or(specs.len());
    if found.is_none() {
        let options = policy.minicache.clone();
        specs.push(Spec::Minicache { layers: Vec::new(), plan: Vec::new(), options });
    }
    let Some(Spec::Minicache { layers, plan, .. }) = specs.get_mut(part) else {
        return Err(Error::range("policy", "a MiniCache for the layer", index));
    };
    let before = match fold {
        Fold::Minicache(group) => last.insert(group, index),
        _ => None,
    };
    if let Some(before) = before.filter(|before| before + 1 != index) {
        let have = format!("layers {before} and {index} in one group");
        return Err(Error::shape("policy", "MiniCache groups of neighbouring layers", have));
    }
    let groups = plan.last().map_or(0, |role| role.group + 1);
    plan.push(match before {
        Some(_) => LayerRole { role: Role::Merge, group: groups - 1 },
        None => LayerRole { role: Role::Primary, group: groups },
    });
    layers.push(layer);
    Ok([part, layers.len() - 1])
}

impl<Q: Sequences, M: Sequences> Ledger<Q, M> {
    /// A ledger whose parts `make` makes.
    pub(crate) fn new(
        model: Model,
        policy: Policy,
        make: impl FnMut(Spec) -> Result<Part<Q, M>>,
    ) -> Result<Self> {
        let (specs, places) = specs(&model, &policy)?;
        let parts = specs.into_iter().map(make).collect::<Result<_>>()?;
        Ok(Self { model, policy, parts, places })
    }

    fn outside(&self, layer: usize) -> Error {
        Error::range("layer", format!("below the cache's {} layers", self.places.len()), layer)
    }

    /// The part that keeps a layer, and the layer's number there.
    pub(crate) fn part(&self, layer: usize) -> Result<(&Part<Q, M>, usize)> {
        let &[part, own] = self.places.get(layer).ok_or_else(|| self.outside(layer))?;
        Ok((self.parts.get(part).ok_or_else(|| self.outside(layer))?, own))
    }

    /// As [`part`](Self::part).
    pub(crate) fn part_mut(&mut self, layer: usize) -> Result<(&mut Part<Q, M>, usize)> {
        let outside = self.outside(layer);
        match self.places.get(layer) {
            Some(&[part, own]) => Ok((self.parts.get_mut(part).ok_or(outside)?, own)),
            None => Err(outside),
        }
    }

    /// Attention's options with the layer's own window, where that is the narrower.
    pub(crate) fn options<'a>(&self, layer: usize, options: &AttendOptions<'a>) -> AttendOptions<'a> {
        let mut options = *options;
        options.window = options.window.into_iter().chain(self.model.window(layer)).min();
        options
    }

    pub(crate) fn sequences(&self) -> usize {
        self.parts.first().map_or(0, |part| either!(part, held => held.sequences()))
    }

    pub(crate) fn len(&self, sequence: usize) -> Result<usize> {
        let lengths = self.parts.iter().map(|part| either!(part, held => held.len(sequence)));
        Ok(lengths.collect::<Result<Vec<_>>>()?.into_iter().min().unwrap_or(0))
    }

    pub(crate) fn add_sequence(&mut self) -> usize {
        self.parts.iter_mut().for_each(|part| {
            either!(part, held => held.add_sequence());
        });
        self.sequences() - 1
    }

    /// Does the same to every part. Only what all parts refuse alike may fail in `change`.
    fn each(&mut self, change: impl Fn(&mut dyn Sequences) -> Result<()>) -> Result<()> {
        self.parts.iter_mut().try_for_each(|part| either!(part, held => change(held)))
    }

    /// Ends a step for every part, whatever becomes of the others, and gives the first error.
    pub(crate) fn end(&mut self, end: impl FnMut(&mut Part<Q, M>) -> Result<()>) -> Result<()> {
        self.parts.iter_mut().map(end).fold(Ok(()), Result::and)
    }

    pub(crate) fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.each(|held| held.remove_sequence(sequence))
    }

    pub(crate) fn clear(&mut self, sequence: usize) -> Result<()> {
        self.each(|held| held.clear(sequence))
    }

    pub(crate) fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.parts.iter().try_for_each(|part| either!(part, held => held.check_trim(sequence, tokens)))?;
        self.each(|held| held.trim(sequence, tokens))
    }

    pub(crate) fn gather(&mut self, sources: &[u32]) -> Result<()> {
        self.each(|held| held.gather(sources))
    }

    pub(crate) fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.each(|held| held.fork(sequence).map(|_| ()))?;
        Ok(self.sequences() - 1)
    }

    fn total(&self, of: impl Fn(&dyn Sequences) -> u64) -> u64 {
        self.parts.iter().map(|part| either!(part, held => of(held))).sum()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.total(|held| held.bytes())
    }

    pub(crate) fn payload_bytes(&self) -> u64 {
        self.total(|held| held.payload_bytes())
    }

    pub(crate) fn raw_bytes(&self) -> u64 {
        self.total(|held| held.raw_bytes())
    }

    pub(crate) fn report(&self) -> FoldReport {
        let layer = |(index, policy): (usize, &super::policy::LayerPolicy)| {
            let (part, own) = self.part(index).ok()?;
            let [tokens, folded] = either!(part, held => held.tokens(own));
            Some(FoldedLayer { policy: policy.clone(), window: self.model.window(index), tokens, folded })
        };
        FoldReport {
            layers: self.policy.layers.iter().enumerate().filter_map(layer).collect(),
            bytes: self.bytes(),
            payload_bytes: self.payload_bytes(),
            raw_bytes: self.raw_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn layers_of_one_kind_share_a_part() {
        let model = Model::new(vec![LayerShape::new(1, 8, DType::F16); 6]);
        let coded = Fold::Coded(CacheOptions::named("compact").unwrap().coding);
        let policy = Policy::named("minicache", 6).unwrap().layer(0, coded).layer(5, coded);
        let (parts, places) = specs(&model, &policy).unwrap();
        assert_eq!(places, [[0, 0], [1, 0], [1, 1], [1, 2], [1, 3], [0, 1]]);
        let Spec::Minicache { plan, .. } = &parts[1] else { panic!("{parts:?}") };
        let roles: Vec<_> = plan.iter().map(|layer| (layer.role, layer.group)).collect();
        let (p, m) = (Role::Primary, Role::Merge);
        assert_eq!(roles, [(p, 0), (p, 1), (p, 2), (m, 2)], "raw layers and a pair");
    }

    #[test]
    fn windows_become_capacities() {
        let layers = vec![LayerShape::new(1, 8, DType::F16); 3];
        let model = Model::new(layers).windows(vec![Some(512), Some(16), None]);
        let policy = Policy::named("balanced", 3).unwrap().raw(0);
        let (parts, _) = specs(&model, &policy).unwrap();
        let capacities: Vec<_> = parts
            .iter()
            .map(|part| match part {
                Spec::Coded { options, .. } => options.capacity,
                Spec::Minicache { .. } => panic!("{part:?}"),
            })
            .collect();
        assert_eq!(capacities, [Some(512), Some(128), None], "tables need 128 tokens");
    }

    #[test]
    fn policies_that_do_not_fit_a_model_are_refused() {
        let model = Model::new(vec![LayerShape::new(1, 8, DType::F16); 3]);
        let told = |model: &Model, policy: &Policy| specs(model, policy).unwrap_err().to_string();
        let raw = Policy::named("raw", 3).unwrap();
        assert_eq!(told(&model, &Policy::named("raw", 2).unwrap()), "policy: wanted 3 layers, had 2");
        let apart = raw.clone().layer(0, Fold::Minicache(0)).layer(2, Fold::Minicache(0));
        assert!(told(&model, &apart).ends_with("had layers 0 and 2 in one group"));
        let pair = raw.clone().layer(0, Fold::Minicache(0)).layer(1, Fold::Minicache(0));
        let windows = model.clone().windows(vec![None, Some(9), None]);
        assert!(told(&windows, &pair).ends_with("had layer 1 with one of 9"));
        assert!(told(&model.clone().windows(vec![Some(0); 3]), &raw).ends_with("had 0 of layer 0"));
        assert!(told(&model.clone().ropes(vec![None; 2]), &raw).starts_with("ropes: wanted none or 3"));
        assert!(told(&Model::new(Vec::new()), &raw).starts_with("layers: wanted at least 1"));
    }
}
