"""kvformat: one verified file for an LLM KV cache."""
