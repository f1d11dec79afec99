"""Types that several doors share: requests and commands, weights, agent sessions, and what the engine does now."""
