"""The order of the GPU tests: a run that is cut off after any minute has found what was most worth knowing.

Each place names a test's path below tests/gpu, perhaps with the beginning of its name.
"""

from __future__ import annotations

ORDER = (
    "test_numerics.py::test_gradients_are_as_close_to_float32_as_those_of_peft[qwen3]",  # is it right at all
    "test_numerics.py::test_merged_passes",
    "test_attention.py",
    "test_varlen_kernel.py",
    "test_speed.py::test_how_long_the_device_computes",  # where the time goes
    "test_mfu.py",
    "test_speed.py::test_06b_beside_peft[grpo-4x16]",  # never ran
    "test_speed.py::test_06b_beside_peft",
    "test_graphs.py",
    "test_beside_decode.py",
    "test_speed.py",
    "test_memory.py::test_memory_after_passes",
    "test_memory.py::test_a_pass_without_memory",
    "test_numerics.py",
    "test_kernels.py",
    "test_beside_decode.py::test_tokens_of_both_alone_and_beside_each_other[mps",  # may wait for a daemon
    "test_graphs.py::test_a_piece_that_waits",  # its capture fails
    "test_mixtures.py",
    "test_pictures.py",
    "test_quantized.py",
    "test_shared_weights.py",
    "test_memory.py",
    "test_engine.py",  # starts processes: the longest
    "test_benchmark.py",
    "test_prompt_logprobs.py",  # needs vLLM
    "test_sparse.py",
)


def place_of(nodeid: str) -> int:
    """The place of a test in `ORDER`: the longest entry that its id begins with. Others come last."""
    name = nodeid.rpartition("tests/gpu/")[2]
    fitting = [entry for entry in ORDER if name.startswith(entry)]
    return ORDER.index(max(fitting, key=len)) if fitting else len(ORDER)
