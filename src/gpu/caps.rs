//! What a device can do.

use serde::Serialize;

/// What the kernels need to know of a device. Shown by `kvfold adapters`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Caps {
    /// `vulkan`, `metal`, `dx12`, `gl` or `webgpu`.
    pub backend: String,
    /// The adapter's name.
    pub adapter: String,
    /// The driver's name and version.
    pub driver: String,
    /// Whether the adapter is a program on the CPU: right, but no measure of speed.
    pub software: bool,
    /// Smallest and largest subgroup, where shaders may use subgroup operations.
    pub subgroups: Option<(u32, u32)>,
    /// Whether products of four bytes are likely to be one instruction, not emulated: on hardware with Vulkan, and with DirectX 12
    /// where the device has subgroups, which come with shader model 6; older models have no such product.
    pub byte_products: bool,
    /// Largest part of a buffer that one binding can show, in bytes.
    pub max_storage_buffer_binding_size: u64,
    /// Largest buffer, in bytes.
    pub max_buffer_size: u64,
    /// Storage buffers that one stage can bind.
    pub max_storage_buffers_per_shader_stage: u32,
    /// Invocations of one workgroup.
    pub max_compute_invocations_per_workgroup: u32,
    /// Bytes of workgroup memory.
    pub max_compute_workgroup_storage_size: u32,
    /// Workgroups in one dimension of a dispatch.
    pub max_compute_workgroups_per_dimension: u32,
    /// Alignment of a storage binding's offset, in bytes.
    pub min_storage_buffer_offset_alignment: u32,
}

impl Caps {
    /// The capabilities of a device or adapter.
    #[must_use]
    pub fn new(info: &wgpu::AdapterInfo, features: wgpu::Features, limits: &wgpu::Limits) -> Self {
        let driver = [info.driver.as_str(), info.driver_info.as_str()];
        Self {
            backend: backend_name(info.backend).to_owned(),
            adapter: info.name.clone(),
            driver: driver.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" "),
            software: info.device_type == wgpu::DeviceType::Cpu,
            byte_products: info.device_type != wgpu::DeviceType::Cpu
                && match info.backend {
                    wgpu::Backend::Vulkan => true,
                    wgpu::Backend::Dx12 => features.contains(wgpu::Features::SUBGROUP),
                    _ => false,
                },
            subgroups: features
                .contains(wgpu::Features::SUBGROUP)
                .then_some((info.subgroup_min_size, info.subgroup_max_size)),
            max_storage_buffer_binding_size: limits.max_storage_buffer_binding_size,
            max_buffer_size: limits.max_buffer_size,
            max_storage_buffers_per_shader_stage: limits.max_storage_buffers_per_shader_stage,
            max_compute_invocations_per_workgroup: limits.max_compute_invocations_per_workgroup,
            max_compute_workgroup_storage_size: limits.max_compute_workgroup_storage_size,
            max_compute_workgroups_per_dimension: limits.max_compute_workgroups_per_dimension,
            min_storage_buffer_offset_alignment: limits.min_storage_buffer_offset_alignment,
        }
    }

    /// Bytes of the largest buffer that one binding can show whole.
    pub(crate) fn largest_binding(&self) -> u64 {
        self.max_storage_buffer_binding_size.min(self.max_buffer_size)
    }

    /// The subgroup size that shuffles may count on; workgroups that any subgroup may exceed take none
    /// ([`Self::fills_subgroups`]).
    pub(crate) fn shuffle_width(&self) -> Option<u32> {
        let (smallest, largest) = self.subgroups?;
        (smallest >= 4 && largest <= 128).then_some(smallest)
    }

    /// Whether a workgroup of so many invocations, a power of two, is one or more whole subgroups: of one that it only fills in part
    /// nothing says which lanes are its own.
    pub(crate) fn fills_subgroups(&self, invocations: u32) -> bool {
        self.subgroups.is_none_or(|(_, largest)| largest <= invocations)
    }
}

/// The smallest subgroups for which variants are listed to be linted, and none of them: every size that adapters have at common head
/// dimensions, `sizes` at others. A size is one number of a text.
pub(crate) fn listed_widths(sizes: &[u32], dim: usize) -> Vec<Option<u32>> {
    let is_listed = |size: &u32| [64, 80].contains(&dim) || sizes.contains(size);
    [None].into_iter().chain([4, 8, 16, 32, 64].into_iter().filter(is_listed).map(Some)).collect()
}

pub(crate) fn backend_name(backend: wgpu::Backend) -> &'static str {
    match backend {
        wgpu::Backend::Noop => "noop",
        wgpu::Backend::Vulkan => "vulkan",
        wgpu::Backend::Metal => "metal",
        wgpu::Backend::Dx12 => "dx12",
        wgpu::Backend::Gl => "gl",
        wgpu::Backend::BrowserWebGpu => "webgpu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_want_full_subgroups() {
        let limits = wgpu::Limits::default();
        let info = |smallest, largest| {
            let mut info = wgpu::AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, wgpu::Backend::Vulkan);
            (info.subgroup_min_size, info.subgroup_max_size) = (smallest, largest);
            Caps::new(&info, wgpu::Features::SUBGROUP, &limits)
        };
        for (sizes, filled) in
            [((32, 32), [true, true]), ((4, 64), [false, true]), ((64, 128), [false, false])]
        {
            let caps = info(sizes.0, sizes.1);
            assert_eq!(caps.shuffle_width(), Some(sizes.0));
            assert_eq!([32, 64].map(|invocations| caps.fills_subgroups(invocations)), filled, "{sizes:?}");
        }
        let none = Caps { subgroups: None, ..info(4, 64) };
        assert!(none.fills_subgroups(1));
    }
}
