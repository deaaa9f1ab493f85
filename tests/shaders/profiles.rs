//! Kinds of devices, and what the kernels ask of each and get from it: the second table of `docs/kernels.md`.

use std::collections::BTreeMap;
use std::fmt::Write;

use kvfold::gpu::Variant;

use super::table::Needs;

/// A kind of device.
struct Profile {
    name: &'static str,
    /// Who compiles the WGSL, to what. `languages.rs` holds the languages of naga to the two columns that follow.
    through: &'static str,
    guards: &'static str,
    products: &'static str,
    /// Smallest subgroups that such devices have, of those that variants are made for.
    subgroups: &'static [u32],
    /// Storage buffers of a stage, bytes of workgroup memory and invocations of a workgroup that each of them grants.
    grants: [u32; 3],
}

/// WebGPU's default limits.
const DEFAULT: [u32; 3] = [8, 16 << 10, 256];

/// A maker's device, of which what every adapter grants is said: its own limits are no lower.
const MADE: Profile = Profile {
    name: "",
    through: "naga: SPIR-V for Vulkan, HLSL for DirectX 12",
    guards: "in every loop",
    products: "one instruction from Vulkan 1.3 (or the extension) and shader model 6.4 on, four products before",
    subgroups: &[],
    grants: DEFAULT,
};

const PROFILES: [Profile; 6] = [
    Profile {
        name: "Apple7 (M1)",
        through: "naga: Metal's language",
        products: "four products; not chosen unless asked for",
        subgroups: &[32],
        grants: [31, 32 << 10, 1024],
        ..MADE
    },
    Profile { name: "NVIDIA", subgroups: &[32], ..MADE },
    Profile { name: "Intel", subgroups: &[8, 16, 32], ..MADE },
    Profile { name: "AMD", subgroups: &[32, 64], ..MADE },
    Profile {
        name: "browser minimum",
        through: "Tint in Chrome, naga in Firefox",
        guards: "in every loop from naga; Tint's own way",
        products: "the browser's; not chosen unless asked for",
        ..MADE
    },
    Profile { name: "WebGPU default", ..MADE },
];

impl Profile {
    /// Whether such a device can take a variant.
    fn takes(&self, variant: &Variant) -> bool {
        let label = variant.label();
        let size = label.rsplit_once("-subgroups_").map(|(_, size)| size.parse());
        size.is_none_or(|size| size.is_ok_and(|size| self.subgroups.contains(&size)))
    }

    fn row(&self, most: [u32; 3]) -> String {
        let sizes: Vec<_> = self.subgroups.iter().map(u32::to_string).collect();
        let sizes = if sizes.is_empty() { "none".to_owned() } else { sizes.join(", ") };
        let of = |i: usize| format!("{} of {}", most[i], self.grants[i]);
        let [storage, bytes, invocations] = [of(0), of(1), of(2)];
        let Self { name, through, guards, products, .. } = self;
        format!(
            "| {name} | {through} | {sizes} | {storage} | {bytes} | {invocations} | none | {guards} | {products} |"
        )
    }
}

/// The table, and a line for everything that it would say falsely.
pub(crate) fn of<'a>(variants: impl Iterator<Item = (&'a Variant, &'a Needs)>) -> (String, Vec<String>) {
    let mut kernels: BTreeMap<(&str, &str), [Needs; PROFILES.len()]> = BTreeMap::new();
    for (variant, needs) in variants {
        let row = kernels.entry(variant.file()).or_default();
        for (profile, most) in PROFILES.iter().zip(row) {
            if profile.takes(variant) {
                most.add(needs);
            }
        }
    }
    let mut found = Vec::new();
    let mut text = String::from(
        "| kind of device | compiled by | subgroups from | storage buffers | bytes of workgroup memory | invocations | \
         loose built-ins | guard | product of four bytes |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (i, profile) in PROFILES.iter().enumerate() {
        let mut most = [0; 3];
        for ((folder, name), row) in &kernels {
            let asked = row[i].asked();
            // The document says so, instead of six equal columns in the first table.
            if asked != row[0].asked() {
                found.push(format!(
                    "{folder}/{name} asks for {asked:?} of {}, {:?} elsewhere",
                    profile.name,
                    row[0].asked()
                ));
            }
            most = std::array::from_fn(|i| most[i].max(asked[i]));
        }
        if most.iter().zip(profile.grants).any(|(most, grant)| *most > grant) {
            found.push(format!("{} grants {:?}, kernels ask for {most:?}", profile.name, profile.grants));
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", profile.row(most));
    }
    (text, found)
}
