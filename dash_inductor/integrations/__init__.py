"""Attention and settings for the tools that people train with; each module needs the package that it is named after."""
