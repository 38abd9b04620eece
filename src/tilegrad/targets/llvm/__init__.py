"""CPUs through LLVM: emit, compile, load, run on worker threads."""
