// What the tables say of one coded position of a KV head: the channel that stands there, and its mean and balance. The mean at
// position t is mean * cos + turned * sin of the channel's RoPE pair at t, whatever the layout; a channel without RoPE belongs
// to the last pair, whose angle is always 0.

struct Channel {
    channel: u32,
    pair: u32,
    mean: f32,
    turned: f32,
    sigma: f32,
}

// Words of a block mean: f16 numbers, two a word.
const MEAN_WORDS: u32 = (HEAD_DIM + 1u) / 2u;

// What is subtracted from keys before they are coded.
const UNCENTRED: u32 = 0u;
const BLOCK_MEAN: u32 = 1u;
const PRE_ROPE: u32 = 2u;
