"""What happened in runs, told to others: spans, metrics and log lines, all made from events."""
