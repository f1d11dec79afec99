"""Words that several packages share: ids, kinds of requests, what a request is."""
