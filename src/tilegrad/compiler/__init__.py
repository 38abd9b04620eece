"""The whole compile on one page, its cache, and how it explains itself."""
