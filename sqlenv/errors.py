"""The one exception that is meant for the user and not for us; the learner has its own."""


class UserError(Exception):
    """A mistake of the user: one line with what is wrong, where, and what to do."""
