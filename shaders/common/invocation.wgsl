// Who this invocation is within its workgroup.
//
// Nothing else in a kernel may be called local_index: naga's Metal text zeroes workgroup memory by the lane of this very name,
// but names the argument apart where the name is taken, which no compiler accepts. naga itself makes up `local`.

struct Invocation {
    @builtin(local_invocation_index) local_index: u32,
}
