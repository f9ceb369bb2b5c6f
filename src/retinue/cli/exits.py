"""Exit codes. The last two are what a shell reports for a program that SIGINT or SIGPIPE ended."""

COMPLETED = 0
FAILED = 1
MISUSED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
