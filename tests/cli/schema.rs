//! Holds a report to `docs/report.schema.json`. Only the keywords that the schema uses are known; any other fails, so that
//! none is passed over.

use std::collections::BTreeSet;

use serde_json::{Value, json};

fn schema() -> Value {
    let text = include_str!("../../docs/report.schema.json");
    serde_json::from_str(text).unwrap()
}

/// Checks a report.
#[track_caller]
pub(crate) fn check(report: &Value) {
    let schema = schema();
    if let Err(fault) = holds(&schema, &schema, report) {
        panic!("the report breaks its schema at {fault}");
    }
}

/// Whether `value` follows `rule`; else where it does not and why.
fn holds(root: &Value, rule: &Value, value: &Value) -> Result<(), String> {
    for (keyword, wanted) in rule.as_object().unwrap() {
        let fits = match keyword.as_str() {
            "$schema" | "$defs" | "title" | "description" => true,
            "$ref" => {
                let target = wanted.as_str().unwrap().strip_prefix('#').unwrap();
                holds(root, root.pointer(target).unwrap(), value)?;
                true
            }
            "type" => names(wanted).any(|name| is(name, value)),
            "enum" => wanted.as_array().unwrap().contains(value),
            "minimum" => value.as_f64().is_none_or(|x| x >= wanted.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|x| x <= wanted.as_f64().unwrap()),
            "required" => {
                value.as_object().is_none_or(|object| names(wanted).all(|name| object.contains_key(name)))
            }
            "additionalProperties" => {
                assert_eq!(wanted, &json!(false));
                let known: BTreeSet<&String> = rule["properties"].as_object().unwrap().keys().collect();
                value.as_object().is_none_or(|object| object.keys().all(|key| known.contains(key)))
            }
            "properties" => {
                for (name, rule) in wanted.as_object().unwrap() {
                    if let Some(value) = value.get(name) {
                        holds(root, rule, value).map_err(|fault| format!("{name}.{fault}"))?;
                    }
                }
                true
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    holds(root, wanted, item).map_err(|fault| format!("{index}.{fault}"))?;
                }
                true
            }
            "oneOf" => {
                let rules = wanted.as_array().unwrap();
                rules.iter().filter(|rule| holds(root, rule, value).is_ok()).count() == 1
            }
            unknown => panic!("the schema's keyword {unknown} is not known here"),
        };
        if !fits {
            return Err(format!("{keyword} {wanted}: {value}"));
        }
    }
    Ok(())
}

/// One name or a list of them.
fn names(value: &Value) -> impl Iterator<Item = &str> {
    value
        .as_array()
        .map_or(std::slice::from_ref(value), Vec::as_slice)
        .iter()
        .map(|name| name.as_str().unwrap())
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        unknown => panic!("the schema's type {unknown} is not known here"),
    }
}

#[test]
fn a_report_that_breaks_the_schema_is_found() {
    let good = super::sample_report();
    let root = schema();
    let broken = |change: &dyn Fn(&mut Value)| {
        let mut report = good.clone();
        change(&mut report);
        holds(&root, &root, &report).is_err()
    };
    assert!(!broken(&|_| ()));
    assert!(broken(&|report| report["software"] = json!("yes")));
    assert!(broken(&|report| report["backend"] = json!("cuda")));
    assert!(broken(&|report| report["extra"] = json!(1)));
    assert!(broken(&|report| drop(report["totals"].as_object_mut().unwrap().remove("ratio"))));
    assert!(broken(&|report| report["pairs"][3]["keys"]["cosine"]["p5"] = json!(-1.5)));
    assert!(broken(&|report| report["pairs"][3]["keys"]["rows"] = json!(1.5)));
    assert!(broken(&|report| report["pairs"][3]["skipped"] = json!("no")));
    assert!(broken(&|report| report["layers"][29]["qjl"]["key_bytes"] = json!(null)));
}
