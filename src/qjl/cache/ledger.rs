//! Which rows a cache holds of which sequence and layer, without a device: what both backends share.

use crate::cache::{LayerShape, RowsView, Step};
use crate::error::{Error, Result};
use crate::rope::Positions;

use super::options::CacheOptions;
use super::track::{Rules, Track};

/// Sequences and layers of a cache.
#[derive(Debug)]
pub(crate) struct Ledger<B, C, X> {
    pub(crate) layers: Vec<LayerShape>,
    pub(crate) options: CacheOptions,
    pub(crate) rules: Rules,
    /// The tracks of every sequence, a layer each.
    pub(crate) sequences: Vec<Vec<Track<B, C, X>>>,
}

impl<B, C, X: Clone + Default> Ledger<B, C, X> {
    /// A ledger of so many empty sequences, for coded blocks of at most so many bytes a side.
    pub(crate) fn new(
        layers: &[LayerShape],
        sequences: usize,
        options: CacheOptions,
        block_bytes: u64,
    ) -> Result<Self> {
        layers.iter().try_for_each(LayerShape::check)?;
        options.check(layers.len())?;
        let rules = Rules::new(layers, &options, block_bytes)?;
        let mut ledger = Self { layers: layers.to_vec(), options, rules, sequences: Vec::new() };
        (0..sequences).for_each(|_| {
            ledger.add_sequence();
        });
        Ok(ledger)
    }

    pub(crate) fn layer(&self, layer: usize) -> Result<&LayerShape> {
        let outside =
            || Error::range("layer", format!("below the cache's {} layers", self.layers.len()), layer);
        self.layers.get(layer).ok_or_else(outside)
    }

    /// The tracks of a sequence.
    pub(crate) fn sequence(&self, sequence: usize) -> Result<&[Track<B, C, X>]> {
        self.sequences.get(sequence).map(Vec::as_slice).ok_or_else(|| self.outside(sequence))
    }

    fn outside(&self, sequence: usize) -> Error {
        Error::range("sequence", format!("below the cache's {} sequences", self.sequences.len()), sequence)
    }

    /// One layer's track of every sequence.
    pub(crate) fn tracks(&self, layer: usize) -> impl Iterator<Item = &Track<B, C, X>> {
        self.sequences.iter().filter_map(move |tracks| tracks.get(layer))
    }

    pub(crate) fn all_tracks(&self) -> impl Iterator<Item = &Track<B, C, X>> {
        self.sequences.iter().flatten()
    }

    /// Puts new tracks of a layer in place of the old ones.
    #[cfg(feature = "gpu")]
    pub(crate) fn replace(&mut self, layer: usize, tracks: Vec<Track<B, C, X>>) {
        for (held, track) in self.sequences.iter_mut().zip(tracks) {
            if let Some(held) = held.get_mut(layer) {
                *held = track;
            }
        }
    }

    /// Puts a sequence's tracks, which `make` has made of the old ones and their layers, in place of these.
    pub(crate) fn remake(
        &mut self,
        sequence: usize,
        make: impl FnMut((&Track<B, C, X>, &LayerShape)) -> Result<Track<B, C, X>>,
    ) -> Result<()> {
        let made = self.sequence(sequence)?.iter().zip(&self.layers).map(make).collect::<Result<_>>()?;
        self.take(sequence, made);
        Ok(())
    }

    /// Takes the tracks of a sequence.
    pub(crate) fn take(&mut self, sequence: usize, made: Vec<Track<B, C, X>>) {
        if let Some(tracks) = self.sequences.get_mut(sequence) {
            *tracks = made;
        }
    }

    /// Checks a step, of a fixed cache also that there is room, and gives the positions of every sequence's new tokens.
    pub(crate) fn check_step<V: RowsView>(&self, layer: usize, step: &Step<'_, V>) -> Result<Vec<Vec<u32>>> {
        let counts = step.check(self.layer(layer)?, self.sequences.len())?;
        let width = step.keys.shape().tokens;
        if let Some(positions) = step.positions {
            check_positions(&positions, self.sequences.len(), width)?;
        }
        let each = self.tracks(layer).zip(counts).enumerate();
        each.map(|(sequence, (track, count))| {
            let room = if self.options.fixed { track.room(&self.rules) } else { count };
            if count > room {
                let what = format!("layer {layer}, sequence {sequence}");
                return Err(Error::Capacity { what, need: count, have: room });
            }
            track.next_positions(&self.rules, step.positions, sequence, [width, count])
        })
        .collect()
    }

    pub(crate) fn len(&self, sequence: usize) -> Result<usize> {
        let tracks = self.sequence(sequence)?;
        Ok(tracks.iter().map(|track| track.len(&self.rules)).min().unwrap_or(0))
    }

    pub(crate) fn evicted(&self, sequence: usize) -> Result<usize> {
        let tracks = self.sequence(sequence)?;
        let evicted = tracks.iter().map(|track| track.evicted).max().unwrap_or(0);
        Ok(evicted.saturating_sub(self.rules.pinned()))
    }

    /// Bytes of all rows that have not left, as they came.
    pub(crate) fn raw_bytes(&self) -> u64 {
        let track = |(track, layer): (&Track<B, C, X>, &LayerShape)| {
            let coded: usize = track.visible_coded().map(|(_, tokens)| tokens.len()).sum();
            let raw: usize = track.visible_raw().map(|piece| piece.tokens).sum();
            ((coded + raw) * layer.token_bytes()) as u64
        };
        self.sequences.iter().flat_map(|tracks| tracks.iter().zip(&self.layers)).map(track).sum()
    }

    pub(crate) fn add_sequence(&mut self) -> usize {
        self.sequences.push(self.layers.iter().map(|_| Track::new(&self.rules)).collect());
        self.sequences.len() - 1
    }

    pub(crate) fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.sequence(sequence)?;
        self.sequences.remove(sequence);
        Ok(())
    }

    pub(crate) fn clear(&mut self, sequence: usize) -> Result<()> {
        let outside = self.outside(sequence);
        let tracks = self.sequences.get_mut(sequence).ok_or(outside)?;
        tracks.iter_mut().for_each(|track| *track = Track::new(&self.rules));
        Ok(())
    }

    /// Tokens of a layer that have not left, and those of them that are coded, over all sequences.
    pub(crate) fn layer_tokens(&self, layer: usize) -> [usize; 2] {
        let coded =
            |track: &Track<B, C, X>| track.visible_coded().map(|(_, tokens)| tokens.len()).sum::<usize>();
        let raw = |track: &Track<B, C, X>| track.visible_raw().map(|piece| piece.tokens).sum::<usize>();
        let each = self.tracks(layer).map(|track| [coded(track) + raw(track), coded(track)]);
        each.fold([0, 0], |[tokens, coded], [t, c]| [tokens + t, coded + c])
    }

    /// Whether [`trim`](Self::trim) can be.
    pub(crate) fn check_trim(&self, sequence: usize, tokens: usize) -> Result<()> {
        self.sequence(sequence)?.iter().try_for_each(|track| track.check_trim(&self.rules, tokens))
    }

    pub(crate) fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let rules = self.rules;
        self.check_trim(sequence, tokens)?;
        if let Some(tracks) = self.sequences.get_mut(sequence) {
            tracks.iter_mut().for_each(|track| track.trim(&rules, tokens));
        }
        Ok(())
    }

    pub(crate) fn fork(&mut self, sequence: usize) -> Result<usize> {
        let tracks = self.sequence(sequence)?.to_vec();
        self.sequences.push(tracks);
        Ok(self.sequences.len() - 1)
    }

    pub(crate) fn gather(&mut self, sources: &[u32]) -> Result<()> {
        let gathered: Result<Vec<_>> =
            sources.iter().map(|&source| Ok(self.sequence(source as usize)?.to_vec())).collect();
        self.sequences = gathered?;
        Ok(())
    }
}

fn check_positions(positions: &Positions<'_>, sequences: usize, tokens: usize) -> Result<()> {
    match positions {
        Positions::Start(starts) if starts.len() != sequences => {
            Err(Error::shape("position starts", format_args!("[{sequences}]"), starts.len()))
        }
        Positions::Explicit(all) if all.len() != sequences * tokens => {
            Err(Error::shape("positions", format_args!("[{sequences}, {tokens}]"), all.len()))
        }
        _ => Ok(()),
    }
}
