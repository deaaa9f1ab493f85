//! The presets that the command line knows.

use anyhow::{Context, Result, bail};
use kvfold::attention::Precision;
use kvfold::fold::Policy;
use kvfold::minicache::{CacheOptions, DirectionPlanes, MergeOptions, Retention, pair_layers_depth};

use crate::baseline::{Baseline, Codes};
use crate::cache::{Cache, HostCache};
use crate::gpu::DeviceCache;
use crate::model::Config;

/// Names beside those of [`Policy::named`].
const FORCED: &str = "minicache-forced";
const FORCED_PLANES: &str = "minicache-planes-forced";
const INT8: &str = "int8";
const INT4: &str = "int4";

/// Everything that `--preset` takes, `raw` left out.
pub(crate) const ALL: [&str; 12] = [
    "near-lossless",
    "balanced",
    "compact",
    "extreme",
    "qjl",
    "qjl-orth",
    "minicache",
    "minicache-planes",
    FORCED,
    FORCED_PLANES,
    INT8,
    INT4,
];

/// Where a cache runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// On a device, which attends to sign planes with this precision.
    Device(Precision),
}

/// A cache of one sequence: a preset by its name, or a policy from a file that ends in `.json`.
pub(crate) fn cache(name: &str, config: &Config, place: Place) -> Result<Box<dyn Cache>> {
    let codes = match name {
        INT8 => Some(Codes::Int8),
        INT4 => Some(Codes::Int4),
        _ => None,
    };
    if let Some(codes) = codes {
        if place != Place::Host {
            bail!("preset {name}: wanted one of kvfold's with --gpu; this one runs on the CPU alone");
        }
        return Ok(Box::new(Baseline::new(config, codes)));
    }
    let policy = policy(name, config.layers)?;
    Ok(match place {
        Place::Host => Box::new(HostCache::new(config, policy)?),
        Place::Device(precision) => Box::new(DeviceCache::new(config, policy, precision)?),
    })
}

/// The policy of that name.
pub(crate) fn policy(name: &str, layers: usize) -> Result<Policy> {
    if name.ends_with(".json") {
        let text = std::fs::read_to_string(name).with_context(|| name.to_owned())?;
        return Ok(Policy::from_json(&text)?);
    }
    if name == FORCED || name == FORCED_PLANES {
        // Nothing retained but the sinks, whatever it costs.
        let mut merge = MergeOptions::default().retention(Retention::Never);
        merge.planes = (name == FORCED_PLANES).then(DirectionPlanes::default);
        let options = CacheOptions::default().merge(merge);
        return Ok(Policy::minicache(&pair_layers_depth(layers, 0.5, 2)?, options.recent(64))?);
    }
    Ok(Policy::named(name, layers)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_a_cache_or_a_policy() {
        for name in ALL.into_iter().filter(|name| ![INT8, INT4].contains(name)) {
            assert_eq!(policy(name, 30).unwrap().layers.len(), 30, "{name}");
        }
        assert!(policy("tiny", 30).is_err());
        assert_ne!(policy(FORCED, 30).unwrap(), policy("minicache", 30).unwrap());
    }
}
