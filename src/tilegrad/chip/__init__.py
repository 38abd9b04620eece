"""Co-design: what an accelerator costs for a model, and how chips compare."""
