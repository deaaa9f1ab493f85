// Angles of RoPE pairs, from the rows that the host made. The kernel declares `turn_at(index)`, one of their numbers.

// Positions that share one coarse row of angles.
const ANGLE_TILE: u32 = 64u;

// Cosine and sine of a pair's angle at a position, by addition of a coarse and a fine row; no trigonometry in kernels. The last pair
// does not turn, and where there is no other there are no rows of positions.
fn angle(position: u32, pair: u32) -> vec2<f32> {
    if (pair == PAIRS - 1u) {
        return vec2<f32>(1.0, 0.0);
    }
    let coarse = turn_at((position / ANGLE_TILE) * PAIRS + pair);
    let fine = turn_at(params.fine_at + (position % ANGLE_TILE) * PAIRS + pair);
    return vec2<f32>(coarse.x * fine.x - coarse.y * fine.y, coarse.y * fine.x + coarse.x * fine.y);
}
