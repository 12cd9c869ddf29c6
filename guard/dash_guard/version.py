"""The version of dash_guard, which is also that of the dash_inductor it belongs to."""

__version__ = "0.1.0"
