"""The one exception that is meant for the user and not for us."""


class UserError(Exception):
    """A mistake of the user: one line with what is wrong, where, and what to do."""


class ServersLostError(UserError):
    """Nobody is left to sample; what is done can be saved, and the same command goes on later."""
