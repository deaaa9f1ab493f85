//! What is written once for every backend.

/// A cache's own methods as those of [`Sequences`].
macro_rules! sequences {
    ($($cache:ty),*) => { $(
        impl crate::fold::ledger::Sequences for $cache {
            fn add_sequence(&mut self) -> usize {
                <$cache>::add_sequence(self)
            }

            fn remove_sequence(&mut self, sequence: usize) -> crate::Result<()> {
                <$cache>::remove_sequence(self, sequence)
            }

            fn clear(&mut self, sequence: usize) -> crate::Result<()> {
                <$cache>::clear(self, sequence)
            }

            fn check_trim(&self, sequence: usize, tokens: usize) -> crate::Result<()> {
                self.ledger.check_trim(sequence, tokens)
            }

            fn trim(&mut self, sequence: usize, tokens: usize) -> crate::Result<()> {
                <$cache>::trim(self, sequence, tokens)
            }

            fn gather(&mut self, sources: &[u32]) -> crate::Result<()> {
                <$cache>::gather(self, sources)
            }

            fn fork(&mut self, sequence: usize) -> crate::Result<usize> {
                <$cache>::fork(self, sequence)
            }

            fn sequences(&self) -> usize {
                <$cache>::sequences(self)
            }

            fn len(&self, sequence: usize) -> crate::Result<usize> {
                <$cache>::len(self, sequence)
            }

            fn tokens(&self, layer: usize) -> [usize; 2] {
                self.ledger.layer_tokens(layer)
            }

            fn bytes(&self) -> u64 {
                <$cache>::bytes(self)
            }

            fn payload_bytes(&self) -> u64 {
                <$cache>::payload_bytes(self)
            }

            fn raw_bytes(&self) -> u64 {
                <$cache>::raw_bytes(self)
            }
        }
    )* };
}
pub(crate) use sequences;

/// Passes every method on to whichever cache a part is.
macro_rules! either {
    ($part:expr, $held:ident => $call:expr) => {
        match $part {
            Part::Coded($held) => $call,
            Part::Minicache($held) => $call,
        }
    };
}
pub(crate) use either;

/// What a cache does whatever it runs on.
macro_rules! folded_methods {
    ($cache:ty) => {
        impl $cache {
            /// The model.
            #[must_use]
            pub const fn model(&self) -> &crate::fold::Model {
                &self.ledger.model
            }

            /// The policy.
            #[must_use]
            pub const fn policy(&self) -> &crate::fold::Policy {
                &self.ledger.policy
            }

            /// Number of layers.
            #[must_use]
            pub fn layers(&self) -> usize {
                self.ledger.model.layers.len()
            }

            /// Number of sequences.
            #[must_use]
            pub fn sequences(&self) -> usize {
                self.ledger.sequences()
            }

            /// Tokens of a sequence that every layer has taken, those that have left included.
            ///
            /// # Errors
            /// [`Error::Range`](crate::Error::Range) when there is no such sequence.
            pub fn len(&self, sequence: usize) -> crate::Result<usize> {
                self.ledger.len(sequence)
            }

            /// Adds an empty sequence, the last, and gives its index: its place in the batch of every step.
            pub fn add_sequence(&mut self) -> usize {
                self.ledger.add_sequence()
            }

            /// Removes a sequence; those after it move up.
            ///
            /// # Errors
            /// As [`len`](Self::len).
            pub fn remove_sequence(&mut self, sequence: usize) -> crate::Result<()> {
                self.ledger.remove_sequence(sequence)
            }

            /// Empties a sequence; what was learnt of it is forgotten.
            ///
            /// # Errors
            /// As [`len`](Self::len).
            pub fn clear(&mut self, sequence: usize) -> crate::Result<()> {
                self.ledger.clear(sequence)
            }

            /// Gives up all but the first `tokens` tokens of a sequence. What is folded stays folded.
            ///
            /// # Errors
            /// [`Error::Range`](crate::Error::Range) when there are fewer, or tokens before have left some layer; nothing is
            /// changed then.
            pub fn trim(&mut self, sequence: usize, tokens: usize) -> crate::Result<()> {
                self.ledger.trim(sequence, tokens)
            }

            /// Makes the sequences anew as copies of these, in this order: beams. Copies share rows until one writes.
            ///
            /// # Errors
            /// As [`len`](Self::len).
            pub fn gather(&mut self, sources: &[u32]) -> crate::Result<()> {
                self.ledger.gather(sources)
            }

            /// Copies a sequence to a new one, the last, and gives its index. Copies share rows until one writes.
            ///
            /// # Errors
            /// As [`len`](Self::len).
            pub fn fork(&mut self, sequence: usize) -> crate::Result<usize> {
                self.ledger.fork(sequence)
            }

            /// Bytes held: stores, tables, rotations, raw rows and the room beside them.
            #[must_use]
            pub fn bytes(&self) -> u64 {
                self.ledger.bytes()
            }

            /// Bytes that the rows need, without the room beside them.
            #[must_use]
            pub fn payload_bytes(&self) -> u64 {
                self.ledger.payload_bytes()
            }

            /// Bytes that the rows held had when they came.
            #[must_use]
            pub fn raw_bytes(&self) -> u64 {
                self.ledger.raw_bytes()
            }

            /// What the cache holds, layer by layer.
            #[must_use]
            pub fn report(&self) -> crate::fold::FoldReport {
                self.ledger.report()
            }
        }
    };
}
pub(crate) use folded_methods;
