"""The one error of model folders and weights."""


class ModelError(ValueError):
    """A model that cannot be found, read or loaded; the message is one line for the user."""
