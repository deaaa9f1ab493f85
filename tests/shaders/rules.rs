//! What a kernel must keep beyond being valid WGSL, read off naga's module.

use std::collections::HashSet;

use naga::{
    AddressSpace, BinaryOperator, Block, Expression, Function, Handle, Literal, MathFunction, Module,
    ScalarKind, Statement,
};

/// WebGPU grants 8 storage buffers in a stage; on Metal wgpu takes one more for the lengths of the others.
pub(crate) const STORAGE_BUFFERS: usize = 7;
/// Bytes of workgroup memory that every adapter has.
pub(crate) const WORKGROUP_BYTES: u32 = 16 << 10;
/// Invocations in a workgroup that every adapter has.
pub(crate) const INVOCATIONS: u32 = 256;

/// Built-ins whose accuracy WGSL leaves so loose (2^-11 absolute, or 4096 ulp) that two adapters differ visibly.
const LOOSE: [MathFunction; 14] = [
    MathFunction::Cos,
    MathFunction::Cosh,
    MathFunction::Sin,
    MathFunction::Sinh,
    MathFunction::Tan,
    MathFunction::Tanh,
    MathFunction::Acos,
    MathFunction::Asin,
    MathFunction::Atan,
    MathFunction::Atan2,
    MathFunction::Asinh,
    MathFunction::Acosh,
    MathFunction::Atanh,
    MathFunction::Pow,
];

/// Every rule that holds for all variants; one line for each breach.
pub(crate) fn breaches(module: &Module) -> Vec<String> {
    let mut found = Vec::new();
    let storage = storage_buffers(module);
    if storage > STORAGE_BUFFERS {
        found.push(format!("{storage} storage buffers, at most {STORAGE_BUFFERS}"));
    }
    if !module.overrides.is_empty() {
        found.push("an `override`, which array sizes inside functions cannot use".to_owned());
    }
    if module.entry_points.len() != 1 {
        found.push(format!("{} entry points, wanted one", module.entry_points.len()));
    }
    let collective = collective_functions(module);
    for function in functions(module) {
        let name = function.name.as_deref().unwrap_or("the entry point");
        found.extend(
            loose_built_ins(function).iter().map(|fun| format!("{name} calls {fun:?}, too inaccurate")),
        );
        if compares_with_itself(function) {
            found.push(format!("{name} compares a value with itself, which is no test for NaN"));
        }
        if looks_for_infinity(function) {
            found.push(format!(
                "{name} looks for an infinite exponent in a number, where fast math finds none"
            ));
        }
        if returns_before_collective(function, &collective) {
            found.push(format!("{name} may return before a barrier or subgroup operation"));
        }
    }
    found
}

/// What a default variant keeps beside [`breaches`].
pub(crate) fn default_breaches(module: &Module) -> Vec<String> {
    let mut found = Vec::new();
    let bytes = workgroup_bytes(module);
    if bytes > WORKGROUP_BYTES {
        found.push(format!("{bytes} bytes of workgroup memory, at most {WORKGROUP_BYTES}"));
    }
    let invocations = invocations(module);
    if invocations > INVOCATIONS {
        found.push(format!("{invocations} invocations, at most {INVOCATIONS}"));
    }
    found
}

/// One resource of a kernel's bind groups.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Binding {
    pub(crate) name: String,
    pub(crate) group: u32,
    pub(crate) number: u32,
    pub(crate) space: AddressSpace,
}

/// The resources that a module declares.
pub(crate) fn bindings(module: &Module) -> Vec<Binding> {
    let resource = |variable: &naga::GlobalVariable| {
        let binding = variable.binding?;
        let name = variable.name.clone().unwrap_or_default();
        Some(Binding { name, group: binding.group, number: binding.binding, space: variable.space })
    };
    module.global_variables.iter().filter_map(|(_, variable)| resource(variable)).collect()
}

/// Pairs that share a name or a number but are not the same resource.
pub(crate) fn conflicts(seen: &[Binding], new: &[Binding]) -> Vec<String> {
    let clash =
        |a: &Binding, b: &Binding| a != b && (a.name == b.name || (a.group, a.number) == (b.group, b.number));
    let pairs = new.iter().flat_map(|b| seen.iter().filter(move |a| clash(a, b)).map(move |a| (a, b)));
    pairs.map(|(a, b)| format!("{b:?} where another variant has {a:?}")).collect()
}

fn is_storage(space: AddressSpace) -> bool {
    matches!(space, AddressSpace::Storage { .. })
}

pub(crate) fn storage_buffers(module: &Module) -> usize {
    module.global_variables.iter().filter(|(_, v)| is_storage(v.space)).count()
}

/// Invocations of a workgroup.
pub(crate) fn invocations(module: &Module) -> u32 {
    module.entry_points.iter().map(|entry| entry.workgroup_size.iter().product()).max().unwrap_or(0)
}

/// Whether invocations of a workgroup wait for each other.
pub(crate) fn waits(module: &Module) -> bool {
    let collective = collective_functions(module);
    module.entry_points.iter().any(|entry| {
        let mut walk = Walk { collective: &collective, met: false, returned: false, breach: false };
        walk.block(&entry.function.body);
        walk.met
    })
}

pub(crate) fn workgroup_bytes(module: &Module) -> u32 {
    let shared = module.global_variables.iter().filter(|(_, v)| v.space == AddressSpace::WorkGroup);
    shared.map(|(_, v)| module.types[v.ty].inner.size(module.to_ctx())).sum()
}

pub(crate) fn functions(module: &Module) -> impl Iterator<Item = &Function> {
    let helpers = module.functions.iter().map(|(_, function)| function);
    helpers.chain(module.entry_points.iter().map(|entry| &entry.function))
}

fn loose_built_ins(function: &Function) -> Vec<MathFunction> {
    let called = function.expressions.iter().filter_map(|(_, expression)| match expression {
        Expression::Math { fun, .. } if LOOSE.contains(fun) => Some(*fun),
        _ => None,
    });
    called.collect()
}

fn compares_with_itself(function: &Function) -> bool {
    let compares = |operator: BinaryOperator| {
        use BinaryOperator as Op;
        matches!(
            operator,
            Op::Equal | Op::NotEqual | Op::Less | Op::LessEqual | Op::Greater | Op::GreaterEqual
        )
    };
    function.expressions.iter().any(|(_, expression)| {
        matches!(expression, &Expression::Binary { op, left, right } if compares(op) && same(function, left, right))
    })
}

/// Whether the exponent bits of an f32 are tested. Metal's fast math takes every f32 for finite, so that only a word that was
/// never a number can tell.
fn looks_for_infinity(function: &Function) -> bool {
    let is_exponent = |handle: Handle<Expression>| {
        matches!(function.expressions[handle], Expression::Literal(Literal::U32(0x7f80_0000)))
    };
    let was_number = |handle: Handle<Expression>| {
        matches!(function.expressions[handle], Expression::As { kind: ScalarKind::Uint, convert: None, .. })
    };
    function.expressions.iter().any(|(_, expression)| match *expression {
        Expression::Binary { op: BinaryOperator::And, left, right } => {
            (is_exponent(left) && was_number(right)) || (is_exponent(right) && was_number(left))
        }
        _ => false,
    })
}

/// Whether two expressions read the same value, as far as their form tells.
fn same(function: &Function, a: Handle<Expression>, b: Handle<Expression>) -> bool {
    use Expression as E;
    if a == b {
        return true;
    }
    match (&function.expressions[a], &function.expressions[b]) {
        (E::Load { pointer: a }, E::Load { pointer: b }) => same(function, *a, *b),
        (E::AccessIndex { base: a, index: i }, E::AccessIndex { base: b, index: j }) => {
            i == j && same(function, *a, *b)
        }
        (E::Access { base: a, index: i }, E::Access { base: b, index: j }) => {
            same(function, *a, *b) && same(function, *i, *j)
        }
        (E::GlobalVariable(a), E::GlobalVariable(b)) => a == b,
        (E::LocalVariable(a), E::LocalVariable(b)) => a == b,
        (E::FunctionArgument(a), E::FunctionArgument(b)) => a == b,
        _ => false,
    }
}

/// Functions that all invocations must reach together: they hold a barrier or a subgroup operation, or call one that
/// does. naga lists a function after those it calls.
fn collective_functions(module: &Module) -> HashSet<Handle<Function>> {
    let mut found = HashSet::new();
    for (handle, function) in module.functions.iter() {
        let mut walk = Walk { collective: &found, met: false, returned: false, breach: false };
        walk.block(&function.body);
        if walk.met {
            found.insert(handle);
        }
    }
    found
}

fn returns_before_collective(function: &Function, collective: &HashSet<Handle<Function>>) -> bool {
    let mut walk = Walk { collective, met: false, returned: false, breach: false };
    walk.block(&function.body);
    walk.breach
}

/// Follows a function's statements in order.
struct Walk<'a> {
    collective: &'a HashSet<Handle<Function>>,
    /// A collective statement was met.
    met: bool,
    /// Some invocations may have returned.
    returned: bool,
    /// A collective statement was met after some may have returned.
    breach: bool,
}

impl Walk<'_> {
    fn block(&mut self, block: &Block) {
        for statement in block {
            self.statement(statement);
        }
    }

    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::Block(block) => self.block(block),
            Statement::If { accept, reject, .. } => self.branches([accept, reject]),
            Statement::Switch { cases, .. } => self.branches(cases.iter().map(|case| &case.body)),
            Statement::Loop { body, continuing, .. } => {
                // Twice: a return in one round comes before a barrier of the next.
                for block in [body, continuing, body, continuing] {
                    self.block(block);
                }
            }
            Statement::Return { .. } => self.returned = true,
            Statement::Call { function, .. } if self.collective.contains(function) => self.meet(),
            Statement::ControlBarrier(_)
            | Statement::WorkGroupUniformLoad { .. }
            | Statement::SubgroupBallot { .. }
            | Statement::SubgroupGather { .. }
            | Statement::SubgroupCollectiveOperation { .. } => self.meet(),
            _ => {}
        }
    }

    fn branches<'b>(&mut self, branches: impl IntoIterator<Item = &'b Block>) {
        let before = self.returned;
        let mut after = before;
        for branch in branches {
            self.returned = before;
            self.block(branch);
            after |= self.returned;
        }
        self.returned = after;
    }

    fn meet(&mut self) {
        self.met = true;
        self.breach |= self.returned;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel around a body; `x` is a storage array, `n` a uniform, `s` shared memory, `i` the invocation.
    fn kernel(helpers: &str, body: &str) -> Module {
        let text = format!(
            "@group(0) @binding(0) var<storage, read_write> x: array<f32>;
             @group(0) @binding(1) var<uniform> n: u32;
             var<workgroup> s: array<f32, 64>;
             {helpers}
             @compute @workgroup_size(64)
             fn main(@builtin(local_invocation_index) i: u32) {{ {body} }}"
        );
        naga::front::wgsl::parse_str(&text).unwrap_or_else(|e| panic!("{}", e.emit_to_string(&text)))
    }

    fn breaks(helpers: &str, body: &str) -> usize {
        breaches(&kernel(helpers, body)).len()
    }

    #[test]
    fn a_clean_kernel_breaks_nothing() {
        let body =
            "s[i] = x[i]; workgroupBarrier(); if i >= n { return; } x[i] = exp(s[63u - i]) + sqrt(s[i]);";
        assert_eq!(breaks("", body), 0);
        assert!(default_breaches(&kernel("", body)).is_empty());
    }

    #[test]
    fn loose_built_ins_are_found_in_helpers_too() {
        for call in ["sin(a)", "cos(a)", "tan(a)", "acos(a)", "atan2(a, 2.0)", "pow(a, 3.0)", "tanh(a)"] {
            assert_eq!(
                breaks(&format!("fn f(a: f32) -> f32 {{ return {call}; }}"), "x[i] = f(x[i]);"),
                1,
                "{call}"
            );
        }
    }

    #[test]
    fn self_comparison_is_found_whatever_is_compared() {
        for test in ["x[i] != x[i]", "a == a", "b != b", "s[3] != s[3]", "!(a >= a)"] {
            assert_eq!(
                breaks("", &format!("let a = x[i]; var b = a; if {test} {{ x[i] = 0.0; }}")),
                1,
                "{test}"
            );
        }
        for test in ["x[i] != x[i + 1u]", "a == b", "s[3] != s[4]", "i == n"] {
            assert_eq!(
                breaks("", &format!("let a = x[i]; var b = a; if {test} {{ x[i] = 0.0; }}")),
                0,
                "{test}"
            );
        }
    }

    #[test]
    fn exponents_of_numbers_are_found() {
        for (test, found) in [
            ("(bitcast<u32>(x[i]) & 0x7f800000u) == 0x7f800000u", 1),
            ("(0x7f800000u & bitcast<u32>(abs(x[i]))) != 0x7f800000u", 1),
            ("(w[i] & 0x7f800000u) == 0x7f800000u", 0),
            ("(bitcast<u32>(x[i]) & 0x7fffffffu) < 0x7f000000u", 0),
        ] {
            let words = "@group(0) @binding(2) var<storage> w: array<u32>;";
            assert_eq!(breaks(words, &format!("if {test} {{ x[i] = 0.0; }}")), found, "{test}");
        }
    }

    #[test]
    fn returns_before_barriers_are_found() {
        let wait = "fn wait() { workgroupBarrier(); } fn outer() { wait(); }";
        for body in [
            "if i >= n { return; } workgroupBarrier();",
            "if i >= n { return; } outer();",
            "if i < n { if i > 2u { return; } } x[i] = subgroupAdd(x[i]);",
            "loop { workgroupBarrier(); if i >= n { return; } }",
            "switch i { case 0u: { return; } default: {} } outer();",
        ] {
            assert_eq!(breaks(wait, body), 1, "{body}");
        }
        for body in [
            "workgroupBarrier(); if i >= n { return; } x[i] = 0.0;",
            "if i >= n { return; } else { x[i] = 1.0; }",
            "for (var k = 0u; k < 4u; k++) { outer(); } if i >= n { return; }",
        ] {
            assert_eq!(breaks(wait, body), 0, "{body}");
        }
    }

    #[test]
    fn sizes_are_counted() {
        let buffer = |k: usize| format!("@group(1) @binding({k}) var<storage, read> b{k}: array<u32>;\n");
        let buffers = |count: usize| (0..count).map(buffer).collect::<String>();
        assert_eq!((breaks(&buffers(6), ""), breaks(&buffers(7), "")), (0, 1));
        assert_eq!(breaks("override K: u32 = 3;", ""), 1);
        assert_eq!(breaks("@compute @workgroup_size(1) fn other() {}", ""), 1);

        let large =
            |floats: u32| default_breaches(&kernel(&format!("var<workgroup> t: array<f32, {floats}>;"), ""));
        assert_eq!((large(4096 - 64).len(), large(4096 - 63).len()), (0, 1));
        let wide = "@compute @workgroup_size(32, 9) fn main() {}";
        assert_eq!(default_breaches(&naga::front::wgsl::parse_str(wide).expect("valid")).len(), 1);
    }

    #[test]
    fn bindings_that_move_or_change_are_found() {
        let first = bindings(&kernel("", ""));
        assert_eq!(first.len(), 2);
        assert!(conflicts(&first, &first).is_empty());
        let changed = |change: fn(&mut Binding)| {
            let mut second = first.clone();
            change(&mut second[1]);
            conflicts(&first, &second).len()
        };
        assert_eq!(changed(|binding| binding.number = 5), 1);
        assert_eq!(changed(|binding| binding.name = "m".to_owned()), 1);
        assert_eq!(
            changed(|binding| binding.space = AddressSpace::Storage { access: naga::StorageAccess::LOAD }),
            1
        );
        assert_eq!(
            changed(|binding| *binding = Binding { name: "m".to_owned(), number: 5, ..binding.clone() }),
            0
        );
    }
}
