"""Data sets: layouts, loading, checks, prepared folders."""
