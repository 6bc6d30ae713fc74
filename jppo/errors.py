"""The errors that every part of jppo may raise."""


class UserError(Exception):
    """A mistake that the user can correct, in one line: value, rule, remedy. Commands print it and exit with code 2."""
