"""Artifacts that outlive the process: the store, what fits, what is trusted, and ``warm_start``."""
