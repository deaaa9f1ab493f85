//! Faults put into kernels, which a test has to notice.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvfold::Gpu;

use crate::suite;

/// A fault: in one kernel's WGSL, which occurrence of a text becomes what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutation {
    pub(crate) kernel: &'static str,
    /// Counted from 0; none where every occurrence changes.
    pub(crate) nth: Option<usize>,
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
}

/// The first occurrence of a text becomes another.
pub(crate) const fn replaced(kernel: &'static str, from: &'static str, to: &'static str) -> Mutation {
    Mutation { kernel, nth: Some(0), from, to }
}

impl Mutation {
    /// The source of the entry point `kernel` with the fault.
    pub(crate) fn apply(&self, kernel: &str, source: &str) -> String {
        if kernel != self.kernel {
            return source.to_owned();
        }
        let found: Vec<usize> = source.match_indices(self.from).map(|(at, _)| at).collect();
        assert!(!found.is_empty(), "{kernel} has no {}", self.from);
        match self.nth {
            None => source.replace(self.from, self.to),
            Some(nth) => {
                let (before, after) = source.split_at(found[nth]);
                format!("{before}{}{}", self.to, &after[self.from.len()..])
            }
        }
    }

    /// Fails unless the named test, on a device with the fault, fails and says so: nothing in particular where numbers
    /// disagree.
    pub(crate) fn is_noticed(&self, test: &str, gpu: &Gpu, says: &str) -> Result<(), String> {
        let run = suite::named(&[test])[0].1;
        let outcome = catch_unwind(AssertUnwindSafe(|| run(gpu)));
        let said = match outcome {
            Ok(Ok(())) => return Err(format!("{test} did not notice {self:?}")),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => match panic.downcast::<String>() {
                Ok(message) => *message,
                Err(_) => String::new(),
            },
        };
        // A text that does not even compile says nothing about a comparison.
        let compared = !says.is_empty() || !said.contains("error:");
        if compared && said.contains(says) {
            Ok(())
        } else {
            Err(format!("another failure than expected: {said}"))
        }
    }
}
