//! The `kvfold` command line as a user meets it: output, exit codes, and files that are wrong.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod fold;
mod made;
mod odd;
mod presets;
mod sample;
mod schema;

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use serde_json::Value;

/// What a run printed, and its exit code.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

fn command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfold"));
    command.args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn kvfold<S: AsRef<OsStr>>(arguments: &[S]) -> Run {
    finish(command(arguments))
}

fn finish(mut command: Command) -> Run {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let run = Run {
        code: output.status.code().expect("kvfold ends by itself"),
        out: text(output.stdout),
        err: text(output.stderr),
    };
    assert!(!run.err.contains("panicked"), "{}", run.err);
    run
}

/// A report on the CPU as JSON, which must follow the schema.
pub(crate) fn json<S: AsRef<OsStr>>(arguments: &[S]) -> Value {
    let mut all: Vec<&OsStr> = ["report", "--json", "--backend", "cpu"].iter().map(OsStr::new).collect();
    all.extend(arguments.iter().map(AsRef::as_ref));
    let run = kvfold(&all);
    assert_eq!(run.code, 0, "{}", run.err);
    let report = serde_json::from_str(&run.out).unwrap();
    schema::check(&report);
    report
}

/// The report on the bundled sample with nothing else said.
pub(crate) fn sample_report() -> Value {
    static REPORT: LazyLock<Value> = LazyLock::new(|| json::<&str>(&[]));
    REPORT.clone()
}

/// A run that must fail with this code, print nothing, and say all of these words.
#[track_caller]
pub(crate) fn fails<S: AsRef<OsStr>>(arguments: &[S], code: i32, words: &[&str]) {
    let run = kvfold(arguments);
    assert_eq!((run.code, run.out.as_str()), (code, ""), "{}", run.err);
    for word in words {
        assert!(run.err.contains(word), "{:?} does not say {word:?}", run.err);
    }
}

#[test]
fn adapters_are_listed_or_their_absence_is_said() {
    let listed = kvfold(&["adapters", "--json"]);
    assert_eq!(listed.code, 0);
    let adapters: Vec<Value> = serde_json::from_str(&listed.out).unwrap();
    let text = kvfold(&["adapters"]);
    assert_eq!(text.code, 0);
    for adapter in &adapters {
        let name = adapter["adapter"].as_str().unwrap();
        assert!(text.out.contains(name), "{}", text.out);
        assert!(adapter["software"].is_boolean(), "{adapter}");
        assert!(adapter["max_buffer_size"].as_u64().unwrap() > 0, "{adapter}");
    }
    assert_eq!(adapters.is_empty(), text.out.starts_with("no adapters"), "{}", text.out);
}

#[test]
fn misuse_is_exit_code_2() {
    let misused: [&[&str]; 12] = [
        &[],
        &["fold"],
        &["report", "--backend", "cuda"],
        &["report", "--threshold", "2"],
        &["report", "--threshold", "nan"],
        &["report", "--threshold", "0.8", "--retention", "never"],
        &["report", "--retention", "fraction:1.5"],
        &["report", "--retention", "cosine"],
        &["report", "--slerp-t", "-0.1"],
        &["report", "--start-frac", "7"],
        &["report", "--sketch-dim", "0"],
        &["report", "--projection", "loaded"],
    ];
    for arguments in misused {
        fails(arguments, 2, &["--help"]);
    }
    fails(&["report", "--threshold", "2"], 2, &["threshold: wanted -1 to 1, had 2"]);
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [["--help"].as_slice(), &["--version"], &["report", "--help"]] {
        let run = kvfold(arguments);
        assert_eq!((run.code, run.err.as_str()), (0, ""));
        assert!(run.out.contains("kvfold"));
    }
}

#[cfg(not(target_os = "macos"))]
#[test]
fn a_backend_that_is_not_there_is_an_error_that_names_what_is() {
    fails(&["report", "--backend", "metal"], 1, &["metal"]);
    #[cfg(feature = "gpu")]
    fails(&["report", "--backend", "metal"], 1, &["no adapter: wanted metal", "the CPU (--backend cpu)"]);
}

#[cfg(feature = "gpu")]
#[test]
fn an_adapter_that_is_not_there_is_an_error() {
    fails(&["report", "--adapter", "no such adapter"], 1, &["no such adapter"]);
}

#[test]
fn colours_stay_out_of_pipes_and_obey_no_color() {
    let coloured = |variable: Option<&str>| {
        let mut command = command(&["report", "--backend", "cpu"]);
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(name);
        }
        variable.map(|name| command.env(name, "1"));
        finish(command).out.contains('\x1b')
    };
    assert!(!coloured(None));
    assert!(coloured(Some("CLICOLOR_FORCE")));
    assert!(!coloured(Some("NO_COLOR")));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = command(&["report", "--backend", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), err.as_str()), (Some(0), ""));
}

#[test]
fn no_progress_is_drawn_in_a_pipe() {
    let run = kvfold(&["report", "--backend", "cpu"]);
    assert_eq!((run.code, run.err.as_str()), (0, ""));
}
