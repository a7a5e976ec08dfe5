"""The one exception that is meant for the user and not for us."""

from exchange import UserError

__all__ = ["UserError"]
