"""Benchmarks: one command each, JSON out."""
