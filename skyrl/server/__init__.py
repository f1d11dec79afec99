"""What clients talk to: the Tinker API, the OpenAI endpoint and the status page, with futures, quotas and the forwarding client.
Knows no trainer."""
