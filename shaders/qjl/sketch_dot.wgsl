// <S q, s> for one key per invocation: the query's sketch passes through workgroup memory in chunks.

const SKETCH_WORDS: u32 = (SKETCH_DIM + 31u) / 32u;
const CHUNK_WORDS: u32 = min(SKETCH_WORDS, 64u);
const CHUNKS: u32 = (SKETCH_WORDS + CHUNK_WORDS - 1u) / CHUNK_WORDS;

var<workgroup> query: array<f32, 32u * CHUNK_WORDS>;

// Loads a chunk of a query's sketch; zeros past its end, so that unused bits count for nothing.
fn load_chunk(query_row: u32, chunk: u32, lane: u32) {
    for (var i = lane; i < 32u * CHUNK_WORDS; i += WORKGROUP) {
        let bit = 32u * CHUNK_WORDS * chunk + i;
        let number = sketches[query_row * (SKETCH_DIM + 1u) + min(bit, SKETCH_DIM - 1u)];
        query[i] = select(0.0, number, bit < SKETCH_DIM);
    }
}

// Adds a chunk's share of the dot product with a key.
fn chunk_dot(key_row: u32, chunk: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < CHUNK_WORDS; i++) {
        let word = chunk * CHUNK_WORDS + i;
        if (word < SKETCH_WORDS) {
            let bits = words[key_row * SKETCH_WORDS + word];
            for (var j = 0u; j < 32u; j++) {
                let number = query[32u * i + j];
                sum += select(-number, number, ((bits >> j) & 1u) == 1u);
            }
        }
    }
    return sum;
}
