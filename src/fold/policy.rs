//! How every layer of a model is kept.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::minicache::{self, DirectionPlanes, LayerRole, MergeOptions, Role, pair_layers_depth};
use crate::qjl::cache::{CacheOptions, Coding, NamedCoding};

/// The newest version of a policy's text, and the only one there is so far.
const VERSION: u32 = 1;
/// The names that layers have beside those of [`CacheOptions::named`].
const RAW: &str = "raw";
/// The name of a policy that pairs the deeper half of the layers.
const MINICACHE: &str = "minicache";
/// The same with the pairs' directions in sign planes.
const MINICACHE_PLANES: &str = "minicache-planes";

/// How one layer is kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "FoldText", into = "FoldText")]
#[non_exhaustive]
pub enum Fold {
    /// As the rows came.
    Raw,
    /// By MiniCache, together with the neighbouring layers of this group.
    Minicache(usize),
    /// By sign planes or QJL.
    Coded(Coding),
}

/// How a [`Fold`] is written: `"raw"`, `"balanced"`, `{"minicache": 3}`, `{"planes": {..}}`, `{"sketch": {..}}`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum FoldText {
    Name(String),
    Minicache { minicache: usize },
    Coding(Coding),
}

impl TryFrom<FoldText> for Fold {
    type Error = Error;

    fn try_from(text: FoldText) -> Result<Self> {
        match text {
            FoldText::Name(name) if name == RAW => Ok(Self::Raw),
            FoldText::Name(name) => Ok(Self::Coded(CacheOptions::named(&name)?.coding)),
            FoldText::Minicache { minicache } => Ok(Self::Minicache(minicache)),
            FoldText::Coding(coding) => Ok(Self::Coded(coding)),
        }
    }
}

impl From<Fold> for FoldText {
    fn from(fold: Fold) -> Self {
        match fold {
            Fold::Raw => Self::Name(RAW.to_owned()),
            Fold::Minicache(group) => Self::Minicache { minicache: group },
            Fold::Coded(coding) => match name_of(&coding) {
                Some(name) => Self::Name(name.to_owned()),
                None => Self::Coding(coding),
            },
        }
    }
}

impl std::fmt::Display for Fold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Raw => f.write_str(RAW),
            Self::Minicache(group) => write!(f, "minicache {group}"),
            Self::Coded(coding) => f.write_str(name_of(coding).unwrap_or("coded")),
        }
    }
}

/// The name of a preset that codes like this.
fn name_of(coding: &Coding) -> Option<&'static str> {
    NamedCoding::ALL.into_iter().find(|named| named.coding() == *coding).map(NamedCoding::name)
}

/// How one layer is kept, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LayerPolicy {
    /// How.
    pub fold: Fold,
    /// Why, where somebody said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// How every layer of a model is kept. Its text form is JSON ([`Policy::to_json`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Policy {
    /// The version of the text form.
    version: u32,
    /// Of every layer.
    pub layers: Vec<LayerPolicy>,
    /// How MiniCache groups merge.
    #[serde(default)]
    pub minicache: minicache::CacheOptions,
}

impl Policy {
    /// All layers kept alike.
    #[must_use]
    pub fn uniform(fold: Fold, layers: usize) -> Self {
        let layer = LayerPolicy { fold, reason: None };
        Self { version: VERSION, layers: vec![layer; layers], minicache: minicache::CacheOptions::default() }
    }

    /// All layers kept by a preset: `raw`, those of [`CacheOptions::named`], `minicache`, which folds the deeper half in pairs at
    /// a cosine of 0.9, the last 64 tokens raw, or `minicache-planes`, the same with directions in three bits a channel.
    ///
    /// # Errors
    /// [`Error::Range`] naming the preset.
    pub fn named(name: &str, layers: usize) -> Result<Self> {
        match name {
            RAW => Ok(Self::uniform(Fold::Raw, layers)),
            MINICACHE | MINICACHE_PLANES => {
                let mut options = minicache::CacheOptions::default().recent(64);
                options.merge.planes = (name == MINICACHE_PLANES).then(DirectionPlanes::default);
                Self::minicache(&pair_layers_depth(layers, 0.5, 2)?, options)
            }
            _ => match CacheOptions::named(name) {
                Ok(options) => Ok(Self::uniform(Fold::Coded(options.coding), layers)),
                Err(Error::Range { what, want, have }) => Err(Error::Range {
                    what,
                    want: format!("{want}, {RAW}, {MINICACHE} or {MINICACHE_PLANES}"),
                    have,
                }),
                Err(error) => Err(error),
            },
        }
    }

    /// Layers folded by MiniCache in the groups of a plan; those that stand alone are raw.
    ///
    /// # Errors
    /// [`Error::Shape`] when a layer is merged into a group that is not its neighbour's.
    pub fn minicache(plan: &[LayerRole], options: minicache::CacheOptions) -> Result<Self> {
        let mut policy = Self::uniform(Fold::Raw, plan.len());
        policy.minicache = options;
        for (index, pair) in plan.windows(2).enumerate() {
            let [lower, upper] = pair else { continue };
            if upper.role != Role::Merge {
                continue;
            }
            if lower.group != upper.group {
                let have = format!("layer {} merged into group {}", index + 1, upper.group);
                return Err(Error::shape("pairing plan", "groups of neighbouring layers", have));
            }
            for layer in policy.layers.iter_mut().skip(index).take(2) {
                layer.fold = Fold::Minicache(upper.group);
            }
        }
        Ok(policy)
    }

    /// Sets how one layer is kept; layers that there are not are left out.
    #[must_use]
    pub fn layer(mut self, layer: usize, fold: Fold) -> Self {
        if let Some(place) = self.layers.get_mut(layer) {
            *place = LayerPolicy { fold, reason: None };
        }
        self
    }

    /// Keeps one layer raw.
    #[must_use]
    pub fn raw(self, layer: usize) -> Self {
        self.layer(layer, Fold::Raw)
    }

    /// Sets how MiniCache groups merge.
    #[must_use]
    pub fn merge(mut self, merge: MergeOptions) -> Self {
        self.minicache.merge = merge;
        self
    }

    /// The policy as JSON text.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Numbers and text keys always serialise.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Reads what [`to_json`](Self::to_json) wrote, or a person.
    ///
    /// # Errors
    /// [`Error::Metadata`] saying what cannot be understood, and where.
    pub fn from_json(text: &str) -> Result<Self> {
        let wrong = |want: &str, have: String| Error::Metadata {
            key: "policy".to_owned(),
            want: want.to_owned(),
            have,
        };
        let policy: Self = serde_json::from_str(text)
            .map_err(|cause| wrong("the JSON object of a policy", cause.to_string()))?;
        if policy.version != VERSION {
            return Err(wrong("version 1", policy.version.to_string()));
        }
        policy.minicache.validate()?;
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_survives_its_text() {
        let mut policy = Policy::named("minicache", 6).unwrap().layer(0, Fold::Raw);
        let coded = CacheOptions::named("compact").unwrap().coding;
        policy = policy.layer(1, Fold::Coded(coded));
        policy.layers[1].reason = Some("least error".to_owned());
        let own = crate::qjl::planes::PlanesOptions::default().sinks(7);
        policy = policy.layer(2, Fold::Coded(Coding::Planes(own)));
        let text = policy.to_json();
        assert!(text.contains("\"fold\": \"compact\"") && text.contains("\"minicache\": 3"), "{text}");
        assert_eq!(Policy::from_json(&text).unwrap(), policy);
        let both = Policy::named("minicache-planes", 6).unwrap();
        let text = both.to_json();
        assert!(text.contains("\"bits\": 3"), "{text}");
        assert_eq!(Policy::from_json(&text).unwrap(), both);
        assert!(!Policy::named("minicache", 6).unwrap().to_json().contains("planes"));
        let wrong = text.replace("\"bits\": 3", "\"bits\": 9");
        let error = Policy::from_json(&wrong).unwrap_err().to_string();
        assert!(error.contains("planes.bits: wanted 1 to 5, had 9"), "{error}");
    }

    #[test]
    fn a_person_may_write_one_and_is_told_what_is_wrong() {
        let read = |text: &str| Policy::from_json(text);
        let policy = read(r#"{"version": 1, "layers": [{"fold": "raw"}, {"fold": "qjl-orth"}]}"#).unwrap();
        assert_eq!(policy, Policy::named("qjl-orth", 2).unwrap().raw(0));
        for (text, told) in [
            (r#"{"version": 1, "layers": [{"fold": "tiny"}]}"#, "tiny"),
            (r#"{"version": 2, "layers": []}"#, "wanted version 1"),
            (r#"{"version": 1, "layers": [], "more": 1}"#, "more"),
            ("[]", "policy"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(told), "{text}: {error}");
        }
        let error = Policy::named("tiny", 2).unwrap_err().to_string();
        assert!(error.ends_with("qjl-orth, qjl, raw, minicache or minicache-planes, had tiny"), "{error}");
    }

    #[test]
    fn the_documented_text_is_read() {
        let page = include_str!("../../docs/folded-format.md");
        let text = page.split("```json").nth(1).and_then(|behind| behind.split("```").next()).unwrap();
        let policy = Policy::from_json(text).unwrap();
        let pair = Fold::Minicache(0);
        assert_eq!((policy.layers.len(), policy.layers[2].fold, policy.layers[3].fold), (5, pair, pair));
    }

    #[test]
    fn groups_of_a_plan_become_folds() {
        let policy = Policy::named("minicache", 5).unwrap();
        let folds: Vec<Fold> = policy.layers.iter().map(|layer| layer.fold).collect();
        let pair = Fold::Minicache;
        assert_eq!(folds, [Fold::Raw, Fold::Raw, pair(2), pair(2), Fold::Raw]);
        let plan = [Role::Primary, Role::Merge]
            .map(|role| LayerRole { role, group: usize::from(role == Role::Merge) });
        assert!(Policy::minicache(&plan, minicache::CacheOptions::default()).is_err());
    }
}
