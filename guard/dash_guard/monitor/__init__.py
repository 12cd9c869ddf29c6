"""The process that collects the messages of a job, runs the detectors and reports findings, with or without a
launcher.
"""
