"""Witnesses: small databases on which queries that mean something else give other results."""
