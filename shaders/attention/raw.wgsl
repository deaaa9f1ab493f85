// Raw keys: the kernel binds `keys` and has `attention`, and `key`, the offset of the first element, then batch, head and token
// strides, in its params.

fn row_start(view: vec4<u32>, kv_head: u32, token: u32) -> u32 {
    let kv_heads = params.attention.kv_heads;
    return view.x + (kv_head / kv_heads) * view.y + (kv_head % kv_heads) * view.z + token * view.w;
}

fn key_pair(start: u32, channel: u32) -> Pair {
    let first = start + channel;
    if (KEYS_ALIGNED) {
        return packed_pair(keys[word_index(first)], keys[word_index(first + 1u)]);
    }
    let at = vec2<u32>(first, start + min(channel + 1u, HEAD_DIM - 1u));
    return loose_pair(vec2<u32>(keys[word_index(at.x)], keys[word_index(at.y)]), at);
}
