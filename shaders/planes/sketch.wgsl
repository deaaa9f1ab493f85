// What `project` leaves of four query rows of one KV head side by side (head by head, each query's heads of it after the last
// one's), SKETCH fours of numbers:
//   QUERY_CHANNELS      2 R (q * sigma)[order] in f32, zeros behind each segment up to whole groups of 32
//   2                   what to subtract for each segment: (2^b - 1) times the sum of the rotated query
//   1                   1 where the row is finite, else 0, as is everything else then
//   QUERY_CHANNELS / 4  the first again in whole units, four signed bytes a word
//   GROUPS              the unit of each group of 32 channels
//   GROUPS              the sum of each group in its units
// and then, with a mean before RoPE,
//   2 PAIRS             A and B of every pair: the mean's score at position t is the sum of A cos + B sin
// or, with block means,
//   HEAD_DIM            the query itself
const GROUPS: u32 = FIRST_GROUPS + SECOND_GROUPS;
const QUERY_CHANNELS: u32 = 32u * GROUPS;
const MINUS_AT: u32 = QUERY_CHANNELS;
const FINITE_AT: u32 = QUERY_CHANNELS + 2u;
const BYTES_AT: u32 = QUERY_CHANNELS + 3u;
const UNITS_AT: u32 = BYTES_AT + QUERY_CHANNELS / 4u;
const SUMS_AT: u32 = UNITS_AT + GROUPS;
const MEAN_AT: u32 = SUMS_AT + GROUPS;
