"""One engine for every IR: Nodes, Blocks, patterns, rewriting, verifying, text, Symbols."""
