"""Data sets: layouts, loading, checks, corrections.

Whatever is wrong with one is a `UserError` that names the file, and the record in it.
"""
