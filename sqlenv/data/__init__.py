"""Data sets: layouts, loading, checks, prepared folders.

Whatever is wrong with one is a `UserError` that names the file, and the record in it.
"""
