//! What can be asked for.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use kvfold::minicache::{DirectionPlanes, MergeOptions, Mode, Retention};
use kvfold::qjl::cache::NamedCoding;
use kvfold::qjl::{KeyScale, ProjectionKind};
use kvfold::report::{PlanesRequest, ReportOptions};

use crate::fold::{FoldArguments, UnfoldArguments};

/// Smaller key/value caches: what MiniCache and QJL save and cost on a model's own keys and values.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the adapters that kernels can run on
    Adapters(AdaptersArguments),
    /// Run every kernel on an adapter against its twin on the CPU
    Doctor(DoctorArguments),
    /// Measure a capture
    Report(ReportArguments),
    /// Fold a capture into a smaller file
    Fold(FoldArguments),
    /// Restore a capture from a folded file
    Unfold(UnfoldArguments),
}

#[derive(Debug, Args)]
pub(crate) struct AdaptersArguments {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// Part of the adapter's name, in any case; without it, the most capable adapter
    #[arg(long, value_name = "NAME")]
    pub(crate) adapter: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// A capture in safetensors (docs/capture-format.md); without it, the sample that kvfold carries
    pub(crate) file: Option<PathBuf>,
    /// Print one JSON object (docs/report.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// Also say how similar layers become under the best rotation, fitted on the first half of the tokens
    #[arg(long)]
    pub(crate) align: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArguments,
    #[command(flatten)]
    minicache: MiniCacheArguments,
    #[command(flatten)]
    qjl: QjlArguments,
    #[command(flatten)]
    planes: PlanesArguments,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Where to compute")]
pub(crate) struct EngineArguments {
    /// auto takes a hardware GPU where there is one and it does the work, else the CPU
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub(crate) backend: Backend,
    /// Part of the adapter's name, in any case
    #[arg(long, value_name = "NAME")]
    pub(crate) adapter: Option<String>,
    /// Keep subgroup operations out of shaders
    #[arg(long)]
    pub(crate) no_subgroups: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    Auto,
    Cpu,
    Metal,
    Vulkan,
    Dx12,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "MiniCache")]
pub(crate) struct MiniCacheArguments {
    /// Short for --retention cosine:X
    #[arg(long, value_name = "X", conflicts_with = "retention", allow_negative_numbers = true)]
    threshold: Option<f32>,
    /// Rows kept raw: cosine:X below X, range:X in the lowest X of the range, fraction:X the least similar X, or never
    #[arg(long, value_name = "RULE", value_parser = retention, default_value = "cosine:0.9")]
    retention: Retention,
    /// How a pair is stored: on one direction, on the lower layer, or as the original does
    #[arg(long, value_enum, default_value_t = ModeName::Shared)]
    mode: ModeName,
    /// Where on the arc from the lower (0) to the upper (1) direction the shared one lies
    #[arg(long, value_name = "T", default_value_t = MergeOptions::default().slerp_t, allow_negative_numbers = true)]
    slerp_t: f32,
    /// Bits of a channel in which shared directions are kept, 1 to 5, after a rotation; f16 where not given
    #[arg(long, value_name = "N")]
    direction_bits: Option<u8>,
    /// Tokens at the start of each sequence that stay raw, under sign planes too
    #[arg(long, value_name = "N", default_value_t = MergeOptions::default().sinks)]
    sinks: u32,
    /// Where in the depth of the model the totals begin to pair layers
    #[arg(long, value_name = "F", default_value_t = ReportOptions::default().start_frac, allow_negative_numbers = true)]
    start_frac: f64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "QJL")]
struct QjlArguments {
    /// How the rows of the projection are drawn
    #[arg(long, value_enum, default_value_t = ProjectionName::Gaussian)]
    projection: ProjectionName,
    /// Sign bits of a key; its head dimension where not given
    #[arg(long, value_name = "M")]
    sketch_dim: Option<usize>,
    /// The scalar stored with a key's signs
    #[arg(long, value_enum, default_value_t = ScaleName::Norm)]
    key_scale: ScaleName,
    /// Seed of the projection
    #[arg(long, value_name = "N", default_value_t = ReportOptions::default().seed)]
    seed: u64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Presets")]
struct PlanesArguments {
    /// The preset measured beside QJL by the options above, int8, int4 and KIVI: near-lossless, balanced, compact, extreme,
    /// qjl-orth, qjl, all, or none, which is quicker
    #[arg(long, value_name = "NAME", default_value = "balanced")]
    preset: Presets,
    /// Last tokens that stay raw, 64 where not given; --sinks says how many first ones do
    #[arg(long, value_name = "N")]
    recent: Option<u32>,
    /// Another capture of the same model, from which tables are made instead of from this one's first tokens
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
}

/// One preset, all or none.
#[derive(Clone, Debug)]
struct Presets(Vec<NamedCoding>);

impl FromStr for Presets {
    type Err = kvfold::Error;

    fn from_str(name: &str) -> kvfold::Result<Self> {
        Ok(Self(match name {
            "all" => PlanesRequest::default().presets,
            "none" => Vec::new(),
            name => vec![name.parse()?],
        }))
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    Shared,
    Anchor,
    Compat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProjectionName {
    Gaussian,
    Orthogonal,
    Hadamard,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScaleName {
    Norm,
    Mse,
    Unbiased,
}

/// `cosine:0.9`, `range:0.05`, `fraction:0.1` or `never`.
fn retention(text: &str) -> Result<Retention, String> {
    let wanted = || "wanted cosine:X, range:X, fraction:X or never".to_owned();
    if text == "never" {
        return Ok(Retention::Never);
    }
    let (rule, number) = text.split_once(':').ok_or_else(wanted)?;
    let number = f32::from_str(number).map_err(|_| wanted())?;
    match rule {
        "cosine" => Ok(Retention::Cosine(number)),
        "range" => Ok(Retention::Range(number)),
        "fraction" => Ok(Retention::Fraction(number)),
        _ => Err(wanted()),
    }
}

/// Ends the program as clap does for misuse.
pub(crate) fn refuse(kind: ErrorKind, message: impl Display) -> ! {
    Arguments::command().error(kind, message).exit()
}

impl MiniCacheArguments {
    /// How pairs are merged, and where in the depth of the model pairing begins.
    pub(crate) fn options(&self) -> (MergeOptions, f64) {
        let mode = match self.mode {
            ModeName::Shared => Mode::Shared,
            ModeName::Anchor => Mode::Anchor,
            ModeName::Compat => Mode::Compat,
        };
        let mut merge = MergeOptions::default()
            .mode(mode)
            .retention(self.threshold.map_or(self.retention, Retention::Cosine))
            .slerp_t(self.slerp_t)
            .sinks(self.sinks);
        merge.planes = self.direction_bits.map(|bits| DirectionPlanes::default().bits(bits));
        (merge, self.start_frac)
    }
}

impl ReportArguments {
    /// The capture that tables are made from, if it is another.
    pub(crate) fn calibrate(&self) -> Option<&Path> {
        self.planes.calibrate.as_deref()
    }

    /// The options asked for. Numbers out of range are misuse: the program ends here, with exit code 2.
    pub(crate) fn options(&self) -> ReportOptions {
        let q = &self.qjl;
        let projection = match q.projection {
            ProjectionName::Gaussian => ProjectionKind::Gaussian,
            ProjectionName::Orthogonal => ProjectionKind::Orthogonal,
            ProjectionName::Hadamard => ProjectionKind::Hadamard,
        };
        let key_scale = match q.key_scale {
            ScaleName::Norm => KeyScale::Norm,
            ScaleName::Mse => KeyScale::Mse,
            ScaleName::Unbiased => KeyScale::Unbiased,
        };
        let (merge, start_frac) = self.minicache.options();
        let mut options = ReportOptions::default()
            .merge(merge)
            .start_frac(start_frac)
            .projection(projection)
            .key_scale(key_scale)
            .seed(q.seed);
        options.sketch_dim = q.sketch_dim;
        let Presets(presets) = &self.planes.preset;
        if presets.is_empty() {
            let unread =
                [("--recent", self.planes.recent.is_some()), ("--calibrate", self.calibrate().is_some())];
            if let Some((name, _)) = unread.iter().find(|(_, given)| *given) {
                refuse(ErrorKind::ArgumentConflict, format!("{name} wants a --preset other than none"));
            }
        } else {
            let planes = PlanesRequest::default().sinks(options.merge.sinks).presets(presets.clone());
            let recent = self.planes.recent.unwrap_or(planes.recent);
            options.planes = Some(planes.recent(recent));
        }
        if let Err(error) = options.validate() {
            refuse(ErrorKind::ValueValidation, error);
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn rules_are_read_and_defaults_are_the_library_s() {
        assert_eq!(retention("never"), Ok(Retention::Never));
        assert_eq!(retention("range:0.05"), Ok(Retention::Range(0.05)));
        assert_eq!(retention("fraction:0.1"), Ok(Retention::Fraction(0.1)));
        for refused in ["", "cosine", "cosine:", "cosine:x", "sines:0.1"] {
            assert!(retention(refused).is_err(), "{refused}");
        }
        let options = |more: &[&str]| {
            let parsed = Arguments::try_parse_from(["kvfold", "report"].iter().chain(more)).unwrap();
            let Command::Report(report) = parsed.command else { panic!("{parsed:?}") };
            report.options()
        };
        let (all, balanced) = (PlanesRequest::default(), vec![NamedCoding::default()]);
        assert_eq!(options(&["--preset", "none"]), ReportOptions::default());
        assert_eq!(options(&["--preset", "all"]), ReportOptions::default().planes(all.clone()));
        assert_eq!(options(&[]), ReportOptions::default().planes(all.presets(balanced)));
    }
}
