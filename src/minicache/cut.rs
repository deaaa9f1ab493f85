//! The verdicts of retention rules, and the order in which they compare rows.

use bytemuck::{Pod, Zeroable};

/// The rule's verdict on one sequence: rows whose `(key(cosine), index)` is at most this pair are kept raw.
///
/// `key` orders f32 as unsigned integers, so that one comparison serves every rule, and the row index breaks ties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Cut {
    /// Largest key that is kept raw.
    pub key: u32,
    /// Largest row index, within the sequence, kept raw at exactly that key.
    pub index: u32,
}

impl Cut {
    /// Keeps nothing: no finite number has key 0.
    pub const NOTHING: Self = Self { key: 0, index: 0 };

    /// Keeps every cosine below `threshold`.
    #[must_use]
    pub fn below(threshold: f32) -> Self {
        Self { key: order_key(threshold) - 1, index: u32::MAX }
    }
}

/// A key that orders finite f32 as unsigned integers do; both zeros share one.
#[must_use]
pub fn order_key(number: f32) -> u32 {
    let bits = if number == 0.0 { 0 } else { number.to_bits() };
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

/// Where the rows of a call stand among those that a rule looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Token of the rule's rows that the call's first is.
    pub(crate) first: usize,
    /// Tokens that the rule looked at. Later ones break no tie.
    pub(crate) tokens: usize,
}

impl Frame {
    /// Index of a row among those of its sequence that the rule looked at.
    pub(crate) fn index(self, head: usize, token: usize) -> u32 {
        let token = self.first + token;
        if token < self.tokens { (head * self.tokens + token) as u32 } else { u32::MAX }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_numbers_do() {
        let sorted = [f32::MIN, -1.0, -0.5, -1e-40, 0.0, 1e-40, 0.25, 1.0, f32::MAX];
        assert!(sorted.map(order_key).is_sorted_by(|a, b| a < b));
        assert_eq!(order_key(-0.0), order_key(0.0));
        assert!(order_key(f32::MIN) > Cut::NOTHING.key);
    }
}
