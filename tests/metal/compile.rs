//! Metal's text to programs, by clang++ against the stand-in for Metal's library.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

use crate::translate::Metal;

/// How a program is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Build {
    /// IEEE arithmetic, as the tolerances assume.
    Plain,
    /// Reassociation, no NaN or infinity, no subnormals: what Metal's default fast math may do.
    FastMath,
    /// Ends at the first race between two barriers.
    Race,
    /// Ends at the first access out of bounds or undefined operation.
    Sanitized,
}

impl Build {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &["-ffp-contract=off"],
            Self::FastMath => &["-ffast-math"],
            Self::Race => &["-ffp-contract=off", "-DRACE"],
            // Metal's text declares arrays of unknown length as arrays of one.
            Self::Sanitized => &[
                "-ffp-contract=off",
                "-fsanitize=address,undefined",
                "-fno-sanitize=bounds",
                "-fno-sanitize-recover=all",
            ],
        }
    }

    /// Flags of the kernel alone.
    fn kernel_flags(self) -> &'static [&'static str] {
        // The calls that this puts into the kernel end in race.cpp.
        if self == Self::Race { &["-fsanitize=thread", "-fno-sanitize-link-runtime"] } else { &[] }
    }
}

/// `f32` literals have no suffix in the text and are not to be doubles; every f16 operation rounds; a buffer is read as more
/// than one type.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-fdeclspec",
    "-fno-strict-aliasing",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-U_FORTIFY_SOURCE",
    "-w",
];

const STAND_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/metal/stand_in");

/// Where texts, programs and objects lie.
pub(crate) static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder");
    let folder = target.join("metal");
    fs::create_dir_all(folder.join("programs")).expect("a writable target folder");
    folder
});

/// The first of `KVFOLD_CLANG` and Debian's versions that can compile the stand-in, or why none can.
pub(crate) static CLANG: LazyLock<Result<String, String>> = LazyLock::new(|| {
    let named = std::env::var("KVFOLD_CLANG").ok();
    let newest = (19..30).rev().map(|version| format!("clang++-{version}"));
    let all = named.into_iter().chain(newest).chain(["clang++".to_owned()]);
    let works = |clang: &String| {
        let source = Path::new(STAND_IN).join("probe.cpp");
        let arguments = FLAGS.iter().chain(&["-fsyntax-only", "-I", STAND_IN]);
        let probe = Command::new(clang).args(arguments).arg(source).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    };
    all.into_iter()
        .find(works)
        .ok_or_else(|| "no clang++ of version 19 or later (apt-get install clang-22)".to_owned())
});

/// Everything that is compiled in beside the text.
static SOURCES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let read = |name| fs::read(Path::new(STAND_IN).join(name)).expect("the stand-in's source");
    ["metal_stdlib", "runtime.h", "runtime.cpp", "race.cpp"].map(read).concat()
});

/// A key that changes with whatever goes into a program.
fn key(parts: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    (&*SOURCES, CLANG.as_ref().ok(), FLAGS, parts).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn clang(build: Build, arguments: &[&Path], extra: &[&str], output: &Path) -> Result<(), String> {
    let compiler = CLANG.as_ref().map_err(Clone::clone)?;
    // Written under another name first, so that two that meet here do not see half a file.
    let partial = output.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    let result = Command::new(compiler)
        .args(FLAGS)
        .args(build.flags())
        .args(extra)
        .args(["-I", STAND_IN, "-o"])
        .arg(&partial)
        .args(arguments)
        .output()
        .map_err(|error| error.to_string())?;
    if !result.status.success() {
        return Err(String::from_utf8_lossy(&result.stderr).into_owned());
    }
    fs::rename(partial, output).map_err(|error| error.to_string())
}

/// The runtime, compiled once for each build.
fn runtime(build: Build) -> Result<Vec<PathBuf>, String> {
    let names: &[&str] = if build == Build::Race { &["runtime", "race"] } else { &["runtime"] };
    let compile = |name: &&str| {
        let object = FOLDER.join(format!("programs/{name}-{}.o", key(&build)));
        if !object.exists() {
            let source = Path::new(STAND_IN).join(format!("{name}.cpp"));
            clang(build, &[&source], &["-c"], &object)?;
        }
        Ok(object)
    };
    names.iter().map(compile).collect()
}

/// The program of a kernel, from the cache where it is there already.
pub(crate) fn program(metal: &Metal, build: Build) -> Result<PathBuf, String> {
    let source = source(metal)?;
    let program = FOLDER.join(format!("programs/{}-{}", metal.entry, key(&(build, &source))));
    if program.exists() {
        return Ok(program);
    }
    let kernel = program.with_extension("cpp");
    fs::write(&kernel, source).map_err(|error| error.to_string())?;
    let runtime = runtime(build)?;
    let inputs: Vec<&Path> = [&kernel].into_iter().chain(&runtime).map(PathBuf::as_path).collect();
    clang(build, &inputs, build.kernel_flags(), &program)?;
    Ok(program)
}

/// Whether clang accepts a text.
pub(crate) fn check(metal: &Metal) -> Result<(), String> {
    use std::io::Write;
    let compiler = CLANG.as_ref().map_err(Clone::clone)?;
    let mut child = Command::new(compiler)
        .args(FLAGS)
        .args(["-I", STAND_IN, "-fsyntax-only", "-x", "c++", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let source = source(metal)?;
    let mut stdin = child.stdin.take().ok_or("no pipe")?;
    stdin.write_all(source.as_bytes()).map_err(|error| error.to_string())?;
    drop(stdin);
    let Output { status, stderr, .. } = child.wait_with_output().map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&stderr).into_owned()) }
}

/// One argument of the kernel's function, `type name [[attribute]]`.
struct Argument<'a> {
    ty: &'a str,
    attribute: Option<&'a str>,
}

/// naga writes one argument a line.
fn arguments<'a>(metal: &'a Metal) -> Result<Vec<Argument<'a>>, String> {
    let head = format!("kernel void {}(", metal.entry);
    let mut lines = metal.text.lines().skip_while(|line| !line.ends_with(&head)).skip(1);
    let mut arguments = Vec::new();
    for line in lines.by_ref().take_while(|line| !line.starts_with(')')) {
        let line = line.trim_start_matches([' ', ',']);
        let (declared, attribute) = match line.split_once(" [[") {
            Some((declared, rest)) => (declared, Some(rest.trim_end_matches("]]"))),
            None => (line, None),
        };
        let (ty, _) = declared.rsplit_once(' ').ok_or_else(|| format!("no argument: {line}"))?;
        arguments.push(Argument { ty, attribute });
    }
    if arguments.is_empty() { Err(format!("no function {}", metal.entry)) } else { Ok(arguments) }
}

/// The text and what calls its function as the attributes say, in C++. In a namespace, since the text may use names that
/// the C library has, too.
fn source(metal: &Metal) -> Result<String, String> {
    let (mut values, mut sizes) = (Vec::new(), Vec::new());
    for Argument { ty, attribute } in arguments(metal)? {
        let ty = ty.trim_end_matches('&');
        let vector =
            |field: &str| format!("metal::uint3(place.{field}[0], place.{field}[1], place.{field}[2])");
        values.push(match attribute {
            None => {
                sizes.push(format!("sizeof({ty})"));
                format!("*reinterpret_cast<{ty}*>(shared[{}])", sizes.len() - 1)
            }
            Some("threadgroup_position_in_grid") => vector("group"),
            Some("threadgroups_per_grid") => vector("groups"),
            Some("thread_index_in_threadgroup") => "place.index".to_owned(),
            Some("simdgroup_index_in_threadgroup") => "place.simdgroup".to_owned(),
            Some("thread_index_in_simdgroup") => "place.lane".to_owned(),
            Some("threads_per_simdgroup") => "stand_in::SIMD_WIDTH".to_owned(),
            Some(other) => match other.strip_prefix("buffer(").and_then(|rest| rest.strip_suffix(')')) {
                Some(slot) => format!("*reinterpret_cast<{ty}*>(buffers[{slot}])"),
                None => return Err(format!("an attribute that is not known here: {other}")),
            },
        });
    }
    let Metal { text, entry, workgroup, .. } = metal;
    let (values, count, threads) = (values.join(", "), sizes.len(), workgroup.iter().product::<u32>());
    // A zero at the end, since an array cannot be empty.
    let sizes = sizes.iter().map(|size| format!("{size}, ")).collect::<String>() + "0";
    Ok(format!(
        "#include <metal_stdlib>\n#include <simd/simd.h>\nnamespace text {{\n{text}\n\
         void invoke(const stand_in::Place& place, char* const* buffers, char* const* shared) {{\n    {entry}({values});\n}}\n\
         const size_t sizes[] = {{{sizes}}};\n}}\n\
         int main() {{ return stand_in::serve({{text::invoke, {threads}, text::sizes, {count}}}); }}\n"
    ))
}
