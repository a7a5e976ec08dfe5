"""Official evaluators, and when two results are the same."""
