"""The mathematics of the pipeline in pure torch: tensors in, tensors out, one job per function.

Axes, in every module: `B` sequences, `T` response tokens, `V` vocabulary. A `mask` is true on the response
tokens that the policy generated (the first EOS included) and false on padding and on tokens put in by tools
or environments. Values under a false mask may be arbitrary or NaN: functions select with `torch.where` before
they calculate, so that these values change neither a loss nor a gradient. float32 and float64 keep their
dtype; narrower dtypes are raised to float32.

Code outside this repository compares these functions with other implementations, so their names and
signatures stay the same (`tests/unit/algo/test_public_names.py`).
"""
