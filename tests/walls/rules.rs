//! The walls. Each says which files it guards and what must not stand in them.

use crate::text::{blank, modules, without_tests, words};

/// One file of the source tree, its path relative to the package with `/` between the parts.
pub(crate) struct File {
    pub(crate) path: String,
    pub(crate) bytes: Vec<u8>,
}

impl File {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// What of a file a wall looks at; unit tests are left out of both.
pub(crate) enum View {
    /// Code alone.
    Code,
    /// Code and the contents of its strings.
    Strings,
}

/// A wall that looks at one file at a time.
pub(crate) struct Wall {
    /// The rule, as a failure states it.
    pub(crate) rule: &'static str,
    guards: fn(&str) -> bool,
    view: View,
    /// Offsets of what offends.
    offences: fn(&str) -> Vec<usize>,
}

impl Wall {
    /// Every offence, as `path:line`.
    pub(crate) fn breaches(&self, files: &[File]) -> Vec<String> {
        let guarded = files.iter().filter(|file| (self.guards)(&file.path));
        guarded.flat_map(|file| self.breaches_in(file)).collect()
    }

    fn breaches_in(&self, file: &File) -> Vec<String> {
        let source = file.text();
        let code = blank(&source, false);
        let seen = match self.view {
            View::Code => without_tests(&code, &code),
            View::Strings => without_tests(&blank(&source, true), &code),
        };
        let line = |at: usize| seen[..at].matches('\n').count() + 1;
        (self.offences)(&seen).into_iter().map(|at| format!("{}:{}", file.path, line(at))).collect()
    }
}

/// `src/*/name.rs` or a file of the folder `src/*/name/`.
fn module(path: &str, name: &str) -> bool {
    let mut parts = path.split('/').skip(2);
    path.starts_with("src/") && parts.any(|part| part.strip_suffix(".rs").unwrap_or(part) == name)
}

/// A file whose name, or the name of a folder of it, is one of these.
fn named(path: &str, names: &[&str]) -> bool {
    path.split('/').any(|part| names.contains(&part.strip_suffix(".rs").unwrap_or(part)))
}

/// Code of the library: not the binary, not a file of unit tests.
fn library(path: &str) -> bool {
    path.starts_with("src/")
        && path.ends_with(".rs")
        && !path.starts_with("src/bin/")
        && !named(path, &["tests"])
}

/// Code that may name wgpu.
fn gpu_side(path: &str) -> bool {
    path.starts_with("src/gpu/") || path == "src/gpu.rs" || module(path, "gpu") || module(path, "gpu_cache")
}

/// A root file of an integration test.
fn integration_test(path: &str) -> Option<&str> {
    let name = path.strip_prefix("tests/")?.strip_suffix(".rs")?;
    let name = name.strip_suffix("/main").unwrap_or(name);
    (!name.contains('/')).then_some(name)
}

fn any_of(text: &str, needles: &[&str]) -> Vec<usize> {
    needles.iter().flat_map(|needle| words(text, needle)).collect()
}

pub(crate) const WGPU: Wall = Wall {
    rule: "only src/gpu/, src/*/gpu.rs, src/*/gpu_cache.rs and the binary name wgpu",
    guards: |path| library(path) && !gpu_side(path) && path != "src/lib.rs",
    view: View::Code,
    offences: |code| words(code, "wgpu"),
};

pub(crate) const REEXPORT: Wall = Wall {
    rule: "src/lib.rs names wgpu only to export it",
    guards: |path| path == "src/lib.rs",
    view: View::Code,
    offences: |code| {
        words(code, "wgpu").into_iter().filter(|&at| !code[..at].ends_with("pub use ")).collect()
    },
};

pub(crate) const REFERENCE: Wall = Wall {
    rule: "a reference shares no code with the CPU twin that it judges",
    guards: |path| library(path) && module(path, "reference"),
    view: View::Code,
    offences: |code| modules(code, "cpu"),
};

pub(crate) const TWIN: Wall = Wall {
    rule: "a CPU twin shares no code with the reference that judges it",
    guards: |path| library(path) && module(path, "cpu"),
    view: View::Code,
    offences: |code| modules(code, "reference"),
};

pub(crate) const RECORDER: Wall = Wall {
    rule: "GPU code never calls a CPU twin",
    guards: |path| library(path) && (path.starts_with("src/gpu/") || module(path, "gpu")),
    view: View::Code,
    offences: |code| modules(code, "cpu"),
};

pub(crate) const BINDINGS: Wall = Wall {
    rule: "web/ uses the library's public items, not its files",
    guards: |path| path.starts_with("web/src/") && path.ends_with(".rs"),
    view: View::Code,
    offences: |code| any_of(code, &["#[path", "include!"]),
};

pub(crate) const BLOCKING: Wall = Wall {
    rule: "only src/gpu/blocking.rs waits for a device",
    guards: |path| library(path) && path != "src/gpu/blocking.rs",
    view: View::Code,
    // A future's `poll` waits for nothing; a device's takes a `PollType`.
    offences: |code| any_of(code, &["pollster", "PollType"]),
};

pub(crate) const SHADER_TEXT: Wall = Wall {
    rule: "only src/gpu/shader.rs reads shaders/",
    guards: |path| library(path) && path != "src/gpu/shader.rs" && !path.starts_with("src/gpu/shader/"),
    view: View::Strings,
    offences: |code| any_of(code, &[".wgsl\"", "shaders/"]),
};

pub(crate) const HOST: Wall = Wall {
    rule: "the library does not print, read the environment or spawn a thread",
    guards: library,
    view: View::Code,
    offences: |code| {
        let output = ["println!", "print!", "eprintln!", "eprint!", "stdout()", "stderr()"];
        let rest = ["std::env", "env::var", "env::args", "thread::spawn", "thread::scope", "thread::Builder"];
        [any_of(code, &output), any_of(code, &rest)].concat()
    },
};

pub(crate) const HOOKS: Wall = Wall {
    rule: "only src/gpu/request.rs, which makes devices of our own, sets a device's hooks",
    guards: |path| library(path) && path != "src/gpu/request.rs",
    view: View::Code,
    offences: |code| any_of(code, &["set_device_lost_callback", "on_uncaptured_error"]),
};

pub(crate) const FILES: Wall = Wall {
    rule: "reading and writing files never touches a device",
    guards: |path| library(path) && named(path, &["capture", "store"]),
    view: View::Code,
    offences: |code| {
        let lower = code.to_lowercase();
        lower.match_indices("gpu").map(|(at, _)| at).collect()
    },
};

pub(crate) const DEVICE_TESTS: Wall = Wall {
    rule: "a test of the device has the word gpu, metal or dawn in its file's name, so that tests/run finds it",
    guards: |path| {
        integration_test(path)
            .is_some_and(|name| !name.split('_').any(|word| ["gpu", "metal", "dawn"].contains(&word)))
    },
    view: View::Code,
    offences: |code| words(code, "Gpu"),
};

/// Files a person reads: at most this many lines.
const LINES: usize = 450;

/// Source files that are too long to read in one go.
pub(crate) fn too_long(files: &[File]) -> Vec<String> {
    let source = [".rs", ".wgsl", ".js", ".mjs", ".ts"];
    let long = files.iter().filter(|file| source.iter().any(|end| file.path.ends_with(end)));
    long.map(|file| (file, file.text().lines().count()))
        .filter(|&(_, lines)| lines > LINES)
        .map(|(file, lines)| format!("{}: {lines} lines, at most {LINES}", file.path))
        .collect()
}

/// Kernels without a twin or recorder of their name, and the reason.
const ALONE: &[(&str, &str)] = &[
    ("shaders/common/append.wgsl", "copies rows bit for bit; every test of a cache runs it"),
    ("shaders/common/join.wgsl", "joins the splits that only a device makes, where they are many"),
    ("shaders/common/combine.wgsl", "joins the splits that only a device makes; every attend test runs it"),
    ("shaders/minicache/turn.wgsl", "its twin is Rotation::apply; the twin of attend turns keys back"),
    (
        "shaders/planes/encode.wgsl",
        "its twins are encode_keys and encode_values, which share a private encode",
    ),
    ("shaders/planes/encode_tiles.wgsl", "its twins are those of encode.wgsl"),
    ("shaders/planes/tile.wgsl", "it moves words: its host form is tiles::pack"),
    ("shaders/planes/block_means.wgsl", "its twin is private to encode_keys"),
    ("shaders/planes/project.wgsl", "its twin is PlaneQueries, the rows that scores and attend read"),
    ("shaders/planes/calibrate.wgsl", "its twin is Tables::calibrate, in f64"),
    ("shaders/planes/query_energy.wgsl", "its twin is QueryEnergy::add, in f64"),
    ("shaders/planes/unrotate.wgsl", "its twin is PlaneValues::finish, the end of attend"),
    ("shaders/qjl/project.wgsl", "its twin is PlaneQueries, the rows that scores and attend read"),
];

/// Kernels that lack a twin or a recorder of their name.
pub(crate) fn unpaired(files: &[File], alone: &[(&str, &str)]) -> Vec<String> {
    let code_of = |folder: &str, name: &str| -> String {
        let ours = |file: &&File| {
            // Planes are a family within qjl.
            let home = if folder == "planes" { "qjl/planes" } else { folder };
            library(&file.path) && file.path.starts_with(&format!("src/{home}/")) && module(&file.path, name)
        };
        files.iter().filter(ours).map(|file| blank(&file.text(), true)).collect()
    };
    let mut breaches = Vec::new();
    for file in files {
        let kernel = file.path.strip_prefix("shaders/").and_then(|path| path.strip_suffix(".wgsl"));
        let Some((folder, name)) = kernel.and_then(|path| path.split_once('/')) else { continue };
        // A file without an entry point is a module that kernels share.
        if words(&blank(&file.text(), false), "@compute").is_empty()
            || alone.iter().any(|&(path, _)| path == file.path)
        {
            continue;
        }
        let twin = code_of(folder, "cpu");
        let declared = ["pub fn ", "pub(crate) fn "]
            .iter()
            .any(|start| !words(&twin, &format!("{start}{name}")).is_empty());
        if !declared {
            breaches.push(format!("{}: no `pub fn {name}` in src/{folder}/cpu.rs", file.path));
        }
        if words(&code_of(folder, "gpu"), name).is_empty() {
            breaches.push(format!("{}: no `{name}` in src/{folder}/gpu.rs", file.path));
        }
    }
    let gone = alone.iter().filter(|(path, _)| !files.iter().any(|file| file.path == *path));
    breaches.extend(gone.map(|(path, _)| format!("{path}: excepted, but not there")));
    breaches
}

/// [`unpaired`] with the project's exceptions.
pub(crate) fn unpaired_here(files: &[File]) -> Vec<String> {
    unpaired(files, ALONE)
}

/// Only this much of a file is searched for paths: a data file's header, all of any text.
const HEAD: usize = 1 << 20;

/// Places where a file names a folder of somebody's machine.
pub(crate) fn machine_paths(files: &[File]) -> Vec<String> {
    // Put together here, so that this file does not hold what it looks for.
    let [root, work, home, users] = ["root", "work", "home", "Users"].map(|name| format!("/{name}/"));
    let begins = |at: usize, bytes: &[u8]| {
        let rest = &bytes[at..];
        let follows = |prefix: &str| rest.strip_prefix(prefix.as_bytes()).and_then(|after| after.first());
        let person = [&home, &users].iter().any(|p| follows(p).is_some_and(u8::is_ascii_alphanumeric));
        let starts = at == 0 || !(bytes[at - 1].is_ascii_alphanumeric() || b"_-.".contains(&bytes[at - 1]));
        starts && (person || rest.starts_with(root.as_bytes()) || rest.starts_with(work.as_bytes()))
    };
    let mut breaches = Vec::new();
    for file in files {
        let head = &file.bytes[..file.bytes.len().min(HEAD)];
        let slashes = head.iter().enumerate().filter(|&(_, &byte)| byte == b'/');
        if let Some((at, _)) = slashes.into_iter().find(|&(at, _)| begins(at, head)) {
            let line = head[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
            breaches.push(format!("{}:{line}", file.path));
        }
    }
    breaches
}

/// Lock files of npm that name a registry other than the public one.
pub(crate) fn private_registries(files: &[File]) -> Vec<String> {
    let locks = files.iter().filter(|file| file.path.ends_with("package-lock.json"));
    let private =
        |line: &&str| line.contains("\"resolved\"") && !line.contains("https://registry.npmjs.org/");
    locks
        .filter(|file| file.text().lines().any(|line| private(&line)))
        .map(|file| file.path.clone())
        .collect()
}
