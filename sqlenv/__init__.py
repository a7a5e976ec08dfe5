"""Databases, execution, data sets, prompts and environments. No JAX below this line."""
