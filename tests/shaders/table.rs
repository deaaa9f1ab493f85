//! What kernels ask of a device, kernel by kernel: the table in `docs/kernels.md`, which this test holds to the truth.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::{env, fs};

use kvfold::gpu::Variant;
use naga::{Expression, MathFunction, Module};

use super::rules;

/// What a variant asks for, or a kernel at the most.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    variants: usize,
    with_subgroups: usize,
    storage: usize,
    workgroup_bytes: u32,
    invocations: u32,
    collective: bool,
    byte_products: bool,
}

impl Needs {
    pub(crate) fn of(variant: &Variant, module: &Module) -> Self {
        let product = |expression: &Expression| {
            use MathFunction::{Dot4I8Packed, Dot4U8Packed};
            matches!(expression, Expression::Math { fun: Dot4I8Packed | Dot4U8Packed, .. })
        };
        Self {
            variants: 1,
            with_subgroups: usize::from(!variant.is_default()),
            storage: rules::storage_buffers(module),
            workgroup_bytes: rules::workgroup_bytes(module),
            invocations: rules::invocations(module),
            collective: rules::waits(module),
            byte_products: rules::functions(module)
                .any(|function| function.expressions.iter().any(|(_, expression)| product(expression))),
        }
    }

    fn add(&mut self, more: &Self) {
        self.variants += more.variants;
        self.with_subgroups += more.with_subgroups;
        self.storage = self.storage.max(more.storage);
        self.workgroup_bytes = self.workgroup_bytes.max(more.workgroup_bytes);
        self.invocations = self.invocations.max(more.invocations);
        self.collective |= more.collective;
        self.byte_products |= more.byte_products;
    }

    fn row(&self, (folder, name): (&str, &str)) -> String {
        let yes = |yes: bool| if yes { "yes" } else { "" };
        format!(
            "| `{folder}/{name}` | {} | {} | {} | {} | {} | {} | {} |",
            self.variants,
            self.with_subgroups,
            self.storage,
            self.workgroup_bytes,
            self.invocations,
            yes(self.collective),
            yes(self.byte_products)
        )
    }
}

/// The table of all kernels.
pub(crate) fn of<'a>(variants: impl Iterator<Item = ((&'a str, &'a str), &'a Needs)>) -> String {
    let mut kernels: BTreeMap<(&str, &str), Needs> = BTreeMap::new();
    for (file, needs) in variants {
        kernels.entry(file).or_default().add(needs);
    }
    let mut text = String::from(
        "| kernel | variants | of them with subgroups | storage buffers | bytes of workgroup memory | invocations | barriers or collectives | \
         products of bytes |\n|---|---|---|---|---|---|---|---|\n",
    );
    for (file, needs) in &kernels {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", needs.row(*file));
    }
    text
}

/// Holds the document's table to `table`; writes it where `KVFOLD_UPDATE` is set.
pub(crate) fn hold(table: &str) {
    const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/kernels.md");
    const START: &str = "| kernel | variants |";
    let document = fs::read_to_string(PATH).expect("docs/kernels.md");
    let (before, rest) = document.split_at(document.find(START).expect("a table of kernels"));
    let after = &rest[rest.find("\n\n").map_or(rest.len(), |end| end + 1)..];
    let wanted = [before, table, after].concat();
    if env::var_os("KVFOLD_UPDATE").is_some() {
        fs::write(PATH, wanted).expect("a writable folder");
    } else {
        assert!(
            document == wanted,
            "docs/kernels.md is not of these kernels: run this test with KVFOLD_UPDATE=1"
        );
    }
}
