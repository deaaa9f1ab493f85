// Where raw rows stand: the kernel has `attention` in its params, and of each tensor the offset of the first element, then batch, head
// and token strides.

fn row_start(view: vec4<u32>, kv_head: u32, token: u32) -> u32 {
    let kv_heads = params.attention.kv_heads;
    return view.x + (kv_head / kv_heads) * view.y + (kv_head % kv_heads) * view.z + token * view.w;
}
