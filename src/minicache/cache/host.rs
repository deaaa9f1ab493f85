//! Rows on the host: what the CPU's cache keeps them in, and the form that is written to files.

use super::super::cut::Cut;
use super::super::folded::Folded;
use super::sequence::Backing;
use crate::cache::host::HostBlock;

/// Rows on the host.
#[derive(Debug)]
pub(crate) struct Host;

impl Backing for Host {
    type Block = HostBlock;
    type Fold = Folded;
    type Cut = Cut;
}
