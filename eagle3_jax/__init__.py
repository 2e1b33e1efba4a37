"""EAGLE-3 speculative decoding in JAX: train a draft head for an open LLM, decode with it, export it."""
