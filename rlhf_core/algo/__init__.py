"""The mathematics of the pipeline in pure torch: tensors in, tensors out, one job per function.

Axes, in every module: `B` sequences, `T` response tokens, `V` vocabulary. A `mask` is true on the response
tokens that the policy generated (the first EOS included) and false on padding and on tokens put in by tools
or environments. What lies under a false mask may be garbage or NaN: functions select with `torch.where`
before they calculate, so that neither a loss nor a gradient can see it. float32 and float64 keep their dtype;
anything narrower is raised to float32.
"""
