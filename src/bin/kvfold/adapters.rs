//! `kvfold adapters`.

use crate::arguments::AdaptersArguments;

#[cfg(not(feature = "gpu"))]
pub(crate) fn run(arguments: &AdaptersArguments) -> kvfold::Result<String> {
    let none =
        if arguments.json { "[]\n" } else { "no adapters: this kvfold was built without GPU support\n" };
    Ok(none.to_owned())
}

#[cfg(feature = "gpu")]
pub(crate) use device::run;

#[cfg(feature = "gpu")]
mod device {
    use std::fmt::Write;

    use kvfold::Result;
    use kvfold::gpu::{Caps, adapters_blocking};
    use kvfold::wgpu::Backends;

    use super::AdaptersArguments;
    use crate::text::{STRONG, bytes, json, plain};

    /// Every adapter of every backend.
    pub(crate) fn run(arguments: &AdaptersArguments) -> Result<String> {
        let adapters = adapters_blocking(Backends::all());
        if arguments.json {
            return Ok(json(&adapters));
        }
        if adapters.is_empty() {
            return Ok("no adapters: kvfold report computes on the CPU\n".to_owned());
        }
        Ok(adapters.iter().map(described).collect::<Vec<_>>().join("\n"))
    }

    fn described(caps: &Caps) -> String {
        let software = if caps.software { " (software: right, but no measure of speed)" } else { "" };
        let subgroups = caps.subgroups.map_or_else(
            || "no".to_owned(),
            |(least, most)| {
                if least == most { format!("of {least}") } else { format!("of {least} to {most}") }
            },
        );
        let lines = [
            ("backend", caps.backend.clone()),
            ("driver", plain(&caps.driver)),
            ("subgroups", subgroups),
            ("largest buffer", bytes(caps.max_buffer_size)),
            ("largest binding", bytes(caps.max_storage_buffer_binding_size)),
            ("bindings", format!("{} storage buffers a stage", caps.max_storage_buffers_per_shader_stage)),
            (
                "workgroup",
                format!(
                    "{} invocations, {} of memory, {} in a dimension",
                    caps.max_compute_invocations_per_workgroup,
                    bytes(caps.max_compute_workgroup_storage_size.into()),
                    caps.max_compute_workgroups_per_dimension
                ),
            ),
        ];
        let mut text = format!("{STRONG}{}{STRONG:#}{software}\n", plain(&caps.adapter));
        for (name, value) in lines {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {name:16}{value}");
        }
        text
    }
}
