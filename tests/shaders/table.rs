//! What kernels ask of a device, kernel by kernel: the table in `docs/kernels.md`, which this test holds to the truth.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::{env, fs};

use kvfold::gpu::Variant;
use naga::Module;

use super::{counts, rules};

/// What a variant asks for, or a kernel at the most.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    variants: usize,
    with_subgroups: usize,
    storage: usize,
    workgroup_bytes: u32,
    invocations: u32,
    loops: usize,
    collective: bool,
    byte_products: bool,
}

impl Needs {
    pub(crate) fn of(variant: &Variant, module: &Module) -> Self {
        Self {
            variants: 1,
            with_subgroups: usize::from(!variant.is_default()),
            storage: rules::storage_buffers(module),
            workgroup_bytes: rules::workgroup_bytes(module),
            invocations: rules::invocations(module),
            collective: rules::waits(module),
            loops: counts::loops_run(module),
            byte_products: counts::multiplies_bytes(module),
        }
    }

    /// Storage buffers, bytes of workgroup memory, invocations.
    pub(crate) fn asked(&self) -> [u32; 3] {
        [self.storage as u32, self.workgroup_bytes, self.invocations]
    }

    pub(crate) fn add(&mut self, more: &Self) {
        self.variants += more.variants;
        self.with_subgroups += more.with_subgroups;
        self.storage = self.storage.max(more.storage);
        self.workgroup_bytes = self.workgroup_bytes.max(more.workgroup_bytes);
        self.invocations = self.invocations.max(more.invocations);
        self.loops = self.loops.max(more.loops);
        self.collective |= more.collective;
        self.byte_products |= more.byte_products;
    }

    fn row(&self, (folder, name): (&str, &str)) -> String {
        let yes = |yes: bool| if yes { "yes" } else { "" };
        format!(
            "| `{folder}/{name}` | {} | {} | {} | {} | {} | {} | {} | {} |",
            self.variants,
            self.with_subgroups,
            self.storage,
            self.workgroup_bytes,
            self.invocations,
            self.loops,
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
        "| kernel | variants | of them with subgroups | storage buffers | bytes of workgroup memory | invocations | guarded loops | \
         barriers or collectives | products of bytes |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (file, needs) in &kernels {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", needs.row(*file));
    }
    text
}

/// Holds the document's tables to `tables`; writes them where `KVFOLD_UPDATE` is set.
pub(crate) fn hold(tables: &[&str]) {
    const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/kernels.md");
    let document = fs::read_to_string(PATH).expect("docs/kernels.md");
    let wanted = tables.iter().fold(document.clone(), |document, table| replaced(&document, table));
    if env::var_os("KVFOLD_UPDATE").is_some() {
        fs::write(PATH, wanted).expect("a writable folder");
    } else {
        assert!(
            document == wanted,
            "docs/kernels.md is not of these kernels: run this test with KVFOLD_UPDATE=1"
        );
    }
}

/// A document with `table` in the place of the one whose first two columns have the same names.
fn replaced(document: &str, table: &str) -> String {
    let start: String = table.split_inclusive('|').take(3).collect();
    let (before, rest) = document.split_at(document.find(&start).expect("a table of such columns"));
    let after = &rest[rest.find("\n\n").map_or(rest.len(), |end| end + 1)..];
    [before, table, after].concat()
}
