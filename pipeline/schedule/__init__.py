"""Retraining on a schedule: APScheduler with a job store on disk, each run a process of its own."""
