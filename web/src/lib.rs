//! Bindings of kvfold for browsers.
