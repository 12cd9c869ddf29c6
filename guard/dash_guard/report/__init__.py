"""Findings, coverage, and the pages, pictures and text that show them."""
