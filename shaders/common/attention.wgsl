// Sizes and options of one attention pass.

struct Attention {
    // Queries of a sequence and head, query heads, query heads that share a KV head, and query rows of this pass.
    queries: u32,
    query_heads: u32,
    group: u32,
    rows: u32,
    // Tokens that the store has room for, and how its first one is numbered within the sequence.
    tokens: u32,
    start: u32,
    // Splits of this store, tokens of one (whole tiles of a workgroup), splits of all stores, and those before this store's.
    splits: u32,
    split: u32,
    all_splits: u32,
    first_split: u32,
    causal: u32,
    // 0xffffffff where there is none.
    window: u32,
    // 0 where there is none.
    soft_cap: f32,
    scale: f32,
    kv_heads: u32,
    // The first query row of this pass, whose sequence is the first of the store.
    first_row: u32,
    // The first and one past the last of the store's tokens that count.
    live_first: u32,
    live_end: u32,
    // The position of the store's first token, where those of the others follow it.
    position: u32,
    consecutive: u32,
    // 1 where a pass adds to what earlier ones have left in its splits' partial results, which are zeros at first.
    adds: u32,
    // Queries of a sequence and head that stand behind those of this pass.
    behind: u32,
    reserved_b: u32,
    reserved_c: u32,
}
