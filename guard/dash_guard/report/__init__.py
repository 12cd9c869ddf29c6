"""Findings, what was covered, and the pages, pictures and text that show them."""
