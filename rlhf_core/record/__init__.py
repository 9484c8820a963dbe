"""The record: every rollout of a run, as columns. `schema` says what a row has, `writer` writes Parquet files
that are committed with checkpoints and with the artifact, `reader` reads them.
"""
