//! Work that falls into independent parts: on all cores with the feature `rayon`, else one after the other. A part is
//! computed the same either way.

/// Does `work` with every item.
#[cfg(all(feature = "rayon", not(target_arch = "wasm32")))]
pub(crate) fn for_each<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Send + Sync) {
    use rayon::iter::{IntoParallelIterator, ParallelIterator};
    items.collect::<Vec<T>>().into_par_iter().for_each(work);
}

/// Does `work` with every item.
#[cfg(not(all(feature = "rayon", not(target_arch = "wasm32"))))]
pub(crate) fn for_each<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Send + Sync) {
    items.for_each(work);
}
