"""Wraps what differs between versions of torch: process groups, wrappers, the flight recorder, frames of threads."""
