//! How codes stand on the device: in tiles of 32 tokens, as `shaders/planes/quads.wgsl` reads them and
//! `shaders/planes/tile.wgsl` leaves them. Files and the host keep the canonical layout, [`PlaneCodes`].
//!
//! A group is 32 codes of b bits: of keys 32 channels of one token, of values 32 tokens of one channel. Its b words hold, of
//! code `4 k + j`, all bits where b is 8, else the low four where b >= 4, the low two where b is 2 or 3, and the top one where b
//! is odd, each where four codes that follow each other become the bytes of a word by a shift and a mask. The same word of the
//! groups of a tile stands side by side: of 32 tokens, or of all channels.

use half::f16;

use super::super::{BYTE, CodeLayout, PlaneCodes, Segment, SegmentCodes};
use super::Side;
use crate::tensor::Shape;

/// Tokens of a tile, and codes of a group.
pub(super) const TILE: usize = 32;

/// Part of a code within the words of its group.
#[derive(Clone, Copy)]
struct Field {
    word: usize,
    shift: usize,
    /// The first bit of the code that it holds, and how many.
    low: usize,
    width: usize,
}

impl Field {
    const fn mask(self) -> u32 {
        (1u32 << self.width) - 1
    }
}

/// The fields of code `i` of a group of codes of so many bits.
fn fields(planes: u8, i: usize) -> impl Iterator<Item = Field> {
    let b = usize::from(planes);
    let (eight, base) = (i / 8, 8 * (i % 4) + 4 * (i / 4 % 2));
    let byte = (planes == BYTE).then_some(Field { word: i / 4, shift: 8 * (i % 4), low: 0, width: 8 });
    let nibble =
        (4..usize::from(BYTE)).contains(&b).then_some(Field { word: eight, shift: base, low: 0, width: 4 });
    let pair = (2..4).contains(&b).then_some(Field {
        word: eight / 2,
        shift: base + 2 * (eight % 2),
        low: 0,
        width: 2,
    });
    let top = (b % 2 == 1).then_some(Field { word: b - 1, shift: base + eight, low: b - 1, width: 1 });
    [byte, nibble, pair, top].into_iter().flatten()
}

/// Sizes of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    side: Side,
    /// Heads of all sequences.
    heads: usize,
    /// Tiles of a head.
    pub(super) tiles: usize,
    /// Words of a column of a tile.
    rows: usize,
    /// Columns of a tile: tokens, or channels in whole fours.
    columns: usize,
    /// Scalars of a token.
    scalars: usize,
}

impl Tiles {
    pub(super) fn new(shape: Shape, layout: &CodeLayout, side: Side) -> Self {
        let planes = |segment: &Segment| usize::from(segment.planes);
        let rows = layout.segments().iter().map(|segment| match side {
            Side::Keys => groups(segment) * planes(segment),
            Side::Values => planes(segment),
        });
        Self {
            side,
            heads: shape.batch * shape.heads,
            tiles: shape.tokens.div_ceil(TILE),
            rows: rows.sum(),
            columns: if side == Side::Keys { TILE } else { shape.dim.next_multiple_of(4) },
            scalars: layout.segments().iter().filter(|segment| segment.planes > 0).count(),
        }
    }

    /// Words of a tile's codes.
    pub(super) const fn tile_words(self) -> usize {
        self.rows * self.columns
    }

    /// Words of the scalars of a tile.
    pub(super) const fn scalar_words(self) -> usize {
        self.scalars * TILE / 2
    }

    /// Words of all codes, behind which the scalars begin.
    pub(super) const fn code_words(self) -> usize {
        self.heads * self.tiles * self.tile_words()
    }

    /// Words of all codes and scalars, behind which means begin.
    pub(super) const fn words(self) -> usize {
        self.code_words() + self.heads * self.tiles * self.scalar_words()
    }

    /// The first word of the group that a code stands in, the words from one of the group to the next, and its index in it.
    fn group(self, head: usize, token: usize, row: usize, channel: usize, planes: usize) -> [usize; 3] {
        let tile = (head * self.tiles + token / TILE) * self.tile_words();
        match self.side {
            Side::Keys => {
                let word = row + channel / TILE * planes;
                [tile + word * TILE + token % TILE, TILE, channel % TILE]
            }
            Side::Values => [tile + row * self.columns + channel, self.columns, token % TILE],
        }
    }

    /// Where the scalar of a segment of a token stands, in halves of a word.
    fn scalar(self, head: usize, token: usize, segment: usize) -> usize {
        2 * self.code_words() + (head * self.tiles * TILE + token) * self.scalars + segment
    }
}

/// What turns a code over on its way to its tile: signed bytes stand 128 higher there, so that attention takes all codes alike.
const fn offset(planes: u8) -> u32 {
    if planes == BYTE { 0x80 } else { 0 }
}

/// Groups of a segment's channels.
pub(super) fn groups(segment: &Segment) -> usize {
    if segment.planes > 0 { segment.channels.div_ceil(TILE) } else { 0 }
}

/// Code `i` of a row of a segment.
fn code(words: &[u32], i: usize, planes: usize) -> u32 {
    let bit = i * planes;
    let word = |index: usize| u64::from(words.get(index).copied().unwrap_or_default());
    let both = word(bit / 32) | word(bit / 32 + 1) << 32;
    (both >> (bit % 32)) as u32 & ((1 << planes) - 1)
}

fn set_code(words: &mut [u32], i: usize, planes: usize, code: u32) {
    let bit = i * planes;
    let both = u64::from(code) << (bit % 32);
    for (word, bits) in words.iter_mut().skip(bit / 32).zip([both as u32, (both >> 32) as u32]) {
        *word |= bits;
    }
}

/// Every code of a store: its head and token, its segment's index, the segment, and the code's channel within it.
fn each(shape: Shape, layout: &CodeLayout, mut with: impl FnMut(usize, usize, usize, &Segment, usize)) {
    for (head, token) in
        (0..shape.batch * shape.heads).flat_map(|h| (0..shape.tokens).map(move |token| (h, token)))
    {
        for (index, segment) in layout.segments().iter().enumerate().filter(|(_, s)| s.planes > 0) {
            (0..segment.channels).for_each(|channel| with(head, token, index, segment, channel));
        }
    }
}

/// The first word row of every segment.
fn word_rows(layout: &CodeLayout) -> Vec<usize> {
    let rows = layout.segments().iter().scan(0, |row, segment| {
        let first = *row;
        *row += groups(segment) * usize::from(segment.planes);
        Some(first)
    });
    rows.collect()
}

/// The words of codes and scalars.
pub(super) fn pack(codes: &PlaneCodes, side: Side) -> Vec<u32> {
    let (shape, layout) = (codes.shape, &codes.layout);
    let (tiles, rows) = (Tiles::new(shape, layout, side), word_rows(layout));
    let mut words = vec![0u32; tiles.words()];
    each(shape, layout, |head, token, index, segment, channel| {
        let (planes, row) = (usize::from(segment.planes), head * shape.tokens + token);
        let Some(stored) = codes.segments.get(index) else { return };
        let own = stored.words.get(row * segment.words()..(row + 1) * segment.words()).unwrap_or_default();
        let code = code(own, channel, planes) ^ offset(segment.planes);
        let first = rows.get(index).copied().unwrap_or_default();
        let [at, step, i] = tiles.group(head, token, first, channel, planes);
        for field in fields(segment.planes, i) {
            if let Some(word) = words.get_mut(at + field.word * step) {
                *word |= ((code >> field.low) & field.mask()) << field.shift;
            }
        }
        if channel == 0 {
            let at = tiles.scalar(head, token, index.min(tiles.scalars - 1));
            let nu = stored.nu.get(row).map_or(0, |nu| u32::from(nu.to_bits()));
            if let Some(word) = words.get_mut(at / 2) {
                *word |= nu << (16 * (at % 2));
            }
        }
    });
    words
}

/// The segments of codes, of the words of a store.
pub(super) fn unpack(words: &[u32], shape: Shape, layout: &CodeLayout, side: Side) -> Vec<SegmentCodes> {
    let (tiles, rows) = (Tiles::new(shape, layout, side), word_rows(layout));
    let mut segments: Vec<SegmentCodes> = PlaneCodes::new(shape, layout).segments;
    for (segment, stored) in layout.segments().iter().zip(&mut segments) {
        stored.words = vec![0; shape.rows() * segment.words()];
        stored.nu = vec![f16::ZERO; if segment.planes > 0 { shape.rows() } else { 0 }];
    }
    let word = |at: usize| words.get(at).copied().unwrap_or_default();
    each(shape, layout, |head, token, index, segment, channel| {
        let (planes, row) = (usize::from(segment.planes), head * shape.tokens + token);
        let Some(stored) = segments.get_mut(index) else { return };
        let first = rows.get(index).copied().unwrap_or_default();
        let [at, step, i] = tiles.group(head, token, first, channel, planes);
        let part = |field: Field| ((word(at + field.word * step) >> field.shift) & field.mask()) << field.low;
        let code = fields(segment.planes, i).map(part).sum::<u32>() ^ offset(segment.planes);
        let own = stored.words.get_mut(row * segment.words()..).unwrap_or_default();
        set_code(own, channel, planes, code);
        if channel == 0 {
            let at = tiles.scalar(head, token, index.min(tiles.scalars - 1));
            if let Some(nu) = stored.nu.get_mut(row) {
                *nu = f16::from_bits((word(at / 2) >> (16 * (at % 2))) as u16);
            }
        }
    });
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_fill_the_words_of_a_group() {
        for planes in [1, 2, 3, 4, 5, BYTE] {
            let mut words = [0u32; 8];
            for field in (0..TILE).flat_map(|i| fields(planes, i)) {
                let bits = field.mask() << field.shift;
                assert_eq!(words[field.word] & bits, 0, "{planes} planes: two codes share a bit");
                words[field.word] |= bits;
            }
            let full = words.iter().take_while(|&&word| word == u32::MAX).count();
            assert_eq!(
                (full, words.iter().filter(|&&word| word != 0).count()),
                (planes.into(), planes.into())
            );
        }
    }

    #[test]
    fn codes_come_back() {
        let layouts = [
            (Side::Keys, vec![Segment { channels: 70, planes: 3 }]),
            (Side::Keys, vec![Segment { channels: 33, planes: 5 }, Segment { channels: 31, planes: 1 }]),
            (Side::Keys, vec![Segment { channels: 20, planes: 2 }, Segment { channels: 20, planes: 0 }]),
            (Side::Values, vec![Segment { channels: 9, planes: 4 }]),
            (Side::Values, vec![Segment { channels: 1, planes: 5 }]),
            (Side::Values, vec![Segment { channels: 70, planes: 8 }]),
        ];
        for (side, segments) in layouts {
            let layout: CodeLayout =
                serde_json::from_value(serde_json::json!({ "segments": segments })).unwrap();
            let shape = Shape { batch: 2, heads: 3, tokens: 45, dim: layout.channels() };
            let mut codes = PlaneCodes::new(shape, &layout);
            let mut next = 1u32;
            let mut random = || {
                next = next.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                next >> 8
            };
            for (segment, stored) in layout.segments().iter().zip(&mut codes.segments) {
                stored.words = vec![0; shape.rows() * segment.words()];
                let planes = usize::from(segment.planes);
                for row in stored.words.chunks_mut(segment.words().max(1)).filter(|_| planes > 0) {
                    (0..segment.channels)
                        .for_each(|i| set_code(row, i, planes, random() & ((1 << planes) - 1)));
                }
                let scalars = if planes > 0 { shape.rows() } else { 0 };
                stored.nu = (0..scalars).map(|_| f16::from_bits(random() as u16)).collect();
            }
            let back = unpack(&pack(&codes, side), shape, &layout, side);
            for (back, codes) in back.iter().zip(&codes.segments) {
                assert_eq!(back.words, codes.words);
                let bits = |nu: &[f16]| nu.iter().map(|nu| nu.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&back.nu), bits(&codes.nu));
            }
        }
    }
}
