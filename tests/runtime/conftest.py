"""Fixtures of the tests with many sequences: the tiny models."""

from tests.models.conftest import checkpoint_folder, gguf_file, model

__all__ = ["checkpoint_folder", "gguf_file", "model"]
