"""Results that a rematerialised training step keeps."""

# The name under which `jax.checkpoint` keeps what the backward pass needs from a forward pass of attention.
KEPT = "attention"
