//! Walls between the parts of the library that the compiler does not see, checked on the source text.
//! Each is shown to fail on made-up text further down.

#![allow(clippy::expect_used, clippy::indexing_slicing, reason = "a test that panics is a test that fails")]

mod rules;
mod support;
mod text;

use std::fs;
use std::path::Path;

use rules::{File, Wall};

/// A folder that holds no source: hidden, or one that `.gitignore` names.
fn is_built(name: &str) -> bool {
    let hidden = name.starts_with('.') && name != ".ci";
    hidden
        || name.starts_with("target-")
        || ["target", "node_modules", "pkg", "dist", "shots"].contains(&name)
}

/// Every file of the package and its workspace, what was built left out.
fn tree() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).expect("a folder of the package") {
            let entry = entry.expect("an entry of the folder");
            let name = entry.file_name().into_string().expect("file names are UTF-8");
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            let kind = entry.file_type().expect("the entry's type");
            if kind.is_file() && name != ".git" {
                let bytes = fs::read(entry.path()).expect("a readable file");
                files.push(File { path, bytes });
            } else if kind.is_dir() && !is_built(&name) {
                folders.push(path);
            }
        }
    }
    files
}

fn none(rule: &str, breaches: &[String]) {
    assert!(breaches.is_empty(), "{rule}:\n{}", breaches.join("\n"));
}

fn holds(wall: &Wall) {
    none(wall.rule, &wall.breaches(&tree()));
}

fn file(path: &str, text: &str) -> File {
    File { path: path.to_owned(), bytes: text.as_bytes().to_vec() }
}

/// Lines of `text` that break the wall, were it to stand at `path`.
fn breaks(wall: &Wall, path: &str, text: &str) -> Vec<String> {
    wall.breaches(&[file(path, text)])
}

#[test]
fn the_tree_is_read() {
    let files = tree();
    for path in ["src/lib.rs", "web/src/lib.rs", "tests/walls/main.rs", "Cargo.toml", ".ci/run"] {
        assert!(files.iter().any(|file| file.path == path), "{path}");
    }
    assert!(!files.iter().any(|file| file.path.starts_with("target")));
}

#[test]
fn wgpu_stays_on_the_gpu_side() {
    holds(&rules::WGPU);
    holds(&rules::REEXPORT);
}

#[test]
fn references_and_twins_are_independent() {
    holds(&rules::REFERENCE);
    holds(&rules::TWIN);
    holds(&rules::RECORDER);
}

#[test]
fn web_is_bindings_only() {
    holds(&rules::BINDINGS);
}

#[test]
fn one_file_waits_and_one_reads_shaders() {
    holds(&rules::BLOCKING);
    holds(&rules::SHADER_TEXT);
}

#[test]
fn the_host_stays_in_charge() {
    holds(&rules::HOST);
    holds(&rules::HOOKS);
}

#[test]
fn files_need_no_device() {
    holds(&rules::FILES);
}

#[test]
fn device_tests_are_found() {
    holds(&rules::DEVICE_TESTS);
}

#[test]
fn every_file_can_be_read_in_one_go() {
    none("too long", &rules::too_long(&tree()));
}

#[test]
fn kernels_have_twins_and_recorders() {
    none("a kernel, its twin and its recorder share one name", &rules::unpaired_here(&tree()));
}

#[test]
fn no_file_names_a_machine() {
    none("paths of a machine", &rules::machine_paths(&tree()));
    none("registries other than the public one", &rules::private_registries(&tree()));
}

#[test]
fn wgpu_walls_can_fail() {
    let naming =
        "//! wgpu\nuse wgpu::Buffer; // wgpu\nconst A: &str = \"wgpu\";\n#[cfg(test)]\nuse wgpu::Device;";
    for path in ["src/error.rs", "src/qjl/cache.rs", "src/qjl/cpu.rs"] {
        assert_eq!(breaks(&rules::WGPU, path, naming), [format!("{path}:2")]);
    }
    let allowed = ["src/gpu/mod.rs", "src/gpu/device.rs", "src/qjl/gpu.rs", "src/qjl/gpu/attend.rs"];
    let also = ["src/qjl/gpu_cache.rs", "src/report/gpu.rs", "src/bin/kvfold.rs", "src/bin/kvfold/main.rs"];
    for path in allowed.into_iter().chain(also) {
        assert!(breaks(&rules::WGPU, path, naming).is_empty(), "{path}");
    }
    assert!(breaks(&rules::REEXPORT, "src/lib.rs", "#[cfg(feature = \"gpu\")]\npub use wgpu;").is_empty());
    assert_eq!(breaks(&rules::REEXPORT, "src/lib.rs", "pub use wgpu;\nfn a(b: wgpu::Buffer) {}").len(), 1);
}

#[test]
fn twin_walls_can_fail() {
    let twin = "use super::{config, cpu};\nfn a() { cpu::merge() }";
    assert_eq!(breaks(&rules::REFERENCE, "src/qjl/reference.rs", twin).len(), 2);
    assert_eq!(breaks(&rules::REFERENCE, "src/qjl/reference/attend.rs", twin).len(), 2);
    assert!(breaks(&rules::REFERENCE, "src/qjl/cpu_cache.rs", twin).is_empty());
    assert_eq!(breaks(&rules::RECORDER, "src/qjl/gpu.rs", twin).len(), 2);
    assert_eq!(breaks(&rules::RECORDER, "src/gpu/dispatch.rs", twin).len(), 2);
    let judge = "use super::reference::merge;";
    assert_eq!(breaks(&rules::TWIN, "src/minicache/cpu.rs", judge).len(), 1);
    let tested = format!("#[cfg(test)]\nmod tests {{ {judge} }}");
    assert!(breaks(&rules::TWIN, "src/minicache/cpu.rs", &tested).is_empty());
    assert!(breaks(&rules::TWIN, "src/minicache/cpu/tests.rs", judge).is_empty());
}

#[test]
fn host_walls_can_fail() {
    let prints = "fn a() { println!(); eprint!(\"println!\"); std::env::var(\"A\"); std::thread::spawn(b); }";
    assert_eq!(breaks(&rules::HOST, "src/gpu/device.rs", prints).len(), 5);
    assert!(breaks(&rules::HOST, "src/bin/kvfold.rs", prints).is_empty());
    let hooks = "device.on_uncaptured_error(a);\ndevice.set_device_lost_callback(b);";
    assert_eq!(breaks(&rules::HOOKS, "src/gpu/mod.rs", hooks).len(), 2);
    assert!(breaks(&rules::HOOKS, "src/gpu/request.rs", hooks).is_empty());
    let waits = "pollster::block_on(a);\ndevice.poll(wgpu::PollType::Poll);\nfuture.poll(&mut context);";
    assert_eq!(breaks(&rules::BLOCKING, "src/gpu/readback.rs", waits).len(), 2);
    assert!(breaks(&rules::BLOCKING, "src/gpu/blocking.rs", waits).is_empty());
    let reads = "const A: &str = include_str!(\"../../shaders/qjl/scores.wgsl\");";
    assert_eq!(breaks(&rules::SHADER_TEXT, "src/qjl/gpu.rs", reads).len(), 2);
    assert!(breaks(&rules::SHADER_TEXT, "src/gpu/shader.rs", reads).is_empty());
    for path in ["src/capture/read.rs", "src/capture.rs", "src/store.rs", "src/qjl/store.rs"] {
        assert_eq!(breaks(&rules::FILES, path, "// gpu\nfn a(b: &GpuCache) {}"), [format!("{path}:2")]);
    }
    assert_eq!(
        breaks(&rules::BINDINGS, "web/src/lib.rs", "#[path = \"../../src/tensor.rs\"]\nmod a;").len(),
        1
    );
}

#[test]
fn device_test_wall_can_fail() {
    let device = "fn a() { kvfold::Gpu::request_blocking(b) }";
    for path in ["tests/minicache.rs", "tests/golden/main.rs", "tests/gpux.rs"] {
        assert_eq!(breaks(&rules::DEVICE_TESTS, path, device).len(), 1, "{path}");
    }
    for path in ["tests/gpu.rs", "tests/qjl_gpu.rs", "tests/gpu_cache/main.rs", "tests/support/mod.rs"] {
        assert!(breaks(&rules::DEVICE_TESTS, path, device).is_empty(), "{path}");
    }
}

#[test]
fn kernel_wall_can_fail() {
    let kernel = || file("shaders/qjl/scores.wgsl", "@compute @workgroup_size(64) fn scores() {}");
    let twin = |text| file("src/qjl/cpu/scores.rs", text);
    let recorder = |text| file("src/qjl/gpu.rs", text);
    let count = |files: &[File], alone| rules::unpaired(files, alone).len();
    assert_eq!(count(&[kernel()], &[]), 2);
    assert_eq!(count(&[kernel(), twin("pub fn scores() {}"), recorder("fn scores() {}")], &[]), 0);
    assert_eq!(count(&[kernel(), twin("pub(crate) fn scores() {}"), recorder("a(\"scores\")")], &[]), 0);
    assert_eq!(count(&[kernel(), twin("fn scores() {}"), recorder("fn scores_of() {}")], &[]), 2);
    assert_eq!(count(&[kernel(), twin("// pub fn scores()"), recorder("scores")], &[]), 1);
    assert_eq!(count(&[file("shaders/qjl/row.wgsl", "// for @compute kernels\nfn row() {}")], &[]), 0);
    let alone = [("shaders/qjl/scores.wgsl", "moves bytes, computes nothing")];
    assert_eq!(count(&[kernel()], &alone), 0);
    assert_eq!(count(&[], &alone), 1);
}

#[test]
fn file_walls_can_fail() {
    let lines = |path, count| rules::too_long(&[file(path, &"a\n".repeat(count))]).len();
    assert_eq!(
        (lines("a.rs", 450), lines("a.rs", 451), lines("a.wgsl", 451), lines("a.md", 451)),
        (0, 1, 1, 0)
    );

    let home = ["ho", "me"].concat();
    let names = |text: &str| rules::machine_paths(&[file("a", text)]).len();
    for part in ["ro", "wo"] {
        let rest = if part == "ro" { "ot" } else { "rk" };
        assert_eq!(names(&format!("x\n \"/{part}{rest}/a\"")), 1);
        assert_eq!(names(&format!("https://example.org/{part}{rest}/a, src/{part}{rest}/a")), 0);
    }
    assert_eq!((names(&format!("/{home}/someone/a")), names(&format!("/{home}/$USER"))), (1, 0));

    let lock = |text| rules::private_registries(&[file("web/package-lock.json", text)]).len();
    assert_eq!(lock("\"resolved\": \"https://registry.npmjs.org/a/-/a-1.0.0.tgz\""), 0);
    assert_eq!(lock("\"resolved\": \"http://mirror.local/a-1.0.0.tgz\""), 1);
}
