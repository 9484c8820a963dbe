"""Log-probabilities of sampled tokens, taken from vLLM step by step.

    model runner --> tokens of a step, and one array of their log-probabilities
                        |                             |
                        v                             v
                   scheduler --> outputs --> here: one list operation for each output --> `FlatLogprobs`

vLLM itself cuts the arrays of a step into three arrays for each request, and appends to six lists for each
token. It takes longer than the computation of the log-probabilities (docs/decisions/0045).
"""

from __future__ import annotations

from typing import Any


def take_logprobs(llm_engine: Any) -> None:
    """Let vLLM's engine, which runs in this process, return log-probabilities without its own code for them.

    Afterwards `CompletionOutput.logprobs` of a request with `logprobs=0` and `flat_logprobs=True` has only
    the list `logprobs`, with one number for each token. No request may ask for more log-probabilities, or
    for those of its prompt, or have a stop string.
    """
    scheduler = llm_engine.engine_core.engine_core.scheduler
    states = llm_engine.output_processor.request_states
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, sampled: Any) -> Any:
        logprobs, sampled.logprobs = sampled.logprobs, None
        outputs = update(scheduled, sampled)
        if logprobs is not None and 0 in outputs:
            _append(outputs[0].outputs, states, sampled.req_id_to_index, logprobs)
        return outputs

    scheduler.update_from_output = update_from_output


def _append(outputs: Any, states: Any, rows: dict[str, int], logprobs: Any) -> None:
    """Append the log-probabilities of the tokens that the scheduler has accepted.

    It returns none for a request that has ended after the step was scheduled. A request that was preempted
    meanwhile keeps its token.
    """
    of_sampled = logprobs.logprobs[:, 0].tolist()
    for output in outputs:
        # A request that was aborted has none.
        state = states.get(output.request_id)
        if state is not None and state.logprobs_processor.logprobs is not None:
            row = rows[output.request_id]
            new = of_sampled[row : row + len(output.new_token_ids)]
            state.logprobs_processor.logprobs.logprobs.extend(new)
