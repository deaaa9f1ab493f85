// Who this invocation is. Dispatches fold to two dimensions, so the linear index is rebuilt here and guarded by the kernel.

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
}

fn linear_workgroup(id: Invocation) -> u32 {
    return id.workgroup.y * id.workgroups.x + id.workgroup.x;
}
