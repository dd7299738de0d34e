"""The processes of a job: start, progress, watchdog, error files."""
