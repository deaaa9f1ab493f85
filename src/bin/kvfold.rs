//! The `kvfold` command line.
fn main() {}
