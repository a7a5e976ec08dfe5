"""Rollouts from SGLang servers: client, pool, weight transfer, processes."""
