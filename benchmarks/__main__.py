"""Measure the speed of a step (`grpo_step.py`); every other benchmark is a command of its own."""

from benchmarks.grpo_step import main

main()
