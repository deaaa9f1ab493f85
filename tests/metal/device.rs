//! A device whose kernels are their Metal text, run on the CPU.

use std::io::Write;
use std::process::{Command as Process, Stdio};
use std::sync::Arc;

use kvfold::wgpu;

use crate::compile::{Build, program};
use crate::custom::{Bound, Kernel, Machine, Program};
use crate::translate::{Metal, translate};

/// How the device runs kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) subgroups: bool,
    pub(crate) build: Build,
    /// Orders in which invocations take turns: forward, reverse, then random ones. All must give the same bytes.
    pub(crate) orders: u32,
}

/// A kernel to be compiled when it is first run.
#[derive(Debug)]
struct Text {
    metal: Metal,
    settings: Settings,
}

impl Machine for Settings {
    fn info(&self) -> wgpu::AdapterInfo {
        wgpu::AdapterInfo {
            name: "Metal text on the CPU".to_owned(),
            subgroup_min_size: 32,
            subgroup_max_size: 32,
            ..wgpu::AdapterInfo::new(wgpu::DeviceType::Cpu, wgpu::Backend::Metal)
        }
    }

    fn subgroups(&self) -> bool {
        self.subgroups
    }

    fn compile(&self, _: &str, kernel: &Kernel<'_>) -> Result<Arc<dyn Program>, String> {
        let metal = translate(kernel.source, kernel.entry, kernel.layout, kernel.checks)?;
        Ok(Arc::new(Text { metal, settings: *self }))
    }
}

impl Program for Text {
    fn run(&self, bindings: &mut [Bound], groups: [u32; 3]) -> Result<(), String> {
        let metal = &self.metal;
        let mut slots: Vec<Vec<u8>> = vec![Vec::new(); bindings.len() + 1];
        for binding in &*bindings {
            slots[metal.slots[&binding.number] as usize].clone_from(&binding.bytes);
        }
        // The lengths of the bound ranges in bytes, as wgpu's Metal backend passes them.
        let (slot, sized) = &metal.sizes;
        let size = |number: &u32| {
            bindings
                .iter()
                .find(|binding| binding.number == *number)
                .map(|binding| binding.bytes.len() as u32)
        };
        slots[*slot as usize] = sized.iter().filter_map(size).flat_map(u32::to_le_bytes).collect();

        let mut input: Vec<u8> = [self.settings.orders, groups[0], groups[1], groups[2], slots.len() as u32]
            .map(u32::to_le_bytes)
            .concat();
        for bytes in &slots {
            input.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            input.extend_from_slice(bytes);
        }
        let output = self.serve(&input)?;
        let mut rest = output.as_slice();
        for (slot, bytes) in (0u32..).zip(&slots) {
            let (bytes, after) = rest.split_at_checked(bytes.len()).ok_or("the result is cut short")?;
            rest = after;
            if let Some(binding) = bindings.iter_mut().find(|binding| metal.slots[&binding.number] == slot)
                && binding.writable
            {
                binding.bytes.copy_from_slice(bytes);
            }
        }
        Ok(())
    }
}

impl Text {
    fn serve(&self, input: &[u8]) -> Result<Vec<u8>, String> {
        let program = program(&self.metal, self.settings.build)?;
        let mut child = Process::new(&program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        // It reads all before it writes, and says at its end why it stopped early: a pipe that breaks is no cause of its own.
        let written = child.stdin.take().ok_or("no pipe")?.write_all(input);
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(format!("{} ({})", String::from_utf8_lossy(&output.stderr).trim(), output.status));
        }
        written.map_err(|error| error.to_string())?;
        Ok(output.stdout)
    }
}
