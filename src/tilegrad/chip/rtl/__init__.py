"""SystemVerilog of an NPU, from the same parameters as its simulator; lint and proofs of it."""
