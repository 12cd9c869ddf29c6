"""The process that collects the messages of a job, asks the detectors, and reports; with or without a launcher."""
