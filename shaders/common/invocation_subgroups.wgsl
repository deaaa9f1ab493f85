// Who this invocation is, with subgroups. Dispatches fold to two dimensions, so the linear index is rebuilt here.

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
}

fn linear_workgroup(id: Invocation) -> u32 {
    return id.workgroup.y * id.workgroups.x + id.workgroup.x;
}
