// Who this invocation is within its workgroup.

struct Invocation {
    @builtin(local_invocation_index) local: u32,
}
