"""What only a GPU can show, see docs/gpu.md. SKYRL_TEST_DEVICE=cpu rehearses the same tests on a CPU."""
