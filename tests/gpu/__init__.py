"""Tests that need a GPU, see docs/gpu.md. SKYRL_TEST_DEVICE=cpu rehearses the same tests on a CPU."""
