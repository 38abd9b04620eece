"""Models from and to files of others: GGUF, safetensors, Hugging Face folders, where they live."""

from .fetch import BUILT_IN, Progress, find_model, kept_models, open_model, remove_model
from .folder import ModelFolder, read_folder
from .gguf import GgufFile, read_gguf
from .gguf_write import write_gguf
from .mapped import MappedFile, Stored
from .safetensors import read_safetensors

__all__ = [
    "BUILT_IN",
    "GgufFile",
    "MappedFile",
    "ModelFolder",
    "Progress",
    "Stored",
    "find_model",
    "kept_models",
    "open_model",
    "read_folder",
    "read_gguf",
    "read_safetensors",
    "remove_model",
    "write_gguf",
]
