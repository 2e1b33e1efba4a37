"""What `python -m eagle3_jax.benchmark` measures: decoding by the engine, and servers under traffic."""
