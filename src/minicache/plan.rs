//! Which layers are folded together.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A layer's part in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The first, and possibly the only, layer of its group (the original's `primary`).
    Primary,
    /// A layer that is merged onto its group's first (the original's `merge`).
    Merge,
}

/// One layer of a pairing plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerRole {
    /// The layer's part.
    pub role: Role,
    /// Its group, counted from 0 over all layers.
    pub group: usize,
}

/// Pairs layers by depth, as the original does: layers before `start = trunc(layers * start_frac)` stand alone, the rest
/// form groups of `group_size` in order; what is left over at the end is a smaller group.
///
/// Source: MiniCache (arXiv 2405.14366), section 3.2, and `pair_layers_depth` of VeloxQuant-MLX 0.94.15.
///
/// # Errors
/// [`Error::Range`] when `group_size < 2` or `start_frac` is outside `[0, 1]` (the original lets the latter pass).
pub fn pair_layers_depth(layers: usize, start_frac: f64, group_size: usize) -> Result<Vec<LayerRole>> {
    if group_size < 2 {
        return Err(Error::range("group_size", "2 or more", group_size));
    }
    if !(0.0..=1.0).contains(&start_frac) {
        return Err(Error::range("start_frac", "0 to 1", start_frac));
    }
    let start = (layers as f64 * start_frac) as usize;
    let role = |layer: usize| match layer.checked_sub(start) {
        None => LayerRole { role: Role::Primary, group: layer },
        Some(depth) => LayerRole {
            role: if depth.is_multiple_of(group_size) { Role::Primary } else { Role::Merge },
            group: start + depth / group_size,
        },
    };
    Ok((0..layers).map(role).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftover_layers_keep_their_place() {
        let roles: String = pair_layers_depth(7, 0.5, 2)
            .unwrap()
            .iter()
            .map(|l| format!("{}{} ", if l.role == Role::Primary { 'P' } else { 'M' }, l.group))
            .collect();
        assert_eq!(roles, "P0 P1 P2 P3 M3 P4 M4 ");
    }

    #[test]
    fn hostile_arguments_are_refused() {
        assert!(pair_layers_depth(4, 0.5, 1).unwrap_err().to_string().contains("2 or more, had 1"));
        assert!(pair_layers_depth(4, f64::NAN, 2).unwrap_err().to_string().contains("0 to 1, had NaN"));
        assert!(pair_layers_depth(0, 0.5, 2).unwrap().is_empty());
    }
}
