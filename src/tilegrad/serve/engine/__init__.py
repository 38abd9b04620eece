"""The engine process, the frames to and from it, and what keeps it alive."""
