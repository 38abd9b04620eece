"""The server: HTTP in one process, the engine in another, a local socket between them."""
