"""The learner and its samplers. Knows JAX and nothing of SQL."""
