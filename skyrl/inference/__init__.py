"""Engine-managed vLLM: how a server is started, watched, told about adapters, put to sleep and taken down."""
