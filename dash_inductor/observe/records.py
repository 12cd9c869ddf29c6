"""The public names of `records`."""

from ..records.records import GraphRecord, SiteRecord, format_table

__all__ = ["GraphRecord", "SiteRecord", "format_table"]
