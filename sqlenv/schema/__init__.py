"""Schemas: read from the file, rendered for a prompt, values that a question names."""
