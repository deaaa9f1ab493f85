//! What a module does that the languages write in their own ways: loops, and products of bytes.

use std::collections::HashSet;

use naga::{Block, Expression, Function, Handle, MathFunction, Module, Statement};

use crate::rules::functions;

/// Loops of all functions.
pub(crate) fn loops(module: &Module) -> usize {
    functions(module).map(loops_of).sum()
}

/// Loops of the functions that a kernel calls, and its own.
pub(crate) fn loops_run(module: &Module) -> usize {
    let mut seen = HashSet::new();
    let mut next: Vec<&Function> = module.entry_points.iter().map(|entry| &entry.function).collect();
    let mut count = 0;
    while let Some(function) = next.pop() {
        count += loops_of(function);
        let mut called = Vec::<Handle<Function>>::new();
        visit(&function.body, &mut |statement| {
            if let Statement::Call { function, .. } = statement {
                called.push(*function);
            }
        });
        next.extend(called.into_iter().filter(|&f| seen.insert(f)).map(|f| &module.functions[f]));
    }
    count
}

/// Whether four bytes of a word are multiplied by those of another.
pub(crate) fn multiplies_bytes(module: &Module) -> bool {
    let product = |expression: &Expression| {
        use MathFunction::{Dot4I8Packed, Dot4U8Packed};
        matches!(expression, Expression::Math { fun: Dot4I8Packed | Dot4U8Packed, .. })
    };
    functions(module).any(|function| function.expressions.iter().any(|(_, expression)| product(expression)))
}

fn loops_of(function: &Function) -> usize {
    let mut count = 0;
    visit(&function.body, &mut |statement| count += usize::from(matches!(statement, Statement::Loop { .. })));
    count
}

/// Every statement of a block, and of the blocks within.
fn visit(block: &Block, see: &mut impl FnMut(&Statement)) {
    for statement in block {
        see(statement);
        match statement {
            Statement::Block(block) => visit(block, see),
            Statement::If { accept: first, reject: second, .. }
            | Statement::Loop { body: first, continuing: second, .. } => {
                visit(first, see);
                visit(second, see);
            }
            Statement::Switch { cases, .. } => cases.iter().for_each(|case| visit(&case.body, see)),
            _ => {}
        }
    }
}
