"""Answers of a checkpoint, an endpoint or a file, judged by official comparators."""
