"""The GPU that is measured, and the processes that measure it."""
