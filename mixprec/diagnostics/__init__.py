"""Diagnostics of training runs and of the machine: stats, compare, report, env."""

__all__ = ["compare", "env", "plotting", "report", "stats", "training_run"]
