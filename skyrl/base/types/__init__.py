"""Types that several packages share: ids, kinds of requests, requests, commands, LoRA shapes and names of weights."""
