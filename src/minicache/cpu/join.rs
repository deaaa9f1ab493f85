//! Joining two folded pairs along their tokens.

use super::super::folded::Folded;
use super::super::join::{Joined, Outline};
use crate::error::Result;

/// One folded pair that holds the tokens of `first` and then those of `second`.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when the two differ in anything but their tokens, or `first` does not end with a whole
/// page of 32; [`Error::Limit`](crate::Error::Limit) when both together exceed 32-bit indices.
pub fn join(first: &Folded, second: &Folded) -> Result<Folded> {
    let outline = |layout, totals, pages| Outline { layout, totals, pages };
    let Joined { layout, totals, pages } = Joined::of(
        outline(&first.layout, &first.totals, &first.pages),
        outline(&second.layout, &second.totals, &second.pages),
    )?;
    Ok(Folded {
        layout,
        totals,
        pages,
        slots: [first.slots.as_slice(), &second.slots].concat(),
        magnitudes: [first.magnitudes.as_slice(), &second.magnitudes].concat(),
        side: [first.side.as_slice(), &second.side].concat(),
    })
}
