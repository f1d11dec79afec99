"""Pictures of requests as they arrive: checked in a worker process, stored once, and taken out of the body."""
