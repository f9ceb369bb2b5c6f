"""Stores: threads, runs, logs, tasks and files, in memory or in a database."""
