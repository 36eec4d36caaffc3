"""Torch's compile workers: how many, started early, looked after, ended."""
