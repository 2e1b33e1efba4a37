"""Measurements of `python -m eagle3_jax.benchmark`: decoding in the engine, and servers under traffic."""
