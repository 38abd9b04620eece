"""NVIDIA GPUs: Bodies to PTX text, PTX to machine code, and the driver that launches it."""
