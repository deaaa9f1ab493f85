// Where this workgroup is. Apart from Invocation, since a struct that holds a lane's built-ins counts as non-uniform.
// Dispatches fold to two dimensions, so the linear index is rebuilt here; kernels guard the few too many.

struct Place {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
}

fn linear_workgroup(place: Place) -> u32 {
    return place.workgroup.y * place.workgroups.x + place.workgroup.x;
}
