"""Kills at enumerated and random points, and what became of the runs."""
