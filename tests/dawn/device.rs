//! A device whose kernels Dawn compiles and runs, as Chrome would.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use kvfold::wgpu::{self, BindingType, BufferBindingType};

use crate::custom::{Bound, Kernel, Machine, Program};
use crate::process::{DAWN, Dawn, Slot};

/// Numbers of kernels by device and text: each test has the library compile them again.
static COMPILED: LazyLock<Mutex<HashMap<(bool, String), u64>>> = LazyLock::new(Mutex::default);

/// What a page would get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Browser {
    pub(crate) subgroups: bool,
}

/// A kernel that Dawn has compiled.
#[derive(Debug)]
struct Compiled {
    number: u64,
    slots: Vec<Slot>,
}

fn dawn() -> Result<&'static Dawn, String> {
    DAWN.as_ref().map_err(Clone::clone)
}

/// How WebGPU names a binding's type.
fn slot(entry: &wgpu::BindGroupLayoutEntry) -> Slot {
    let BindingType::Buffer { ty, .. } = entry.ty else { panic!("binding {} is no buffer", entry.binding) };
    let ty = match ty {
        BufferBindingType::Uniform => "uniform",
        BufferBindingType::Storage { read_only: true } => "read-only-storage",
        BufferBindingType::Storage { read_only: false } => "storage",
    };
    (entry.binding, ty)
}

impl Machine for Browser {
    fn info(&self) -> wgpu::AdapterInfo {
        let adapter = DAWN.as_ref().ok().map(|dawn| &dawn.adapter);
        let (smallest, largest) = adapter.map_or((0, 0), |adapter| adapter.sizes);
        wgpu::AdapterInfo {
            name: adapter.map_or_else(String::new, |adapter| adapter.name.clone()),
            subgroup_min_size: smallest,
            subgroup_max_size: largest,
            // A page is not told whether its adapter is a program.
            ..wgpu::AdapterInfo::new(wgpu::DeviceType::Other, wgpu::Backend::BrowserWebGpu)
        }
    }

    fn subgroups(&self) -> bool {
        self.subgroups
    }

    fn compile(&self, _: &str, kernel: &Kernel<'_>) -> Result<Arc<dyn Program>, String> {
        assert!(kernel.checks.bounds_checks, "no page can leave a browser's checks out");
        // naga refuses this line, so that only the text for browsers begins with it, which a native library never makes. It and
        // comments are all in which the two texts differ.
        let enable = if kernel.source.contains("@builtin(subgroup_") { "enable subgroups;\n" } else { "" };
        let key = (self.subgroups, format!("{enable}{}", kernel.source));
        let slots: Vec<Slot> = kernel.layout.iter().map(slot).collect();
        let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match compiled.get(&key) {
            Some(number) => *number,
            None => {
                let number = dawn()?.compile(self.subgroups, &key.1, kernel.entry, &slots)?;
                *compiled.entry(key).or_insert(number)
            }
        };
        Ok(Arc::new(Compiled { number, slots }))
    }
}

impl Program for Compiled {
    fn run(&self, bindings: &mut [Bound], groups: [u32; 3]) -> Result<(), String> {
        assert!(
            bindings.iter().map(|binding| binding.number).eq(self.slots.iter().map(|(number, _)| *number))
        );
        let bytes: Vec<&[u8]> = bindings.iter().map(|binding| &*binding.bytes).collect();
        let written = dawn()?.run(self.number, groups, &bytes)?;
        let mut rest = &*written;
        for binding in bindings.iter_mut().filter(|binding| binding.writable) {
            let (bytes, after) =
                rest.split_at_checked(binding.bytes.len()).ok_or("the result is cut short")?;
            binding.bytes.copy_from_slice(bytes);
            rest = after;
        }
        Ok(())
    }
}
