"""Environments: from a question to attempts at it. They know nothing of tokens."""
