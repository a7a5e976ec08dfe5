"""Rollouts and the native sampler."""
