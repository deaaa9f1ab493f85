//! The table of `README.md` that says where the library runs: it is what `docs/support.json` records, no more.
//!
//! `KVFOLD_UPDATE=1` writes it. `KVFOLD_SUPPORT=FILE` takes results in first, as `tests/run` leaves them in
//! `target/test-logs/support.jsonl`; `null` stands for a platform that no recorded run was of.

use std::path::Path;
use std::{env, fs};

use serde::{Deserialize, Serialize};

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Platform {
    platform: String,
    /// Whether its code is type-checked.
    types: String,
    /// What its tests are.
    tested: String,
    /// When they run.
    runs: String,
    /// The step of `tests/run` that they are.
    step: Option<String>,
    recorded: Option<Recorded>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    /// The adapter and its driver, or the browser; empty where the step needs none.
    adapter: String,
    passed: u32,
    failed: u32,
    /// Of the tests that ran, as `tests/run` counts them.
    ignored: u32,
    date: String,
    commit: Option<String>,
}

/// A line of `support.jsonl`.
#[derive(Deserialize)]
struct Step {
    step: String,
    #[serde(flatten)]
    recorded: Recorded,
}

impl Platform {
    fn row(&self) -> String {
        let Self { platform, types, tested, runs, .. } = self;
        let Some(Recorded { adapter, passed, failed, ignored, date, commit }) = &self.recorded else {
            return format!("| {platform} | {types} | {tested} | | {runs} |");
        };
        let ignored = if *ignored > 0 { format!(", {ignored} ignored") } else { String::new() };
        let adapter = if adapter.is_empty() { String::new() } else { format!(" on {adapter}") };
        let commit = commit.as_ref().map(|commit| format!(", `{commit}`")).unwrap_or_default();
        format!(
            "| {platform} | {types} | {tested} | {passed} passed, {failed} failed{ignored}{adapter} ({date}{commit}) | {runs} |"
        )
    }
}

fn table(platforms: &[Platform]) -> String {
    let mut lines = vec![
        "| | type-checked | kernels tested | last recorded run | runs |".to_owned(),
        "|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(platforms.iter().map(Platform::row));
    lines.join("\n")
}

/// Puts what a run of `tests/run` found in the place of what was recorded of the same steps.
fn take_in(platforms: &mut [Platform], results: &str) {
    for line in results.lines() {
        let Step { step, recorded } = serde_json::from_str(line).expect("a line of support.jsonl");
        if let Some(platform) = platforms.iter_mut().find(|platform| platform.step.as_ref() == Some(&step)) {
            platform.recorded = Some(recorded);
        }
    }
}

/// A document with `table` in the place of the one that begins so.
fn replaced(document: &str, table: &str) -> String {
    let (before, rest) = document.split_at(document.find("| | type-checked |").expect("the table"));
    let after = &rest[rest.find("\n\n").expect("text after the table")..];
    [before, table, after].concat()
}

#[test]
fn the_table_of_support_is_what_was_recorded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (records, readme) = (root.join("docs/support.json"), root.join("README.md"));
    let read = |path: &Path| fs::read_to_string(path).expect("a readable file");
    let mut platforms: Vec<Platform> = serde_json::from_str(&read(&records)).expect("records");
    let update = env::var_os("KVFOLD_UPDATE").is_some();
    if let Some(results) = env::var_os("KVFOLD_SUPPORT").filter(|_| update) {
        take_in(&mut platforms, &fs::read_to_string(results).expect("what tests/run left"));
        let text = serde_json::to_string_pretty(&platforms).expect("JSON");
        fs::write(&records, text + "\n").expect("a writable folder");
    }
    // Each step that is named is one of tests/run.
    let run = read(&root.join("tests/run"));
    for step in platforms.iter().filter_map(|platform| platform.step.as_ref()) {
        assert!(run.contains(&format!("tests \"{step}\" ")), "{step} is no step of tests/run");
    }
    let document = read(&readme);
    let wanted = replaced(&document, &table(&platforms));
    if update {
        fs::write(&readme, wanted).expect("a writable folder");
    } else {
        assert!(
            document == wanted,
            "README.md does not say what docs/support.json records: KVFOLD_UPDATE=1 writes it"
        );
    }
}

#[test]
fn results_replace_those_of_their_step() {
    let platform = |step: Option<&str>| Platform {
        platform: "A".to_owned(),
        types: "yes".to_owned(),
        tested: "all".to_owned(),
        runs: "always".to_owned(),
        step: step.map(str::to_owned),
        recorded: None,
    };
    let mut platforms = [platform(Some("gpu tests")), platform(None), platform(Some("page"))];
    let line = r#"{"step": "gpu tests", "passed": 3, "failed": 1, "ignored": 0, "adapter": "B", "date": "2026-01-02", "commit": "abc"}"#;
    take_in(&mut platforms, line);
    assert_eq!(
        platforms[0].row(),
        "| A | yes | all | 3 passed, 1 failed on B (2026-01-02, `abc`) | always |"
    );
    for other in &platforms[1..] {
        assert_eq!(other.row(), "| A | yes | all | | always |");
    }
    let document = "before\n| | type-checked | old |\n| old |\n\nafter";
    let wanted = format!("before\n{}\n\nafter", table(&platforms));
    assert_eq!(replaced(document, &table(&platforms)), wanted);
}
