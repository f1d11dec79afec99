"""Load generators, a null upstream and reports. They measure the cost of skyrl beside the server that it forwards
to."""
