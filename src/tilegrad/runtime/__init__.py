"""Device-neutral execution: Buffers, the Store on disk, Executables as plain data."""
