"""The monitor process: it collects the messages of a job, runs the detectors and reports findings.

It runs in the wrapper of a launcher, or alone.
"""
