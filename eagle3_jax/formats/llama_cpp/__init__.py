"""Heads as llama.cpp loads them: one GGUF file of the head and its target's tokenizer."""
