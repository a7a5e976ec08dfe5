"""Reward families: text in, numbers out. No JAX below this line."""
