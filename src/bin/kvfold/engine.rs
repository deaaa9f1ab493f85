//! Who computes, and why.

use kvfold::report::Engine;

use crate::arguments::{Backend, EngineArguments};

/// An engine, and whether it may be another.
pub(crate) struct Choice {
    pub(crate) engine: Engine,
    /// Why `auto` took the CPU twins.
    pub(crate) fallback: Option<String>,
    /// Whether the CPU twins may take over from a device that gives out.
    pub(crate) auto: bool,
}

impl Choice {
    fn asked_for(engine: Engine) -> Self {
        Self { engine, fallback: None, auto: false }
    }

    /// The CPU twins as `auto`'s choice.
    fn cpu_because(cause: String) -> Self {
        Self { engine: Engine::Cpu, fallback: Some(cause), auto: true }
    }
}

#[cfg(not(feature = "gpu"))]
pub(crate) fn choose(arguments: &EngineArguments) -> kvfold::Result<Choice> {
    let unused = (&arguments.adapter, arguments.no_subgroups);
    match arguments.backend {
        Backend::Cpu => Ok(Choice::asked_for(Engine::Cpu)),
        Backend::Auto if unused == (&None, false) => {
            Ok(Choice::cpu_because("this kvfold was built without GPU support".to_owned()))
        }
        other => Err(kvfold::Error::NoAdapter {
            want: format!("{other:?}").to_lowercase(),
            have: "a kvfold built without GPU support".to_owned(),
        }),
    }
}

#[cfg(feature = "gpu")]
pub(crate) use device::choose;

#[cfg(feature = "gpu")]
mod device {
    use kvfold::gpu::{Caps, Request, adapters_blocking};
    use kvfold::wgpu::Backends;
    use kvfold::{Error, Gpu, Result};

    use super::{Backend, Choice, Engine, EngineArguments};

    /// The engine asked for. `auto` takes hardware, or the CPU twins, which give the same numbers faster than an adapter
    /// that is itself a program; an adapter asked for by name is taken whatever it is.
    pub(crate) fn choose(arguments: &EngineArguments) -> Result<Choice> {
        let backends = match arguments.backend {
            Backend::Cpu => return Ok(Choice::asked_for(Engine::Cpu)),
            Backend::Auto if arguments.adapter.is_none() => return Ok(hardware_or_cpu(arguments)),
            Backend::Auto => Backends::all(),
            Backend::Metal => Backends::METAL,
            Backend::Vulkan => Backends::VULKAN,
            Backend::Dx12 => Backends::DX12,
        };
        let mut wanted = request(arguments).backends(backends);
        wanted.name.clone_from(&arguments.adapter);
        let gpu = Gpu::request_blocking(wanted).map_err(|error| match error {
            Error::NoAdapter { want, have } if have == "none" => {
                Error::NoAdapter { want, have: existing(&adapters_blocking(Backends::all())) }
            }
            other => other,
        })?;
        Ok(Choice::asked_for(Engine::Gpu(gpu)))
    }

    fn request(arguments: &EngineArguments) -> Request {
        Request::default().subgroups(!arguments.no_subgroups)
    }

    fn hardware_or_cpu(arguments: &EngineArguments) -> Choice {
        let adapters = adapters_blocking(Backends::all());
        let Some(hardware) = adapters.iter().find(|adapter| !adapter.software) else {
            let cause = adapters.first().map_or_else(
                || "no GPU".to_owned(),
                |adapter| format!("no GPU but {}, which is software and slower", adapter.adapter),
            );
            return Choice::cpu_because(cause);
        };
        match Gpu::request_blocking(request(arguments).name(hardware.adapter.clone())) {
            Ok(gpu) => Choice { engine: Engine::Gpu(gpu), fallback: None, auto: true },
            Err(error) => Choice::cpu_because(error.to_string()),
        }
    }

    /// The adapters there are, for an error.
    fn existing(adapters: &[Caps]) -> String {
        let name = |caps: &Caps| {
            let software = if caps.software { ", software" } else { "" };
            format!("{} ({}{software})", caps.adapter, caps.backend)
        };
        let mut names: Vec<String> = adapters.iter().map(name).collect();
        names.push("the CPU (--backend cpu)".to_owned());
        names.join(", ")
    }
}
