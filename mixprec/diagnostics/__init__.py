"""Diagnostics of training runs: compare, report, memory_report, plan, audit, what layers lose."""

__all__ = ["compare", "memory_report", "plotting", "report", "training_run"]
