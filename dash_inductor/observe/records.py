"""The public names of `records`."""

from ..records.records import GraphRecord, Record, SiteRecord, format_table

__all__ = ["GraphRecord", "Record", "SiteRecord", "format_table"]
