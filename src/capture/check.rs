//! What must agree within a [`Capture`], whether it was read or is to be written.

use super::read::TOKENS;
use super::{Capture, Layer, Part, metadata};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor};

/// Largest batch, head count and head dimension. Far above any cache's; it bounds the work that a tensor of no tokens,
/// and so of no bytes, can ask for.
pub(crate) const MAX_SIZE: usize = 1 << 16;

impl Capture {
    /// Checks that the layers agree with each other and with the metadata. Reading and writing do so by themselves.
    ///
    /// Batch and tokens are equal in all layers, heads within a layer; query heads are a multiple of the KV heads, and
    /// query and key dimensions are equal. Every layer has keys, after or before RoPE. Heads and dimensions may differ
    /// by layer.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Shape`] naming the tensor, [`Error::Metadata`] naming the key.
    pub fn check(&self) -> Result<()> {
        tensors(&self.layers)?;
        info(self)
    }
}

/// Checks the layers' tensors against each other.
pub(super) fn tensors(layers: &[Layer]) -> Result<()> {
    let Some(first) = layers.first() else {
        return Err(Error::MissingTensor { tensor: Part::Value.name(0), have: "0 layers".to_owned() });
    };
    let first = first.values.shape();
    layers.iter().enumerate().try_for_each(|(index, layer)| check_layer(index, layer, first))
}

/// Checks what the file says against its tensors, which are in order.
pub(super) fn info(capture: &Capture) -> Result<()> {
    let (batch, tokens) = (capture.batch(), capture.tokens());
    if let Some(ids) = &capture.info.token_ids
        && ids.len() != batch * tokens
    {
        return Err(Error::shape(
            TOKENS,
            format_args!("[{batch}, {tokens}]"),
            format_args!("{} ids", ids.len()),
        ));
    }
    metadata::check(capture)
}

fn check_layer(index: usize, layer: &Layer, first: Shape) -> Result<()> {
    let values = layer.values.shape();
    let Shape { batch, heads, tokens, .. } = values;
    let refuse =
        |part: Part, tensor: &Tensor, want: String| Err(Error::shape(part.name(index), want, tensor.shape()));
    for (part, tensor) in layer.tensors() {
        let own = tensor.shape();
        if [own.batch, own.heads, own.dim].iter().any(|size| !(1..=MAX_SIZE).contains(size)) {
            return refuse(part, tensor, format!("batch, heads and head_dim of 1 to {MAX_SIZE}"));
        }
    }
    if (batch, tokens) != (first.batch, first.tokens) {
        let want = format!("[{}, *, {}, *] as {}", first.batch, first.tokens, Part::Value.name(0));
        return refuse(Part::Value, &layer.values, want);
    }
    let Some(keys) = layer.any_keys() else {
        return Err(Error::MissingTensor { tensor: Part::Key.name(index), have: Part::Value.name(index) });
    };
    let dim = keys.shape().dim;
    for (part, keys) in layer.tensors().filter(|(part, _)| matches!(part, Part::Key | Part::KeyPre)) {
        keys.shape().check_equal(&part.name(index), Shape { dim, ..values })?;
    }
    if let Some(queries) = &layer.queries {
        let own = queries.shape();
        let fits =
            own.batch == batch && own.heads.is_multiple_of(heads) && own.tokens <= tokens && own.dim == dim;
        if !fits {
            let want = format!("[{batch}, a multiple of {heads}, at most {tokens}, {dim}]");
            return refuse(Part::Query, queries, want);
        }
    }
    Ok(())
}
