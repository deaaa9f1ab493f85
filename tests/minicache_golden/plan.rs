//! Pairings of layers.

use kvfold::Error;
use kvfold::minicache::{Role, pair_layers_depth};
use serde_json::Value;

#[test]
fn all_pairings_of_the_original_are_reproduced() {
    let path = format!("{}/tests/golden/pair_layers_depth.json", env!("CARGO_MANIFEST_DIR"));
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 180);
    for case in cases {
        let number = |key: &str| case[key].as_u64().unwrap() as usize;
        let start_frac = case["start_frac"].as_f64().unwrap();
        let plan = pair_layers_depth(number("n_layers"), start_frac, number("group_size")).unwrap();
        let name = |role: Role| if role == Role::Primary { "primary" } else { "merge" };
        let roles: Vec<_> = plan.iter().map(|layer| (name(layer.role), layer.group as u64)).collect();
        let want = case["roles"].as_array().unwrap().iter();
        let want: Vec<_> = want.map(|r| (r[0].as_str().unwrap(), r[1].as_u64().unwrap())).collect();
        let at = [&case["n_layers"], &case["start_frac"], &case["group_size"]];
        assert_eq!(roles, want, "{at:?}");
    }
}

/// The original takes any `start_frac` (below 0 is 0, above 1 leaves all layers alone); kvfold refuses those. A group of one
/// layer both refuse.
#[test]
fn what_the_original_lets_pass_is_refused() {
    for start_frac in [-0.5, 1.5, f64::INFINITY, f64::NAN] {
        let error = pair_layers_depth(8, start_frac, 2).unwrap_err();
        assert!(matches!(&error, Error::Range { what: "start_frac", .. }), "{error}");
    }
    for group_size in [0, 1] {
        let error = pair_layers_depth(8, 0.5, group_size).unwrap_err();
        assert!(matches!(&error, Error::Range { what: "group_size", .. }), "{error}");
    }
}
