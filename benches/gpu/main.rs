//! How long the kernels take on a device, beside the least that its memory allows.
//!
//! `cargo bench --bench gpu -- [--quick] [--json] [--only TEXT] [--exact] [--no-subgroups]`
//!
//! A figure is the median of some submits, each of many calls over rotating inputs that together exceed a last-level cache,
//! between two timestamps where the device has them. All that a call records is in it: making queries ready, coded and raw rows,
//! combining, and the clearing of new buffers. The floor is the bytes that a call must move over the rate of a copy by a kernel
//! of the same device. `KVFOLD_ADAPTER` names another adapter.

mod cases;
mod device;
mod timing;

use cases::{Case, Cases};
use timing::Timer;

/// What is asked for on the command line.
#[derive(Clone, Debug, Default)]
struct Options {
    quick: bool,
    json: bool,
    exact: bool,
    no_subgroups: bool,
    only: Option<String>,
}

impl Options {
    fn parse() -> Result<Self, String> {
        let mut options = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--json" => options.json = true,
                "--exact" => options.exact = true,
                "--no-subgroups" => options.no_subgroups = true,
                "--only" => options.only = Some(arguments.next().ok_or("--only wants a part of a name")?),
                // What `cargo bench` adds.
                "--bench" => {}
                other => {
                    return Err(format!(
                        "{other}: not one of --quick, --json, --exact, --no-subgroups, --only TEXT"
                    ));
                }
            }
        }
        Ok(options)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse()?;
    let gpu = device::open(&options)?;
    let timer = Timer::new(&gpu, options.quick)?;
    let copied = timer.copy()?;
    if !options.json {
        let caps = gpu.caps();
        println!("{} ({}, {})", caps.adapter, caps.backend, caps.driver);
        if caps.software {
            println!("A program on the CPU: these figures say nothing of a GPU.");
        }
        println!("copy: {:.3} TB/s read and written; timed by {}", copied / 1e12, timer.clock());
        println!(
            "{:<58} {:>10} {:>9} {:>9} {:>7} {:>8}",
            "case", "MB", "floor us", "us", "x floor", "spread"
        );
    }
    let mut rows = Vec::new();
    for (name, make) in Cases::all(&options) {
        if options.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let case: Case = make(&gpu, &timer)?;
        let time = timer.time(&case)?;
        let floor = case.bytes as f64 / copied;
        if options.json {
            rows.push(serde_json::json!({
                "case": name, "bytes": case.bytes, "floor_us": floor * 1e6, "median_us": time.median * 1e6,
                "ratio": time.median / floor, "spread": time.spread,
            }));
        } else {
            let [mb, floor_us, us] = [case.bytes as f64 / 1e6, floor * 1e6, time.median * 1e6];
            let ratio = time.median / floor;
            println!(
                "{name:<58} {mb:>10.2} {floor_us:>9.1} {us:>9.1} {ratio:>7.2} {:>7.1}%",
                100.0 * time.spread
            );
        }
    }
    if options.json {
        let report =
            serde_json::json!({ "device": gpu.caps(), "copy_bytes_per_second": copied, "cases": rows });
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(())
}
