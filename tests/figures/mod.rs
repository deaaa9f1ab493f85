//! When two reports agree, figure by figure: what engines may differ in, wherever they ran.

use serde_json::Value;

/// How far figures of two engines may be apart, relative to the larger of 1 and the figure.
const FIGURE: f64 = 1e-3;

/// Counts, texts and nulls must be equal, figures close.
pub fn agree(one: &Value, other: &Value, at: &str) {
    match (one, other) {
        (Value::Object(a), Value::Object(b)) => {
            assert!(a.keys().eq(b.keys()), "{at}");
            a.iter().for_each(|(key, value)| agree(value, &b[key], &format!("{at}.{key}")));
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{at}");
            (0..).zip(a.iter().zip(b)).for_each(|(i, (a, b)): (usize, _)| agree(a, b, &format!("{at}.{i}")));
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() <= FIGURE * a.abs().max(1.0), "{at}: {a} {b}");
        }
        _ => assert_eq!(one, other, "{at}"),
    }
}
