"""The text of an answer taken apart: reasoning, content, calls of tools."""
