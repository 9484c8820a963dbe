"""Prefect's flows and tasks, and what they show in Prefect. The only package that imports Prefect."""
