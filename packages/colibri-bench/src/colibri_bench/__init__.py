"""Demonstrates the Colibri toolkit on a small embedded model."""

from .demo_model import DEMO_NAME, demo_gguf

__all__ = ["DEMO_NAME", "demo_gguf"]
