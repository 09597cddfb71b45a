"""Diagnostics of training runs and of the machine: stats, compare, report, memory_report, env."""

__all__ = ["compare", "env", "memory_report", "plotting", "report", "stats", "training_run"]
