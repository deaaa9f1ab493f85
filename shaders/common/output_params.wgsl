// A host's tensor that is written.

struct Output {
    words: u32,
    rows: u32,
    tokens: u32,
    heads: u32,
    // Elements from one row to the next in the order in which words are counted, and whether the tensor has no gaps.
    pitch: u32,
    contiguous: u32,
    // Offset of the first element, then batch, head and token strides.
    place: vec4<u32>,
}
