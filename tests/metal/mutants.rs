//! Tests of the tests: a kernel with a fault must fail its comparison. The faults are those that a Vulkan driver may hide:
//! there lanes run in step, a store past the end is dropped, and nobody reads the Metal text.

use crate::compile::Build::{self, FastMath, Plain, Race};
use crate::custom::mutation::{Mutation, replaced};

/// A fault and the test that must fail, with part of what it says then; nothing where numbers or orders disagree.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) mutation: Mutation,
    pub(crate) build: Build,
    pub(crate) test: &'static str,
    pub(crate) says: &'static str,
}

/// What the race checker says first.
const RACE: &str = "race on word";

const fn without_barrier(kernel: &'static str, nth: usize) -> Mutation {
    Mutation { kernel, nth: Some(nth), from: "workgroupBarrier();", to: "" }
}

/// How a load tells what is finite, and how it must not.
const STORED: &str = "return (word & exponent) != exponent;\n}";
const NUMBER: &str = "return is_finite(element(word, element_index));\n}
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }";

/// The same of eight channels at once.
const WORDS: &str = "held_if(words, vec4<u32>(), true, words_are_finite(words));\n}";
const NUMBERS: &str = "held_if(words, vec4<u32>(), true, numbers_are_finite(words));\n}
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }
fn pair_is_finite(word: u32) -> bool { let two = unpack_pair(word, 0u); return both(is_finite(two.x), is_finite(two.y)); }
fn numbers_are_finite(words: vec4<u32>) -> bool {
    return both(both(pair_is_finite(words.x), pair_is_finite(words.y)), both(pair_is_finite(words.z), pair_is_finite(words.w)));
}";

/// Barriers are counted from the top of the whole text; the first six are those of the reductions, where a kernel has them.
#[rustfmt::skip]
pub(crate) const MUTANTS: &[Mutant] = &[
    // A barrier is missing.
    Mutant { name: "similarity_reads_a_sum_too_early", mutation: without_barrier("similarity", 0), build: Plain, test: "similarity_equals_its_twin", says: "" },
    Mutant { name: "similarity_overwrites_a_sum_too_early", mutation: without_barrier("similarity", 1), build: Plain, test: "similarity_equals_its_twin", says: "" },
    Mutant { name: "retain_stores_bits_too_early", mutation: without_barrier("retain", 1), build: Plain, test: "merge_equals_its_twin_in_every_mode_and_type", says: "" },
    Mutant { name: "arrange_adds_too_early", mutation: without_barrier("arrange", 1), build: Plain, test: "merge_equals_its_twin_in_every_mode_and_type", says: "" },
    Mutant { name: "threshold_takes_a_digit_too_early", mutation: without_barrier("threshold", 7), build: Plain, test: "merge_equals_its_twin_under_every_rule", says: "" },
    Mutant { name: "quantize_sets_bits_too_early", mutation: without_barrier("quantize", 8), build: Plain, test: "quantize_equals_its_twin", says: "" },
    Mutant { name: "quantize_values_scales_too_early", mutation: without_barrier("quantize_values", 6), build: Plain, test: "quantize_values_equals_its_twin", says: "" },
    Mutant { name: "project_reads_a_block_too_early", mutation: without_barrier("project", 6), build: Plain, test: "scores_equal_the_reference_on_the_stored_codes", says: "" },
    Mutant { name: "scores_reads_a_query_too_early", mutation: replaced("scores", "    workgroupBarrier();\n    let token = tile", "    let token = tile"), build: Plain, test: "scores_equal_the_reference_on_the_stored_codes", says: "" },
    Mutant { name: "attend_weighs_too_early", mutation: replaced("attend", "    workgroupBarrier();\n    let tile_values", "    let tile_values"), build: Plain, test: "attend_equals_the_reference_on_the_stored_codes", says: "" },
    Mutant { name: "calibrate_reads_rows_too_early", mutation: without_barrier("calibrate", 6), build: Plain, test: "tables_and_energies_equal_the_hosts", says: "" },
    Mutant { name: "calibrate_balances_too_early", mutation: without_barrier("calibrate", 8), build: Plain, test: "tables_and_energies_equal_the_hosts", says: "" },
    // The same for the race checker, which needs no order that shows it.
    Mutant { name: "similarity_races_for_a_sum", mutation: without_barrier("similarity", 0), build: Race, test: "similarity_equals_its_twin", says: RACE },
    // An invocation leaves before a barrier.
    Mutant { name: "similarity_returns_past_the_last_row", mutation: replaced("similarity", "    let readable = ", "    if (row >= params.rows) { return; }\n    let readable = "), build: Plain, test: "similarity_equals_its_twin", says: "not all invocations reach" },
    Mutant { name: "scores_returns_past_the_last_token", mutation: replaced("scores", "    load_query(sketch_at(rows), lane);", "    if (tile + 4u * lane >= params.attention.tokens) { return; }\n    load_query(sketch_at(rows), lane);"), build: Plain, test: "scores_equal_the_reference_on_the_stored_codes", says: "not all invocations reach" },
    // A store past the end, which Metal's text moves to the last element.
    Mutant { name: "retain_stores_past_the_last_page", mutation: replaced("retain", "page < params.pages && id.local_index % PAGE", "id.local_index % PAGE"), build: Plain, test: "one_buffer_may_hold_both_layers", says: "" },
    Mutant { name: "restore_stores_past_the_last_word", mutation: replaced("restore", "word >= params.view.words || at >= arrayLength(&output)", "false"), build: Plain, test: "merge_takes_every_head_dim", says: "" },
    Mutant { name: "combine_stores_past_the_last_word", mutation: replaced("combine", "let at = output_word(min(word, params.view.words - 1u));\n    if (word >= params.view.words || at >= arrayLength(&output))", "let at = output_word(word);\n    if (false)"), build: Plain, test: "attend_equals_the_reference_on_the_stored_codes", says: "" },
    // What is finite is asked of a number, which fast math takes for finite.
    Mutant { name: "quantize_values_compares_a_number_with_itself", mutation: replaced("quantize_values", "let finite = element_is_finite(word, at);", "let x = element(word, at);\n        let finite = x == x;"), build: FastMath, test: "quantize_values_equals_its_twin", says: "" },
    Mutant { name: "similarity_looks_for_an_infinite_exponent", mutation: replaced("similarity", STORED, NUMBER), build: FastMath, test: "similarity_equals_its_twin", says: "" },
    Mutant { name: "exact_looks_for_an_infinite_exponent", mutation: replaced("exact", WORDS, NUMBERS), build: FastMath, test: "exact_attention_masks_rows_that_are_not_finite", says: "" },
    Mutant { name: "exact_looks_for_an_infinite_logit", mutation: replaced("exact", "0x7fffffffu) < 0x7f000000u", "0x7f800000u) != 0x7f800000u"), build: FastMath, test: "exact_attention_masks_scores_beyond_f32", says: "" },
    // A name that Metal's compiler does not know: naga zeroes workgroup memory by it.
    Mutant { name: "the_zeroing_lane_has_no_name", mutation: Mutation { kernel: "similarity", nth: None, from: "local_index", to: "local" }, build: Plain, test: "similarity_equals_its_twin", says: "undeclared identifier 'local'" },
];
