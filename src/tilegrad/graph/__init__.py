"""Graph IR: what to compute."""
