// Who this invocation is within its workgroup, with subgroups.
//
// Nothing else in a kernel may be called local_index: naga's Metal text zeroes workgroup memory by the lane of this very name,
// but names the argument apart where the name is taken, which no compiler accepts. naga itself makes up `local`.

struct Invocation {
    @builtin(local_invocation_index) local_index: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
}
