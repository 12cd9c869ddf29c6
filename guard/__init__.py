"""Lets pytest and `python -m` find `guard.tests`; the distribution is `dash_guard`."""
