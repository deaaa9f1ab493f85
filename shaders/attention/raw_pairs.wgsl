// Raw keys two channels at a time; the kernel binds `keys`.

fn key_pair(start: u32, channel: u32) -> Pair {
    let first = start + channel;
    if (KEYS_ALIGNED) {
        return packed_pair(keys[word_index(first)], keys[word_index(first + 1u)]);
    }
    let at = vec2<u32>(first, start + min(channel + 1u, HEAD_DIM - 1u));
    return loose_pair(vec2<u32>(keys[word_index(at.x)], keys[word_index(at.y)]), at);
}
