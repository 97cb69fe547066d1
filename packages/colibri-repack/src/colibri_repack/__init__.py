"""Repacks safetensors and GGUF checkpoints into .colibri files within a memory limit."""
